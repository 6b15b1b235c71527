"""The outcome of a job whose handler was cancelled, and of one that did not end when it was."""

from __future__ import annotations

from asyncio import CancelledError
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ...errors import HandlerStuck
from ...states import outcome_of_cancel, outcome_of_error, storable
from .job_states import COMMITTED, LOST

if TYPE_CHECKING:
    from ...jobs import Claim, Outcome
    from ...states import Retries
    from .common import ParentState
    from .running_job import RunningJob


def outcome_of_cancelled(job: RunningJob, retries: Retries | None, stops: ParentState) -> Outcome | None:
    """The outcome of a cancelled job; None when there is nothing left to report."""
    reason = job.cancel_reason or "shutdown"
    if reason == "suspended":
        return job.durability.suspended() if job.stuck is None else _failed_of_it(job, job.stuck, retries)
    message = stops.because if reason == "shutdown" else job.cancel_message
    return outcome_of_cancel(job.claim, reason, retries, message)


def outcome_of_self_cancelled(claim: Claim, retries: Retries | None) -> Outcome:
    """The outcome of a handler that has cancelled its job's own nursery: a failure of its own. Its retries judge it by the one
    exception for that which they can name: Trio's cannot be made outside of Trio."""
    error = CancelledError("the handler cancelled its own nursery (job.nursery)")
    return outcome_of_error(claim, error, retries, f"CancelledError: {error}")


def outcome_of_stuck(job: RunningJob, retries: Retries | None, stops: ParentState) -> Outcome | None:
    """The outcome of a job whose handler did not end when it was cancelled, whatever it may return later; None if there is
    nothing left to report."""
    if job.state in (LOST, COMMITTED):
        return None
    outcome = outcome_of_cancelled(job, retries, stops)
    if outcome is None or job.stuck is None:
        return outcome
    return replace(outcome, error=storable(job.stuck))


def _failed_of_it(job: RunningJob, said: str, retries: Retries | None) -> Outcome:
    """A handler that does not end when it is suspended does not end the next time either: it uses budget, or its worker would
    be replaced without end."""
    error = HandlerStuck(said.partition("\n")[0].removeprefix("HandlerStuck: "))
    return outcome_of_error(job.claim, error, retries, storable(said))
