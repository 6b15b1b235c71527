"""A glance at everything, for a view that is drawn again and again: bounded, whatever is in the tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .operations import Query, workers

if TYPE_CHECKING:
    from .operations import Operation, Row, WorkerRecord

MOST = 1000
"""How many due jobs of a queue and priority are counted, and how many later ones."""
SCHEDULES = 100
"""How many schedules are looked at, the first by name."""
PATIENCE = 2.0
"""Seconds that each statement may take: the caller bounds them, all in one transaction, so that they are prepared."""


@dataclass(frozen=True, slots=True)
class QueueGlance:
    """The live jobs of a queue. `at_least`: the counting ended at its bound, so there may be more. `oldest`: for how many
    seconds the first available job has been due."""

    name: str
    paused: bool
    available: int
    running: int
    scheduled: int
    oldest: float
    at_least: bool


@dataclass(frozen=True, slots=True)
class Counters:
    """Rows that were ever inserted, at `at` seconds since 1970 by the database's clock: jobs, finished jobs, and attempts that
    did not complete."""

    at: float
    enqueued: int
    finished: int
    missed: int


@dataclass(frozen=True, slots=True)
class Glance:
    """What one look finds. `late`: for how many seconds schedules are late. `more_queues`: there are more than are counted."""

    counters: Counters
    workers: list[WorkerRecord]
    queues: list[QueueGlance]
    more_queues: bool
    paused_kinds: list[str]
    quarantined: int
    late: dict[str, float]


def glance() -> Operation[Glance]:
    """One look. Raises `TookTooLong`."""
    ((at, enqueued, finished, missed),) = yield Query("table_counters", {})
    fleet = yield from workers()
    *rows, (_, quarantined, _, _, _, cut_short, _) = yield Query("metrics_queues", {"most": MOST})
    paused = yield Query("paused_kinds", {})
    schedules = yield Query("metrics_schedules", {"most": SCHEDULES})
    return Glance(
        Counters(at, enqueued, finished, missed),
        fleet,
        sorted([_queue(row) for row in rows], key=lambda queue: queue.name),
        cut_short,
        [kind for kind, _ in paused],
        quarantined,
        {name: seconds for name, seconds in schedules if seconds > 0},
    )


def _queue(row: Row) -> QueueGlance:
    name, available, scheduled, running, oldest, paused, _ = row
    full = available + running >= MOST or scheduled >= MOST
    return QueueGlance(name, paused, available, running, scheduled, oldest or 0.0, full)
