"""A glance at everything, for a view that is drawn again and again: bounded, whatever is in the tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .operations import Query, workers

if TYPE_CHECKING:
    from .operations import Operation, Row, WorkerRecord

MOST, FEWEST, ALL = 1000, 50, 4000
"""How many due jobs of a queue and priority are counted, and how many later ones: at most and at least, and of all queues
together. With 20 queues of 3 priorities and 1,000 of each the count takes 40 ms, 2 % of a core every two seconds."""
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


def most_of(queues: int) -> int:
    """How many to count of each of so many queues, for a look every two seconds."""
    return max(FEWEST, min(MOST, ALL // max(1, queues)))


def glance(most: int = MOST) -> Operation[Glance]:
    """One look that counts at most `most` due and as many later jobs of a queue and priority. Raises `TookTooLong`."""
    ((at, enqueued, finished, missed),) = yield Query("table_counters", {})
    fleet = yield from workers()
    *rows, (_, quarantined, _, _, _, cut_short, *_) = yield Query("metrics_queues", {"most": most})
    paused = yield Query("paused_kinds", {})
    schedules = yield Query("metrics_schedules", {"most": SCHEDULES})
    return Glance(
        Counters(at, enqueued, finished, missed),
        fleet,
        sorted([_queue(row, most) for row in rows], key=lambda queue: queue.name),
        cut_short,
        [kind for kind, _ in paused],
        quarantined,
        {name: seconds for name, seconds in schedules if seconds > 0},
    )


def _queue(row: Row, most: int) -> QueueGlance:
    name, available, scheduled, running, oldest, paused, *_ = row
    full = available + running >= most or scheduled >= most
    return QueueGlance(name, paused, available, running, scheduled, oldest or 0.0, full)
