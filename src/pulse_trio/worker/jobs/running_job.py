"""One job that this worker holds: its claim, its lease as far as it is proven, and the nursery it runs in.

The nursery's cancel scope has one deadline, the earliest of the lease's, the timeout's and the whole job's. A deadline runs no
hook of ours, so the reason of a cancellation is computed from what struck first.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import trio

from ...describing import Carried, CarriedBase, carried
from ...states import options_of, storable
from .interrupts import as_users

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator
    from contextlib import AbstractAsyncContextManager

    from ...jobs import CancelReason, Claim, JobNursery, JobTransaction, Outcome
    from ...settings import Terms


_NEVER = math.inf
_ENDED = "job.nursery can be used only while the job runs: until its handler and its last child have ended."


Fence = tuple[int, int, int]
"""(job id, attempt, session): what every write about a running job must match."""


def fence_of(claim: Claim) -> Fence:
    """The claim's own."""
    return claim.id, claim.attempt, claim.session


class Transactions(Protocol):
    """Where `job.transaction()` comes from."""

    def open(self, held: RunningJob, result: Any) -> AbstractAsyncContextManager[JobTransaction]: ...


@dataclass(frozen=True, slots=True)
class Common:
    """What all jobs of a worker have in common: one reference for each job instead of five.

    `cleanup` and `timeout` in seconds (infinity: no timeout); `orphaned()` says whether the program around the worker was
    cancelled; `say(claim, fraction, message)` takes what a handler says of its progress.
    """

    cleanup: float
    timeout: float
    orphaned: Callable[[], bool]
    transactions: Transactions
    say: Callable[[Claim, float, str | None], None]


