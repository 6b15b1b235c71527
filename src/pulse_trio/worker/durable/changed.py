"""Code that has changed under a job whose block is open: no line says that a block was opened, only its children do.

The main task's calls are numbered, so a block is opened again by the call with its number. Where that call is another one, or
the handler returns, nobody waits for the block's children any more, and a block with another number would start them once more.
So it is a mismatch, found before the handler does anything live (unopened.py says what looks like one).

An attempt may also have ended the block, failed of that, and forgotten it; then the next one may go another way. The children
say so: all were cut.

So it is with a wait that is under way (under_way.py): the call with its number is another one, and the wait would begin anew.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import trio

from ...errors import ReplayMismatch
from ...lines import BeyondLimit, Kind
from ...store.trees import Fence
from .children import was_cut
from .interrupted import UNDONE, misfit, plain_failure
from .keys import KEYED, REMEMBERED
from .returning import REOPENED_WITHIN
from .tree_store import answered
from .under_way import FAILED, open_scopes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ...store.trees import Member
    from .calls import Call
    from .children import Child
    from .durable import Durable
    from .unopened import Passed

_NAMED = 3
"""The most children that a message names."""


async def goes_live(durable: Durable, call: Call) -> None:
    """The call has no line: it is about to do its work. Raises `ReplayMismatch` as `check_blocks` does; where the job is being
    cancelled, and that waits until the handler is back where it stood, it is cut short here."""
    if durable.history.replay.unopened.suspects:
        with durable.awaiting(call):
            await check_blocks(durable, call)
    await durable.suspension.returning.stands_at(call)


async def check_blocks(durable: Durable, call: Call | None = None) -> None:
    """The handler is about to do something live, in this `call`. Raises `ReplayMismatch` if its main task has gone on without a
    block that an earlier attempt had open."""
    unopened = durable.history.replay.unopened
    _leave_out_waits(durable)
    is_live = bool(unopened.suspects) and durable.history.replay.over
    if is_live and durable.cancelling.is_held_back and call is not None and call.handles is None:
        # The job is being cancelled, which waits until the block is open again: it will not be. (Where the handler handles an
        # exception, that may be the reason.)
        durable.suspension.returning.is_given_up()
        await trio.lowlevel.checkpoint_if_cancelled()
        await trio.sleep(REOPENED_WITHIN)  # behind results that wait for their turn
    if not is_live or _is_cancelled(durable):
        return
    for number, passed in list(unopened.suspects.items()):
        if isinstance(number, int):
            await _check(durable, number, f"now calls {_described(passed, call)}", call)
            unopened.opened(number)
    check_waits(durable, call)


def check_waits(durable: Durable, call: Call | None = None) -> None:
    """The handler is about to do something live, in this `call`. Raises `ReplayMismatch` if its main task has made another call
    in the place of a wait that an earlier attempt has begun."""
    _leave_out_waits(durable)
    if not durable.history.replay.over or _is_cancelled(durable):
        return
    for key, passed in durable.history.replay.unopened.suspects.items():
        if isinstance(key, str):
            raise _is_under_way(durable, key, f"now calls {_described(passed, call)}", call)


async def check_interrupted(durable: Durable, call: Call) -> None:
    """The handler makes this `call` while it handles an exception. If that is one of plain code's, and the attempts before had
    gone on to a block or a wait to which this one has not come, the call is refused (interrupted.py), as it is before a line.
    Raises `Interrupted`."""
    unopened = durable.history.replay.unopened
    if not durable.history.replay.over or _is_cancelled(durable):
        return
    if call.kind == "block" and unopened.has(call.key) and UNDONE in durable.history.replay.moments:
        return  # one before had failed so, too, and had opened this very block because of it
    if plain_failure(durable, {trio.lowlevel.current_task(): call}) is None:
        return
    for number in unopened.numbers():
        await _check(durable, number, f"now calls {call}", call)
    if _may_leave_out_waits(durable):
        return
    for key in unopened.waits.left_out():
        raise _is_under_way(durable, key, f"now calls {call}", call)
    awaited = [f"waits for the event {event!r}" for event in sorted(unopened.waits.events)]
    for waits in awaited + [f"waits in the call with the key {key!r}" for key in sorted(unopened.waits.keyed)]:
        mismatch = ReplayMismatch(
            f"job {durable.running.claim.id} {waits} since an earlier attempt, but the handler now calls {call}"
        )
        raise misfit(durable, mismatch, {trio.lowlevel.current_task(): call})


async def check_end(durable: Durable, now: str = "has returned") -> None:
    """The main task makes no more durable calls. Raises `ReplayMismatch` if it has not opened a block that an earlier attempt
    had open."""
    unopened = durable.history.replay.unopened
    if unopened.is_empty and not unopened.waits:
        return
    if durable.running.transaction == "committed" or (_is_cancelled(durable) and not durable.cancelling.is_held_back):
        return
    for number in unopened.left_out():
        await _check(durable, number, now)
    # Where lines are left these say more.
    if durable.history.replay.over and not _may_leave_out_waits(durable):
        for key in unopened.waits.left_out():
            raise _is_under_way(durable, key, now)


def check_children(durable: Durable, call: Call, children: Iterable[Child[Any]]) -> None:
    """The block of this call has ended well in an earlier attempt, and this attempt has started these children in it. Raises
    `ReplayMismatch` if one of them is new: nobody runs it any more. (A block that has failed may have been cut short before it
    came to all of its children.)"""
    if new := [child for child in children if child.known_id is None]:
        named = ", ".join(f"{child.key!r} ({child.kind})" for child in new[:_NAMED])
        more = f" and {len(new) - _NAMED:,} more" if len(new) > _NAMED else ""
        job_id = durable.running.claim.id
        raise durable.fail(
            ReplayMismatch(
                f"job {job_id}, {call} has ended in an earlier attempt, but the handler now starts more children in it: "
                f"{named}{more}. The code changed under a running job, or what it starts does not come from a step: branch on "
                f"job.version, or run it again from the beginning: pulse-trio jobs retry {job_id} --afresh"
            )
        )


def _is_cancelled(durable: Durable) -> bool:
    """Whether the job is being cancelled, or was before: a clean-up may come before the block is opened again."""
    resumed = durable.history.replay.resumed
    return (
        durable.running.cancel_reason is not None
        or durable.cancelling.noted
        or (resumed is not None and (resumed.cancelling or any(line.kind is Kind.CANCELLED for line in resumed.lines)))
    )


def _leave_out_waits(durable: Durable) -> None:
    suspects = durable.history.replay.unopened.suspects
    waits = [key for key in suspects if isinstance(key, str)]
    if waits and _may_leave_out_waits(durable):
        for key in waits:
            del suspects[key]


def _may_leave_out_waits(durable: Durable) -> bool:
    """Whether the main task may not have come to a wait though the code is the same: the handler has asked how a child is; a
    scope has struck, whose clean-up has the next numbers; or another task may have cut the main one short, by what came of a
    call of its own."""
    history = durable.history
    waits = history.replay.unopened.waits
    return (
        waits.given_up
        or durable.cancelling.is_held_back
        or any(scope.line is not None or scope.has_struck for scope in durable.scopes)
        or waits.lines_beside
        or (waits.beside and history.has_news)
        # A failure that attempts have failed of is handed out again, and what came after it may be another way.
        or any(key.endswith(":needed") for key in history.replay.moments)
    )


async def leave_waits(durable: Durable) -> None:
    """The attempt has failed, or does not fit its history. Remembers that the scopes that it leaves are not under way, and in
    the second case nothing that it has begun: the code may be mended before the next one."""
    history = durable.history
    before, left = history.replay.resumed, open_scopes(history.replay)
    # What is under way in the attempts before is so for code that fits. Code that does not may have calls of its own there.
    after = before.last if durable.fatal is not None and before is not None else 0
    if after:
        left.update(key for key in history.replay.moments if REMEMBERED.fullmatch(key))
    known = before is not None and left <= {line.key for line in before.lines}
    if not left or history.lost:
        return
    if known and (after or history.replay.moments.get(FAILED) == 0.0):
        return  # the history says so already
    # The history may have no room for lines, or the lease be lost: then the error is what there is to say.
    with suppress(RuntimeError, BeyondLimit):
        history.moment(FAILED, float(after), anew=True)
        await history.written()


def _is_under_way(durable: Durable, key: str, now: str, call: Call | None = None) -> Exception:
    job_id, until = durable.running.claim.id, _spelled(durable.history.replay.moments[key])
    mismatch = ReplayMismatch(
        f"job {job_id}, {key.partition(':')[2]} (key {key}) is under way since an earlier attempt, until {until}, but the "
        f"handler {now}. The code changed under a running job, or decides by what no durable call has returned: branch on "
        "job.version, give what waits a key= from the first, or run it again from the beginning: "
        f"pulse-trio jobs retry {job_id} --afresh"
    )
    return misfit(durable, mismatch, {} if call is None else {trio.lowlevel.current_task(): call})


def _spelled(moment: float) -> str:
    try:
        return datetime.fromtimestamp(moment, UTC).isoformat(" ", "seconds")
    except (ValueError, OverflowError, OSError):
        return f"{moment:.0f} s after 1970"


async def _check(durable: Durable, number: int, now: str, call: Call | None = None) -> None:
    claim, trees = durable.running.claim, durable.parts.trees
    fence = Fence(claim.id, claim.attempt, claim.session)
    members: list[Member] = await answered(lambda: trees.members(fence, number))
    left = [member for member in members if not is_over(durable, member)]
    if left:
        resumed = durable.history.replay.resumed
        key = number - (0 if resumed is None else resumed.first_block)
        name = f"{key}:block is" if key <= KEYED else "with a key is"
        mismatch = ReplayMismatch(
            f"job {claim.id}, block {name} open since an earlier attempt ({_named(left)}), but the handler {now}. "
            "The code changed under a running job: branch on job.version, or run it again from the beginning: "
            f"pulse-trio jobs retry {claim.id} --afresh"
        )
        raise misfit(durable, mismatch, {} if call is None else {trio.lowlevel.current_task(): call})


def is_over(durable: Durable, member: Member) -> bool:
    """Whether nothing is lost of a child that is not waited for: it was cut, or an attempt has failed of it."""
    resumed = durable.history.replay.resumed
    failed_of = None if resumed is None else resumed.forgotten
    return (
        was_cut(member)
        or member.state == "gone"
        or (failed_of is not None and member.state != "completed" and member.job_id in failed_of.get("failed", ()))
    )


def _named(left: Sequence[Member]) -> str:
    named = [f"its child {member.key} is job {member.job_id}, {member.state}" for member in left[:_NAMED]]
    if len(left) > _NAMED:
        named.append(f"and {len(left) - _NAMED:,} more")
    return "; ".join(named)


def _described(passed: Passed, call: Call | None) -> str:
    said = str(call) if call is not None and call.key == passed.key else f"{passed.kind} (key {passed.key})"
    return f"{said} where it called {passed.had}" if passed.had else said
