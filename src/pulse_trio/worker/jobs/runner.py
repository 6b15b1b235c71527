"""Runs one job: a nursery of its own, the handler in it, an outcome out of it.

The nursery holds the handler, its children and, once the first beat is due, its heartbeat; its deadline is the lease. The pure
functions of `states` turn the handler's result or exception into an `Outcome`. No exception of a handler reaches its siblings
or the worker, except those that are not the job's: an outer cancellation, and a real Ctrl-C.

Cost: a job that ends at once and leaves its nursery as it was opened hands it to the next one (task_pool.py); it costs a
dictionary entry and some objects. It logs nothing and emits no event unless an instrument asked for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio
from msgspec.structs import force_setattr

from ...codec import same_result
from ...current import Given, enter
from ...describing import error_text, leaves_of, original, parted, raised_by_ctrl_c
from ...handlers import UnfitArguments
from ...jobs import Outcome
from ...observe import (
    BadRow,
    EndedAfterCommit,
    FenceLost,
    LeaseUnproven,
    UnfitArgumentsReleased,
    UnknownKindReleased,
)
from ...states import GIVEN_BACK, STOPPED, UnreadableOptions, outcome_of_error, storable
from .completion import completed, in_view_of, is_dead_of
from .cut_short import outcome_of_cancelled, outcome_of_self_cancelled, outcome_of_stuck
from .events import JobEvents
from .job_states import LOST, CleansUpNext, DurableCallRefused
from .running_job import RunningJob
from .tasks import abandon_what_is_left_open, leave_what_another_closed, start_task

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextvars import Context

    from ...jobs import Claim
    from ..plan import Plan
    from .common import Common, OutcomeSink
    from .job_table import JobTable
    from .kinds.calls import Calls
    from .tasks import Tasks, Turns

UNKNOWN_KIND_DELAY = 15.0
"""Seconds before a job of a kind this worker lacks, or whose arguments do not fit its handler, is due again: time for a worker
that can run it (a deploy under way). It doubles with each attempt, to eight times this, so that a backlog that no worker can
run is not claimed again and again. Not of durable jobs and their children, whose attempts are those of suspensions, too."""

_KEPT = 4096
"""Characters of arguments that stay with a claim while its handler runs. Longer ones are dropped once they are decoded."""

_LEFT_OPEN = "the handler has returned, and its job.transaction() was still open: leave the block before it returns"

_LAST_ATTEMPT = 2**31 - 1  # No claim can follow it: the attempt number in the fence would repeat.


class Runner:
    """Turns claims into outcomes, in the tasks of `pool`."""

    def __init__(
        self, calls: Calls, jobs: JobTable, pool: Tasks, reports: OutcomeSink, common: Common, plan: Plan
    ) -> None:
        terms, observer = plan.terms, plan.observer
        self._calls = calls
        self._jobs = jobs
        self._pool = pool
        self._reports = reports
        self._common = common
        self._plan = plan
        self._same_terms = None if terms.by_queue else terms.own
        # If every job has a timeout, no deadline that another job left in the nursery is close enough to share.
        self._shared = not plan.settings.timeout
        # trio.current_time() without the look-up of the clock: each job calls it once.
        self._now = trio.lowlevel.current_clock().current_time
        self._observer = observer
        self._events = JobEvents(observer, plan.spans)
        self._meter = plan.meter

    def accept(self, claims: Sequence[Claim], sent: float, *, beside: bool = False) -> list[RunningJob]:
        """Takes over claimed jobs. `sent` is Trio's clock before the claim was sent: the leases count from then. `beside`: see
        `JobTable.add`."""
        terms = self._plan.terms
        if self._plan.on_lease is not None and terms.by_queue and claims:
            self._plan.on_lease(min(terms.of(claim.queue).lease for claim in claims))
        call_of, same, common = self._calls.by_kind.get, self._same_terms, self._common
        accepted = [
            RunningJob(claim, call_of(claim.kind) or _never, sent, same or terms.of(claim.queue), common)
            for claim in claims
        ]
        self._jobs.add(accepted, beside=beside)
        return accepted

    def start(self, claims: Sequence[Claim], sent: float, *, beside: bool = False) -> None:
        """Takes over claimed jobs and runs them, in this order if each ends at once."""
        self.accept(claims, sent, beside=beside)
        self._pool.send()

    def give_back(self, job: RunningJob) -> None:
        """Releases a due job that has not begun."""
        job.plain = False
        self._end(job, Outcome(job.claim, "released", error=GIVEN_BACK))

    async def serve(self, place: Turns) -> None:
        """Runs due jobs in the task of `place`, as long as it may take one."""
        try:
            due = self._take(place) if place.arrived() else None
            while due is not None or await place.next():
                due = await self.run(self._take(place) if due is None else due, place)
        finally:
            place.left()

    def run_alone(self, nursery: trio.Nursery, context: Context) -> None:
        """Runs the first due job in a task of its own, with the variables of `context`."""
        job = self._jobs.due.popleft()
        enter(Given(job), context)
        context.run(start_task, nursery, self.run, job)

    def _take(self, place: Turns) -> RunningJob:
        place.job = job = self._jobs.due.popleft()
        self._pool.taken(place)
        return job

    async def run(self, job: RunningJob, place: Turns | None = None) -> RunningJob | None:
        """Runs one job to its end.

        With a `place`, then runs due jobs that this task may take, as long as each leaves the nursery as it was opened: empty,
        not cancelled, no scope left open in it. Returns a job that was taken but needs a new nursery.
        """
        task = trio.lowlevel.current_task() if place is None else place.task
        self._begin(job, task, self._now())
        if job.ended:
            return None
        claim = job.claim
        outcome: Outcome | None = None
        # One coroutine for a job, beside the handler's: a second cost 0.3 kB for each waiting job.
        try:
            try:
                async with trio.open_nursery() as nursery:
                    while True:
                        job.opened(nursery, self._shared)
                        try:
                            outcome = completed(
                                claim,
                                await job.call(job, claim.args if len(claim.args) <= _KEPT else _taken(claim)),
                            )
                        except BaseException as error:  # noqa: ASYNC103 -- the program's part is raised
                            # Caught here, inside the nursery, where the exception is still itself; outside, it would be a group
                            # of one, and Trio would have queried its class.
                            programs = self._sort_out(job, error)
                            if programs is not None:
                                # The nursery closes now, perhaps in the very tick in which the first beat falls due.
                                job.end_heartbeat()
                                abandon_what_is_left_open(nursery, place)
                                if programs is error:
                                    raise
                                raise programs from None  # noqa: ASYNC104 -- the program's part of it
                            outcome = job.outcome
                            nursery.cancel_scope.cancel()
                        job.body_ended()
                        if place is not None and (children := job.children_left(nursery, place.task)) is not None:
                            await children.last_ended()
                        if place is None or not job.left_nothing(nursery, place.task):
                            abandon_what_is_left_open(nursery, place)
                            break
                        self._end(job, outcome)
                        while job.ended:
                            if not place.at_hand():
                                outcome = None  # a result may be a megabyte, and a place may wait for long
                                if self._meter is not None and job.plain:
                                    self._time(job)
                                if not await place.next():
                                    return None
                                if nursery.cancel_scope.cancel_called:
                                    # The deadline that the last job left passed while no job used the nursery.
                                    return self._take(place)
                            job = self._take(place)
                            claim = job.claim
                            self._begin(job, task, self._now())
            except BaseExceptionGroup as group:
                if job.ended:
                    raise
                outcome = self._outcome_of_group(job, group)
            except Exception as error:
                # Trio's own error at the end of the nursery: the handler has left a scope or a nursery open.
                leave_what_another_closed(place)
                if job.ended:
                    raise
                outcome = job.outcome = self._failed(job, error)
            else:
                if nursery.cancel_scope.cancelled_caught and not job.ended:
                    # A task of the job was cut short: the handler, or a child of one that had returned.
                    outcome = job.outcome or self._after_cancel(job)
            if not job.ended:
                self._end(job, outcome)
                if self._meter is not None and job.plain:
                    self._time(job)
        except BaseException:
            # Not the job's exception: the worker is being cancelled (or the program ends). The job is released unharmed.
            if not job.ended:
                job.plain = False
                self._end(job, job.outcome or Outcome(claim, "released", error=STOPPED))
            raise
        return None

    def _begin(self, job: RunningJob, task: trio.lowlevel.Task, now: float) -> None:
        """Begins the job, or ends it if it must not begin."""
        job.task = task
        # The lease may be over before the job begins: another job of the batch blocked the loop, or the process was stopped.
        claim = job.claim
        if (
            job.call is _never
            or claim.options is not None
            or job.reason is not None
            or claim.attempt >= _LAST_ATTEMPT
            or now >= job.lease_deadline
        ) and self._refuses(job):
            return
        self._jobs.begin(job)
        if self._events.starts_wanted:
            self._events.started(job)

    def _end(self, job: RunningJob, outcome: Outcome | None) -> None:
        job.ended = True
        if job.scope_nursery is not None:
            job.end_heartbeat()
        if job.plain:
            job.outcome = outcome
            if self._events.ends_wanted:
                self._events.ended(job)
        else:
            self._end_of_other(job, outcome)
        if self._jobs.end(job):
            # `end` is true of jobs with an outcome alone; saying so with a cast or an assert costs every job a call.
            self._reports.add(job.outcome)  # type: ignore[arg-type]

    def _time(self, job: RunningJob) -> None:
        """A job has ended simply, now, and no other begins with its end."""
        job.pair.seconds.append(self._now() - job.begun)

    def _end_of_other(self, job: RunningJob, outcome: Outcome | None) -> None:
        """The end of a job that is not `plain`."""
        if job.transaction in ("open", "settling") and outcome is not None and outcome.kind == "completed":
            # Its writes are not committed, or that is not known: then this report is refused if they are.
            outcome = self._failed(job, RuntimeError(_LEFT_OPEN))
        if job.cut is not None and hasattr(job, "durability") and job.committed is None:
            # `job.cleanup()` ends without a word when its time is over: what the handler has raised or returned since tells of
            # work that is not done. The next attempt comes there again.
            outcome = self.outcome_of_cancelled(job)
        job.outcome = in_view_of(job, outcome)
        if job.committed is not None:
            self._after_commit(job, job.committed)
        self._events.failed(job)
        if self._events.ends_wanted:
            self._events.ended(job)
        if job.stuck is not None:
            # The events say how it ended; its report is what its cancellation meant.
            job.outcome = self.outcome_of_stuck(job)
        if self._meter is not None:
            self._meter.ended(job, None if job.state is LOST else job.outcome, self._now())

    def _refuses(self, job: RunningJob) -> bool:
        """Ends a job that cannot be begun. Returns whether it did."""
        begins, outcome = False, Outcome(job.claim, "released")
        try:
            begins, outcome = self._refusal(job)
        except Exception as error:
            # Decoding a hostile row may raise any exception: the job is dead, and the worker goes on.
            outcome = self._bad_row(job.claim, error)
        finally:
            if not begins:
                job.plain = False
                self._end(job, outcome)
        return not begins

    def _refusal(self, job: RunningJob) -> tuple[bool, Outcome | None]:
        """Whether a job can be begun, and its outcome if it cannot."""
        claim, known = job.claim, job.call is not _never
        if self._now() >= job.lease_deadline:
            return False, self._after_cancel(job)
        if claim.attempt >= _LAST_ATTEMPT:
            return False, self._bad_row(claim, ValueError(f"{claim.attempt} is the greatest attempt number"))
        if claim.options is not None:
            try:
                never = job.read_options()
            except UnreadableOptions as error:
                if known:
                    return False, self._bad_row(claim, error)
            else:
                if never is not None and not self._calls.goes_on(job, never):
                    return False, Outcome(claim, "cancelled", error=never)
        if job.reason is not None and not self._calls.replays_first(job):
            return False, self._after_cancel(job)
        if not known:
            self._observer.emit(UnknownKindReleased(claim.id, claim.kind))
            return False, Outcome(claim, "released", delay=_elsewhere(claim))
        self._calls.look_back(job)
        return True, None

    def _bad_row(self, claim: Claim, error: Exception) -> Outcome:
        """The outcome of a job whose row is unusable: dead, and reported."""
        self._observer.emit(BadRow(claim.id, claim.kind, "start", storable(f"{type(error).__name__}: {error}")[:2000]))
        return Outcome(claim, "discarded", error=error_text(error))

    def _outcome_of_group(self, job: RunningJob, group: BaseExceptionGroup[BaseException]) -> Outcome | None:
        """A child's failure is the job's; so is a SystemExit. An outer cancellation and a Ctrl-C are the program's."""
        if (programs := self._sort_out(job, group)) is not None:
            raise programs from None
        return job.outcome

    def _sort_out(self, job: RunningJob, error: BaseException) -> BaseException | None:
        """Records the job's part of an exception as its outcome, and returns the program's part."""
        leaves = leaves_of(error)
        if refused := [leaf for leaf in leaves if issubclass(type(leaf), DurableCallRefused)]:
            if len(refused) == len(leaves):
                job.outcome = job.outcome or self._after_cancel(job)
                return None
            leaves = [leaf for leaf in leaves if leaf not in refused]
            error = parted(error, leaves)
        mine = [leaf for leaf in leaves if _is_the_programs(leaf)]
        # Where the handler itself has said that it is to run again, a task beside it that failed, too, says no more.
        if len(mine) < len(leaves) and (job.outcome is None or job.outcome.kind not in ("failed", "released")):
            jobs = parted(error, [leaf for leaf in leaves if not _is_the_programs(leaf)]) if mine else error
            job.outcome = self._failed(job, jobs)
        return None if not mine else error if mine == [error] else parted(error, mine)

    def _after_cancel(self, job: RunningJob) -> Outcome | None:
        job.plain = False
        reason = job.cancel_reason
        if reason == "lease-unproven":
            self._observer.emit(LeaseUnproven(job.claim.id, job.claim.kind, job.claim.attempt))
        elif reason == "fence-lost":
            self._observer.emit(FenceLost(job.claim.id, job.claim.kind, job.claim.attempt, "heartbeat"))
        elif reason is None:
            return outcome_of_self_cancelled(job.claim, self._calls.retries.get(job.claim.kind))
        return self.outcome_of_cancelled(job)

    def outcome_of_cancelled(self, job: RunningJob) -> Outcome | None:
        """The outcome of a cancelled job; None when there is nothing left to report."""
        return outcome_of_cancelled(job, self._calls.retries.get(job.claim.kind), self._common.stops)

    def outcome_of_stuck(self, job: RunningJob) -> Outcome | None:
        """The outcome of a job whose handler did not end when it was cancelled, whatever it may return later; None if there is
        nothing left to report."""
        return outcome_of_stuck(job, self._calls.retries.get(job.claim.kind), self._common.stops)

    def _failed(self, job: RunningJob, error: BaseException) -> Outcome:
        job.plain = False
        claim, error = job.claim, original(error)
        text = job.said[1] if job.said is not None and job.said[0] is error else error_text(error)
        job.said = (error, text)
        if issubclass(type(error), UnfitArguments):
            self._observer.emit(UnfitArgumentsReleased(claim.id, claim.kind, claim.attempt, text))
            return Outcome(claim, "released", delay=_elsewhere(claim), error=text)
        if issubclass(type(error), CleansUpNext):
            return Outcome(claim, "released", error=storable(str(error)))
        if is_dead_of(job, error):
            return Outcome(claim, "discarded", error=text)
        return outcome_of_error(claim, error, self._calls.retries.get(claim.kind), text)

    def _after_commit(self, job: RunningJob, committed: Outcome) -> None:
        """The job was completed by its transaction; later results and exceptions are only reported as events."""
        later, job.outcome = job.outcome, committed
        if later is None or later is committed or (later.kind == "completed" and later.result is None):
            return
        claim, codec = job.claim, self._calls.codec
        if later.kind == "completed" and same_result(codec, later.result, committed.result, claim.kind, claim.id):
            return
        said = later.error or f"the handler's attempt ended as {later.kind}"
        if later.kind == "completed":
            said = "the handler returned a value, which is lost: set tx.result"
        self._observer.emit(EndedAfterCommit(claim.id, claim.kind, claim.attempt, said))


def _taken(claim: Claim) -> str:
    """The arguments, which the claim gives up."""
    args = claim.args
    force_setattr(claim, "args", "{}")
    return args


def _elsewhere(claim: Claim) -> float:
    """Seconds until a job that this worker cannot run is due again."""
    in_tree = claim.options is not None and '"tree"' in claim.options
    return UNKNOWN_KIND_DELAY * (1 if in_tree else 2 ** min(claim.attempt - 1, 3))


async def _never(_: RunningJob, __: str) -> None:
    """Stands in for the handler of a kind that has none: such a job is not begun."""


def _is_the_programs(error: BaseException) -> bool:
    """A cancellation, or a KeyboardInterrupt from Ctrl-C."""
    return raised_by_ctrl_c(error) or issubclass(type(error), trio.Cancelled)
