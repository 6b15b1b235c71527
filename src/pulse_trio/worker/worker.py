"""The nursery tree of a worker. Shutdown is nesting:

    services {reports, heartbeats, watchdog, listener, cancellations, stacks}  >  jobs  >  intake {claim loop, scheduler}

To stop, the worker cancels the intake; running jobs get the grace period. Jobs still running then are cancelled, get their
clean-up time and are released; heartbeats keep every lease until the last job has ended. Then the last reports are written, and
the heartbeats end.

A worker that is cancelled from outside does the same without any grace: its handlers see `Cancelled` with the reason "shutdown"
at once, and the worker gives their leases back under a shield with a deadline.

building.py makes the parts. They share the job table (jobs/job_table.py), the store and the plan (plan.py).
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import trio

from ..errors import ConfigurationError, HandlerStuck, ResourceFailed
from ..handlers import Handlers, check_queue
from ..logs import LogInstrument, logger
from ..observe import JobQuarantined, Observer, QueueBacklog, ScheduleLate, WorkerStarted, WorkerStopped
from ..settings import settings_by_name
from ..store import WorkerStore
from ..tracing import traces_of
from .building import Hooks, build
from .burst import end_burst
from .jobs.interrupts import protect
from .jobs.run_spans import RunSpans
from .leaving import FAREWELL, end_what_is_left, farewell, leave_the_half_open, leave_the_stuck, watch, withdraw_idle
from .metrics.figures import Figures
from .metrics.of_worker import LostLeases, WorkerMetrics
from .metrics.sampler import Sampler
from .outage import once_it_is_there
from .plan import Plan
from .processes.launch import launch_of
from .processes.orders import obey
from .stopping import Stops
from .upkeep.declarations import Declarations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any, NoReturn

    from ..errors import ResourceLost
    from ..jobs import Outcome
    from ..observe import Instrument
    from ..settings import WorkerSettings
    from .building import Parts
    from .metrics.of_worker import FiguresLine
    from .processes.orders import Orders
    from .processes.spawning import Launch


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What a worker did: jobs by outcome, how many it released unfinished as it stopped, and how many are `unwritten`."""

    ended: dict[str, int]
    released: int
    unwritten: int = field(default=0, kw_only=True)


