"""The database operations of clients, written once for every driver.

Each operation is a generator that yields the statements it needs and is sent their rows; it never waits. `run` drives one over
an async psycopg connection (Trio's or asyncio's), `run_sync` over a blocking one. Decisions and waits are separate, as in
psycopg itself.

The operations here are about one job and about workers; each other subject has a module beside this one.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import psycopg

from ..errors import InvalidArguments, InvalidTransition, UnknownJob, UsageError
from ..plain import json_value
from ..postgres import OwnAsyncCursor, OwnCursor, TrioConnection
from ..records import SESSION, JobRecord, State
from ..sql import statement
from ..states import TRANSITIONS, Event
from .arrays import numbers
from .bounded import bounded, bounded_sync
from .places import Place, unretried
from .refusals import refuse_raw_bytes, translate, unsendable

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from datetime import datetime

T = TypeVar("T")
Row = Sequence[Any]


class Query(NamedTuple):
    """One statement to run: its name in `sql/`, its parameters, the seconds after which PostgreSQL stops it, and the name
    under which the audit trail notes it."""

    name: str
    parameters: Mapping[str, Any]
    timeout: float | None = None
    actor: str | None = None


Operation = Generator[Query, Sequence[Row], T]


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """One attempt of a job as `pulse.attempts` shows it."""

    job_id: int
    attempt: int
    worker: int = field(metadata=SESSION)
    started_at: datetime | None
    ended_at: datetime | None
    outcome: str
    error: str | None
    host: str | None = None
    pid: int | None = None
    """`host` and `pid` are the worker's; None when the database no longer knows it."""


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A worker's session as `pulse.workers` shows it."""

    id: int = field(metadata=SESSION)
    host: str
    pid: int
    state: str
    started_at: datetime
    seen_at: datetime
    queues: list[str]
    concurrency: int
    running: int
    version: str
    beat_age: float = 0.0
    """Seconds since its last sign of life, by the database's clock."""

    @property
    def is_live(self) -> bool:
        """Whether it is a worker that runs. One whose connection was lost has an earlier session, too, until the jobs of that
        one have ended: it has no slots, and is no other worker. Nor has a quarantine process, which claims nothing."""
        return self.state in ("running", "draining") and self.concurrency > 0


_RETRY_TRIES = 10
_META = 25
"""The column of the metadata in job.sql and jobs.sql."""


def check_id(job_id: object) -> int:
    """Checks a job's id. Raises `InvalidArguments`."""
    if not isinstance(job_id, int) or isinstance(job_id, bool) or not 0 < job_id < 2**63:
        raise InvalidArguments(f"A job's id is a whole number above 0, got {job_id!r:.200}.")
    return job_id


def job(job_id: int) -> Operation[JobRecord]:
    """One job. Raises `UnknownJob`, `InvalidArguments`."""
    rows = yield Query("job", {"id": check_id(job_id)})
    if not rows:
        raise UnknownJob(missing(job_id))
    return record_of(rows[0])


def outcome(job_id: int) -> Operation[JobRecord]:
    """One job for a role that may see neither arguments nor keys: `args` is empty, `key` None. Raises `UnknownJob`."""
    rows = yield Query("outcome", {"id": check_id(job_id)})
    if not rows:
        raise UnknownJob(missing(job_id))
    return record_of(rows[0])


def is_refusal(error: UsageError) -> bool:
    """Whether the database refused a statement because the role lacks a right."""
    return isinstance(error.__cause__, psycopg.errors.InsufficientPrivilege)


def missing(job_id: int) -> str:
    """The error for a job that does not exist."""
    return (
        f"There is no job {job_id} (it was deleted, or ended longer ago than its retention; workers that keep no completed "
        "jobs remove them at once)."
    )


def attempts(job_id: int) -> Operation[list[AttemptRecord]]:
    """Every attempt of a job, in order."""
    rows = yield Query("attempts", {"id": job_id})
    return [AttemptRecord(*row) for row in rows]


