"""Enqueues batches without unique keys by COPY.

COPY cannot skip duplicates, so requests with a unique key go through `enqueue_many.sql` (one client: 55k rows/s; COPY: 138k).
Ids are taken from the sequence first, so that they are known, and in the order of the requests. The moments of jobs with a
delay are computed here, but from the transaction's own `now()`: only the database's clock counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import psycopg
from psycopg.pq import PipelineStatus

from ..postgres import OwnAsyncCursor, OwnCursor
from ..sql import render, statement
from . import new_jobs, operations
from .arrays import texts
from .new_jobs import Enqueued, encoded_request
from .refusals import refuse_raw_bytes, translate, unsendable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..codec import Codec
    from ..jobs import JobRequest

_COPY = 'COPY :"schema".job (id, kind, args, queue, priority, run_at, max_attempts, options, key) FROM STDIN'
_ESCAPES = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})


@dataclass(frozen=True, slots=True)
class Reserved:
    """Ids for a batch, and the transaction's time."""

    ids: Sequence[int]
    now: datetime


def can_be_copied(
    connection: psycopg.AsyncConnection[Any] | psycopg.Connection[Any], requests: Sequence[JobRequest]
) -> bool:
    """Whether a batch has no unique key, and is large enough for three statements; and whether the connection, which may be the
    caller's, is in no pipeline: a pipeline has no COPY."""
    return (
        len(requests) > 10
        and all(request.unique_key is None for request in requests)
        and connection.pgconn.pipeline_status == PipelineStatus.OFF
    )


def copy_text(requests: Sequence[JobRequest], reserved: Reserved) -> str:
    """The batch in COPY's text format."""
    now = reserved.now.isoformat()
    lines: list[str] = []
    for job_id, r in zip(reserved.ids, requests, strict=True):
        run_at = r.run_at or (now if r.delay is None else _later(reserved.now, r.delay))
        options = _options(r, reserved.now)
        args = _escaped(r.args)
        kind = r.kind.translate(_ESCAPES)
        key = "\\N" if r.key is None else r.key.translate(_ESCAPES)
        lines.append(
            f"{job_id}\t{kind}\t{args}\t{r.queue}\t{r.priority}\t{run_at}\t{r.max_attempts}\t{options}\t{key}\n"
        )
    return "".join(lines)


def _escaped(args: str) -> str:
    # msgspec's JSON is one line without tabs, and rarely has a backslash. `msgspec.Raw` values may have any white space between
    # their tokens.
    if "\n" in args or "\t" in args or "\r" in args:
        return args.translate(_ESCAPES)
    return args.replace("\\", "\\\\") if "\\" in args else args


def _options(request: JobRequest, now: datetime) -> str:
    options = request.options
    if request.deadline_in is not None or request.expires_in is not None:
        moments = {"deadline": request.deadline_in, "expires": request.expires_in}
        chosen: dict[str, Any] = msgspec.json.decode(options) if options is not None else {}
        chosen |= {name: now.timestamp() + seconds for name, seconds in moments.items() if seconds is not None}
        options = msgspec.json.encode(chosen).decode()
    return "\\N" if options is None else options.translate(_ESCAPES)


def due_queues(requests: Sequence[JobRequest], reserved: Reserved) -> list[str]:
    """The queues that have a due job in the batch: their workers are woken."""
    return sorted({r.queue for r in requests if not r.delay and (r.run_at is None or _is_past(r.run_at, reserved.now))})


def _later(now: datetime, delay: float) -> str:
    return (now + timedelta(seconds=delay)).isoformat()


def _is_past(run_at: str, now: datetime) -> bool:
    return datetime.fromisoformat(run_at) <= now


async def enqueue_many(
    connection: psycopg.AsyncConnection[Any], schema: str, requests: Sequence[JobRequest], codec: Codec | None = None
) -> list[Enqueued]:
    """Adds a batch in the connection's transaction; returns the answers in the order of the requests."""
    if not can_be_copied(connection, requests):
        return await operations.run(connection, schema, new_jobs.enqueue_many(requests, codec))
    try:
        refuse_raw_bytes(connection)
        async with OwnAsyncCursor(connection) as cursor:
            await cursor.execute(statement("reserve_ids", schema), {"count": len(requests)}, binary=True)
            if not (rows := await cursor.fetchall()):
                return await operations.run(connection, schema, new_jobs.enqueue_many(requests, codec))
            reserved = _reserved(rows)
            if codec is not None:
                requests = [encoded_request(codec, r, new) for r, new in zip(requests, reserved.ids, strict=True)]
            async with cursor.copy(render(_COPY, schema).encode()) as copy:
                await copy.write(copy_text(requests, reserved))
            await cursor.execute(statement("wake", schema), {"queues": texts(due_queues(requests, reserved))})
    except UnicodeEncodeError as error:
        raise unsendable(connection, error) from error
    except psycopg.Error as error:
        raise translate(error, schema) from error
    return [Enqueued(job_id, True) for job_id in reserved.ids]


def enqueue_many_sync(
    connection: psycopg.Connection[Any], schema: str, requests: Sequence[JobRequest], codec: Codec | None = None
) -> list[Enqueued]:
    """The same over a blocking connection."""
    if not can_be_copied(connection, requests):
        return operations.run_sync(connection, schema, new_jobs.enqueue_many(requests, codec))
    try:
        refuse_raw_bytes(connection)
        with OwnCursor(connection) as cursor:
            cursor.execute(statement("reserve_ids", schema), {"count": len(requests)}, binary=True)
            if not (rows := cursor.fetchall()):
                return operations.run_sync(connection, schema, new_jobs.enqueue_many(requests, codec))
            reserved = _reserved(rows)
            if codec is not None:
                requests = [encoded_request(codec, r, new) for r, new in zip(requests, reserved.ids, strict=True)]
            with cursor.copy(render(_COPY, schema).encode()) as copy:
                copy.write(copy_text(requests, reserved))
            cursor.execute(statement("wake", schema), {"queues": texts(due_queues(requests, reserved))})
    except UnicodeEncodeError as error:
        raise unsendable(connection, error) from error
    except psycopg.Error as error:
        raise translate(error, schema) from error
    return [Enqueued(job_id, True) for job_id in reserved.ids]


def _reserved(rows: Sequence[tuple[int, datetime | None]]) -> Reserved:
    # Only the first row has the time: a timestamp takes longer to read than an id.
    now = rows[0][1]
    assert now is not None  # noqa: S101 -- the statement's own shape
    return Reserved([row[0] for row in rows], now)