class RunningJob:
    """What stands behind a `Job` while this worker holds it. Also its `JobRuntime`."""

    __slots__ = (
        "_children",
        "_cleanup_end",
        "_common",
        "_heartbeat_joined",
        "_heartbeat_over",
        "_parked",
        "_reason",
        "asked",
        "beat_due",
        "call",
        "cancel_message",
        "claim",
        "committed",
        "ended",
        "job_deadline",
        "lease_deadline",
        "lost",
        "outcome",
        "plain",
        "said",
        "scope_nursery",
        "started",
        "terms",
        "timeout_deadline",
        "transaction",
    )

    def __init__(
        self,
        claim: Claim,
        call: Callable[[RunningJob, str], Awaitable[Any]],
        started: float,
        terms: Terms,
        common: Common,
    ) -> None:
        self.claim = claim
        self.call = call
        self.started = started
        self.terms = terms
        self.lease_deadline = started + terms.proven_for
        self.beat_due = started + terms.heartbeat
        self.timeout_deadline = started + common.timeout
        self.job_deadline = self._cleanup_end = _NEVER
        self.ended = False
        """Whether the runner has done with it."""
        self.asked = False
        self.cancel_message: str | None = None
        # No deadline of the whole job, no request for its cancellation, no transaction of its own, no failure: the path of most
        # jobs asks this alone.
        self.plain = True
        self.scope_nursery: trio.Nursery | None = None
        self.outcome: Outcome | None = None
        self.lost = False
        self.said: tuple[BaseException, str] | None = None
        """What is kept of an exception that was described where it was raised (another process)."""
        self._common = common
        self._reason: CancelReason | None = None
        self.transaction: Literal["open", "settling", "committed"] | None = None
        self.committed: Outcome | None = None
        self._children: Children | None = None
        self._heartbeat_joined = False
        self._heartbeat_over = False
        self._parked: trio.lowlevel.Task | None = None

    # The job's nursery

    def read_options(self, epoch_offset: Callable[[], float]) -> Literal["deadline", "expired"] | None:
        """The timeout and the moments, from the row; why the job must not start at all, if so. Raises `msgspec.DecodeError`.

        `epoch_offset()` is the database's clock (seconds since 1970) minus ours, or a little more: what we take for a moment of
        the database's comes early rather than late.
        """
        options = options_of(self.claim)
        if options.timeout is not None:
            self.timeout_deadline = self.started + options.timeout
        if options.deadline is not None:
            self.plain = False
            self.job_deadline = options.deadline - epoch_offset()
            if self.job_deadline <= trio.current_time():
                return "deadline"
        if options.expires is not None and options.expires - epoch_offset() <= trio.current_time():
            return "expired"
        return None

    def opened(self, nursery: trio.Nursery, shared: bool) -> None:
        """The nursery is this job's; from here on the lease is its deadline.

        A nursery that another job has left may have that one's deadline. If that may be `shared`, and is early by no more than
        a twentieth of the heartbeat, it is taken as this job's own, until the first beat moves it: setting it cost more than
        anything else here.
        """
        self.scope_nursery = nursery
        scope = nursery.cancel_scope
        if shared and self.claim.options is None and 0 <= self.lease_deadline - scope.deadline <= self.terms.early:
            self.lease_deadline = scope.deadline
        else:
            scope.deadline = self.deadline

    def left_nothing(self, nursery: trio.Nursery, task: trio.lowlevel.Task) -> bool:
        """Whether the handler, which has returned, left the nursery as it was opened, so that it may be another job's."""
        return (
            self._children is None
            and not self._heartbeat_joined
            and not nursery.child_tasks
            and _scopes_of(task) is _scopes_of(nursery)
            and not nursery.cancel_scope.cancel_called
        )

    @property
    def deadline(self) -> float:
        return min(self.lease_deadline, self.timeout_deadline, self.job_deadline)

    @property
    def nursery(self) -> JobNursery:
        if self._children is None:
            if self.scope_nursery is None:
                raise RuntimeError(_ENDED)
            self._children = Children(self, self.scope_nursery)
        return self._children

    def body_ended(self) -> None:
        """The handler has returned: the heartbeat may go as soon as the last child has."""
        if self._children is None or self._children.running == 0:
            self.end_heartbeat()
        else:
            self._children.last = True

    @contextmanager
    def cleanup(self) -> Generator[trio.CancelScope]:
        end = trio.current_time() + self._common.cleanup
        if self.cancel_reason is not None:
            # One time for all clean-ups that follow a cancellation: who waits for the job knows how long.
            end = self._cleanup_end = min(end, self._cleanup_end)
        with trio.CancelScope(shield=True, deadline=end) as scope:
            yield scope

    # The fenced transaction

    def open_transaction(self, result: Any) -> AbstractAsyncContextManager[JobTransaction]:
        return self._common.transactions.open(self, result)

    def begin_transaction(self) -> None:
        if self.transaction == "committed":
            raise RuntimeError("The job is completed by its first job.transaction(); there can be no second.")
        if self.transaction is not None:
            raise RuntimeError("The job has a job.transaction() open; use that one (tx.transaction() is a savepoint).")
        if self.scope_nursery is None:
            raise RuntimeError("job.transaction() can be used only while the job runs.")
        self.transaction = "open"

    def end_transaction(self) -> None:
        """It was rolled back."""
        self.transaction = None
        if self.lost:
            self._wake_heartbeat()

    # The heartbeat

    def join_heartbeat(self) -> None:
        """The first beat is due: the heartbeat task joins the job's nursery.

        Not before, because a task that is started and stopped costs more than most jobs do: joining late was measured at
        34-41k jobs/s end to end, a heartbeat from the start at 10.8k.
        """
        if not self._heartbeat_joined and self.scope_nursery is not None:
            self._heartbeat_joined = True
            self.scope_nursery.start_soon(self._heartbeat, name="heartbeat")

    async def _heartbeat(self) -> None:
        """Waits for the one thing a beat can say that matters here. Renewals only move the deadline.

        Parked by hand: with a `trio.Event` and a shielding scope the same task took 3.2 kB, which is most of what a
        waiting job takes.
        """
        if not self._heartbeat_over:
            self._parked = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(_not_cancelled)
        if self.lost:
            self.cancel("fence-lost")

    def end_heartbeat(self) -> None:
        """The nursery closes: nothing joins it any more, and the heartbeat leaves."""
        self.scope_nursery = None
        self._wake_heartbeat()

    def _wake_heartbeat(self) -> None:
        # Once only: rescheduling a task a second time, or one that has not parked, is an internal error of Trio's.
        if not self._heartbeat_over and self._parked is not None:
            trio.lowlevel.reschedule(self._parked)
        self._heartbeat_over = True

    def renew(self, sent: float) -> None:
        """A beat was accepted that was sent at `sent`: the lease counts from there."""
        # A deadline that has struck stays the reason, though the lease goes on while the handler cleans up.
        self._reason = self._reason or self._deadline_reason()
        self.lease_deadline = sent + self.terms.proven_for
        self.beat_due = sent + self.terms.heartbeat
        if self._reason is not None:
            # If it struck in this very turn of the loop, Trio has not seen it and now never would.
            self.cancel(self._reason)
        if self.scope_nursery is not None:
            self.scope_nursery.cancel_scope.deadline = self.deadline

    def lose(self) -> None:
        """A beat matched no row: the heartbeat task cancels the nursery."""
        self.lost = True
        # The row may be gone because our own transaction has just completed the job: then the answer to COMMIT is on its way.
        if self.transaction != "settling":
            self._wake_heartbeat()

    # Progress

    def progress(self, fraction: float, message: str | None) -> None:
        self._common.say(self.claim, fraction, message and storable(message))

    # Cancellation

    def ask(self, message: str | None) -> None:
        """Somebody asked for the job's cancellation, and perhaps said why: cancels it with the reason `user`."""
        self.asked = True
        self.plain = False
        self.cancel_message = message
        self.cancel("user")

    def cancel(self, reason: CancelReason) -> None:
        """Cancels the handler and everything in its nursery; the first reason stays."""
        if self._reason is None:
            self._reason = self.cancel_reason or reason
        if self.scope_nursery is not None:
            self.scope_nursery.cancel_scope.cancel(reason=reason)

    def take_cancellation(self) -> CancelReason:
        """A cancellation has reached the call of a handler; if nothing of the job's own struck, it is the worker's."""
        self._reason = self._reason or self._deadline_reason() or "parent"
        return self._reason

    @contextmanager
    def time_stopped(self) -> Generator[None]:
        """The handler waits for room to run in: its timeout begins at the end of the block."""
        limit = self.timeout_deadline - self.started
        self._limit_to(math.inf)
        yield
        self._limit_to(trio.current_time() + limit)

    def _limit_to(self, timeout_deadline: float) -> None:
        self.timeout_deadline = timeout_deadline
        if self.scope_nursery is not None:
            self.scope_nursery.cancel_scope.deadline = self.deadline

    @property
    def cancel_reason(self) -> CancelReason | None:
        if self._reason is None:
            try:
                self._reason = self._deadline_reason()
            except RuntimeError:
                # A handler in a thread, which no Cancelled reaches, asks whether to go on.
                return trio.from_thread.run_sync(lambda: self.cancel_reason)
        # Not asked of Trio (current_effective_deadline): a scope of the handler's own that is cancelled is nobody's business.
        if self._reason is None and self._common.orphaned():
            self._reason = "parent"
        return self._reason

    def reason_at(self, now: float) -> CancelReason | None:
        """`cancel_reason` for another thread than Trio's, as of `now` on Trio's clock. Changes nothing, and does not know of a
        cancellation of the program before it has reached the handler's call."""
        return self._reason or self._reason_of_deadline(now)

    def _deadline_reason(self) -> CancelReason | None:
        return self._reason_of_deadline(trio.current_time())

    def _reason_of_deadline(self, now: float) -> CancelReason | None:
        first = self.deadline
        if now < first:
            return None
        if first == self.timeout_deadline:
            return "timeout"
        return "deadline" if first == self.job_deadline else "lease-unproven"


