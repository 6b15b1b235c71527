"""Schedules: workers declare them when they start, clients change them, any worker fires them.

The operations for clients are generators, as in `operations`. Those that read and then write (`put`, `resume`, `run_now`) must
be run in one transaction. `fire` is for workers: an error in one schedule does not keep the others from firing.
"""

from __future__ import annotations

import difflib
import json
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import psycopg
from psycopg.rows import tuple_row

from ..errors import DatabaseError, UnknownSchedule, UsageError
from ..handlers import Schedule, check_name
from ..jobs import JobRequest
from ..plain import json_value
from ..sql import statement
from ..states import storable
from ..timing import CatchUp, Timing, due
from .arrays import numbers, texts
from .held_up import is_held_up, waiting_briefly
from .new_jobs import Enqueued, enqueue_many
from .operations import Operation, Query, Row, run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..postgres import TrioConnection
    from .held_up import HeldUp

BATCH = 25
"""Schedules fired in one transaction: other workers may take the next ones while these are written."""
_COLUMNS = ("kind", "args", "queue", "priority")
"""The parts of a request that have columns of their own; the others are in `options`."""


@dataclass(frozen=True, slots=True)
class ScheduleRecord:
    """A schedule as `pulse.schedules` shows it. `state` is active, paused or broken (`problem` says why); `every` is seconds;
    `declared_by` counts the live workers whose code declares it."""

    name: str
    state: str
    kind: str
    args: dict[str, Any]
    queue: str
    priority: int
    cron: str | None
    timezone: str
    every: float | None
    catch_up: str
    next_due: datetime | None
    last_due: datetime | None
    last_job: int | None
    declared: bool
    declared_by: int
    paused_at: datetime | None
    problem: str | None
    created_at: datetime


@dataclass(frozen=True, slots=True)
class FireRecord:
    """A fired occurrence, and its job; `job_state` is None when the job's retention has passed."""

    name: str
    due_at: datetime
    fired_at: datetime
    job_id: int
    added: bool
    job_state: str | None


class Fired(NamedTuple):
    """One fired occurrence: its job, how many seconds late it was, and whether the job is new (False: its unique key was
    taken)."""

    name: str
    due_at: datetime
    job_id: int
    late: float
    added: bool


class Broken(NamedTuple):
    """A schedule that could not be fired."""

    name: str
    error: str


class OneIsBroken(Exception):
    """A schedule could not be fired together with others."""


class _Due(NamedTuple):
    """A locked row: the schedule, where it stands, and the server's time."""

    schedule: Schedule
    next_due: datetime | None
    now: datetime
    paused: bool


# For clients


def schedules() -> Operation[list[ScheduleRecord]]:
    """Every schedule, by name."""
    rows = yield Query("schedules", {})
    return [_record(row) for row in rows]


def fires(name: str, *, limit: int) -> Operation[list[FireRecord]]:
    """The latest occurrences of a schedule, latest first; also of one that was removed. Raises `UnknownSchedule`."""
    rows = yield Query("schedule_fires", {"name": check_name(name), "limit": limit})
    if not rows:
        yield from _found(name)
    return [FireRecord(*row) for row in rows]


def put(schedule: Schedule) -> Operation[None]:
    """Makes a schedule, or changes the one of that name; a paused one stays paused. Raises `UsageError` if code declares it."""
    ((now, declared),) = yield Query("schedule_clock", {"name": schedule.name})
    if declared:
        raise UsageError(
            f"The schedule {schedule.name!r} is declared in code: change it there, or give this one another name."
        )
    yield _put([schedule], now, declared=False)


def pause(name: str) -> Operation[None]:
    """Stops a schedule until it is resumed; occurrences in between are not caught up. Raises `UnknownSchedule`."""
    if not (yield Query("schedule_pause", {"name": check_name(name), "paused": True})):
        yield from _unknown(name)


