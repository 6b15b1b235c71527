"""Runs one job: a nursery of its own, the handler in it, an outcome out of it.

The nursery holds the handler, its children and, once the first beat is due, its heartbeat; its deadline is the lease.
Whatever leaves the handler becomes an `Outcome` by the pure functions of `states`; nothing a handler raises reaches its
siblings or the worker, except what is not the job's: an outer cancellation, and a real Ctrl-C.

Cost: a job that ends at once and leaves its nursery as it was opened hands it to the next one (task_pool.py); it costs a
dictionary entry and some objects. There is no logging and no event unless somebody asked for them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

import trio
from msgspec.structs import force_setattr, replace

from ...codec import same_result
from ...describing import error_text, leaves_of, original, parted, raised_by_ctrl_c
from ...handlers import UnfitArguments, UnfitValue, encode_result
from ...jobs import Outcome
from ...observe import (
    AttemptFailed,
    BadRow,
    EndedAfterCommit,
    FenceLost,
    JobEnded,
    JobStarted,
    LeaseUnproven,
    UnfitArgumentsReleased,
    UnknownKindReleased,
)
from ...states import UnreadableOptions, outcome_of_cancel, outcome_of_error, retry_delay, storable
from ...trio_internals import forget, opened_by
from .running_job import Common, RunningJob, Transactions

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...codec import Codec
    from ...handlers import Handlers
    from ...jobs import Claim
    from ...observe import Observer
    from ...settings import TermsOfQueues
    from .kinds import Call

UNKNOWN_KIND_DELAY = 15.0
"""Seconds before a job of a kind this worker lacks, or whose arguments do not fit its handler, is due again: time for a worker
that can run it (a deploy under way). It doubles with each attempt, to eight times this, so that a backlog nobody can run is not
claimed again and again."""

_FAILURES = ("failed", "timeout", "discarded")

_KEPT = 4096
"""Characters of arguments that stay with a claim while its handler runs. What is longer goes once it is decoded."""

_LAST_ATTEMPT = 2**31 - 1
"""No claim can follow it: the fence's number would come again."""


class Place(Protocol):
    """Where a task that runs one job after another gets the next: a claim, and when it was sent."""

    task: trio.lowlevel.Task
    spoiled: bool

    def at_hand(self) -> tuple[Claim, float] | None: ...

    async def next(self) -> tuple[Claim, float] | None: ...


