"""One job that this worker holds: its claim, its proven lease, and the nursery in which it runs.

The nursery's cancel scope has one deadline, the earliest of the lease's, the timeout's and the whole job's. A deadline runs no
hook of ours, so the reason of a cancellation is computed from the deadline that struck first.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import trio

from ...states import options_of
from ...trio_internals import innermost_scope, is_cancelled_around
from .children import ENDED as NURSERY_ENDED
from .children import Children
from .cleanup import CleanUp
from .job_states import CLAIMED, LOST, not_durable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractAsyncContextManager, AbstractContextManager

    from ...durable_calls import DurableCalls
    from ...jobs import CancelReason, CancelRequest, Claim, JobNursery, JobTransaction, Outcome
    from ...settings import Terms
    from ..metrics.meter import Pair
    from .common import Attempt, Common
    from .job_states import JobState
    from .own_run import OwnRun

Fence = tuple[int, int, int]
"""(job id, attempt, session): what every write about a running job must match."""


def fence_of(claim: Claim) -> Fence:
    """The claim's own."""
    return claim.id, claim.attempt, claim.session


class RunningJob:
    """The worker's side of a `Job` while the worker holds it. Also its `JobRuntime`."""

    __slots__ = (
        "_children",
        "_cleanup",
        "_common",
        "_heartbeat_joined",
        "_heartbeat_over",
        "_parked",
        "_progressed",
        "asked",
        "beat_due",
        "begun",
        "call",
        "cancel_message",
        "claim",
        "committed",
        "cut",
        "durability",
        "ended",
        "job_deadline",
        "lease_deadline",
        "outcome",
        "pair",
        "plain",
        "reason",
        "said",
        "scope_nursery",
        "sent",
        "state",
        "stuck",
        "task",
        "terms",
        "timeout_deadline",
        "transaction",
    )

    begun: float  # set only where there are metrics, as is `pair`; below 0: its handler has not begun
    pair: Pair
    durability: Attempt  # set for durable handlers alone

    def __init__(
        self,
        claim: Claim,
        call: Callable[[RunningJob, str], Awaitable[Any]],
        sent: float,
        terms: Terms,
        common: Common,
    ) -> None:
        self.claim = claim
        self.call = call
        self.state: JobState = CLAIMED
        """Only the job table changes it."""
        self.task: trio.lowlevel.Task | None = None  # that runs it
        self.stuck: str | None = None
        """The error that is reported of a handler that did not end when it was cancelled."""
        self.sent = sent
        """Trio's clock when its claim was sent: lease and timeout count from there."""
        self.terms = terms
        self.lease_deadline = sent + terms.proven_for
        self.beat_due = sent + terms.heartbeat
        self.timeout_deadline = sent + common.timeout
        self.job_deadline = math.inf
        self.ended = False
        """Whether the runner has finished with it."""
        self.asked = False
        self.cancel_message: str | None = None
        # Neither deadline nor request to cancel, transaction, failure, lost lease: for most jobs the runner checks only this.
        self.plain = True
        self.scope_nursery: trio.Nursery | None = None
        self.outcome: Outcome | None = None
        self.said: tuple[BaseException, str] | None = None
        """The stored part of an exception that was described where it was raised (another process)."""
        self._common = common
        self.reason: CancelReason | None = None  # that was requested; `cancel_reason` knows of deadlines too
        self.transaction: Literal["open", "settling", "committed"] | None = None
        self.committed: Outcome | None = None
        self.cut: str | None = None  # what is reported of a clean-up that was cut short
        self._children: Children | None = None
        self._cleanup: CleanUp | None = None  # made by the first one
        self._heartbeat_joined = False
        self._heartbeat_over = False
        self._parked: trio.lowlevel.Task | None = None
        self._progressed = False

    # The job's nursery

    def read_options(self) -> Literal["deadline", "expired"] | None:
        """Reads the timeout and the moments from the row. Returns why the job must not start at all, if so. Raises
        `msgspec.DecodeError`.

        Our estimate of the database's clock is a little ahead of it, so that the computed moments come early rather than late.
        """
        options = options_of(self.claim)
        if options.timeout is not None:
            self.timeout_deadline = self.sent + options.timeout
        if options.deadline is not None:
            self.plain = False
            self.job_deadline = options.deadline - self._common.clock.epoch_offset
            if self.job_deadline <= trio.current_time():
                return "deadline"
        if options.expires is not None and options.expires - self._common.clock.epoch_offset <= trio.current_time():
            return "expired"
        return None

    def opened(self, nursery: trio.Nursery, shared: bool) -> None:
        """The nursery is this job's; from now on the lease is its deadline.

        A nursery that another job has left may have that job's deadline. If deadlines may be `shared` and this one is early by
        no more than a twentieth of the heartbeat, this job keeps it until the first beat moves it: setting it cost more than
        anything else here.
        """
        self.scope_nursery = nursery
        scope = nursery.cancel_scope
        if (
            shared
            # A trace, tags, or the mark of a child: most jobs with options of their own have no deadline among them.
            and (self.claim.options is None or self.deadline == self.lease_deadline)
            and 0 <= self.lease_deadline - scope.deadline <= self.terms.early
        ):
            self.lease_deadline = scope.deadline
        else:
            scope.deadline = self.deadline

    def left_nothing(self, nursery: trio.Nursery, task: trio.lowlevel.Task) -> bool:
        """Whether the handler, which has returned, left the nursery as it was opened, so that it may be another job's."""
        return (
            (self._children is None or not self._children.scope_shown)
            and not self._heartbeat_joined
            and not nursery.child_tasks
            and innermost_scope(task) is innermost_scope(nursery)
            and not nursery.cancel_scope.cancel_called
        )

    @property
    def deadline(self) -> float:
        return min(self.lease_deadline, self.timeout_deadline, self.job_deadline)

    @property
    def nursery(self) -> JobNursery:
        if self._children is None:
            if self.scope_nursery is None:
                raise RuntimeError(NURSERY_ENDED)
            self._children = Children(self, self.scope_nursery)
        return self._children

    async def children_ended(self) -> None:
        """Waits until no task that the handler started in `job.nursery` runs."""
        if self._children is not None:
            await self._children.none_runs()

    def body_ended(self) -> None:
        """The handler has returned: the heartbeat may leave as soon as the last child has ended."""
        if self._children is None or self._children.running == 0:
            self.end_heartbeat()
        else:
            self._children.last = True

    def children_left(self, nursery: trio.Nursery, task: trio.lowlevel.Task) -> Children | None:
        """The handler's children, if they run and nothing else is left of it."""
        left = self._children
        return left if left is not None and left.running and innermost_scope(task) is innermost_scope(nursery) else None

    @property
    def run(self) -> OwnRun:
        return self._common.run

    def cleanup(self, *, waits: bool = False) -> AbstractContextManager[trio.CancelScope]:
        self.run.check("job.cleanup()")
        self._cleanup = self._cleanup or CleanUp(self, self._common)
        return self._cleanup.block(waits=waits)

    # The fenced transaction

    def open_transaction(self, result: Any) -> AbstractAsyncContextManager[JobTransaction]:
        return self._common.transactions.open(self, result)

    def begin_transaction(self) -> Attempt | None:
        """Returns the attempt of a durable handler, which says when the transaction may begin."""
        self.run.check("job.transaction()")
        if self.transaction == "committed":
            raise RuntimeError("The job is completed by its first job.transaction(); there can be no second.")
        if self.transaction is not None:
            raise RuntimeError("The job has a job.transaction() open; use that one (tx.transaction() is a savepoint).")
        if self.scope_nursery is None:
            raise RuntimeError("job.transaction() can be used only while the job runs.")
        self.transaction = "open"
        self.plain = False
        return getattr(self, "durability", None)

    def end_transaction(self) -> None:
        """The transaction was rolled back."""
        self.transaction = None
        if self.state is LOST:
            self._wake_heartbeat()
            if not self._heartbeat_joined:
                self.cancel("fence-lost")

    def durable(self) -> DurableCalls:
        try:
            return self.durability
        except AttributeError:
            raise not_durable(self.claim.kind, self.claim.id) from None

    # The heartbeat

    def join_heartbeat(self) -> None:
        """The first beat is due: the heartbeat task joins the job's nursery.

        It does not join earlier, because starting and stopping a task costs more than most jobs do: joining late was measured
        at 34-41k jobs/s end to end, a heartbeat from the start at 10.8k.
        """
        if not self._heartbeat_joined and self.scope_nursery is not None:
            self._heartbeat_joined = True
            self.scope_nursery.start_soon(self._heartbeat, name="heartbeat")

    async def _heartbeat(self) -> None:
        """Waits for a beat's news that the lease is lost. Renewals only move the deadline.

        Parked by hand: with a `trio.Event` and a shielding scope the same task took 3.2 kB, which is most of the memory of a
        waiting job.
        """
        if not self._heartbeat_over:
            self._parked = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(_not_cancelled)
        if self.state is LOST:
            self.cancel("fence-lost")

    def end_heartbeat(self) -> None:  # the nursery closes: no task joins it any more
        self.scope_nursery = None
        if self._progressed:
            self._common.progress.forget(self.claim)
        self._wake_heartbeat()

    def _wake_heartbeat(self) -> None:
        # Once only: rescheduling a task a second time, or one that has not parked, is an internal error of Trio's.
        if not self._heartbeat_over and self._parked is not None:
            trio.lowlevel.reschedule(self._parked)
        self._heartbeat_over = True

    def renew(self, sent: float) -> None:
        """The beat that was sent at `sent` was accepted: the lease counts from then."""
        # A deadline that has struck stays the reason, though the lease is still renewed while the handler cleans up.
        self.reason = self.reason or self._reason_of_deadline(trio.current_time())
        self.lease_deadline = sent + self.terms.proven_for
        self.beat_due = sent + self.terms.heartbeat
        if self.reason is not None:
            # If it struck in this very turn, Trio has not seen it, and never will.
            self.cancel(self.reason)
        self._deadline_moved()

    def lose(self) -> None:
        """A beat matched no row: the heartbeat task cancels the nursery."""
        # The row may be gone because our own transaction has just completed the job: then the answer to COMMIT is on its way.
        if self.transaction == "settling":
            return
        self.plain = False
        self._wake_heartbeat()
        if not self._heartbeat_joined:
            # No heartbeat will cancel it: it was not begun when the beat was sent.
            self.cancel("fence-lost")

    # Progress

    def progress(self, fraction: float, message: str | None) -> None:
        self.run.check("job.progress")
        self._progressed = True
        self._common.progress.say(self.claim, fraction, message)

    # Cancellation

    def ask(self, request: CancelRequest) -> None:
        """Takes a request for the job's cancellation: cancels it with the request's reason."""
        self.asked = True
        self.plain = False
        self.cancel_message = request.message
        self.cancel(request.reason)

    def cancel(self, reason: CancelReason) -> None:
        """Cancels the handler and everything in its nursery; the first reason stays."""
        durability = getattr(self, "durability", None)
        if durability is not None and durability.holds_back(reason):
            return
        if self.reason is None:
            self.reason = self.cancel_reason or reason
        if self._cleanup is not None:
            self._cleanup.cancelled()
        if self.scope_nursery is not None:
            self.scope_nursery.cancel_scope.cancel(reason=reason)

    def take_cancellation(self) -> CancelReason | None:
        """A cancellation has reached the call of a handler. Returns the job's reason; or the worker's, if something around the
        job is cancelled; or None: only a scope inside of the job is, such as a middleware's."""
        self.reason = self.reason or self._reason_of_deadline(trio.current_time())
        nursery = self.scope_nursery
        if self.reason is None and (nursery is None or is_cancelled_around(nursery.cancel_scope)):
            self.reason = "shutdown"
        return self.reason

    def stop_time(self) -> float:
        """The handler waits for a slot. Returns its timeout, which `start_time` is told when it begins."""
        limit = self.timeout_deadline - self.sent
        self.start_time(math.inf)
        return limit

    def start_time(self, limit: float) -> None:
        if self.timeout_deadline != (moved := trio.current_time() + limit):  # most jobs have none
            self.timeout_deadline = moved
            self._deadline_moved()

    def _deadline_moved(self) -> None:
        if self.scope_nursery is not None:
            self.scope_nursery.cancel_scope.deadline = self.deadline
        if self._cleanup is not None:
            self._cleanup.deadline_moved()

    @property
    def cancel_reason(self) -> CancelReason | None:
        if self.reason is not None:
            return self.reason
        try:
            if not (run := self._common.run).is_current:
                return self.reason_at(run.now())
        except RuntimeError:
            # A handler in a thread, which no Cancelled reaches, asks whether to go on.
            return trio.from_thread.run_sync(lambda: self.cancel_reason)
        self.reason = self._reason_of_deadline(run.now())
        # Trio is not asked (current_effective_deadline): a cancelled scope of the handler's own concerns only the handler.
        if self.reason is None and self._common.stops.orphaned:
            self.reason = "shutdown"
        return self.reason

    def reason_at(self, now: float) -> CancelReason | None:
        """`cancel_reason` for another thread than Trio's, as of `now` on Trio's clock. Changes nothing. A cancellation of the
        program shows only after it has reached the handler's call."""
        return self.reason or self._reason_of_deadline(now)

    def _reason_of_deadline(self, now: float) -> CancelReason | None:
        # Comparisons instead of `deadline`: each durable call asks. Before it begins, its options may say another timeout.
        if now < self.lease_deadline:
            if self.task is None or (now < self.timeout_deadline and now < self.job_deadline):
                return None
        elif self.task is None:
            return "lease-unproven"
        first = self.deadline
        if first == self.timeout_deadline:
            return "timeout"
        return "deadline" if first == self.job_deadline else "lease-unproven"


def _not_cancelled(_: object) -> trio.lowlevel.Abort:
    # The heartbeat leaves when told to, so a task that is cut short in the nursery always belongs to the job: a thread that
    # returned its value after the deadline has returned it.
    return trio.lowlevel.Abort.FAILED


HEARTBEAT = RunningJob._heartbeat.__code__  # pyright: ignore[reportPrivateUsage]
"""The code of a job's heartbeat task, which does not belong to its handler."""
