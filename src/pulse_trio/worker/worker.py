"""The nursery tree of a worker. Shutdown is nesting:

    services {settler, heartbeats, watchdog, listener, cancellations, stacks}  >  jobs  >  intake {claimer, scheduler}

To stop, the intake is cancelled; the jobs nursery has its grace, heartbeats going on to the last job; what is left is
cancelled, with clean-up time and the lease still held, and released unharmed; the settler drains; the heartbeats end.

A worker that is cancelled from outside does the same without any grace: its handlers see `Cancelled` with the reason
"parent" at once, and their leases are given back under a shield with a deadline of its own.
"""

from __future__ import annotations

import logging
import math
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import trio
from msgspec.structs import replace

from ..codec import coded_result, in_schema
from ..errors import ConfigurationError, DatabaseUnavailable, HandlerStuck
from ..handlers import Handlers, check_queue, death_hooks
from ..logs import LogInstrument, logger
from ..observe import HandlerOverran, JobQuarantined, Observer, WorkerStarted, WorkerStopped
from ..settings import WorkerSettings
from ..states import storable
from ..store import ClaimCursor, WorkerStore
from .claiming.claim_loop import ClaimLoop
from .claiming.claimer import Claimer
from .claiming.cursors import ClaimCursors
from .claiming.idle import Idle
from .claiming.inline_quarantine import InlineQuarantine
from .claiming.limited import LimitedQueues
from .claiming.listener import Listener
from .claiming.sweeps import Sweeps
from .claiming.wakeups import Wakeups
from .diagnosis.lag import LagMonitor
from .diagnosis.stack import task_of, task_tree
from .diagnosis.stacks import Stacks
from .diagnosis.stuck import StuckHandlers
from .holding.cancellations import Cancellations
from .holding.heartbeats import Heartbeats
from .holding.progress import ProgressReports
from .holding.reports import Reports
from .jobs.interrupts import protect
from .jobs.job_table import JobTable
from .jobs.kinds import Calls
from .jobs.runner import Runner, completed
from .jobs.task_pool import TaskPool
from .jobs.transactions import Transactions
from .processes.launch import launch_of
from .processes.quarantine import Quarantine, Stops
from .upkeep.batches import Batches
from .upkeep.scheduler import Scheduler
from .upkeep.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any, NoReturn

    from ..codec import Codec
    from ..jobs import Claim, Outcome
    from ..observe import Instrument
    from .jobs.running_job import RunningJob
    from .processes.orders import Orders
    from .processes.quarantine import Launch

