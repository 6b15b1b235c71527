"""The beginning of each durable call, and of what else may be done only where the history allows it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import trio

from ...errors import UsageError
from ..jobs.job_states import HELD_BACK, DurableCallRefused
from .calls import IN_STEP, Call
from .changed import check_blocks, check_end, check_interrupted
from .detours import HALF_WAY
from .half_undone import check_undone
from .interrupted import note_plain_failure
from .keys import entry_key
from .seen import learn_what_was_seen, note_what_was_seen
from .told_apart import check_level, note_what_it_undoes, told_apart

if TYPE_CHECKING:
    from .calls import CallKind
    from .detours import Given
    from .durable import Durable

REFUSED = frozenset({"suspended", "shutdown", "fence-lost", "lease-unproven"})
"""While a handler unwinds for one of these reasons durable calls are refused: the next attempt stands where this one did."""
VERSION = "0:version"
"""The key of the moment that is the version."""
_TRANSACTION = "job.transaction()"


async def begin(
    durable: Durable,
    kind: CallKind,
    name: str,
    key: str | None,
    what: str,
    given: Given | None = None,
) -> Call:
    """A durable call begins. `name` is that of the function or event, `what` the call as its caller knows it: "job.step", and
    `given` what a step calls.

    Raises:
        UsageError: a second task gave no key.
        DurableCallRefused: the handler unwinds for a reason after which the next attempt comes to this place.
    """
    await _may_begin(durable, what)
    unopened, counted = durable.history.replay.unopened, given if key is None else None
    if counted is not None and unopened.within:
        name = told_apart(durable, name, counted)
    if given is not None and unopened.within:
        check_level(durable, name, key, given)
    if unopened.waits.marks:
        await _check_undone(durable, Call(kind, key or f"{durable.keys.count + 1}:{kind}", name))
    call = Call(kind, "", name)
    call.handles = sys.exception()
    call.key = durable.keys.next(kind, key, what, number_of(durable, call, key, given))
    durable.cancelling.moves(asked=True)
    durable.failures.clean_ups.call_begins(durable.running.reason)
    for scope in durable.scopes:
        scope.call_begins()
    if durable.fatal is not None:
        raise durable.fatal
    # A block's own key says that a task stands at its end. And this task is in no step yet: those beside it start children.
    stands = Call("block", entry_key(call.key) if kind == "block" else call.key)
    if unopened.suspects:
        with durable.awaiting(stands):
            await check_blocks(durable, call)
    if call.handles is not None:
        if unopened.has_more:
            with durable.awaiting(stands):
                await check_interrupted(durable, call)
        if given is not None:
            note_what_it_undoes(durable, call, key, given)
        decided = durable.history.holds_what_came_before
        if note_plain_failure(durable, call):
            # Together with that: a block whose body has failed would be open again if the worker were lost between the two.
            marked = durable.failures.call_begins() or decided
            with durable.awaiting(stands):
                await durable.history.written(decided=marked)
    if kind != "block" and durable.keys.in_main and _is_beyond(durable):
        durable.keys.beyond = True
    history = durable.history
    if VERSION not in history.replay.moments and durable.is_first:
        expires = '"expires"' in (durable.running.claim.options or "")
        if expires or history.code_version != 1:
            history.moment(VERSION, history.code_version)
        if expires or (kind == "block" and history.code_version != 1):
            # A job that has begun expires no more: not one that waits for an event, which is no line, nor one whose worker is
            # lost in its first step. And children are started before the next line.
            await history.written()
    await _write_what_it_rests_on(durable, stands)
    durable.failures.detour.tell(durable.history)
    durable.quiet.begins(call)
    if kind == "block":
        await _enter(durable, stands)
    return call


async def _enter(durable: Durable, stands: Call) -> None:
    """A block is about to be opened. What has struck cuts its task short here: a later attempt may be cut short before it comes
    here, and would not do what the body undoes."""
    if durable.history.replay.stands_at(stands.key):
        await durable.replayed(stands)
    else:
        with durable.awaiting(stands):
            await trio.lowlevel.checkpoint_if_cancelled()


def number_of(durable: Durable, call: Call, key: str | None, given: Given | None = None) -> int | None:
    """The number of a call that begins, has no number yet and perhaps a `key`; None if it is the next one."""
    if not durable.cancelling.noted or not durable.keys.in_main:
        return None
    detour = durable.failures.detour
    if key is None:
        return detour.number(durable, call, given)
    if HALF_WAY in durable.history.replay.moments:
        detour.check(durable, call)
    return None


async def begin_transaction(durable: Durable) -> None:
    """`job.transaction()` begins, which completes the job: refused where a durable call is, and it begins when the history is
    used up. It has no line and no number. Raises what `begin` raises, and `ReplayMismatch`."""
    _check_blocks(durable)
    await _may_begin(durable, _TRANSACTION)
    if durable.fatal is not None:
        raise durable.fatal
    call = Call("transaction", "0:transaction")
    if durable.history.replay.unopened.waits.marks:
        await _check_undone(durable, call)
    await _write_what_it_rests_on(durable, call)
    await durable.replayed(call)
    await check_end(durable, f"now calls {_TRANSACTION}, which completes the job")


async def _check_undone(durable: Durable, call: Call) -> None:
    """Before the call has its number: one that fails here was none, and the handler's answer has the numbers that it had."""
    call.handles = sys.exception()
    with durable.awaiting(call):
        await check_undone(durable, call)