def retry(job_id: int, *, afresh: bool = False) -> Operation[State]:
    """A person's retry: a finished job goes back on its queue, a waiting one is due now. Returns the new state. With `afresh` a
    finished durable job forgets first what it has done.

    Raises `UnknownJob`, or `InvalidTransition` for a job that is running or available already.
    """
    tries = 0
    named = retry_statement(afresh=afresh)
    while True:
        rows = yield Query(
            named, {"ids": numbers([job_id]), "delay": 0.0, "spacing": 0.0, "filter": None, "state": None}
        )
        _, moved, blocked_by, state, *_ = rows[0]
        if moved:
            return State.AVAILABLE
        if state is None:
            raise UnknownJob(missing(job_id))
        if blocked_by is None and (places := (yield from places_of([job_id]))):
            why = unretried(places[job_id], state, owes=bool((yield from unfinished_clean_ups([job_id]))))
            if why is not None:
                raise InvalidTransition(why)
        if blocked_by is not None or Event.RETRY not in TRANSITIONS[State(state)]:
            raise InvalidTransition(unmoved(job_id, State(state), blocked_by))
        # It finished, or was put off, at that moment: now a retry is possible. If not, another fact prevents it.
        tries += 1
        if tries == _RETRY_TRIES:
            raise InvalidTransition(unmoved(job_id, State(state), None, afresh=afresh))


def retry_statement(*, afresh: bool) -> str:
    """The name of the statement by which finished jobs go back, with what they have done or without it."""
    return "retry_job_afresh" if afresh else "retry_job"


def places_of(job_ids: Sequence[int]) -> Operation[dict[int, Place]]:
    """Where those of these jobs stand that belong to trees."""
    rows = yield Query("tree_places", {"ids": numbers(job_ids)})
    return {row[0]: Place(*row) for row in rows}


def refused_for_keys(job_ids: Sequence[int], states: Mapping[int, State]) -> Operation[dict[int, str]]:
    """Why those of these jobs would not be retried whose unique key a live job has, or one of them that goes first."""
    first, refused = dict[tuple[str, str], int](), dict[int, str]()
    for job_id, queue, key, taken_by in (yield Query("keys_of_finished", {"ids": numbers(job_ids)})):
        other = first.setdefault((queue, key), job_id)
        if taken_by is not None:
            refused[job_id] = unmoved(job_id, states[job_id], taken_by)
        elif other != job_id:
            refused[job_id] = f"Job {job_id} cannot be retried: job {other} goes first, and has the same unique key."
    return refused


def below(job_ids: Iterable[int], retried: Collection[int]) -> Operation[set[int]]:
    """Those of these jobs that have one of the `retried` above them in their trees."""
    found, passed = set[int](), set[tuple[int, int]]()
    above = {job_id: job_id for job_id in job_ids} if retried else {}
    while above:
        places = yield from places_of(list(set(above.values())))
        higher = dict[int, int]()
        for job_id, at in above.items():
            place = places.get(at)
            if place is None or place.parent_id is None:
                continue
            if place.parent_id in retried or place.root_id in retried:
                found.add(job_id)
            elif place.parent_id != place.root_id and (job_id, place.parent_id) not in passed:
                # Once: the owner of the schema can write parents in a circle.
                passed.add((job_id, place.parent_id))
                higher[job_id] = place.parent_id
        above = higher
    return found


def unfinished_clean_ups(job_ids: Sequence[int]) -> Operation[list[int]]:
    """Those of these jobs that were cancelled and have not undone all that they did, so that a retry does the rest of it."""
    rows = yield Query("unfinished_clean_ups", {"ids": numbers(job_ids)})
    return [row[0] for row in rows]