class Runner:
    """Turns claims into outcomes. `call_of(kind)` is how its handler is called, None if there is none. `on_end(held)` is
    called when a job has ended and `held.outcome` is set; `orphaned()` says whether the program around the worker was
    cancelled; `timeout` is in seconds, for jobs that have none of their own, 0 for none; `epoch_offset()` says by how much the
    database's clock is ahead of ours; `say(claim, fraction, message)` takes what a handler says of its progress."""

    def __init__(
        self,
        handlers: Handlers,
        call_of: Callable[[str], Call | None],
        *,
        codec: Codec | None,
        on_start: Callable[[RunningJob], None],
        on_end: Callable[[RunningJob], None],
        observer: Observer,
        terms: TermsOfQueues,
        cleanup: float,
        timeout: float,
        orphaned: Callable[[], bool],
        epoch_offset: Callable[[], float],
        transactions: Transactions,
        say: Callable[[Claim, float, str | None], None],
    ) -> None:
        self._on_start = on_start
        self._on_end = on_end
        self._observer = observer
        self._same_terms = None if terms.by_queue else terms.own
        self._terms_of = terms.of
        # With a timeout for every job, no deadline that another job left in the nursery is near enough.
        self._shared = not timeout
        # trio.current_time() without the way to the clock: each job asks once.
        self._now = trio.lowlevel.current_clock().current_time
        self._common = Common(cleanup, timeout or math.inf, orphaned, transactions, say)
        self._call_of = call_of
        self._epoch_offset = epoch_offset
        self._codec = codec
        self._retries = {h.kind: h.retries for h in handlers if h.retries is not None}
        self._tell_start = observer.wanted(JobStarted)
        self._tell_end = observer.wanted(JobEnded)
        self._tell_failure = observer.wanted(AttemptFailed)

    async def run(self, claim: Claim, sent: float, place: Place | None = None) -> tuple[Claim, float] | None:
        """Runs one claimed job to its end. `sent` is Trio's clock before the claim was sent: the lease counts from it.

        With a `place`, runs the jobs that it has for this task afterwards, as long as each leaves the nursery as it was opened:
        empty, not cancelled, no scope left open in it. Returns one that was taken and needs a nursery of its own making.
        """
        held = self._begin(claim, sent)
        if held.ended:
            return None
        outcome: Outcome | None = None
        # One coroutine for a job, beside the handler's: a second was 0.3 kB of each job that waits.
        try:
            try:
                async with trio.open_nursery() as nursery:
                    while True:
                        held.opened(nursery, self._shared)
                        try:
                            outcome = completed(
                                claim,
                                await held.call(held, claim.args if len(claim.args) <= _KEPT else _taken(claim)),
                            )
                        except BaseException as error:  # noqa: ASYNC103 -- the program's part is raised
                            # Caught here, inside the nursery, where it is still itself; outside it would be a group of one,
                            # and Trio would have asked its class this and that.
                            programs = self._sort_out(held, error)
                            if programs is not None:
                                # The nursery closes now, perhaps in the very tick in which the first beat falls due.
                                held.end_heartbeat()
                                _abandon_what_is_left_open(nursery, place)
                                if programs is error:
                                    raise
                                raise programs from None  # noqa: ASYNC104 -- the program's part of it
                            outcome = held.outcome
                            nursery.cancel_scope.cancel()
                        held.body_ended()
                        if place is None or not held.left_nothing(nursery, place.task):
                            _abandon_what_is_left_open(nursery, place)
                            break
                        self._end(held, outcome)
                        while held.ended:
                            if (due := place.at_hand()) is None:
                                outcome = None  # a result may be a megabyte, and a place may wait for long
                                due = await place.next()
                                if due is None or nursery.cancel_scope.cancel_called:
                                    # The deadline that the last job left passed while nobody used the nursery.
                                    return due
                            claim, sent = due
                            held = self._begin(claim, sent)
            except BaseExceptionGroup as group:
                if held.ended:
                    raise
                outcome = self._outcome_of_group(held, group)
            except Exception as error:
                # Trio's own, from the nursery's end: the handler has left a scope or a nursery open.
                if held.ended:
                    raise
                outcome = held.outcome = self._failed(held, error)
            else:
                if nursery.cancel_scope.cancelled_caught and not held.ended:
                    # Something of the job was cut short: the handler, or a child of one that had returned.
                    outcome = held.outcome or self._after_cancel(held)
            if not held.ended:
                self._end(held, outcome)
        except BaseException:
            # Not the job's: the worker is being cancelled (or the program ends). The job goes back unharmed.
            if not held.ended:
                self._end(held, held.outcome or Outcome(claim, "released"))
            raise
        return None

    def _begin(self, claim: Claim, sent: float) -> RunningJob:
        """The job as it begins, or as it has ended if it is not to begin."""
        call = self._call_of(claim.kind)
        held = RunningJob(claim, call or _never, sent, self._same_terms or self._terms_of(claim.queue), self._common)
        self._on_start(held)
        # The lease may be over before its job begins: another job of the batch held the loop, or the process was stopped.
        if (
            call is None
            or claim.options is not None
            or held.asked
            or claim.attempt >= _LAST_ATTEMPT
            or self._now() >= held.lease_deadline
        ):
            refusal: Outcome | None = Outcome(claim, "released")
            try:
                refusal = self._refusal(held, call)
            except Exception as error:
                # Whatever a row can make of what reads it: the job is dead, and the worker goes on.
                refusal = self._bad_row(claim, error)
            finally:
                if refusal is not None:
                    held.plain = False
                    self._end(held, refusal)
        if self._tell_start and not held.ended:
            self._observer.emit(JobStarted(claim.id, claim.kind, claim.queue, claim.attempt))
        return held

    def _end(self, held: RunningJob, outcome: Outcome | None) -> None:
        held.ended = True
        held.end_heartbeat()
        if held.plain:
            held.outcome = outcome
        else:
            self._end_of_other(held, outcome)
        if self._tell_end:
            self._emit_end(held)
        self._on_end(held)

    def _end_of_other(self, held: RunningJob, outcome: Outcome | None) -> None:
        """The end of a job that is not `plain`."""
        held.outcome = _in_view_of(held, outcome)
        if held.committed is not None:
            self._after_commit(held, held.committed)
        if self._tell_failure and held.outcome is not None and held.outcome.kind in _FAILURES:
            self._emit_failure(held, held.outcome)

    def _refusal(self, held: RunningJob, call: Call | None) -> Outcome | None:
        """The outcome of a job that is not begun; None if it can be."""
        claim = held.claim
        if self._now() >= held.lease_deadline:
            return self._after_cancel(held)
        if claim.attempt >= _LAST_ATTEMPT:
            return self._bad_row(claim, ValueError(f"attempt {claim.attempt} is the last number that there is"))
        if claim.options is not None:
            try:
                never = held.read_options(self._epoch_offset)
            except UnreadableOptions as error:
                if call is not None:
                    return self._bad_row(claim, error)
            else:
                if never is not None:
                    return Outcome(claim, "cancelled", error=never)
        if held.asked:
            return self._after_cancel(held) or Outcome(claim, "released")
        if call is None:
            self._observer.emit(UnknownKindReleased(claim.id, claim.kind))
            return Outcome(claim, "released", delay=_elsewhere(claim))
        return None

    def _bad_row(self, claim: Claim, error: Exception) -> Outcome:
        """The outcome of a job whose row cannot be worked with: dead, and said to be."""
        self._observer.emit(BadRow(claim.id, claim.kind, "start", storable(f"{type(error).__name__}: {error}")[:2000]))
        return Outcome(claim, "discarded", error=error_text(error))

    def _outcome_of_group(self, held: RunningJob, group: BaseExceptionGroup[BaseException]) -> Outcome | None:
        """A child's failure is the job's; so is a SystemExit. An outer cancellation and a Ctrl-C are the program's."""
        if (programs := self._sort_out(held, group)) is not None:
            raise programs from None
        return held.outcome

    def _sort_out(self, held: RunningJob, error: BaseException) -> BaseException | None:
        """Notes what of an exception is the job's, as its outcome, and gives what is the program's."""
        leaves = leaves_of(error)
        mine = [leaf for leaf in leaves if _is_the_programs(leaf)]
        if len(mine) < len(leaves) and (held.outcome is None or held.outcome.kind != "failed"):
            jobs = parted(error, [leaf for leaf in leaves if not _is_the_programs(leaf)]) if mine else error
            held.outcome = self._failed(held, jobs)
        return None if not mine else error if mine == [error] else parted(error, mine)

    def _after_cancel(self, held: RunningJob) -> Outcome | None:
        held.plain = False
        reason = held.cancel_reason
        if reason == "lease-unproven":
            self._observer.emit(LeaseUnproven(held.claim.id, held.claim.kind, held.claim.attempt))
        elif reason == "fence-lost":
            self._observer.emit(FenceLost(held.claim.id, held.claim.kind, held.claim.attempt, "heartbeat"))
        elif reason is None:
            error = "CancelledError: the handler cancelled its own nursery (job.nursery)"
            return Outcome(held.claim, "failed", delay=retry_delay(held.claim), error=error)
        return self.outcome_of_cancelled(held)

    def outcome_of_cancelled(self, held: RunningJob) -> Outcome | None:
        """What the cancellation of a job means; None when there is nothing left to report."""
        reason = held.cancel_reason or "parent"
        return outcome_of_cancel(held.claim, reason, self._retries.get(held.claim.kind), held.cancel_message)

    def _failed(self, held: RunningJob, error: BaseException) -> Outcome:
        held.plain = False
        claim, error = held.claim, original(error)
        text = held.said[1] if held.said is not None and held.said[0] is error else error_text(error)
        held.said = (error, text)
        if issubclass(type(error), UnfitArguments):
            self._observer.emit(UnfitArgumentsReleased(claim.id, claim.kind, claim.attempt, text))
            return Outcome(claim, "released", delay=_elsewhere(claim), error=text)
        if issubclass(type(error), UnfitValue):
            return Outcome(claim, "discarded", error=text)
        return outcome_of_error(claim, error, self._retries.get(claim.kind), text)

    def _after_commit(self, held: RunningJob, committed: Outcome) -> None:
        """The job was completed by its transaction; whatever came later can only be told."""
        later, held.outcome = held.outcome, committed
        if later is None or later is committed or (later.kind == "completed" and later.result is None):
            return
        claim = held.claim
        if later.kind == "completed" and same_result(self._codec, later.result, committed.result, claim.kind, claim.id):
            return
        said = later.error or f"the handler's attempt ended as {later.kind}"
        if later.kind == "completed":
            said = "the handler returned a value, which is lost: set tx.result"
        self._observer.emit(EndedAfterCommit(claim.id, claim.kind, claim.attempt, said))

    def _emit_failure(self, held: RunningJob, outcome: Outcome) -> None:
        claim = held.claim
        self._observer.emit(
            AttemptFailed(
                claim.id,
                claim.kind,
                claim.queue,
                claim.attempt,
                outcome.kind,
                trio.current_time() - held.started,
                outcome.error,
                held.said[0] if held.said is not None else None,
            )
        )

    def _emit_end(self, held: RunningJob) -> None:
        claim, outcome = held.claim, held.outcome
        self._observer.emit(
            JobEnded(
                claim.id,
                claim.kind,
                claim.queue,
                claim.attempt,
                outcome.kind if outcome is not None else "lost",
                trio.current_time() - held.started,
                outcome.error if outcome is not None else None,
            )
        )


