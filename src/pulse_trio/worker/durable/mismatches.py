"""What the error says of a handler that does not fit its history."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import ReplayMismatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...lines import Line

_CHANGED = "The code changed under a running job"
_REORDERED = (
    "A limiter, a lock or a semaphore was given to other tasks than before, and in none of the last attempts so that what is "
    "remembered could come again: pulse-trio jobs retry {} tries once more. Otherwise the code changed under a running job"
)


def mismatch(job_id: int, line: Line, now: str, *, cause: str = _CHANGED, reordered: bool = False) -> ReplayMismatch:
    """The error. `now` says where the handler is. `reordered`: the order of its tasks may be all that is different."""
    why = _REORDERED.format(job_id) if reordered else cause
    return ReplayMismatch(
        f"job {job_id}, {line}, but {now}. {why}: branch on job.version, or run it again from the beginning, which calls "
        f"each step again: pulse-trio jobs retry {job_id} --afresh"
    )


def stuck(job_id: int, line: Line, now: str, *, reordered: bool, no_line: bool) -> ReplayMismatch:
    """The error of a handler whose tasks wait in durable calls, none of which is that of the history's next line. `no_line`:
    one of them has none."""
    if reordered or not no_line:
        return mismatch(job_id, line, now, reordered=reordered)
    return mismatch(
        job_id,
        line,
        f"{now}, which has no line. If a plain Trio scope (trio.move_on_after) cut it short in an earlier attempt, that is "
        "not remembered: use job.move_on_after or job.fail_after, whose end is",
        cause=f"Otherwise t{_CHANGED[1:]}",
    )


def returned_before_its_cancellation(job_id: int) -> ReplayMismatch:
    """The error of a handler that has returned where it was cut short in an earlier attempt."""
    return ReplayMismatch(
        f"job {job_id} was cancelled in an earlier attempt while its handler awaited something plain, and this time it "
        f"returned before. What is left of its clean-up was not done: pulse-trio jobs retry {job_id} does that"
    )


def failed_no_more(job_id: int, failed: Sequence[int]) -> ReplayMismatch:
    """The error of a block which had failed, of these children or of its body, and has not now."""
    why = (
        f"of children {failed} in an earlier attempt; they have ended otherwise since, by a retry at that very moment or by a "
        "person's hand. Run it"
        if failed
        else "in an earlier attempt, of plain code in its body, and the handler has undone what it did; now the body has not "
        "failed. Put what may fail into a step. Run it"
    )
    return ReplayMismatch(
        f"job {job_id}: its block failed {why} again from the beginning: pulse-trio jobs retry {job_id} --afresh"
    )
