"""The durable handlers of one worker: what all their attempts share, and how one is called."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import trio

from ...codec import coded_line, plain_line
from ...describing import leaves_of, message_of, type_name
from ...handlers import UnfitArguments
from ...lines import LinesRefused
from ...states import WISHES
from ...trio_internals import keep_order
from ..jobs.job_states import CleansUpNext, DurableCallRefused
from .afresh import is_asked_by, remember
from .astray import goes_astray
from .beginning import REFUSED
from .changed import check_end, leave_waits
from .durable import RETURNED, Durable
from .failures import reasons_of
from .half_undone import check_answer, check_undone
from .interrupted import ends_with, explained, is_plain, leave_undone
from .left_behind import await_left_behind
from .once_more import leaves_undone
from .reordering import begin_anew
from .resuming import history_of, resume
from .snoozes import as_failure

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

    from ...codec import Codec
    from ...handlers import Handler
    from ...jobs import Claim
    from ...lines import Lines, Resumed
    from ...tracing import Traces
    from ..jobs.common import DatabaseClock
    from ..jobs.job_table import JobTable
    from ..jobs.running_job import RunningJob
    from .history import Writer
    from .looks import Looks
    from .receiving import Receiver
    from .tree_store import TreeStore

_UNWINDING = (trio.Cancelled, DurableCallRefused)
_LINES_BESIDE = 5.0
"""Seconds that a handler which begins afresh waits for the lines of other tasks: less than a replay may stand still."""


class Begun(Protocol):
    @property
    def connection(self) -> Any: ...

    @property
    def lost(self) -> bool: ...

    async def remember(self, lines: Lines) -> bool | None: ...


class TransactionStore(Protocol):
    def begin(self, *, seconds: float) -> AbstractAsyncContextManager[Begun]: ...


class ResumeStore(Protocol):
    async def resume(self, claim: Claim) -> Resumed | None: ...

    async def begin_afresh(self, claim: Claim) -> bool: ...

    async def comes_after_deadline(self, claim: Claim) -> bool: ...


@dataclass(frozen=True, slots=True)
class DurableParts:
    """What the attempts of one worker share."""

    store: ResumeStore
    writer: Writer
    jobs: JobTable
    clock: DatabaseClock
    codec: Codec | None
    trees: TreeStore
    looks: Looks
    receiver: Receiver
    transactions: TransactionStore
    limiter: trio.CapacityLimiter
    """Of the threads of plain steps."""
    traces: Traces | None = None
    """Where an instrument makes spans: children carry the span that is current where they are started."""

    def coded(self, claim: Claim, line: int, text: str) -> str:
        """The stored form of a value, bound to its job and line."""
        return text if self.codec is None else coded_line(self.codec, text, claim.kind, claim.id, line)

    def plain(self, claim: Claim, line: int, stored: str) -> str:
        """The reverse. Raises `CodecError`."""
        return stored if self.codec is None else plain_line(self.codec, stored, claim.kind, claim.id, line)


def durable_call(
    handler: Handler[..., Any], call: Callable[[RunningJob, str], Awaitable[Any]], parts: DurableParts
) -> Callable[[RunningJob, str], Awaitable[Any]]:
    """The call of a durable handler, with all that is around it: a cancellation that comes while a middleware awaits something,
    a middleware that fails, or arguments that cannot be read, must not lose what is to be undone. Limiters and locks are given
    to the same tasks again only if Trio keeps their order: of 30 jobs with nested limiters two stood still for more than 80 s,
    and now all end within 5 s."""
    declared = handler.durability
    assert declared is not None  # noqa: S101 -- it is durable
    keep_order()

    async def in_attempt(running: RunningJob, args: str) -> Any:
        durable = Durable(running, declared, parts)
        return await run(durable, partial(call, running, args))

    return in_attempt


def may_have_history(claim: Claim) -> bool:
    """Whether this is a later attempt of a job that has made a durable call, or of a child that its parent watches. A child has
    the mark from its start on, with a 2 until it is watched or durable (migrations/0052_quiet_children.sql)."""
    options = claim.options
    return claim.attempt > 1 and options is not None and '"tree"' in options and '"tree": 2' not in options


def unless_history(
    call: Callable[[RunningJob, str], Awaitable[Any]], parts: DurableParts
) -> Callable[[RunningJob, str], Awaitable[Any]]:
    """The call of a handler that is not durable, for a job that may have a history: another version of the code has begun it.
    Run from the top, the handler would do again what that remembers. Raises `UnfitArguments` if so, as for an older version."""

    async def looks_first(running: RunningJob, args: str) -> Any:
        claim = running.claim
        found = await history_of(running, parts)
        if found.last > 0 or found.blocks or found.events:
            raise UnfitArguments(
                f"job {claim.id} has a history, and the handler {claim.kind!r} of this worker is not durable: a worker whose "
                "handler has durable=True goes on with it."
            )
        # A child that its parent watches: its deadline, or a cancellation, came before its beginning.
        if (reason := running.reason or running.read_options()) is not None and reason != "expired":
            running.cancel(reason)
        await trio.lowlevel.checkpoint()
        return await call(running, args)

    return looks_first


async def run(durable: Durable, call: Callable[[], Awaitable[Any]]) -> Any:
    """Calls the handler. Raises what makes the job dead, whatever the handler has caught: `ReplayMismatch` too if it returned
    before its history was used up. Raises `UsageError` if it did not await a durable call."""
    durable.running.durability = durable
    # The runner looks at what else is to be said of its end.
    durable.running.plain = False
    if may_have_history(durable.running.claim):
        durable.cancelling.begins()
        await _resume(durable)
        _check_version(durable)
        unopened = durable.history.replay.unopened
        unopened.waits.found(durable.history.replay, failures=durable.running.claim.failures)
        if unopened.waits or not unopened.is_empty:
            durable.keys.replay = durable.history.replay
        durable.hand_out()
    try:
        return await _called(durable, call)
    finally:
        durable.keys.forget_unawaited()
        durable.failures.forget()
        durable.cancelling.ends()
        durable.suspension.returning.ends()


async def _resume(durable: Durable) -> None:
    """Reads the history. Raises `CleansUpNext` if the deadline came before the database had answered: nobody knows yet what
    is to be undone, so the job runs once more, as one whose deadline came between two attempts."""
    try:
        await resume(durable)
    except trio.Cancelled as error:
        if durable.running.cancel_reason == "deadline" and durable.cancelling.resumes:
            raise CleansUpNext("its history could not be read in time") from error  # noqa: ASYNC104 -- the job goes on
        raise


def _check_version(durable: Durable) -> None:
    """Raises `UnfitArguments` where a newer version of the handler has begun the job: the author of that version has
    thought of this one's jobs, but not this one of that version's. While a deployment is under way both run, and to replay
    here would be a mismatch, which is the job's death."""
    if durable.version > durable.history.code_version:
        claim = durable.running.claim
        raise UnfitArguments(
            f"version {durable.version} of {claim.kind!r} has begun job {claim.id}, and this worker has version "
            f"{durable.history.code_version}: a worker with that version, or a newer one, goes on with it."
        )