def resume(name: str) -> Operation[datetime | None]:
    """Lets a paused or broken schedule go on; returns its next occurrence. Raises `UnknownSchedule`, or `ConfigurationError` if
    it cannot go on. One that is active goes on as it is: what it has missed is still to be caught up."""
    taken = yield from _take(name)
    if taken.next_due is not None and not taken.paused:
        return taken.next_due
    next_due = taken.schedule.timing.after(taken.now)
    yield Query("schedule_pause", {"name": name, "paused": False})
    yield _move(name, next_due)
    return next_due


def remove(name: str) -> Operation[int]:
    """Removes a schedule; its jobs and the record of its fires stay. Returns how many live workers declare it: each will create
    it again at its next start. Raises `UnknownSchedule`."""
    rows = yield Query("schedule_remove", {"name": check_name(name)})
    if not rows:
        yield from _unknown(name)
    return rows[0][0]


def run_now(name: str) -> Operation[Enqueued]:
    """Enqueues a schedule's job now, paused or not; its own occurrences stay as they are. Raises `UnknownSchedule`."""
    taken = yield from _take(name)
    fired, moment = None, taken.now
    while fired is None:
        # The moments of a schedule differ: on a clock that stands still, in a test, a second run would have that of the first.
        (fired,) = (yield from _fire(taken, [moment])) or (None,)
        moment += timedelta(microseconds=1)
    if fired.added:
        yield Query("note_enqueue", {"ids": numbers([fired.job_id]), "target": f"schedule {name}"})
    return Enqueued(fired.job_id, fired.added)


def _found(name: str) -> Operation[None]:
    names = [record.name for record in (yield from schedules())]
    if name not in names:
        yield from _unknown(name)


def _unknown(name: str) -> Operation[None]:
    near = difflib.get_close_matches(name, [record.name for record in (yield from schedules())], n=3)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else " See: pulse-trio cron list"
    raise UnknownSchedule(f"There is no schedule {name!r}.{hint}")


def _take(name: str) -> Operation[_Due]:
    rows = yield Query("schedule_one", {"name": check_name(name)})
    if not rows:
        yield from _unknown(name)
    return _due(rows[0])


def _record(row: Row) -> ScheduleRecord:
    fields = list(row)
    fields[3] = json_value(fields[3])
    return ScheduleRecord(*fields)


# For workers


def declare(declared: Sequence[Schedule], session: int) -> Operation[None]:
    """Writes the schedules that a worker's code declares. If only the handler's options changed, the next occurrence stays."""
    ((now, _),) = yield Query("schedule_clock", {"name": ""})
    yield _put(declared, now, declared=True)
    yield Query("schedule_declared", {"names": texts([s.name for s in declared]), "session": session})


async def fire(
    connection: TrioConnection[Any], schema: str, held: HeldUp[str], *, apart: bool
) -> tuple[list[Fired], list[Broken]]:
    """Locks due schedules that no other transaction has locked, and fires their occurrences. In a transaction.

    With `apart` each is fired in a savepoint, two round trips more; one with an error is noted as broken, and one whose unique
    key somebody else's open transaction has is `held` up. Without, an error in one raises `OneIsBroken`: roll back, and fire
    them apart.
    """
    fired: list[Fired] = []
    broken: list[Broken] = []
    async with psycopg.AsyncCursor(connection, row_factory=tuple_row) as cursor:
        await cursor.execute(statement("schedule_due", schema), {"limit": BATCH, "aside": held.turn()})
        rows = await cursor.fetchall()
    for row in rows:
        keyed = '"unique_key"' in (row[5] or "")
        try:
            # A savepoint: an error in one schedule must not delay the others.
            async with (
                connection.transaction() if apart else nullcontext(),
                waiting_briefly(connection) if keyed else nullcontext(),
            ):
                fired += await run(connection, schema, _catch_up(row))
        except (DatabaseError, psycopg.Error) as error:
            if not (keyed and is_held_up(error)):
                raise
            if not apart:
                raise OneIsBroken from error
            held.put_off(row[0], f"the schedule {row[0]!r}", _due(row).schedule.request)
        except Exception as error:
            # Reading a hostile row (JSON of any depth, names of time zones that are paths, ...) may raise any exception: that
            # schedule is broken, and the others are fired.
            if type(error) is UsageError:
                # Not this schedule's fault: the role lacks a right.
                raise
            if not apart:
                raise OneIsBroken from error
            problem = storable(str(error) or type(error).__name__)
            broken.append(Broken(row[0], problem))
            await run(connection, schema, _break(row[0], problem))
    held.turned()
    return fired, broken


