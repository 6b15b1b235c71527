"""What the error says of a handler that does not fit its history."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import ReplayMismatch

if TYPE_CHECKING:
    from ...lines import Line

_CHANGED = "The code changed under a running job"
_REORDERED = (
    "Trio gives a limiter, a lock or a semaphore to other tasks in each attempt, and in none of the last ones so that what is "
    "remembered could come again: pulse-trio jobs retry {} tries once more. Otherwise the code changed under a running job"
)


def mismatch(job_id: int, line: Line, now: str, *, cause: str = _CHANGED, reordered: bool = False) -> ReplayMismatch:
    """The error. `now` says where the handler is. `reordered`: the order of its tasks may be all that is different."""
    why = _REORDERED.format(job_id) if reordered else cause
    return ReplayMismatch(
        f"job {job_id}, {line}, but {now}. {why}: branch on job.version, or run it again from the beginning: "
        f"pulse-trio jobs retry {job_id} --afresh"
    )
