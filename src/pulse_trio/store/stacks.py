"""Where a running job is: clients ask, the worker that runs it answers.

The request is a row and a notification. If no answer comes, that is not the database's fault: the worker's loop may be blocked,
or the worker gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import InvalidTransition, UnknownJob, WorkerSilent
from .operations import Query, check_id, missing

if TYPE_CHECKING:
    from datetime import datetime

    from .operations import Operation, Row

POLL = 0.05
"""Seconds between two looks for an answer."""
LOOKS = 100
"""Looks until the worker counts as silent: five seconds, or a little more."""

NOT_IN_A_TRANSACTION = (
    "stack() on a connection of yours would wait for a worker that cannot see the question before you commit; ask with a "
    "client of its own."
)


@dataclass(frozen=True, slots=True)
class JobStack:
    """Where a running job was at `taken_at`: its tasks with the frames they wait in, as text of at most 64 KiB.

    `host` and `pid` are the worker's; None when the database no longer knows its session."""

    job_id: int
    kind: str
    attempt: int
    host: str | None
    pid: int | None
    taken_at: datetime
    stack: str


@dataclass(frozen=True, slots=True)
class StackRequest:
    """A question to a worker. `silent_for`: seconds since the worker's last sign of life, by the database's clock."""

    id: int
    job_id: int
    kind: str
    attempt: int
    host: str | None
    pid: int | None
    silent_for: float | None


def ask(job_id: int) -> Operation[StackRequest]:
    """Asks where a running job is. Raises `UnknownJob`, or `InvalidTransition` for a job that is not running."""
    ((request, state, kind, attempt, host, pid, silent_for),) = yield Query("stack_ask", {"job_id": check_id(job_id)})
    if state is None:
        raise UnknownJob(missing(job_id))
    if request is None:
        raise InvalidTransition(f"Job {job_id} is {state}: only a running job has a stack.")
    return StackRequest(request, job_id, kind, attempt, host, pid, silent_for)


def take(request: StackRequest) -> Operation[JobStack | None]:
    """Takes the answer, which is then deleted; None while there is none."""
    rows = yield Query("stack_take", {"request": request.id, "forget": False})
    return _stack(request, rows[0]) if rows else None


def give_up(request: StackRequest) -> Operation[JobStack]:
    """The last look. Raises `WorkerSilent`, and deletes the request."""
    rows = yield Query("stack_take", {"request": request.id, "forget": True})
    if rows and rows[0][0] is not None:
        return _stack(request, rows[0])
    worker = (
        f"{request.host}:{request.pid}" if request.host is not None else "whose session the database no longer knows"
    )
    seen = "" if request.silent_for is None else f" (its last beat was {request.silent_for:.0f} s before the question)"
    raise WorkerSilent(
        f"The worker {worker} runs job {request.job_id} and did not answer within {POLL * LOOKS:g} s{seen}. It is gone, its "
        "event loop is blocked (then its log names the handler and the line), or it does not hear notifications just now "
        "(then try again)."
    )


def _stack(request: StackRequest, row: Row) -> JobStack:
    answered_at, answer = row
    return JobStack(request.job_id, request.kind, request.attempt, request.host, request.pid, answered_at, answer)