def _catch_up(row: Row) -> Operation[list[Fired]]:
    taken = _due(row)
    schedule, next_due, now, _ = taken
    occurrences = [] if next_due is None else due(schedule.timing, next_due, now, schedule.catch_up)
    fired = yield from _fire(taken, occurrences)
    yield _move(schedule.name, schedule.timing.after(now))
    return fired


def _fire(taken: _Due, occurrences: Sequence[datetime]) -> Operation[list[Fired]]:
    """The one function that fires: writes the occurrence, its job, and their link."""
    if not occurrences:
        return []
    schedule = taken.schedule
    rows = yield Query("schedule_fire", {"name": schedule.name, "due_ats": texts(map(_text, occurrences))})
    fresh = sorted(row[0].astimezone(UTC) for row in rows)
    done = yield from enqueue_many([schedule.request_at(moment) for moment in fresh])
    yield Query(
        "schedule_fired",
        {
            "name": schedule.name,
            "due_ats": texts(map(_text, fresh)),
            "job_ids": numbers([d.id for d in done]),
            "added": texts([str(d.added) for d in done]),
        },
    )
    return [
        Fired(schedule.name, moment, d.id, (taken.now - moment).total_seconds(), d.added)
        for moment, d in zip(fresh, done, strict=True)
    ]


def _break(name: str, error: str) -> Operation[None]:
    yield Query("schedule_move", {"name": name, "next_due": None, "problem": error[:2000]})


def _move(name: str, next_due: datetime | None) -> Query:
    problem = None if next_due is not None else "its expression does not come again"
    return Query("schedule_move", {"name": name, "next_due": next_due, "problem": problem})


# Rows


def _put(given: Sequence[Schedule], now: datetime, *, declared: bool) -> Query:
    requests = [s.request for s in given]
    return Query(
        "schedule_put",
        {
            "names": texts([s.name for s in given]),
            "kinds": texts([r.kind for r in requests]),
            "args": texts([r.args for r in requests]),
            "queues": texts([r.queue for r in requests]),
            "priorities": numbers([r.priority for r in requests]),
            "options": texts([_options(r) for r in requests]),
            "crons": texts([s.timing.cron for s in given]),
            "timezones": texts([s.timing.timezone for s in given]),
            "everies": texts([_interval(s.timing.every) for s in given]),
            "catch_ups": texts([s.catch_up for s in given]),
            "due_ass": texts([s.due_as for s in given]),
            "next_dues": texts([_text(s.timing.after(now)) for s in given]),
            "declared": declared,
        },
    )


def _options(request: JobRequest) -> str | None:
    """The fields without a column, as JSON: fields that requests may gain later are kept too."""
    plain = msgspec.to_builtins(request)
    rest = {name: value for name, value in plain.items() if name not in _COLUMNS and value is not None}
    return json.dumps(rest, sort_keys=True)


def _interval(every: timedelta | None) -> str | None:
    if every is None:
        return None
    # In fields that each fit 32 bits: PostgreSQL 14 refuses 3600000000 microseconds.
    seconds, micros = divmod(every // timedelta(microseconds=1), 1_000_000)
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}.{micros:06}"


def _text(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()


def _due(row: Row) -> _Due:
    """Raises `ConfigurationError` or msgspec's error for a row that was written by hand, and wrongly."""
    name, kind, args, queue, priority, options, cron, timezone, every, catch_up, due_as, next_due, now, *paused = row
    rest = msgspec.json.decode(options or "{}", type=dict[str, Any])
    request = msgspec.convert({**rest, "kind": kind, "args": args, "queue": queue, "priority": priority}, JobRequest)
    chosen: CatchUp = catch_up
    timing = Timing(cron, timezone, None if every is None else timedelta(microseconds=every))
    return _Due(Schedule(name, request, timing, chosen, due_as), next_due, now, paused == [True])
