"""Why a job waits: the database's facts about one live job, and the sentences that follow from them.

Facts and decision are apart: one statement (sql/why_waits.sql) reads the facts by index, and `reasons_of` decides without a
database. What stops a due job comes first; what would stop a job that is not yet due comes after its due time, because a person
who waits for tonight's job wants to know now that its queue is paused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

from ..records import FAR
from ..text import count_of, duration, shown
from .operations import Query

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime

    from .operations import Operation

PATIENCE = 2.0
"""Seconds that the look may take."""
NAMED = 20
"""How many jobs a reason names at most."""
_MANY = 1000
"""The bound of the counts in why_waits.sql."""


@dataclass(frozen=True, slots=True)
class Reason:
    """One thing that a job waits for.

    `code` is for programs: `queue_paused`, `kind_paused`, `quarantined`, `no_worker`, `workers_draining`, `unknown_kind`,
    `queue_limit`, `queue_rate`, `key_limit`, `key_rate`, `workers_busy`, `next` (a worker should claim it now), `scheduled`,
    `retry`, `event`, `children`, `descendants` or `sleep`. `text` is a sentence for people. `until` is the moment at which the
    wait ends by itself, if it does; `since` when it began, if that is known. `jobs` are the ids of jobs that it waits for, at
    most 20.
    """

    code: str
    text: str
    until: datetime | None = None
    since: datetime | None = None
    jobs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Facts:
    """A row of why_waits.sql."""

    running: bool
    queue: str
    kind: str
    key: str | None
    attempt: int
    run_at: datetime
    due_in: float
    failed_before: bool
    suspect: bool
    suspected_at: datetime | None
    options: str | None
    queue_paused: datetime | None
    kind_paused: datetime | None
    max_running: int | None
    rate_count: int | None
    rate_seconds: float | None
    key_max_running: int | None
    key_rate_count: int | None
    key_rate_seconds: float | None
    holders: Sequence[int]
    key_holders: Sequence[int]
    full_in: float | None
    key_full_in: float | None
    live_workers: int
    serving_workers: int
    draining_workers: int
    free_slots: int
    put_back: str | None
    ahead: int | None
    suspended: bool
    events: Sequence[str] | None
    blocks: int
    ends_as: str | None
    children: Sequence[int]


def why(job_id: int) -> Operation[list[Reason]]:
    """What a job waits for, the most decisive first; nothing for a job that runs, has finished, or does not exist. Raises
    `TookTooLong`."""
    rows = yield Query("why_waits", {"id": job_id}, PATIENCE)
    return list(reasons_of(Facts(*rows[0]))) if rows else []


def reasons_of(facts: Facts) -> Iterator[Reason]:
    """The reasons, the most decisive first."""
    if facts.running:
        return
    if facts.ends_as is not None:
        yield Reason(
            "descendants",
            f"It has ended as {facts.ends_as}, and is settled when the jobs that it started have ended.",
            jobs=tuple(facts.children),
        )
        return
    if facts.suspended:
        yield from _suspended(facts)
        return
    due = facts.due_in <= 0
    stopped = list(_stopped(facts))
    if not due:
        # A job that workers put back is due again in seconds, again and again: that is no reason of its own.
        stopped.insert(int(facts.put_back is not None), _later(facts))
    yield from stopped
    if due and not stopped:
        yield from _turn(facts)


def _suspended(facts: Facts) -> Iterator[Reason]:
    until = facts.run_at if facts.run_at != FAR else None
    # Without a name: only the owner of the schema can have written it.
    for event in filter(None, facts.events or ()):
        yield Reason("event", f"It waits for the event {shown(event)}.", until)
    if facts.blocks:
        # Those that it watches: it may wait for others, too.
        text = f"It waits for jobs that it started{_named(facts.children, ', among them')}."
        yield Reason("children", text, None if facts.events else until, jobs=tuple(facts.children))
    if not facts.events and not facts.blocks:
        yield Reason("sleep", f"It sleeps: it goes on in {duration(max(0.0, facts.due_in))}.", until)


def _later(facts: Facts) -> Reason:
    when = f"in {duration(facts.due_in)}"
    if facts.failed_before:
        return Reason("retry", f"Attempt {facts.attempt} failed; the next one is due {when}.", facts.run_at)
    return Reason("scheduled", f"It is due {when}.", facts.run_at)


def _stopped(facts: Facts) -> Iterator[Reason]:
    """What keeps it from being claimed until a person acts, or another job ends."""
    if facts.queue_paused is not None:
        yield Reason("queue_paused", f"Its queue, {facts.queue}, is paused.", since=facts.queue_paused)
    if facts.kind_paused is not None:
        yield Reason("kind_paused", f"Its kind, {shown(facts.kind)}, is paused.", since=facts.kind_paused)
    yield from _unserved(facts)
    if facts.due_in > 0:
        return
    if facts.suspect:
        text = "It is in quarantine, because its worker died with it too often: it waits for a process of its own."
        yield Reason("quarantined", text, since=facts.suspected_at)
    yield from _limited(facts)


def _unserved(facts: Facts) -> Iterator[Reason]:
    if facts.serving_workers:
        if facts.put_back:
            what = f"a handler for the kind {shown(facts.kind)} that takes its arguments."
            once = f"A worker has claimed it and put it back: it did not have {what}"
            many = f"Workers claim it and put it back: none of them has {what}"
            yield Reason("unknown_kind", once if facts.put_back == "once" else many)
    elif facts.draining_workers:
        yield Reason(
            "workers_draining", f"Each worker of its queue, {facts.queue}, is stopping and claims no more jobs."
        )
    elif facts.live_workers:
        other = (
            "1 worker is live and serves"
            if facts.live_workers == 1
            else f"{facts.live_workers:,} workers are live and serve"
        )
        yield Reason("no_worker", f"No live worker serves its queue, {facts.queue} ({other} other queues).")
    else:
        yield Reason("no_worker", "No worker is live.")


def _limited(facts: Facts) -> Iterator[Reason]:
    if facts.max_running is not None and len(facts.holders) >= facts.max_running:
        held = facts.holders
        text = f"Its queue runs at most {count_of(facts.max_running, 'job')} at once, and that many run{_named(held)}."
        yield Reason("queue_limit", text, jobs=tuple(held[:NAMED]))
    if (wait := _wait(facts.rate_count, facts.rate_seconds, facts.full_in)) is not None:
        yield Reason(
            "queue_rate",
            f"Its queue starts at most {_rate(facts.rate_count, facts.rate_seconds)}; the next one in {duration(wait)}.",
            facts.run_at + timedelta(seconds=wait - facts.due_in),
        )
    if facts.key is None:
        return
    own_limit, own_count, own_seconds = _own(facts.options)
    most = own_limit if own_limit is not None else facts.key_max_running
    key = shown(facts.key)
    if most is not None and len(facts.key_holders) >= most:
        held = facts.key_holders
        text = (
            f"At most {count_of(int(most), 'job')} of the key {key} may run at once, and that many run{_named(held)}."
        )
        yield Reason("key_limit", text, jobs=tuple(held[:NAMED]))
    count, seconds = (
        (own_count, own_seconds) if own_count is not None else (facts.key_rate_count, facts.key_rate_seconds)
    )
    if (wait := _wait(count, seconds, facts.key_full_in)) is not None:
        yield Reason(
            "key_rate",
            f"At most {_rate(count, seconds)} are allowed for the key {key}; the next one in {duration(wait)}.",
            facts.run_at + timedelta(seconds=wait - facts.due_in),
        )


def _turn(facts: Facts) -> Iterator[Reason]:
    """It is due, and nothing stops it: it waits for a free worker."""
    ahead = ""
    if facts.ahead:
        number = f"more than {_MANY:,}" if facts.ahead >= _MANY else f"{facts.ahead:,}"
        ahead = f"; {number} due {'job comes' if facts.ahead == 1 else 'jobs come'} before it"
    if facts.free_slots == 0:
        workers = "the worker" if facts.serving_workers == 1 else f"all {facts.serving_workers:,} workers"
        yield Reason("workers_busy", f"Every slot of {workers} of its queue is taken{ahead}.")
    else:
        yield Reason("next", f"It is due, and a worker with a free slot serves its queue{ahead}.")


def _named(ids: Sequence[int], lead: str = ":") -> str:
    if not ids:
        return ""
    first = ", ".join(f"{job_id}" for job_id in ids[:3])
    return f"{lead} {first}" + (f" and {len(ids) - 3:,} more" if len(ids) > 3 else "")


def _rate(count: float | None, seconds: float | None) -> str:
    return f"{count_of(int(count or 0), 'job')} in {duration(seconds or 0.0)}"


def _wait(count: float | None, seconds: float | None, full_in: float | None) -> float | None:
    """Seconds until the bucket has a token; None if it has one, or there is no rate."""
    if not count or not seconds or full_in is None:
        return None
    tokens = count - max(0.0, full_in) * count / seconds
    return (1 - tokens) * seconds / count if tokens < 1 else None


def _own(options: str | None) -> tuple[float | None, float | None, float | None]:
    """The limit and the rate that the job itself carries for its key. A producer wrote them, so anything may be there."""
    try:
        found: Any = json.loads(options or "{}")
    except (ValueError, RecursionError):
        return None, None, None
    if not isinstance(found, dict):
        return None, None, None
    given = cast("dict[str, Any]", found)
    limit, rate = given.get("limit"), given.get("rate")
    pair: list[Any] = cast("list[Any]", rate) if isinstance(rate, list) else []
    count, seconds = [_number(each) for each in pair] if len(pair) == 2 else (None, None)
    return (_number(limit), count, seconds) if count and seconds else (_number(limit), None, None)


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 2**31:
        return None
    return float(value)
