"""Queues as people see and control them: their jobs, pauses and limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import UsageError
from ..handlers import QueueLimits, Rate, check_queue, check_text
from .limits import limits_parameters
from .operations import Query

if TYPE_CHECKING:
    from datetime import datetime

    from .operations import Operation

IN_EFFECT = {"queue": 0.5, "kind": 1.5}
"""Seconds until a pause has reached every worker: a queue's with the next claim, a kind's with the next sweep."""


@dataclass(frozen=True, slots=True)
class QueueRecord:
    """A queue as `pulse.queues` shows it: how many of its jobs are due, wait for their time, and run; the age of the job that
    has been due the longest, in seconds; its limits, None for no limit; for how many seconds the oldest attempt has run; how
    many jobs died within the last 24 hours; how many are suspended. `at_least`: a count ended at its bound, so there may be
    more jobs; `dead_at_least`: that of the dead ones did, for all queues together. Never of `pulse.queues`, which counts
    all."""

    name: str
    paused: bool
    available: int
    scheduled: int
    running: int
    oldest_available_age: float | None
    limit: int | None
    rate: str | None
    key_limit: int | None
    key_rate: str | None
    oldest_running_age: float | None = None
    dead: int = 0
    suspended: int = 0
    at_least: bool = False
    dead_at_least: bool = False


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """A key of a queue (a tenant): how many of its jobs are due (`waiting`) and run; the age of the job that has been due the
    longest, in seconds."""

    queue: str
    key: str
    waiting: int
    running: int
    oldest_available_age: float | None


@dataclass(frozen=True, slots=True)
class PausedKind:
    """A kind whose jobs are not claimed, and since when."""

    kind: str
    paused_at: datetime


def queues() -> Operation[list[QueueRecord]]:
    """Every queue with live jobs or recently dead ones, with a worker in the last 7 days, or with a pause or a limit; by
    name."""
    rows = yield Query("queues", {})
    return [QueueRecord(*row) for row in rows]


def keys(queue: str | None = None, *, limit: int = 50, timeout: float | None = 10.0) -> Operation[list[KeyRecord]]:
    """The keys with the most due jobs, at most `limit`, of one queue or of all. Raises `TookTooLong` after `timeout`
    seconds."""
    rows = yield Query("queue_keys", {"queue": None if queue is None else check_queue(queue), "limit": limit}, timeout)
    return [KeyRecord(*row) for row in rows]


def paused_kinds() -> Operation[list[PausedKind]]:
    """The kinds that are paused, by name."""
    rows = yield Query("paused_kinds", {})
    return [PausedKind(*row) for row in rows]


def pause(queue: str | None = None, *, kind: str | None = None) -> Operation[bool]:
    """Stops claims of a queue or of a kind until `resume`; running jobs go on. Returns True if it was not paused before.

    Raises `UsageError` unless one of the two is given, or `InvalidName`."""
    rows = yield _about("pause", queue, kind)
    return bool(rows[0][0])


def resume(queue: str | None = None, *, kind: str | None = None) -> Operation[bool]:
    """Ends a pause. Returns True if there was one. Raises as `pause` does."""
    rows = yield _about("resume", queue, kind)
    return bool(rows[0][0])


def _about(verb: str, queue: str | None, kind: str | None) -> Query:
    if (queue is None) == (kind is None):
        raise UsageError(f"Say what to {verb}: a queue, or one kind (kind=..., --kind).")
    if queue is not None:
        return Query(f"{verb}_queue", {"queue": check_queue(queue)})
    return Query(f"{verb}_kind", {"kind": check_text("kind", kind or "", 256)})


def running(queue: str | None = None, *, kind: str | None = None) -> Operation[int]:
    """How many jobs of a queue or of a kind run now."""
    rows = yield Query("running_of", {"queue": queue, "kind": kind})
    return rows[0][0]


def limits_of(queue: str) -> Operation[QueueLimits]:
    """The current limits of a queue."""
    rows = yield Query("limits_of_queue", {"queue": check_queue(queue)})
    if not rows:
        return QueueLimits(queue)
    limit, starts, seconds, key_limit, key_starts, key_seconds = rows[0]
    rate = Rate(starts, seconds) if starts is not None else None
    return QueueLimits(queue, limit, rate, key_limit, Rate(key_starts, key_seconds) if key_starts is not None else None)


def limit(limits: QueueLimits) -> Operation[None]:
    """Sets every limit of a queue; None removes one. Takes effect with the next claim of every worker."""
    yield Query("limit_queue", limits_parameters(limits))
