"""The fake of the worker's tests is what each part of the worker asks for, as is the real store. Type-checked, never run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pulse_trio.store import WorkerStore
    from pulse_trio.testing.memory import MemoryStore
    from pulse_trio.worker.claiming.claimer import ClaimStore
    from pulse_trio.worker.claiming.idle import IdleStore
    from pulse_trio.worker.claiming.inline_quarantine import SuspectStore
    from pulse_trio.worker.claiming.listener import ListenStore
    from pulse_trio.worker.claiming.sweeps import SweepStore
    from pulse_trio.worker.diagnosis.stacks import AnswerStore
    from pulse_trio.worker.holding.cancellations import LedgerStore
    from pulse_trio.worker.holding.heartbeats import HeartbeatStore
    from pulse_trio.worker.holding.progress import ProgressStore
    from pulse_trio.worker.holding.report_writer import SettleStore
    from pulse_trio.worker.jobs.common import DatabaseClock
    from pulse_trio.worker.processes.quarantine import QuarantineStore
    from pulse_trio.worker.upkeep.batches import BatchStore
    from pulse_trio.worker.upkeep.declarations import DeclarationStore
    from pulse_trio.worker.upkeep.scheduler import ScheduleStore
    from pulse_trio.worker.upkeep.watchdog import WatchStore

    Claiming = tuple[ClaimStore, IdleStore, SuspectStore, QuarantineStore, ListenStore, SweepStore]
    Holding = tuple[LedgerStore, HeartbeatStore, ProgressStore, SettleStore, AnswerStore, DatabaseClock]
    Upkeep = tuple[BatchStore, DeclarationStore, ScheduleStore, WatchStore]


def claiming(store: MemoryStore | WorkerStore) -> Claiming:
    return store.claims, store.waking, store, store, store.waking, store.claims


def holding(store: MemoryStore | WorkerStore) -> Holding:
    return store.requests, store, store.progress, store.reports, store, store.sessions


def upkeep(store: MemoryStore | WorkerStore) -> Upkeep:
    return store.upkeep, store.startup, store.firing, store.upkeep