async def _replay_beside(durable: Durable, error: BaseException) -> None:
    """The handler says that all is undone. Tasks in `job.nursery` had lines after that, in an attempt that was lost then: they
    come to these first, or the history would not be forgotten. The handler stands in no call meanwhile: it may have failed of
    plain code long before its last line, and that is no mismatch."""
    running = durable.running
    if durable.fatal is not None or durable.history.replay.over or not is_asked_by(error):
        return
    if running.cancel_reason is None:
        deadline = min(trio.current_time() + _LINES_BESIDE, running.timeout_deadline)
        with trio.CancelScope(shield=True, deadline=deadline):
            await running.children_ended()


def _check_refused(durable: Durable) -> None:
    """Raises `LinesRefused` if the handler has heard that its lines are refused, and perhaps swallowed that."""
    if (refusal := durable.history.refusal) is not None:
        raise durable.fail(refusal)


def _came_too_early(durable: Durable) -> bool:
    """Whether the job's deadline came in the replay, which no line waits for as it does for a person: the handler had not come
    to what is to be undone. The job runs once more, as one whose deadline came between two attempts."""
    replay, cancelling = durable.history.replay, durable.cancelling
    return (
        durable.running.cancel_reason == "deadline"
        and durable.fatal is None
        and not (replay.over or cancelling.noted or cancelling.told)
        and durable.history.has_lines
    )


def _says_nothing(durable: Durable, error: BaseException) -> bool:
    """Whether the handler unwinds for one of the reasons `REFUSED`, and raises an exception of its own that comes of that
    (`raise Discard(...) from error`, say): the next attempt stands where this one did."""
    leaves = leaves_of(error)
    return (
        durable.running.cancel_reason in REFUSED
        and durable.fatal is None
        and not all(issubclass(type(leaf), _UNWINDING) for leaf in leaves)
        and all(map(_comes_of_unwinding, leaves))
    )


def _comes_of_unwinding(leaf: BaseException) -> bool:
    # What the handler raises as its word on the job needs no cause.
    reasons = reasons_of(leaf, contexts=issubclass(type(leaf), WISHES))
    return issubclass(type(leaf), (Exception, *_UNWINDING)) and any(
        issubclass(type(one), _UNWINDING) for one in reasons
    )


