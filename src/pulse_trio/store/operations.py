"""The database operations of clients, written once for every driver.

Each operation is a generator that yields the statements it needs and is sent their rows; it never waits. `run` drives one over
an async psycopg connection (Trio's or asyncio's), `run_sync` over a blocking one. Decisions and waits are separate, as in
psycopg itself.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
import psycopg

from ..codec import encoded
from ..errors import (
    DatabaseUnavailable,
    InvalidArguments,
    InvalidTransition,
    JobExists,
    PulseTrioError,
    SchemaError,
    TookTooLong,
    UnknownJob,
    UsageError,
)
from ..postgres import OwnAsyncCursor, OwnCursor
from ..records import SESSION, JobRecord, State
from ..sql import statement
from ..states import TRANSITIONS, Event
from .arrays import numbers, optional_numbers, texts
from .bounded import bounded, bounded_sync
from .disk_full import disk_full
from .rights import remedy

if TYPE_CHECKING:
    from datetime import datetime

    from ..codec import Codec
    from ..jobs import JobRequest

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


class Enqueued(NamedTuple):
    """What an enqueue did: the job's id, whether it is new (False: that job had the unique key), and whether that job got the
    new arguments and the new time (`on_conflict="replace"`; False if it runs already)."""

    id: int
    added: bool
    replaced: bool = False


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


def enqueue(request: JobRequest, codec: Codec | None = None) -> Operation[Enqueued]:
    """Adds one job, encoded by `codec` if there is one. If its unique key is taken, adds nothing and returns the job that has
    the key, or raises `JobExists`, as `on_conflict` says."""
    reserved: int | None = None
    if codec is not None:
        if request.unique_key is None:
            reserved = (yield Query("reserve", {"count": 1}))[0][0]
        request = encoded_request(codec, request, reserved)
    if request.unique_key is not None:
        return (yield from _enqueue_unique([request]))[0]
    rows = yield Query(
        "enqueue",
        {
            "kind": request.kind,
            "args": request.args,
            "queue": request.queue,
            "priority": request.priority,
            "run_at": request.run_at,
            "delay": request.delay,
            "deadline_in": request.deadline_in,
            "expires_in": request.expires_in,
            "max_attempts": request.max_attempts,
            "options": request.options,
            "key": request.key,
            "reserved": reserved,
        },
    )
    return Enqueued(rows[0][0], added=True)


class KeysMovedError(Exception):
    """A job that had a key is gone, and its key sorts before others that are locked already: begin again, `one_by_one`."""


class Deadlocked(DatabaseUnavailable):
    """PostgreSQL ended this transaction (or what came after its last savepoint) to end a deadlock."""


def reserve(count: int) -> Operation[list[int]]:
    """Ids for jobs that are about to be added."""
    rows = yield Query("reserve", {"count": count})
    return [row[0] for row in rows]


def enqueue_many(
    requests: Sequence[JobRequest],
    codec: Codec | None = None,
    *,
    ids: Sequence[int] | None = None,
    one_by_one: bool = False,
) -> Operation[list[Enqueued]]:
    """Adds a batch in one statement; the answers come in the order of the requests. Duplicates take a second statement. `ids`
    are reserved ids. Keys are locked in their order, and none after that.

    Raises `JobExists` when a request asks for that, and `KeysMovedError` unless `one_by_one`, which takes longer: then the
    other jobs have been written, and the transaction must be rolled back."""
    if not requests:
        return []
    plain = not one_by_one and all(_is_plain(request) for request in requests)
    if codec is not None:
        bound: list[int | None] = [None] * len(requests)
        if plain:
            ids = ids or (yield from reserve(len(requests)))
            bound = [new if r.unique_key is None else None for new, r in zip(ids, requests, strict=True)]
        requests = [encoded_request(codec, r, new) for r, new in zip(requests, bound, strict=True)]
    if not plain:
        return (yield from _enqueue_unique(requests))
    reserved = None if ids is None else numbers(ids)
    rows = yield Query("enqueue_many", {**_columns(requests), "reserved": reserved})
    answers = [Enqueued(new_id, added) for _, added, new_id, *_ in rows]
    taken = [n for n, answer in enumerate(answers) if not answer.added]
    if taken:
        keys = {
            "queues": texts([requests[n].queue for n in taken]),
            "unique_keys": texts([requests[n].unique_key for n in taken]),
        }
        for n, (_, holder) in zip(taken, (yield Query("key_holders", keys)), strict=True):
            if holder is None:
                raise KeysMovedError
            answers[n] = Enqueued(holder, added=False)
    return answers


def encoded_request(codec: Codec, request: JobRequest, job_id: int | None) -> JobRequest:
    """The request with its arguments encoded, bound to its future id if that is known."""
    return msgspec.structs.replace(request, args=encoded(codec, request.args, request.kind, job_id))


def _is_plain(request: JobRequest) -> bool:
    """Whether the request's unique key, if it has one, is held only while its job is live, and a duplicate is skipped."""
    return request.on_conflict == "skip" and request.unique_for is None and request.unique_after is None