def _scopes_of(owner: trio.lowlevel.Task | trio.Nursery) -> object:
    """The innermost scope that is open in a task, or was when a nursery was opened. Trio does not publish it; a Trio that
    keeps it elsewhere gets a new nursery for each job."""
    return getattr(owner, "_cancel_status", owner)


def _not_cancelled(_: object) -> trio.lowlevel.Abort:
    # The heartbeat leaves when it is told to, so what is cut short in the nursery is always something of the job's: a
    # thread that returned its value after the deadline has returned it.
    return trio.lowlevel.Abort.FAILED


class Children:
    """`job.nursery`: starts tasks in the job's own nursery and knows when the last has ended.

    The heartbeat lives in the same nursery, which would otherwise wait for it for ever. A nursery of their own for the
    children would cost every job 12 us, and most have none.
    """

    def __init__(self, held: RunningJob, nursery: trio.Nursery) -> None:
        self._held = held
        self._nursery = nursery
        self.running = 0
        self.last = False

    @property
    def cancel_scope(self) -> trio.CancelScope:
        return self._nursery.cancel_scope

    def start_soon(self, async_fn: Any, /, *args: Any, name: object = None) -> None:
        """Starts a child of the job; see `trio.Nursery.start_soon`."""
        self._check_open()
        self.running += 1
        self._nursery.start_soon(self._run, async_fn, args, name=name or async_fn)

    async def start(self, async_fn: Any, /, *args: Any, name: object = None) -> Any:
        """Starts a child and waits until it says it has started; see `trio.Nursery.start`."""
        self._check_open()
        self.running += 1
        try:
            return await self._nursery.start(self._run_started, async_fn, args, name=name or async_fn)
        except (Carried, CarriedBase) as carrier:
            error = carrier.original
        raise error

    def _check_open(self) -> None:
        if self._held.scope_nursery is None:
            raise RuntimeError(_ENDED)

    async def _run(self, async_fn: Any, args: tuple[Any, ...], **given: Any) -> None:
        safe: BaseException | None = None
        try:
            await as_users(async_fn, *args, **given)
        except BaseException as error:  # noqa: ASYNC103 -- raised below, as what it is or inside of one of ours
            if (safe := carried(error)) is error:
                raise
        finally:
            self._ended()
        if safe is not None:
            raise safe

    async def _run_started(self, async_fn: Any, args: tuple[Any, ...], *, task_status: trio.TaskStatus[Any]) -> None:
        await self._run(async_fn, args, task_status=task_status)

    def _ended(self) -> None:
        self.running -= 1
        if self.last and self.running == 0:
            self._held.end_heartbeat()
