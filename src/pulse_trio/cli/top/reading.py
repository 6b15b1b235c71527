"""What one frame shows: read from the database, without a line of its drawing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...doctor.findings import BACKLOG, LATE
from ...errors import TookTooLong
from ...store import history, operations
from ...store.bounded import bounded
from ...store.glance import MOST, PATIENCE, Glance, glance, most_of
from ...text import count_of, duration

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    import psycopg

    from ...records import JobRecord
    from ...store.filtering import JobFilter
    from ...store.glance import Counters


@dataclass(frozen=True, slots=True)
class Rates:
    """Rows a second since the look before: jobs enqueued, jobs finished, attempts that did not complete."""

    enqueued: float
    finished: float
    missed: float


@dataclass(frozen=True, slots=True)
class Frame:
    """One look at the database, with the jobs that were `chosen`. `jobs` is None where their list took too long; `rates` is
    None at the first look."""

    at: datetime
    chosen: JobFilter
    glance: Glance
    jobs: list[JobRecord] | None
    rates: Rates | None
    troubles: list[str]


async def look(
    connection: psycopg.AsyncConnection[Any],
    schema: str,
    chosen: JobFilter,
    limit: int,
    *,
    now: datetime,
    before: Glance | None = None,
) -> Frame:
    """Reads one frame; `before` is the glance of the last one. Raises `DatabaseUnavailable`, `TookTooLong`."""
    async with bounded(connection, PATIENCE):
        seen = await operations.run(connection, schema, glance(MOST if before is None else most_of(len(before.queues))))
    jobs: list[JobRecord] | None
    try:
        jobs = await operations.run(connection, schema, history.jobs(chosen, limit=limit, timeout=PATIENCE))
    except TookTooLong:
        jobs = None
    return Frame(
        now,
        chosen,
        seen,
        jobs,
        rates(before.counters if before is not None else None, seen.counters),
        list(troubles(seen)),
    )


def rates(before: Counters | None, now: Counters) -> Rates | None:
    """What was added a second between two looks; None if that is not known, as after a day's table was dropped."""
    if before is None or now.at <= before.at:
        return None
    seconds = now.at - before.at
    added = [now.enqueued - before.enqueued, now.finished - before.finished, now.missed - before.missed]
    return None if min(added) < 0 else Rates(*(each / seconds for each in added))


def troubles(seen: Glance) -> Iterator[str]:
    """What is wrong, the worst first: with the thresholds of the alerts."""
    if not any(worker.state in ("running", "draining") for worker in seen.workers):
        yield "no worker runs"
    if stale := [f"{worker.host}:{worker.pid}" for worker in seen.workers if worker.state == "stale"]:
        yield f"no sign of life: {', '.join(stale)}"
    for queue in seen.queues:
        if queue.oldest > BACKLOG:
            why = "is paused" if queue.paused else "is behind"
            yield f"{queue.name} {why} (oldest {duration(round(queue.oldest))})"
        elif queue.paused and queue.available:
            yield f"{queue.name} is paused"
    yield from (f"kind {kind} is paused" for kind in seen.paused_kinds)
    yield from (f"{name} is late by {duration(round(late))}" for name, late in seen.late.items() if late > LATE)
    if seen.quarantined:
        yield f"{count_of(seen.quarantined, 'job')} in quarantine"