def _enqueue_unique(requests: Sequence[JobRequest]) -> Operation[list[Enqueued]]:
    columns = {
        **_columns(requests),
        "unique_fors": optional_numbers([r.unique_for for r in requests]),
        "unique_afters": optional_numbers([r.unique_after for r in requests]),
        "replacing": texts(["true" if r.on_conflict == "replace" else "false" for r in requests]),
    }
    rows = yield Query("enqueue_unique", columns)
    answers = [Enqueued(job_id, added, replaced) for _, job_id, added, replaced in rows]
    for request, answer in zip(requests, answers, strict=True):
        if request.on_conflict == "raise" and not answer.added:
            raise JobExists(
                f"Job {answer.id} of queue {request.queue!r} has the unique key {request.unique_key!r} already.",
                job_id=answer.id,
            )
    return answers


def _columns(requests: Sequence[JobRequest]) -> dict[str, str]:
    return {
        "kinds": texts([r.kind for r in requests]),
        "args": texts([r.args for r in requests]),
        "queues": texts([r.queue for r in requests]),
        "priorities": numbers([r.priority for r in requests]),
        "run_ats": texts([r.run_at for r in requests]),
        "delays": optional_numbers([r.delay for r in requests]),
        "deadlines": optional_numbers([r.deadline_in for r in requests]),
        "expiries": optional_numbers([r.expires_in for r in requests]),
        "max_attempts": numbers([r.max_attempts for r in requests]),
        "options": texts([r.options for r in requests]),
        "unique_keys": texts([r.unique_key for r in requests]),
        "keys": texts([r.key for r in requests]),
    }


_RETRY_TRIES = 10


def job(job_id: int) -> Operation[JobRecord]:
    """One job. Raises `UnknownJob`."""
    rows = yield Query("job", {"id": job_id})
    if not rows:
        raise UnknownJob(missing(job_id))
    return record_of(rows[0])


def outcome(job_id: int) -> Operation[JobRecord]:
    """One job for a role that may see neither arguments nor keys: `args` is empty, `key` None. Raises `UnknownJob`."""
    rows = yield Query("outcome", {"id": job_id})
    if not rows:
        raise UnknownJob(missing(job_id))
    return record_of(rows[0])


def is_refusal(error: UsageError) -> bool:
    """Whether the database refused a statement because the role lacks a right."""
    return isinstance(error.__cause__, psycopg.errors.InsufficientPrivilege)


def missing(job_id: int) -> str:
    """The error for a job that does not exist."""
    return (
        f"There is no job {job_id} (finished jobs are removed when their retention has passed; workers that keep no "
        "completed jobs remove them at once)."
    )


def attempts(job_id: int) -> Operation[list[AttemptRecord]]:
    """Every attempt of a job, in order."""
    rows = yield Query("attempts", {"id": job_id})
    return [AttemptRecord(*row) for row in rows]


