"""Batches: jobs that are waited for together, and the job that is enqueued when all of them have finished.

A client opens a batch, adds jobs to it and closes it. A watching worker finishes closed batches (`finish`): one transaction
stores the counts and enqueues the callback job, so that it is enqueued exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from ..errors import InvalidArguments, InvalidTransition, UnknownBatch, UsageError
from ..jobs import JobRequest
from ..states import State, storable
from .arrays import numbers
from .new_jobs import enqueue
from .operations import Query

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import datetime

    from .operations import Operation

AT_ONCE = 100
"""Batches that one transaction looks at."""
FAILURES = 1000
"""The most failures that are listed."""


@dataclass(frozen=True, slots=True)
class BatchStatus:
    """A batch as it is now. The counts of a finished batch are those of the moment at which it finished.

    `removed`: jobs that no longer exist (completed under a worker that keeps none, deleted, past their retention).
    `callback_error`: why the callback job could not be enqueued.
    """

    id: int
    name: str | None
    created_at: datetime
    closed_at: datetime | None
    finished_at: datetime | None
    callback_job_id: int | None
    callback_error: str | None
    total: int
    completed: int
    dead: int
    cancelled: int
    running: int
    waiting: int
    removed: int


@dataclass(frozen=True, slots=True)
class BatchFailure:
    """A job of a batch that did not complete: its state, and its last error or why it was cancelled."""

    job_id: int
    kind: str
    state: State
    error: str | None


def open_batch(name: str | None, callback: JobRequest | None = None) -> Operation[int]:
    """Opens a new batch; returns its id."""
    rows = yield Query("batch_open", {"name": name})
    if callback is not None:
        yield from keep(rows[0][0], callback)
    return rows[0][0]


def keep(batch_id: int, callback: JobRequest | None) -> Operation[None]:
    """Writes the callback of an open batch, for whoever closes it: its producer may be lost. Raises `InvalidTransition` for one
    that is closed."""
    ((is_open,),) = yield Query("batch_keep", {"id": batch_id, "callback": _encoded(callback)})
    if not is_open:
        raise InvalidTransition(f"Batch {batch_id} is closed: its callback can be set no more.")


def lock(batch_id: int) -> Operation[None]:
    """Keeps the batch from being closed for the rest of the transaction. Raises `UnknownBatch`, or `InvalidTransition` for one
    that is closed."""
    rows = yield Query("batch_lock", {"id": batch_id})
    if not rows:
        raise _unknown(batch_id)
    if rows[0][0]:
        raise InvalidTransition(f"Batch {batch_id} is closed: it takes no more jobs. Open a new one.")


def add(batch_id: int, job_ids: Iterable[int]) -> Operation[None]:
    """Makes jobs members of a batch that is locked."""
    yield Query("batch_add", {"id": batch_id, "jobs": numbers(job_ids)})


def close(batch_id: int) -> Operation[None]:
    """Closes a batch with the callback that is kept: it finishes with its last job. Raises `UnknownBatch`."""
    rows = yield Query("batch_close", {"id": batch_id})
    if not rows:
        raise _unknown(batch_id)


def _encoded(callback: JobRequest | None) -> str | None:
    return None if callback is None else msgspec.json.encode(callback).decode()


def status(batch_id: int) -> Operation[BatchStatus]:
    """A batch with its counts. Raises `UnknownBatch`."""
    rows = yield Query("batch_status", {"id": batch_id})
    if not rows:
        raise _unknown(batch_id)
    return BatchStatus(*rows[0])


def finished(batch_id: int) -> Operation[bool]:
    """Whether a batch has finished. Raises `UnknownBatch`."""
    rows = yield Query("batch_finished", {"id": batch_id})
    if not rows:
        raise _unknown(batch_id)
    return rows[0][0]


def failures(batch_id: int) -> Operation[list[BatchFailure]]:
    """The jobs of a batch that are dead or cancelled, the first `FAILURES`."""
    rows = yield Query("batch_failures", {"id": batch_id, "limit": FAILURES})
    return [BatchFailure(row[0], row[1], State(row[2]), row[3]) for row in rows]


def live(batch_id: int) -> Operation[list[int]]:
    """The jobs of a batch that have not finished."""
    rows = yield Query("batch_live", {"id": batch_id})
    return [row[0] for row in rows]


# Finishing batches


def unfinished() -> Operation[bool]:
    """Whether any batch is closed and has not finished."""
    rows = yield Query("batch_unfinished", {})
    return rows[0][0]


def due(aside: Sequence[int] = ()) -> Operation[list[int]]:
    """Closed batches that may have finished, but those `aside`, locked for the transaction."""
    rows = yield Query("batch_due", {"limit": AT_ONCE, "aside": numbers(aside)})
    return [row[0] for row in rows]


def finish(batch_ids: list[int]) -> Operation[list[tuple[int, str | None]]]:
    """Finishes those of the locked batches that have no live job; returns them with the callbacks to enqueue now, as they are
    stored."""
    rows = yield Query("batch_advance", {"ids": numbers(batch_ids)})
    ready = [row[0] for row in rows]
    if not ready:
        return []
    done = yield Query("batch_finish", {"ids": numbers(ready)})
    return [(row[0], row[1]) for row in done]


def callback_of(stored: str) -> JobRequest:
    """A batch's callback. Raises `InvalidArguments` for one that cannot be read."""
    try:
        return msgspec.json.decode(stored, type=JobRequest)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidArguments(f"The batch's callback cannot be read: {error}.") from None


def call(batch_id: int, request: JobRequest) -> Operation[int]:
    """Enqueues a finished batch's callback job; returns its id."""
    done = yield from enqueue(request)
    yield Query("batch_called", {"id": batch_id, "job": done.id, "error": None})
    return done.id


def refused(batch_id: int, error: UsageError) -> Operation[None]:
    """Notes why a callback job could not be enqueued."""
    yield Query("batch_called", {"id": batch_id, "job": None, "error": storable(str(error))})


def _unknown(batch_id: int) -> UnknownBatch:
    return UnknownBatch(
        f"There is no batch {batch_id}. A finished one is removed when its retention has passed, and one that a transaction"
        " makes is there for others when that has been committed."
    )