def _in_view_of(held: RunningJob, outcome: Outcome | None) -> Outcome | None:
    """The outcome of a job that has a deadline, or whose cancellation was asked for."""
    if outcome is None:
        return None
    if outcome.kind == "completed":
        return replace(outcome, cancelling=True) if held.asked else outcome
    # A retry that would begin after the job's deadline is due at that moment, and is cancelled then: who waits for the job
    # need not wait longer, and the failure is on record.
    left = max(0.0, held.job_deadline - trio.current_time())
    return replace(outcome, delay=left) if outcome.delay > left else outcome


def _taken(claim: Claim) -> str:
    """The arguments, which the claim has no more."""
    args = claim.args
    force_setattr(claim, "args", "{}")
    return args


def _elsewhere(claim: Claim) -> float:
    """Seconds until a job that this worker cannot run is due again."""
    return UNKNOWN_KIND_DELAY * 2 ** min(claim.attempt - 1, 3)


async def _never(_: RunningJob, __: str) -> None:
    """Stands for the handler of a kind that has none: such a job is not begun."""


def completed(claim: Claim, value: Any) -> Outcome:
    """The outcome of a handler that returned. Raises `UnfitValue` if JSON cannot carry the value."""
    if value is None:
        return Outcome(claim, "completed")
    return Outcome(claim, "completed", result=encode_result(claim.kind, value))


def _abandon_what_is_left_open(nursery: trio.Nursery, place: Place | None) -> None:
    """Nurseries that the handler opened and did not close (in an async generator that nobody finished, most often) are
    cancelled and forgotten, as Trio does it when a task ends. The job then fails as for a scope that is left open; its own
    nursery could not be closed below them. Their generator may still try to, in a task that is gone by then: no other job may
    run in it.
    """
    opened = opened_by(trio.lowlevel.current_task())
    while nursery in opened and opened[-1] is not nursery:
        inner = opened.pop()
        inner.cancel_scope.cancel(reason="the job's handler ended and left it open")
        forget(inner)
        if place is not None:
            place.spoiled = True


def _is_the_programs(error: BaseException) -> bool:
    """A cancellation, or a KeyboardInterrupt from Ctrl-C."""
    return raised_by_ctrl_c(error) or issubclass(type(error), trio.Cancelled)