def retry(job_id: int) -> Operation[State]:
    """A person's retry: a finished job goes back on its queue, a waiting one is due now. Returns the new state.

    Raises `UnknownJob`, or `InvalidTransition` for a job that is running or available already.
    """
    tries = 0
    while True:
        rows = yield Query("retry_job", {"ids": numbers([job_id]), "delay": 0.0, "spacing": 0.0, "filter": None})
        _, moved, blocked_by, state, *_ = rows[0]
        if moved:
            return State.AVAILABLE
        if state is None:
            raise UnknownJob(missing(job_id))
        if blocked_by is not None or Event.RETRY not in TRANSITIONS[State(state)]:
            raise InvalidTransition(unmoved(job_id, State(state), blocked_by))
        # It finished, or was put off, at that moment: now a retry is possible. If not, another fact prevents it.
        tries += 1
        if tries == _RETRY_TRIES:
            raise InvalidTransition(unmoved(job_id, State(state), None))


def unmoved(job_id: int, state: State, blocked_by: int | None) -> str:
    """Why a job was not retried."""
    if blocked_by is not None:
        return f"Job {job_id} cannot be retried: the live job {blocked_by} on that queue has the same unique key."
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
    return JobRecord(*fields)


def json_value(text: str) -> Any:
    """Decodes JSON. If Python cannot read it (too many levels), returns its beginning, as the view does if jsonb cannot hold
    it: one job must not make a whole list unreadable."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        # An integer with more digits than Python reads.
        return json.loads(text, parse_int=Decimal)
    except (ValueError, ArithmeticError, RecursionError):
        return {"$unreadable": text[:1000]}


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
                    # The name is set for the transaction. Without autocommit that is the caller's, who commits it.
                    alone = query.actor is not None and connection.autocommit
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


def refuse_raw_bytes(connection: psycopg.AsyncConnection[Any] | psycopg.Connection[Any]) -> None:
    """Raises `UsageError` for a caller's connection that returns every text as bytes of an unknown encoding."""
    if connection.pgconn.parameter_status(b"client_encoding") == b"SQL_ASCII":
        raise UsageError("The connection has the client_encoding SQL_ASCII. Run on it: SET client_encoding = 'UTF8'")


def unsendable(
    connection: psycopg.AsyncConnection[Any] | psycopg.Connection[Any], error: UnicodeEncodeError
) -> UsageError | InvalidArguments:
    """The error for a text that a caller's connection cannot carry, or that no connection can."""
    encoding = (connection.pgconn.parameter_status(b"client_encoding") or b"?").decode()
    wrong = error.object[error.start]
    if encoding == "UTF8":
        return InvalidArguments(f"The text has {wrong!r}, half of a character, which cannot be stored.")
    return UsageError(
        f"The connection has the client_encoding {encoding}, which has no {wrong!r}. Run on it: SET client_encoding = 'UTF8'"
    )


def translate(error: psycopg.Error, schema: str) -> PulseTrioError:
    """Turns psycopg's error into one of ours, by whose fault it is. The one place where that is decided for clients."""
    text = str(error).strip()
    headline = text.partition("\n")[0]
    match error:
        case psycopg.errors.UndefinedTable() | psycopg.errors.InvalidSchemaName() | psycopg.errors.UndefinedFunction():
            return SchemaError(
                f"The database has no usable pulse-trio schema {schema!r} ({headline}). Create it with: pulse-trio migrate"
            )
        case psycopg.errors.InFailedSqlTransaction():
            return UsageError("The transaction is aborted already by an earlier error; roll it back before enqueuing.")
        case psycopg.errors.UniqueViolation():
            return InvalidTransition("Another live job on that queue has the same unique key.")
        case (
            psycopg.errors.CheckViolation()
            | psycopg.errors.StatementTooComplex()
            | psycopg.errors.ProgramLimitExceeded()
            | psycopg.DataError()
        ):
            return InvalidArguments(f"The database refused the job: {headline}.")
        case psycopg.errors.InsufficientPrivilege():
            return UsageError(f"The database role may not do that: {headline}.{remedy(headline, schema)}")
        case psycopg.errors.DeadlockDetected():
            return Deadlocked(f"The database ended a deadlock ({headline}). The writes were rolled back: try again.")
        case psycopg.errors.QueryCanceled():
            return TookTooLong(f"The database stopped that, because it took too long ({headline}).")
        case _:
            return DatabaseUnavailable(f"The database could not do that: {disk_full(error) or headline}")