def check_completion(durable: Durable) -> None:
    """The transaction is about to complete the job: raises if something is against it that came since it began."""
    _check_blocks(durable)
    if durable.fatal is not None:
        raise durable.fatal


def check_place(durable: Durable, what: str) -> None:
    """Raises `UsageError` in the function of a step, or in a task that it has started: later attempts do not call it. And when
    the attempt has ended: who calls then is a thread or a task that the handler has not waited for."""
    if durable.running.ended:
        raise UsageError(
            f"{what} when its attempt has ended, so it does nothing: a handler waits for each thread and task that makes "
            "durable calls (no abandon_on_cancel=True, no system task)."
        )
    if trio.lowlevel.current_task() in durable.standing or is_in_step(durable):
        raise UsageError(f"{what} inside of a step or another durable call: make it in the handler itself.")


def is_in_step(durable: Durable) -> bool:
    """Whether the caller is the function of a step: in its task, or in one that it has started."""
    step = IN_STEP.get()
    return step is not None and step in durable.standing.values()


def refusal(durable: Durable, what: str) -> DurableCallRefused | None:
    """The error of a call, if it is one that the handler makes while it unwinds, and the next attempt comes to its place."""
    reason = durable.running.cancel_reason
    if reason is None:
        return None
    replays = not durable.history.replay.over and not durable.cancelling.noted
    if reason not in REFUSED and not replays:
        return None
    return DurableCallRefused(
        f"{what} is refused while the handler unwinds ({reason}): the next attempt comes here again, and does it then."
    )


def _is_beyond(durable: Durable) -> bool:
    """Whether the main task's call, which begins, has no line, and none was cut short in it before: it did not come further in
    any attempt but while it unwound. A block is no such call, because its body goes on in it."""
    struck = durable.cancelling.noted or any(scope.line is not None for scope in durable.scopes)
    return durable.history.replay.over and not struck


async def _may_begin(durable: Durable, what: str) -> None:
    check_place(durable, what)
    if durable.running.transaction == "committed":
        raise UsageError(f"{what} after job.transaction(): the job is completed.")
    if (refused := refusal(durable, what)) is not None:
        await trio.lowlevel.checkpoint()
        raise refused
    # The handler may clean up for a reason of before, a person's.
    if durable.history.lost:
        await durable.history.check_lease()
    if durable.cancelling.comes_before_a_call():
        await trio.lowlevel.checkpoint_if_cancelled()
    durable.cancelling.clean_up_begins()


async def _write_what_it_rests_on(durable: Durable, call: Call) -> None:
    """Children are started and lines written that were to come before the next durable call. If the task is cancelled
    meanwhile, it stood in `call`."""
    if not durable.history.replay.over:
        await learn_what_was_seen(durable)
    elif durable.blocks:
        note_what_was_seen(durable)
        with durable.awaiting(call):
            for block in list(durable.blocks):
                # A job that is being cancelled starts none any more, and what is to be undone is undone all the same.
                if block.left_behind or durable.running.cancel_reason not in HELD_BACK:
                    try:
                        await block.flush()
                    except UsageError:
                        # The database may have known of the cancellation first.
                        if durable.running.cancel_reason not in HELD_BACK:
                            raise
    marked = durable.failures.call_begins()
    if durable.history.let_go() or marked or durable.history.decided:
        # The handler has taken a branch because of these: each of its tasks goes on when they are written.
        with durable.awaiting(call):
            await durable.history.written(decided=True)


def _check_blocks(durable: Durable) -> None:
    if any(not block.left_behind for block in durable.blocks):
        raise UsageError("job.transaction() completes the job, and a job.durable_nursery() of it is still open.")