_FAREWELL = 5.0
"""Seconds the last reports may take when the worker was cancelled or its grace has passed."""


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What a worker did in its life: jobs by outcome, and how many were given back unfinished when it stopped."""

    ended: dict[str, int]
    released: int


class Worker:
    """A worker for a Trio program: `async with trio.open_nursery() as n: n.start_soon(Worker(handlers, dsn).run)`.

    Args: `dsn` as libpq takes it; every setting of `WorkerSettings` by name (times in seconds); `burst` ends `run` when
    nothing is due and nothing runs; `keep` False deletes completed jobs instead of archiving them; `watch` False leaves the
    watchdog to somebody else (a supervisor); `on_session` is told each session before it claims, `on_lease` the shortest
    lease (seconds) among jobs before they begin, where queues have leases of their own; `on_stuck` ends the process because
    of handlers that do not end, and is given what its successor is to report of their jobs (as its `stuck`); `instruments`
    get the events of `pulse_trio.observe`; `log` False keeps them out of the logger `pulse_trio`, to which they go otherwise,
    as with `pulse-trio run`: what needs attention as warnings and errors, the rest at INFO.

    `app` says where another process finds the handlers, as in "myapp:handlers": jobs that killed their worker again and again
    then run in a process of their own. Without it they run in this one, when nothing else does or after 30 s. `launch` is how
    `pulse-trio run` starts such a process, and `orders` what such a process is told to run.
    """

    def __init__(
        self,
        handlers: Handlers,
        dsn: str,
        *,
        burst: bool = False,
        keep: bool = True,
        watch: bool = True,
        on_session: Callable[[int], None] | None = None,
        on_lease: Callable[[float], None] | None = None,
        on_stuck: Callable[[list[Outcome]], NoReturn] | None = None,
        stuck: Sequence[Outcome] = (),
        app: str | None = None,
        launch: Launch | None = None,
        orders: Orders | None = None,
        instruments: Iterable[Instrument] = (),
        log: bool = True,
        store: WorkerStore | None = None,
        settings: WorkerSettings | None = None,
        **given: Any,
    ) -> None:
        self.settings = settings or WorkerSettings(**given)
        if self.settings.processes != 1:
            raise ConfigurationError(
                "A Worker is one process. For several: pulse-trio run --processes N, or a Worker in each process of yours."
            )
        for queue in self.settings.queues or ():
            check_queue(queue)
        self._handlers = handlers
        self._terms = self.settings.terms(handlers.queue_leases)
        self._death_hooks = death_hooks(handlers)
        self._burst = burst
        self._on_lease = on_lease
        self._on_stuck = on_stuck
        self._left_stuck = stuck
        self._watch = watch
        # Each job that ends well is worth a line only to who wants everything, as with `run --verbose`.
        every_job = logger.isEnabledFor(logging.DEBUG)
        self._observer = Observer(
            [*([LogInstrument(every_job=every_job)] if log else []), *handlers.instruments, *instruments]
        )
        self._launch = launch_of(app, dsn, self.settings, keep=keep) if app is not None else launch
        self._orders = orders
        self._quarantine: Quarantine | None = None
        self._store = store or WorkerStore(
            dsn,
            direct_dsn=self.settings.direct_dsn,
            schema=self.settings.schema,
            lease=self.settings.lease,
            leases={queue: terms.lease for queue, terms in self._terms.by_queue.items()},
            queues=self.settings.queues,
            declared=handlers.queues,
            concurrency=self.settings.concurrency,
            keep=keep,
            stale=self.settings.stale,
            unfit_patience=self.settings.unfit_patience,
            on_session=on_session,
            on_bad_row=self._observer.emit,
            on_suspect=self._job_suspected,
            on_death=self._observer.emit,
            session=orders.session if orders is not None else None,
        )
        self._hushed = trio.Event()
        self._stopping = trio.Event()
        self._stopping_now = trio.Event()
        self._orphaned = False
        self._committed: set[RunningJob] = set()
        """Jobs completed by their own transaction, whose handlers have not returned yet."""
        self._jobs_table = JobTable(self.settings.concurrency)
        self._held: Callable[[], Iterable[RunningJob]] = tuple
        self._stuck: dict[RunningJob, str] = {}
        self._ended: dict[str, int] = {}
        self._released = 0

    # What a program may ask of a running worker

    def stop(self) -> None:
        """Stop claiming; let running jobs end within the grace; then cancel and release what is left."""
        self._hushed.set()
        self._stopping.set()

    def quiet(self) -> None:
        """Stop claiming, and go on running what runs until `stop`: for draining a machine without a deadline."""
        self._hushed.set()

    def stop_now(self) -> None:
        """Stop claiming and cancel what runs, at once; jobs are released unharmed."""
        self.stop()
        self._stopping_now.set()

    @property
    def running(self) -> int:
        """Jobs whose handler runs now."""
        return self._jobs_table.running

    @property
    def leases(self) -> tuple[float, float]:
        """Seconds of the shortest and of the longest lease that this worker's claims may have."""
        return self._terms.shortest, self._terms.longest

    @property
    def shortest_held(self) -> float:
        """Seconds of the shortest lease among this worker's own and those of the jobs that it holds now."""
        if not self._terms.by_queue:
            return self.settings.lease
        return min((held.terms.lease for held in self._held()), default=self.settings.lease)

    # Life

    async def run(self, *, task_status: trio.TaskStatus[Worker] = trio.TASK_STATUS_IGNORED) -> WorkerReport:
        """Claims and runs jobs until `stop`, cancellation, or (with `burst`) until nothing is due.

        `nursery.start(worker.run)` returns when the worker is registered. Raises `SchemaError` if the schema is not what
        this version needs, `DatabaseUnavailable` if the database cannot be reached at the start; later it reconnects.

        Raises `HandlerStuck` after a handler that had not ended `cleanup` and one more second after its cancellation: then the
        worker stops as by `stop_now`, and keeps that one job's lease until the handler has ended. A program that cannot wait
        has to end itself: the event `HandlerOverran` tells it.
        """
        protect(self._handlers)
        try:
            await self._store.check_schema()
            session = await self._store.open_session()
            await self._store.declare_limits(self._handlers.queue_limits)
            if self._orders is None:
                await self._declare_deaths()
            self._build()
            if self._orders is None:
                self._observer.emit(WorkerStarted(session, self.settings.queues, self.settings.concurrency))
            for outcome in self._left_stuck:
                self._settler.add(outcome)
            self._warn_of_late_beats()
            task_status.started(self)
            await self._live()
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + _FAREWELL):
                await self._store.aclose()
        if self._orders is None:
            self._observer.emit(WorkerStopped(self._released))
        if self._stuck and self._on_stuck is not None:
            self._on_stuck([])  # it has ended after all, and is reported; the worker has stopped all the same
        if self._stuck:
            stuck = ", ".join(f"{held.claim.id} ({held.claim.kind})" for held in self._stuck)
            raise HandlerStuck(f"The handler of job {stuck} did not end when it was cancelled: the worker has stopped.")
        return WorkerReport(dict(self._ended), self._released)

    def _warn_of_late_beats(self) -> None:
        for queue, terms in [(None, self._terms.own), *self._terms.by_queue.items()]:
            if terms.one_beat_decides:
                logger.warning(
                    "heartbeat%s is %g s, above a third of the lease (%g s): one beat that is late may cancel what runs here",
                    "" if queue is None else f" of the queue {queue}",
                    terms.heartbeat,
                    terms.lease,
                )

    async def _declare_deaths(self) -> None:
        hooked = {hook.kind for hook in self._death_hooks}
        others = [handler.kind for handler in self._handlers if handler.kind not in hooked]
        await self._store.declare_deaths(self._death_hooks, others)

    def _build(self) -> None:
        s = self.settings
        self._cancellations = Cancellations(
            self._store,
            held=lambda: self._leases.held,
            on_gone=lambda held: self._leases.hurry(held),
            observer=self._observer,
        )
        self._leases = Heartbeats(
            self._store,
            sign_of_life=s.sign_of_life,
            mixed=bool(self._terms.by_queue),
            on_asked=self._cancellations.reach,
            early=self._cancellations.early,
            on_early=self._cancellations.heard,
            observer=self._observer,
        )
        self._held = lambda: self._leases.held
        self._stacks = Stacks(
            self._store,
            held=lambda: self._leases.held,
            session=lambda: self._store.session,
            stack_of=self._stack_of,
        )
        self._progress = ProgressReports(self._store, self._observer)
        codec = in_schema(self._handlers.codec, s.schema)
        self._calls = Calls(
            self._handlers,
            codec=codec,
            threads=trio.CapacityLimiter(s.concurrency),
            process_slots=s.process_slots,
            cleanup=s.cleanup,
            margin=self._terms.least_margin,
            lag_warning=s.lag_warning,
            observer=self._observer,
        )
        self._overruns = StuckHandlers(
            lambda: [
                held
                for held in chain(self._leases.held, self._leases.lost, self._committed)
                if not self._calls.ends_by_itself(held.claim.kind)
            ],
            patience=s.cleanup + 1,
            on_overrun=self._overran,
        )
        self._lag = LagMonitor(warning=s.lag_warning, observer=self._observer)
        self._transactions = Transactions(
            self._store.transactions,
            completed=completed if codec is None else partial(_encoded, codec),
            on_commit=self._job_committed,
            on_lost=self._leases.lose,
            margin=self._terms.least_margin,
        )
        self._runner = Runner(
            self._handlers,
            self._calls.get,
            codec=codec,
            on_start=self._leases.add,
            on_end=self._job_ended,
            observer=self._observer,
            terms=self._terms,
            cleanup=s.cleanup,
            timeout=s.timeout,
            transactions=self._transactions,
            orphaned=lambda: self._orphaned or self._jobs_nursery.cancel_scope.cancel_called,
            epoch_offset=lambda: self._store.epoch_offset,
            say=self._progress.say,
        )
        self._places = TaskPool(self._runner.run)
        self._settler = Reports(
            self._store,
            on_settled=self._settled if self._orders is None else self._ordered_settled,
            observer=self._observer,
            jobs=self._jobs_table,
            target=s.lease / 30,
        )
        cursors, limited = ClaimCursors(s.queues, ClaimCursor), LimitedQueues(s.queues)
        self._wakeups = Wakeups(s.queues, cursors, limited, s.poll)
        if self._launch is not None:
            self._quarantine = Quarantine(
                self._store,
                self._launch,
                Stops(self._hushed, self._stopping, self._stopping_now),
                queues=s.queues,
                places=s.quarantine_slots,
                terms=self._terms,
                grace=s.grace,
                cleanup=s.cleanup,
                on_end=self._left_quarantine,
                on_release=self._released_in_quarantine,
                observer=self._observer,
            )
        if self._orders is not None:
            # This process claims nothing, so completions do not travel with claims.
            self._settler.stay_behind()
        inline = self._suspects()
        sweeps = Sweeps(self._store, s.queues, cursors, limited, self._wakeups, self._quarantine or inline)
        self._claim_loop = ClaimLoop(
            self._jobs_table,
            sweeps,
            Claimer(self._store, cursors, limited, self._settler, self._start, self._observer),
            Idle(self._store, sweeps, self._wakeups, self._settler),
            self._wakeups,
            inline if self._quarantine is None else None,
        )
        self._batches = Batches(self._store, retention=s.retention, observer=self._observer)
        self._listener = Listener(
            self._store,
            on_notify=self._wakeups.notified,
            on_cancel=self._cancellations.heard,
            on_stack=self._stacks.heard,
            on_batch=self._batches.heard,
            on_deaf=self._wakeups.deafened,
            observer=self._observer,
        )
        self._watchdog = Watchdog(
            self._store,
            tick=s.watchdog,
            retention=s.retention,
            on_rescue=self._wakeups.look_again,
            observer=self._observer,
        )
        if self._terms.shortest < s.lease:
            self._watchdog.quicken(self._terms.shortest)

        self._scheduler = Scheduler(
            self._store,
            self._handlers.schedules,
            retention=s.retention,
            on_hour=self._declare_deaths,
            observer=self._observer,
        )

    def _suspects(self) -> InlineQuarantine:
        s = self.settings
        return InlineQuarantine(
            self._store,
            queues=s.queues,
            running=lambda: self._jobs_table.running,
            ended=lambda: self._jobs_table.next_freed(),
            unreported=lambda: self._settler.pending,
            start=self._start,
            give_back=self._settler.add,
            terms=self._terms,
            observer=self._observer,
        )

    async def _live(self) -> None:
        async with trio.open_nursery() as outer:
            services = trio.CancelScope(shield=True)
            outer.start_soon(self._services, services)
            try:
                await self._jobs()
            finally:
                try:
                    with trio.CancelScope(shield=True, deadline=trio.current_time() + self._farewell_limit()):
                        await self._farewell()
                finally:
                    # Also when Ctrl-C strikes in the farewell: nobody else ends what is shielded.
                    services.cancel()

    async def _services(self, scope: trio.CancelScope) -> None:
        # Shielded: a cancelled worker still has to give its leases back. The coordinator ends this scope itself.
        with scope:
            async with trio.open_nursery() as nursery:
                self._services_nursery = nursery
                nursery.start_soon(self._leases.run)
                nursery.start_soon(self._settler.run)
                nursery.start_soon(self._cancellations.run)
                nursery.start_soon(self._stacks.run)
                # Not with the intake: who drains for hours must still hear what is to be cancelled.
                nursery.start_soon(self._listener.run)
                nursery.start_soon(self._transactions.run)
                nursery.start_soon(self._progress.run)
                nursery.start_soon(self._overruns.run)
                if self.settings.lag_warning:
                    nursery.start_soon(self._lag.run)
                for service in self._calls.services:
                    nursery.start_soon(service)
                if self._watch:
                    nursery.start_soon(self._watchdog.run)
                    nursery.start_soon(self._batches.run)

    async def _jobs(self) -> None:
        async with trio.open_nursery() as enders:
            enders.start_soon(self._watch_the_parent)
            async with trio.open_nursery() as self._jobs_nursery:
                if self._quarantine is not None:
                    self._jobs_nursery.start_soon(self._quarantine.run)
                await (self._intake() if self._orders is None else self._obey(self._orders))
                enders.start_soon(self._withdraw_idle)
                self._places.close()
                self._leases.draining = True
                await self._stopping.wait()
                enders.start_soon(self._end_what_is_left)
            enders.cancel_scope.cancel()

    async def _withdraw_idle(self) -> None:
        """Who drains for hours must not make producers notify. With nothing to drain the connection is closed in a moment,
        and the announcement goes with it."""
        if self._store.idle and self._jobs_table.running:
            with suppress(DatabaseUnavailable):
                await self._store.withdraw_idle()

    async def _watch_the_parent(self) -> None:
        """Notes a cancellation from outside in the moment it comes, before any handler sees it."""

        def cancelled(_: object) -> trio.lowlevel.Abort:
            self._orphaned = True
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(cancelled)

    async def _intake(self) -> None:
        if self._hushed.is_set():
            return  # told before it began: not one claim
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._claim_loop.run)
            nursery.start_soon(self._scheduler.run)
            if self._burst:
                nursery.start_soon(self._end_burst)
            await self._hushed.wait()
            nursery.cancel_scope.cancel()

    async def _obey(self, orders: Orders) -> None:
        """In a quarantine process: runs what it is told to, and nothing else."""
        with trio.CancelScope() as obeying:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._run_ordered, orders)
                await self._hushed.wait()
                obeying.cancel()

    async def _run_ordered(self, orders: Orders) -> None:
        while (due := await orders.next()) is not None:
            claim, sent, lease = due
            # These handlers may say another lease than those of the worker that claimed (files were deployed meanwhile): it is
            # proven for no longer than what was written.
            sent -= max(0.0, self._terms.of(claim.queue).lease - lease)
            orders.taken(claim)
            self._start([claim], sent)
        self.stop()

    async def _end_burst(self) -> None:
        """Ends the worker when a sweep that began after the last job had ended found nothing due."""
        # What is due includes the schedules; their jobs are there for the next sweep.
        await self._scheduler.looked.wait()
        self._wakeups.look_again()
        while True:
            await self._wakeups.dry.wait()
            # If something still runs, its end asks for another look: it may have enqueued something.
            if not self._busy:
                await self._settler.drained()
            if self._wakeups.found_nothing and not self._busy:
                if await self._finish_batches():
                    # A callback job may be due now.
                    self._wakeups.look_again()
                elif self._wakeups.found_nothing and not self._busy:
                    self.stop()

    @property
    def _busy(self) -> bool:
        """Whether anything runs, here or in quarantine."""
        return self._jobs_table.running > 0 or (self._quarantine is not None and self._quarantine.running > 0)

    async def _finish_batches(self) -> bool:
        try:
            return await self._batches.finish()
        except DatabaseUnavailable:
            return False

    async def _end_what_is_left(self) -> None:
        with trio.move_on_after(self.settings.grace):
            await self._stopping_now.wait()
        for held in list(self._leases.held):
            if held.outcome is None:
                held.cancel("shutdown")
        for held in self._committed:
            held.cancel("shutdown")

    # A handler that does not end

    def _overran(self, held: RunningJob, seconds: float) -> None:
        """The handler of `held` was cancelled and has not ended: all else is handed back, and the process replaced."""
        claim = held.claim
        stack = self._stack_of(held)
        reason = held.cancel_reason or "parent"
        self._observer.emit(HandlerOverran(claim.id, claim.kind, claim.attempt, reason, seconds, stack))
        self._stuck[held] = (
            f"HandlerStuck: did not end within {seconds:.3g} s of its cancellation ({reason})\n\n{stack}"
        )
        self.stop_now()
        if self._on_stuck is not None and len(self._stuck) == 1:
            self._services_nursery.start_soon(self._leave_the_stuck)

    def _stack_of(self, held: RunningJob) -> str:
        """Where a job is; empty if it has ended."""
        task = task_of(self._jobs_nursery.child_tasks, held.claim)
        return "" if task is None else self._calls.stack_of(held) or task_tree(task)

    async def _leave_the_stuck(self) -> None:
        with trio.move_on_after(self.settings.cleanup + _FAREWELL):
            # Asked again and again, once in a process's life: no job pays for an event.
            while any(h.outcome is None and h not in self._stuck for h in self._leases.held):  # noqa: ASYNC110
                await trio.sleep(0.05)
            await self._farewell()
        assert self._on_stuck is not None  # noqa: S101 -- asked before
        self._on_stuck([outcome for held in self._stuck if (outcome := self._outcome_of_stuck(held)) is not None])

    def _outcome_of_stuck(self, held: RunningJob) -> Outcome | None:
        """What its cancellation meant, whatever its handler may return one day; None if there is nothing left to report."""
        if held.committed is not None or held.lost:
            return None
        outcome = self._runner.outcome_of_cancelled(held)
        if outcome is None or outcome.kind == "released":
            return outcome
        return replace(outcome, error=storable(self._stuck[held]))

    def _farewell_limit(self) -> float:
        """Seconds the last reports may take: few when somebody waits for us to go."""
        cancelled = trio.current_effective_deadline() == -math.inf
        hurried = cancelled or self._stopping_now.is_set() or self._released > 0
        return _FAREWELL if hurried else max(_FAREWELL, self.settings.lease)

    async def _farewell(self) -> None:
        await self._settler.drained()
        try:
            await self._store.end_sessions()
        except DatabaseUnavailable:
            # pulse.workers will show it as stale; nothing else depends on it.
            return

    # One job

    def _start(self, claims: list[Claim], sent: float) -> None:
        if self._on_lease is not None and self._terms.by_queue:
            self._on_lease(min(self._terms.of(claim.queue).lease for claim in claims))
        self._jobs_table.running += len(claims)
        self._places.start(self._jobs_nursery, claims, sent)

    def _job_committed(self, held: RunningJob) -> None:
        self._leases.remove(held.claim)
        self._committed.add(held)

    def _job_ended(self, held: RunningJob) -> None:
        self._jobs_table.running -= 1
        if held in self._stuck:
            held.outcome = self._outcome_of_stuck(held)
        outcome = held.outcome
        if held.committed is not None:
            self._committed.discard(held)
            self._count("completed")
            self._done(held.claim)
        elif outcome is None:
            self._leases.remove(held.claim)
            self._count("lost")
            self._done(held.claim)
        else:
            self._settler.add(outcome)
            self._count(outcome.kind)
            if outcome.kind == "released" and held.cancel_reason in ("shutdown", "parent"):
                self._released += 1
        self._jobs_table.freed.give()
        if self._burst and not self._jobs_table.running:
            self._wakeups.look_again()

    def _settled(self, claim: Claim) -> None:
        self._leases.remove(claim)
        self._wakeups.ended(claim.queue)

    def _ordered_settled(self, claim: Claim) -> None:
        self._settled(claim)
        self._done(claim)

    def _done(self, claim: Claim) -> None:
        if self._orders is not None:
            self._orders.done(claim)

    # Quarantine

    def _job_suspected(self, job_id: int, kind: str, crashes: int) -> None:
        self._observer.emit(JobQuarantined(job_id, kind, crashes))

    def _released_in_quarantine(self) -> None:
        self._released += 1

    def _left_quarantine(self, claim: Claim) -> None:
        self._wakeups.ended(claim.queue)
        if self._burst:
            self._wakeups.look_again()

    def _count(self, kind: str) -> None:
        self._ended[kind] = self._ended.get(kind, 0) + 1


def _encoded(codec: Codec, claim: Claim, value: Any) -> Outcome:
    """The outcome of a job that its transaction completes, its result encoded."""
    return completed(claim, coded_result(codec, claim.kind, claim.id, value))
