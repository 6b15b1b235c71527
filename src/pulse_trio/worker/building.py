"""Makes the parts of a worker, from the innermost to the outermost, and gives each the parts that it needs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from ..codec import in_schema
from ..store import ClaimCursor
from .claiming.ahead import Ahead
from .claiming.claim_loop import ClaimLoop
from .claiming.claimer import Claimer
from .claiming.cursors import ClaimCursors
from .claiming.idle import Idle
from .claiming.inline_quarantine import InlineQuarantine
from .claiming.limited import LimitedQueues
from .claiming.listener import Listener, Told
from .claiming.sweeps import Sweeps
from .claiming.wakeups import Wakeups
from .diagnosis.lag import LagMonitor
from .diagnosis.stacks import Stacks
from .diagnosis.stuck import StuckHandlers
from .durable.attempts import DurableParts
from .durable.looks import Looks
from .durable.receiving import Receiver
from .durable.writing import LineWriter
from .holding.cancellations import Cancellations
from .holding.heartbeats import Heartbeats
from .holding.progress import ProgressReports
from .holding.report_writer import ReportWriter
from .holding.reports import Reports
from .jobs.common import Common
from .jobs.job_table import JobTable
from .jobs.kinds.calls import Calls
from .jobs.metered import MeteredRunner
from .jobs.own_run import OwnRun
from .jobs.runner import Runner
from .jobs.task_pool import TaskPool
from .jobs.transactions import Transactions
from .processes.quarantine import Quarantine
from .resources import WorkerResources
from .upkeep.batches import Batches
from .upkeep.scheduler import Scheduler
from .upkeep.steps_back import StepsBack
from .upkeep.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import NoReturn

    from ..handlers import Handlers
    from ..jobs import Outcome
    from ..store import WorkerStore
    from .plan import Plan
    from .processes.orders import Orders
    from .processes.spawning import Launch
    from .stopping import Stops
    from .upkeep.declarations import Declarations


@dataclass(frozen=True, slots=True)
class Hooks:
    """What the surrounding program gave a worker. `Worker` documents each field."""

    dsn: str
    watch: bool
    on_session: Callable[[int], None] | None
    on_stuck: Callable[[list[Outcome]], NoReturn] | None
    left_stuck: Sequence[Outcome]
    launch: Launch | None
    orders: Orders | None


@dataclass(frozen=True, slots=True)
class Services:
    """The services: they run beside the jobs for as long as the worker lives."""

    calls: Calls
    report_writer: ReportWriter
    heartbeats: Heartbeats
    cancellations: Cancellations
    progress: ProgressReports
    transactions: Transactions
    listener: Listener
    stacks: Stacks
    stuck: StuckHandlers
    lag: LagMonitor
    watchdog: Watchdog
    batches: Batches
    lines: LineWriter
    looks: Looks
    receiver: Receiver


@dataclass(frozen=True, slots=True)
class Parts:
    """All parts of one worker: the job table, the task pool, the resources, the intake and the services."""

    jobs: JobTable
    reports: Reports
    runner: Runner
    pool: TaskPool
    resources: WorkerResources
    quarantine: Quarantine | None
    claim_loop: ClaimLoop
    ahead: Ahead
    wakeups: Wakeups
    scheduler: Scheduler
    steps_back: StepsBack
    services: Services


def build(
    handlers: Handlers, store: WorkerStore, declarations: Declarations, plan: Plan, stops: Stops, hooks: Hooks
) -> Parts:
    """Makes the parts of one worker, in its Trio run."""
    settings, observer = plan.settings, plan.observer
    codec = in_schema(handlers.codec, settings.schema)
    cursors, limited = ClaimCursors(settings.queues, ClaimCursor), LimitedQueues(settings.queues)
    wakeups = Wakeups(cursors, limited, plan)
    # A quarantine process claims nothing itself: the worker that gave it the job has to know when the job ended.
    jobs = JobTable(settings.concurrency, wakeups if hooks.orders is None else hooks.orders)

    resources = WorkerResources(handlers, hooks.dsn, settings, plan.spans)
    histories, trees, receipts = store.histories, store.trees, store.receipts
    lines = LineWriter(histories, jobs, plan)
    receiver = Receiver(receipts, observer)
    limiter = trio.CapacityLimiter(settings.concurrency)
    looks = Looks(trees, receiver, observer)
    kept = store.transactions
    traces = plan.spans.traces if plan.spans is not None else None
    durables = DurableParts(
        histories, lines, jobs, store.sessions, codec, trees, looks, receiver, kept, limiter, traces
    )
    calls = Calls(handlers, codec, plan, resources, durables)
    reports = Reports(jobs, observer, looks)
    progress = ProgressReports(store.progress, observer)
    transactions = Transactions(store.transactions, jobs, codec, plan)
    timeout = settings.timeout or math.inf
    common = Common(settings.cleanup, timeout, stops, transactions, progress, store.sessions, observer, OwnRun())
    pool = TaskPool(jobs)
    runner = (Runner if plan.meter is None else MeteredRunner)(calls, jobs, pool, reports, common, plan)

    inline = InlineQuarantine(store, jobs, reports, runner, plan)
    quarantine = None
    if hooks.launch is not None:
        quarantine = Quarantine(store, hooks.launch, stops, wakeups, jobs.tally, plan)
    sweeps = Sweeps(store.claims, settings.queues, cursors, limited, wakeups, quarantine or inline)
    claim_loop = ClaimLoop(
        jobs,
        sweeps,
        Claimer(store.claims, cursors, limited, reports, runner, observer),
        Idle(store.waking, sweeps, wakeups, reports),
        wakeups,
        inline if quarantine is None else None,
    )
    if hooks.orders is not None:
        # This process claims nothing, so completions do not travel with claims.
        reports.stay_behind()

    cancellations = Cancellations(store.requests, jobs, observer)
    stacks = Stacks(store, jobs, calls)
    batches = Batches(store.upkeep, retention=settings.retention, observer=observer)
    watchdog = Watchdog(store.upkeep, settings, observer, wakeups)
    if plan.terms.shortest < settings.lease:
        watchdog.quicken(plan.terms.shortest)
    services = Services(
        calls=calls,
        report_writer=ReportWriter(store.reports, reports, plan),
        heartbeats=Heartbeats(store, jobs, cancellations, stops, plan),
        cancellations=cancellations,
        progress=progress,
        transactions=transactions,
        listener=Listener(store.waking, wakeups, Told(cancellations, stacks, batches, looks), observer),
        stacks=stacks,
        stuck=StuckHandlers(jobs, calls, stops, plan, leaves=hooks.on_stuck is not None),
        lag=LagMonitor(warning=settings.lag_warning, observer=observer, jobs=jobs),
        watchdog=watchdog,
        batches=batches,
        lines=lines,
        looks=looks,
        receiver=receiver,
    )
    scheduler = Scheduler(store.firing, declarations, plan)
    steps_back = StepsBack(jobs, declarations, scheduler, plan)
    store.lineage.follower = steps_back
    ahead = Ahead(jobs, runner)
    return Parts(
        jobs, reports, runner, pool, resources, quarantine, claim_loop, ahead, wakeups, scheduler, steps_back, services
    )
