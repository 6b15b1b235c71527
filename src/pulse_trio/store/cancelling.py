"""Cancelling, as clients do it: the request, its ledger row, and its end.

The request itself cancels a waiting job. The worker cancels a running one: the request marks the row and notifies, and the
ledger row of the request says what came of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import InvalidArguments, UnknownJob
from ..states import State, storable
from .arrays import numbers
from .operations import Query, check_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import datetime

    from .operations import Operation, Row

REASON_LIMIT = 1000
"""Characters of a reason. It travels in a notification, which holds 8,000 bytes."""


@dataclass(frozen=True, slots=True)
class CancelResult:
    """What a request did: the job's state now, and the request's ledger row.

    `state` is `cancelled` for a job that waited, `running` for one whose handler is being cancelled, or which ends when its
    children have, and unchanged for a job that had finished already; then there is no ledger row, and `cancellation` is None.
    """

    job_id: int
    cancellation: int | None
    state: State


@dataclass(frozen=True, slots=True)
class CancellationRecord:
    """One row of the ledger, as `pulse.cancellations` shows it. `attempt` is None for a job that waited; `ended_as` is what
    the job became; `cause` is `parent`, `sibling` or `deadline` for a member of a tree, None if a person asked."""

    id: int
    job_id: int
    attempt: int | None
    reason: str | None
    requested_by: str
    requested_at: datetime
    delivered_at: datetime | None
    ended_at: datetime | None
    ended_as: State | None
    cause: str | None = None


def cancel(
    job_id: int, *, reason: str | None = None, by: str | None = None, now: bool = False
) -> Operation[CancelResult]:
    """Cancels one job; a finished one stays as it is. Raises `UnknownJob`, or `InvalidArguments` for the reason."""
    results = yield from cancel_many([job_id], reason=reason, by=by, now=now)
    if not results:
        raise UnknownJob(f"There is no job {job_id} (it was deleted, or ended longer ago than its retention).")
    return results[0]


def cancel_many(
    job_ids: Iterable[int], *, reason: str | None = None, by: str | None = None, now: bool = False
) -> Operation[list[CancelResult]]:
    """Cancels many jobs in one statement; returns the answers in the order of their ids, none for an unknown job. `now`: a
    durable job that does not run ends at once, without the attempt in which it would clean up, and so does what these jobs have
    started (10,000 jobs at most; a second call ends the next)."""
    text = check_reason(reason)
    # Checked as numbers here: the database's message about a bad one would name a statement that the user never wrote.
    ids = [check_id(job_id) for job_id in job_ids]
    rows = yield Query("cancel_jobs_now" if now else "cancel_jobs", {"ids": numbers(ids), "reason": text, "by": by})
    return [CancelResult(row[0], row[1], State(row[2])) for row in rows]


def cancellations(job_id: int) -> Operation[list[CancellationRecord]]:
    """The ledger rows of a job, oldest request first."""
    rows = yield Query("cancel_ledger", {"job_id": job_id})
    return [_record(row) for row in rows]


def ended(results: Sequence[CancelResult]) -> Operation[dict[int, State]]:
    """By ledger id: what became of the jobs whose cancellation has ended. Unfinished ones are left out."""
    ids = [r.cancellation for r in results if r.cancellation is not None]
    rows = yield Query("cancel_ended", {"ids": numbers(ids)})
    return {row[0]: State(row[1]) for row in rows}


def _record(row: Row) -> CancellationRecord:
    fields = list(row)
    fields[8] = None if fields[8] is None else State(fields[8])
    return CancellationRecord(*fields)


def check_reason(reason: object) -> str | None:
    """Returns the reason as it is stored, None for an empty one. Raises `InvalidArguments`."""
    if reason is None or reason == "":
        return None
    if not isinstance(reason, str):
        raise InvalidArguments(f"The reason of a cancellation must be text, got {reason!r}.")
    if len(reason) > REASON_LIMIT:
        raise InvalidArguments(
            f"The reason of a cancellation has {len(reason)} characters; the limit is {REASON_LIMIT}."
        )
    if storable(reason) != reason:
        raise InvalidArguments("The reason of a cancellation holds NUL or half a surrogate pair, which no text can.")
    return reason