class Worker:
    """A worker for a Trio program: `async with trio.open_nursery() as n: n.start_soon(Worker(handlers, dsn).run)`.

    Args: `dsn` as libpq takes it; every setting of `WorkerSettings` by name (times in seconds); `burst` ends `run` when nothing
    is due and nothing runs; `keep` False deletes completed jobs instead of archiving them; `watch` False leaves the watchdog to
    another process (a supervisor); `on_session` receives each session before it claims, when the resources are open;
    `on_lease`, where queues have leases of their own, the shortest lease (seconds) among jobs before they begin. `on_stuck`
    must end the process when handlers do not end. It receives their outcomes, which the next process takes as `stuck`.
    `instruments` get the events of `pulse_trio.observe`. `log` False keeps the events out of the logger `pulse_trio`; otherwise
    they go there, as with `pulse-trio run`: events that need attention as warnings and errors, the rest at INFO.

    `app` says where another process finds the handlers, as in "myapp:handlers": jobs that killed their worker again and again
    then run in a process of their own. Without it they run in this one, when no other job runs or after 30 s. `pulse-trio run`
    passes `launch`, which starts such a process, and `orders`, the jobs that such a process is to run; and `figures_to`, the
    line to a supervisor that serves `http` for this worker.
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
        figures_to: FiguresLine | None = None,
        instruments: Iterable[Instrument] = (),
        log: bool = True,
        store: WorkerStore | None = None,
        settings: WorkerSettings | None = None,
        **given: Any,
    ) -> None:
        if not isinstance(cast("object", handlers), Handlers):
            raise ConfigurationError(
                f"A worker takes a Handlers, then the DSN: Worker(handlers, dsn); got {type(handlers).__name__}."
            )
        self.settings = settings or settings_by_name(given)
        if self.settings.processes != 1:
            raise ConfigurationError(
                "A Worker is one process. For several: pulse-trio run --processes N, or a Worker in each process of yours."
            )
        for queue in self.settings.queues or ():
            check_queue(queue)
        self._handlers = handlers
        # Only when every event is wanted, as with `run --verbose`, is there a line for each job that ends well.
        every_job = logger.isEnabledFor(logging.DEBUG)
        figures = Figures() if self.settings.http else None
        told = [
            *([LogInstrument(every_job=every_job)] if log else []),
            *([LostLeases(figures)] if figures is not None else []),
            *handlers.instruments,
            *instruments,
        ]
        observer, traces = Observer(told), traces_of(told)
        terms = self.settings.terms(handlers.queue_leases)
        launch = launch_of(app, dsn, self.settings, keep=keep) if app is not None else launch
        self._hooks = Hooks(dsn, watch, on_session, on_stuck, stuck, launch, orders)
        self._store = store or WorkerStore(
            dsn,
            direct_dsn=self.settings.direct_dsn,
            schema=self.settings.schema,
            lease=self.settings.lease,
            leases={queue: its.lease for queue, its in terms.by_queue.items()},
            queues=self.settings.queues,
            declared=handlers.queues,
            concurrency=self.settings.concurrency,
            keep=keep,
            stale=self.settings.stale,
            unfit_patience=self.settings.unfit_patience,
            on_session=self._session_opened,
            on_suspect=self._job_suspected,
            on_event=observer.emit,
            session=orders.session if orders is not None else None,
        )
        store, named = self._store, [*(self.settings.queues or ()), *handlers.queues]
        self._metrics: WorkerMetrics | None = None
        if figures is not None:
            kinds = [handler.kind for handler in handlers]
            self._metrics = WorkerMetrics(self.settings, store, figures, kinds, named, figures_to)
        # What the log says of queues and schedules that fall behind is worth no statement.
        asked = observer.wanted(QueueBacklog, besides=LogInstrument) or observer.wanted(
            ScheduleLate, besides=LogInstrument
        )
        self._sampler: Sampler | None = None
        if orders is None and (asked or (figures is not None and figures_to is None)):
            counted = store.figures
            self._sampler = Sampler(counted, observer, named)
            if self._metrics is not None:
                self._metrics.sampler = self._sampler
        meter, spans = self._metrics and self._metrics.meter, RunSpans(traces) if traces is not None else None
        self._plan = Plan(self.settings, terms, observer, burst, meter, spans, on_lease)
        self._declarations = Declarations(self._store.startup, handlers)
        self._stops = Stops()
        self._parts: Parts | None = None  # made when it runs
        self.ended_by: ResourceFailed | ResourceLost | None = None
        """Set before it ends, if a resource ends it."""

    # What a program may ask of a running worker

    def stop(self) -> None:
        """Stops claiming, lets running jobs end within the grace, then cancels and releases the rest."""
        self._stops.stop()

    def quiet(self) -> None:
        """Stops claiming; running jobs go on until `stop`. For draining a machine without a deadline."""
        self._stops.quiet()

    def stop_now(self) -> None:
        """Stops claiming and cancels running jobs at once; they are released unharmed."""
        self._stops.stop_now()

    @property
    def running(self) -> int:
        """The number of jobs whose handler runs now."""
        return self._parts.jobs.in_slots if self._parts is not None else 0

    @property
    def is_held_by_a_resource(self) -> bool:
        """Whether a resource does not end although it was cancelled, and so keeps the worker from ending."""
        return self._parts is not None and self._parts.resources.left.is_set()

    @property
    def leases(self) -> tuple[float, float]:
        """Seconds of the shortest and of the longest lease that this worker's claims may have."""
        return self._plan.terms.shortest, self._plan.terms.longest

    @property
    def shortest_held(self) -> float:
        """Seconds of the shortest lease among this worker's own and those of the jobs that it holds now."""
        if self._parts is None or not self._plan.terms.by_queue:
            return self.settings.lease
        return self._parts.jobs.shortest_lease(default=self.settings.lease)

    # Life, from the outside to the inside

    async def run(self, *, task_status: trio.TaskStatus[Worker] = trio.TASK_STATUS_IGNORED) -> WorkerReport:
        """Claims and runs jobs until `stop`, cancellation, or (with `burst`) until nothing is due.

        `nursery.start(worker.run)` returns when the worker is registered and its resources are open, or when it was told to
        stop before that. A worker runs once: a second call raises `UsageError`. Raises `SchemaError` if the schema is not what
        this version needs, `DatabaseUnavailable` if the database cannot be reached at the start; later it reconnects. Raises
        `ResourceFailed` if a resource cannot be opened (no job was claimed), `ResourceLost` if one failed later.
        Raises `HandlerStuck` if a handler is still running `cleanup` + 1 seconds after it was cancelled: then the worker stops
        as by `stop_now`, and keeps that one job's lease until the handler has ended. A program that cannot wait has to end
        itself when the event `HandlerOverran` comes.
        """
        self._stops.begins()
        protect(self._handlers)
        if self._metrics is None:
            return await self._run(task_status)
        async with self._metrics.serving():
            return await self._run(task_status)

    async def _run(self, task_status: trio.TaskStatus[Worker]) -> WorkerReport:
        try:
            session = await once_it_is_there(self._register, self.settings.connect_timeout)
            store = self._store if self._metrics is None else self._metrics.store
            parts = self._parts = build(self._handlers, store, self._declarations, self._plan, self._stops, self._hooks)
            if self._metrics is not None:
                self._metrics.registered(parts, self._stops)
            if self._hooks.orders is None:
                self._plan.observer.emit(WorkerStarted(session, self.settings.queues, self.settings.concurrency))
            for outcome in self._hooks.left_stuck:
                parts.reports.add(outcome)
            self._warn_of_late_beats()
            failed = await self._live(parts, task_status)
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + FAREWELL):
                await self._store.aclose(started=self._parts is not None)
        return self._report(parts, failed)

    async def _live(self, parts: Parts, task_status: trio.TaskStatus[Worker]) -> ResourceFailed | ResourceLost | None:
        """Runs until the worker is told to stop. Returns the failure of a resource, if one has ended the worker."""
        resources, failed = parts.resources, None
        async with trio.open_nursery() as outer:
            services = trio.CancelScope(shield=True)
            outer.start_soon(self._serve, parts, services)
            try:
                opened = await resources.open(parts.services.calls, self._stops)
                # Also when it was told to stop meanwhile: `nursery.start` takes a return without this for an error.
                task_status.started(self)
                if opened:
                    self._session_opened(self._store.sessions.current)
                    await self._run_jobs(parts)
            except ResourceFailed as error:
                failed = error  # told and raised when the worker has ended
            finally:
                try:
                    await resources.close(self._stops.now, self._closing_limit(parts))  # noqa: ASYNC102 -- shielded inside, with a deadline
                    with trio.CancelScope(shield=True, deadline=trio.current_time() + self._farewell_limit(parts)):
                        await farewell(parts.reports, self._store.sessions)
                finally:
                    # Also when Ctrl-C strikes in farewell(): nothing else ends the shielded services.
                    services.cancel()
            self.ended_by = failed or resources.lost
            if self.is_held_by_a_resource and self._hooks.on_stuck is not None:
                self._hooks.on_stuck([])  # all is reported, and the resource keeps the event loop from ending
        return self.ended_by

    async def _serve(self, parts: Parts, scope: trio.CancelScope) -> None:
        # Shielded: a cancelled worker still has to give its leases back. `_live` ends this scope.
        services = parts.services
        with scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(services.heartbeats.run)
                nursery.start_soon(services.report_writer.run)
                nursery.start_soon(services.cancellations.run)
                nursery.start_soon(services.stacks.run)
                # Not cancelled with the intake: a worker that drains for hours must still receive requests for cancellation.
                nursery.start_soon(services.listener.run)
                nursery.start_soon(services.transactions.run)
                nursery.start_soon(services.progress.run)
                nursery.start_soon(services.lines.run)
                nursery.start_soon(services.looks.run)
                nursery.start_soon(services.receiver.run)
                nursery.start_soon(services.stuck.run)
                nursery.start_soon(parts.steps_back.run)
                if self._sampler is not None:
                    nursery.start_soon(self._sampler.run)
                if self._hooks.on_stuck is not None:
                    nursery.start_soon(
                        leave_the_stuck, parts, self._store.sessions, self._hooks.on_stuck, self.settings.cleanup
                    )
                if self.settings.lag_warning:
                    nursery.start_soon(services.lag.run)
                if parts.resources.any:
                    nursery.start_soon(parts.resources.run)
                    if self._hooks.on_stuck is not None:
                        nursery.start_soon(leave_the_half_open, parts, self._store.sessions, self._hooks.on_stuck)
                for service in services.calls.services:
                    nursery.start_soon(service)
                if self._hooks.watch:
                    nursery.start_soon(watch, parts)
                    nursery.start_soon(services.batches.run)

    async def _run_jobs(self, parts: Parts) -> None:
        async with trio.open_nursery() as enders:
            enders.start_soon(self._stops.watch_the_parent)
            async with trio.open_nursery() as jobs:
                self._stops.jobs_scope = jobs.cancel_scope
                parts.pool.open(jobs, parts.runner)
                if parts.quarantine is not None:
                    jobs.start_soon(parts.quarantine.run)
                await self._take_in(parts)
                enders.start_soon(withdraw_idle, parts.jobs, self._store.waking)
                parts.pool.close()
                self._stops.draining = True
                await self._stops.stopping.wait()
                enders.start_soon(end_what_is_left, parts.jobs, self._stops, self.settings.grace)
            enders.cancel_scope.cancel()

    async def _take_in(self, parts: Parts) -> None:
        if self._hooks.orders is not None:
            await obey(self._hooks.orders, parts.runner, self._plan.terms, self._stops, self._store.upkeep)
        elif not self._stops.hushed.is_set():  # Do not claim at all if the worker was told to stop before it started.
            async with trio.open_nursery() as intake:
                intake.start_soon(parts.claim_loop.run)
                intake.start_soon(parts.ahead.run)
                intake.start_soon(parts.scheduler.run)
                if self._plan.burst:
                    intake.start_soon(end_burst, parts, self._stops)
                await self._stops.hushed.wait()
                intake.cancel_scope.cancel()
            parts.ahead.give_back()

    # Its beginning and its end

    async def _register(self) -> int:
        await self._store.startup.check_schema()
        # Before there is a session: it is tried again while somebody's open transaction has a queue's row.
        await self._declarations.declare_limits()
        session = await self._store.sessions.open_session()
        if self._hooks.orders is None:
            await self._declarations.declare_deaths()
        return session

    def _warn_of_late_beats(self) -> None:
        terms = self._plan.terms
        for queue, its in [(None, terms.own), *terms.by_queue.items()]:
            if its.one_beat_decides:
                logger.warning(
                    "heartbeat%s is %g s, above a third of the lease (%g s): one beat that is late may cancel what runs here",
                    "" if queue is None else f" of the queue {queue}",
                    its.heartbeat,
                    its.lease,
                )

    def _session_opened(self, session: int) -> None:
        """Tells a new session, but none before the resources are open: before, the worker claims nothing, and a
        supervisor must not end it for its silence, because what opens a resource may block for long."""
        tell = self._hooks.on_session
        if tell is not None and self._parts is not None and self._parts.resources.are_open:
            tell(session)

    def _is_hurried(self, parts: Parts) -> bool:
        """Whether the program waits for the worker to end."""
        cancelled = trio.current_effective_deadline() == -math.inf
        return cancelled or self._stops.now.is_set() or parts.jobs.tally.released > 0

    def _closing_limit(self, parts: Parts) -> float:
        """Seconds that all resources may take to close."""
        return min(self.settings.cleanup, FAREWELL) if self._is_hurried(parts) else self.settings.cleanup

    def _farewell_limit(self, parts: Parts) -> float:
        """Seconds that the last reports may take."""
        return FAREWELL if self._is_hurried(parts) else max(FAREWELL, self.settings.lease)

    def _report(self, parts: Parts, failed: ResourceFailed | ResourceLost | None) -> WorkerReport:
        tally, stuck = parts.jobs.tally, parts.services.stuck.jobs
        if self._hooks.orders is None:
            self._plan.observer.emit(WorkerStopped(tally.released))
        if stuck and self._hooks.on_stuck is not None:
            # The handler has ended after all and is reported; the worker has stopped all the same.
            self._hooks.on_stuck([])
        if stuck:
            names = ", ".join(f"{job.claim.id} ({job.claim.kind})" for job in stuck)
            raise HandlerStuck(
                f"The handler of job {names} did not end when it was cancelled: the worker has stopped."
            ) from failed
        if failed is not None:
            raise failed
        return WorkerReport(dict(tally.ended), tally.released, unwritten=parts.reports.pending)

    def _job_suspected(self, job_id: int, kind: str, crashes: int) -> None:
        self._plan.observer.emit(JobQuarantined(job_id, kind, crashes))
