"""What one frame shows: read from the database, without a line of its drawing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import trio

from ...doctor import judge_attempts, judge_slots, judge_stopping, judge_unserved
from ...doctor.findings import BACKLOG, LATE
from ...errors import TookTooLong
from ...store import history, operations, watching
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
    from ...store.watching import Recent

RECENT_AGE = 10.0
"""Seconds for which one look at the last attempts serves: it reads more than the others, and changes slowly."""
AFTER_TOO_LONG = 60.0
"""Seconds until they are looked at again where that took too long."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Rows a second since the look before: jobs enqueued, jobs finished, attempts that did not complete."""

    enqueued: float
    finished: float
    missed: float


@dataclass(frozen=True, slots=True)
class Lately:
    """How attempts ended lately, looked at `at` by Trio's clock; `found` is None where that took too long."""

    at: float
    found: Recent | None


@dataclass(frozen=True, slots=True)
class Frame:
    """One look at the database, with the jobs that were `chosen`. `jobs` is None where their list took too long; `rates` is
    None at the first look."""

    at: datetime
    chosen: JobFilter
    glance: Glance
    jobs: list[JobRecord] | None
    rates: Rates | None
    lately: Lately
    troubles: list[str]


async def look(
    connection: psycopg.AsyncConnection[Any],
    schema: str,
    chosen: JobFilter,
    limit: int,
    *,
    now: datetime,
    before: Frame | None = None,
) -> Frame:
    """Reads one frame; `before` is the last one. Raises `DatabaseUnavailable`, `TookTooLong`."""
    most = MOST if before is None else most_of(len(before.glance.queues))
    async with bounded(connection, PATIENCE):
        seen = await operations.run(connection, schema, glance(most))
    jobs: list[JobRecord] | None
    try:
        jobs = await operations.run(connection, schema, history.jobs(chosen, limit=limit, timeout=PATIENCE))
    except TookTooLong:
        jobs = None
    lately = await _lately(connection, schema, None if before is None else before.lately)
    counted = None if before is None else before.glance.counters
    return Frame(now, chosen, seen, jobs, rates(counted, seen.counters), lately, list(troubles(seen, lately.found)))


async def _lately(connection: psycopg.AsyncConnection[Any], schema: str, before: Lately | None) -> Lately:
    now = trio.current_time()
    if before is not None and now < before.at + (AFTER_TOO_LONG if before.found is None else RECENT_AGE):
        return before
    try:
        return Lately(now, await operations.run(connection, schema, watching.recent(PATIENCE)))
    except TookTooLong:
        return Lately(now, None)


def rates(before: Counters | None, now: Counters) -> Rates | None:
    """What was added a second between two looks; None if that is not known, as after a day's table was dropped."""
    if before is None or now.at <= before.at:
        return None
    seconds = now.at - before.at
    added = [now.enqueued - before.enqueued, now.finished - before.finished, now.missed - before.missed]
    return None if min(added) < 0 else Rates(*(each / seconds for each in added))


def troubles(seen: Glance, lately: Recent | None) -> Iterator[str]:
    """What is wrong, the worst first: with the thresholds of the alerts, and by the doctor's rules."""
    if not any(worker.is_live for worker in seen.workers):
        yield "no worker runs"
    due = sum(queue.available for queue in seen.queues)
    more = seen.more_queues or any(queue.at_least for queue in seen.queues)
    yield from (found.what for found in judge_stopping(seen.workers, due, more=more))
    if stale := [f"{worker.host}:{worker.pid}" for worker in seen.workers if worker.state == "stale"]:
        yield f"no sign of life: {', '.join(stale)}"
    oldest = max((queue.oldest for queue in seen.queues), default=0.0)
    yield from (found.what for found in judge_slots(seen.workers, oldest))
    yield from _of_queues(seen)
    yield from (f"kind {kind} is paused" for kind in seen.paused_kinds)
    if lately is not None:
        yield from (found.what for found in judge_attempts(lately.failing, lately.rescued))
    yield from (f"{name} is late by {duration(round(late))}" for name, late in seen.late.items() if late > LATE)
    if seen.quarantined:
        yield f"{count_of(seen.quarantined, 'job')} in quarantine"


def _of_queues(seen: Glance) -> Iterator[str]:
    for queue in seen.queues:
        if queue.oldest > BACKLOG:
            why = "is paused" if queue.paused else "is behind"
            yield f"{queue.name} {why} (oldest {duration(round(queue.oldest))})"
        elif queue.paused:
            if queue.available:
                yield f"{queue.name} is paused"
        else:
            unserved = judge_unserved(seen.workers, queue.name, queue.available, queue.oldest, more=queue.at_least)
            yield from (found.what for found in unserved)