async def _end_beside(durable: Durable, error: BaseException) -> None:
    """Plain code of the handler has failed while tasks in `job.nursery` run, which are cancelled for it. What they undo then
    rests on a failure of which no line tells. So they end while the handler is still there, and the history says on what."""
    running = durable.running
    if running.cancel_reason is not None or durable.fatal is not None or running.scope_nursery is None:
        return
    if is_asked_by(error):
        return  # it waits for them itself (afresh.py)
    if not durable.quiet.others_run() or not is_plain(durable, error):
        return
    durable.failures.handler_failed = error
    with trio.CancelScope(shield=True):
        running.scope_nursery.cancel_scope.cancel()
        await running.children_ended()


async def _called(durable: Durable, call: Callable[[], Awaitable[Any]]) -> Any:
    try:
        value = await call()
        _check_refused(durable)
        await check_end(durable)
        durable.suspension.returning.is_given_up()
        if durable.history.replay.unopened.waits.undoing:
            await check_undone(durable)
        # Tasks in `job.nursery` may still make durable calls.
        with durable.awaiting(RETURNED):
            await durable.running.children_ended()
            if durable.running.cancel_reason is None:
                await await_left_behind(durable)
    except BaseException as error:
        durable.suspension.returning.is_given_up()
        with suppress(LinesRefused):
            _check_refused(durable)
        await _end_beside(durable, error)  # noqa: ASYNC102 -- it shields itself; a task that never ends is found as stuck
        await check_answer(durable, error)  # noqa: ASYNC102, ASYNC120 -- waits as long as the lease is proven
        await durable.quiet.leave_said()  # noqa: ASYNC102, ASYNC120 -- shielded inside, with a deadline
        reason = durable.running.cancel_reason
        # A task in `job.nursery` that undoes something now does so because of what is held: its call writes that first.
        if reason is not None or not durable.quiet.others_run():
            durable.history.forget_held()
        if durable.fatal is not None or reason in (None, "timeout"):
            await leave_waits(durable)  # noqa: ASYNC102 -- waits as long as the lease is proven
            await leave_undone(durable, error)  # noqa: ASYNC102 -- waits as long as the lease is proven
        if durable.fatal is None and reason not in REFUSED:
            steps = reason is not None and (reason != "timeout" or durable.cancelling.is_written)
            await durable.failures.forget_those_of(error, steps_alone=steps)  # noqa: ASYNC102 -- waits as long as the lease is proven
        await _replay_beside(durable, error)  # noqa: ASYNC102 -- shielded inside, with a deadline
        instead = await remember(durable, error)  # noqa: ASYNC102 -- waits as long as the lease is proven
        instead = instead or as_failure(durable, error)
        await leaves_undone(durable, instead or error)  # noqa: ASYNC102 -- waits as long as the lease is proven
        again = _came_too_early(durable)
        again = again or await durable.cancelling.ended(error)  # noqa: ASYNC102 -- a handler that does not end is found as stuck
        await goes_astray(durable, durable.fatal)  # noqa: ASYNC102 -- waits as long as the lease is proven
        if again:
            cause = error if durable.fatal is None else ends_with(durable.fatal)
            raise CleansUpNext(f"{type_name(cause)}: {message_of(cause)}") from cause  # noqa: ASYNC104 -- no `Cancelled`
        # A group around it would be a failure, which is retried.
        if durable.fatal is not None and not any(issubclass(type(leaf), trio.Cancelled) for leaf in leaves_of(error)):
            if (ending := ends_with(durable.fatal)) is not durable.fatal:
                raise ending  # noqa: ASYNC104, B904 -- none is among them; its cause is the handler's
            if error is not durable.fatal:
                raise durable.fatal from error  # noqa: ASYNC104 -- none is among them
        if instead is not None:
            raise instead from error  # noqa: ASYNC104 -- what the handler raised was no `Cancelled`
        if _says_nothing(durable, error):
            ended = f"the handler has unwound ({durable.running.cancel_reason}), and raised what came of that"
            raise DurableCallRefused(ended) from error  # noqa: ASYNC104 -- it ends the attempt as the `Cancelled` would
        raise
    if durable.fatal is None and durable.running.cancel_reason is None:
        await durable.failures.forget_those_of()
    await durable.cancelling.ended()
    left = durable.history.replay.left()
    if (fatal := durable.fatal or (left and explained(durable, left))) is not None and not (
        durable.history.replay.out_of_order and await begin_anew(durable)
    ):
        await leave_waits(durable)
        await goes_astray(durable, fatal)
        raise ends_with(fatal)
    # What a handler returns while it is suspended, or has lost its job, counts for nothing.
    if durable.running.cancel_reason not in REFUSED:
        durable.keys.check_awaited()
    return value