def unmoved(job_id: int, state: State, blocked_by: int | None, *, afresh: bool = False) -> str:
    """Why a job was not retried."""
    if blocked_by is not None:
        return f"Job {job_id} cannot be retried: the live job {blocked_by} on that queue has the same unique key."
    if afresh and state in (State.RETRYABLE, State.SCHEDULED):
        return (
            f"Job {job_id} was not retried: children of it live, which a new beginning would start a second time. Cancel it "
            "first, or retry it without --afresh. (Or it is being moved at this moment.)"
        )
    if Event.RETRY in TRANSITIONS[state]:
        return (
            f"Job {job_id} was not retried: a job with its unique key came first, it is being moved at this moment, or what it "
            "was enqueued with is no longer accepted (see `jobs show`): then enqueue it anew."
        )
    return f"Job {job_id} is {state}: a job can be retried when it has finished or waits for its time."


def workers(*, gone: bool = False) -> Operation[list[WorkerRecord]]:
    """Worker sessions, newest first; ended ones only if asked for."""
    rows = yield Query("workers", {"gone": gone})
    return [WorkerRecord(*row) for row in rows]


def count_by_state(*, queue: str | None = None) -> Operation[dict[State, int]]:
    """How many jobs are in each state, finished ones included."""
    rows = yield Query("count_by_state", {"queue": queue})
    return {State(state): count for state, count in rows}


def record_of(row: Row) -> JobRecord:
    """Reads a row of job.sql or jobs.sql."""
    fields = list(row)
    fields[3] = State(fields[3])
    fields[13] = json_value(fields[13])
    fields[14] = json_value(fields[14]) if fields[14] is not None else None
    if len(fields) > _META and fields[_META] is not None:
        fields[_META] = json_value(fields[_META])
    return JobRecord(*fields)


# Drivers


async def run(connection: psycopg.AsyncConnection[Any], schema: str, operation: Operation[T]) -> T:
    """Drives an operation over an async connection, in its current transaction."""
    try:
        query = next(operation)
        refuse_raw_bytes(connection)
        # Not connection.execute: the connection is the caller's, and so are its cursor class and its row factory.
        async with OwnAsyncCursor(connection) as cursor:
            while True:
                async with bounded(connection, query.timeout):
                    # A bounded statement is planned for its own values, each time.
                    prepare = None if query.timeout is None else False
                    # The name is set for the transaction. Without autocommit that is the caller's, who commits it. A worker's
                    # settings are those of its transactions where a pooler has the session.
                    due = isinstance(connection, TrioConnection) and connection.due_prologue is not None
                    alone = due or (query.actor is not None and connection.autocommit)
                    async with connection.transaction() if alone else nullcontext():
                        if query.actor is not None:
                            await cursor.execute(statement("act_as", schema), {"actor": query.actor})
                        await cursor.execute(
                            statement(query.name, schema), query.parameters, prepare=prepare, binary=True
                        )
                        rows = await cursor.fetchall()
                query = operation.send(rows)
    except StopIteration as stop:
        return stop.value
    except UnicodeEncodeError as error:
        raise unsendable(connection, error) from error
    except psycopg.Error as error:
        raise translate(error, schema) from error


def run_sync(connection: psycopg.Connection[Any], schema: str, operation: Operation[T]) -> T:
    """Drives an operation over a blocking connection, in its current transaction."""
    try:
        query = next(operation)
        refuse_raw_bytes(connection)
        with OwnCursor(connection) as cursor:
            while True:
                with bounded_sync(connection, query.timeout):
                    prepare = None if query.timeout is None else False
                    alone = query.actor is not None and connection.autocommit
                    with connection.transaction() if alone else nullcontext():
                        if query.actor is not None:
                            cursor.execute(statement("act_as", schema), {"actor": query.actor})
                        cursor.execute(statement(query.name, schema), query.parameters, prepare=prepare, binary=True)
                        rows = cursor.fetchall()
                query = operation.send(rows)
    except StopIteration as stop:
        return stop.value
    except UnicodeEncodeError as error:
        raise unsendable(connection, error) from error
    except psycopg.Error as error:
        raise translate(error, schema) from error
