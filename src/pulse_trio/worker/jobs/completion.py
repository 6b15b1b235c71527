"""The outcome of a job whose handler returned a value, or whose transaction completes it; and of one that has a deadline or
was to be cancelled."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import trio
from msgspec.structs import replace

from ...codec import coded_result
from ...describing import leaves_of
from ...errors import NotDurable, ReplayMismatch
from ...handlers import UnfitValue, encode_result
from ...jobs import Outcome
from ...lines import BeyondLimit
from ...states import FAILURES, outcome_of_cancel, retry_delay

if TYPE_CHECKING:
    from ...codec import Codec
    from ...jobs import Claim
    from .running_job import RunningJob


DEAD_AT_ONCE = (UnfitValue, ReplayMismatch, NotDurable, BeyondLimit)
"""What a handler's exception may be that every further attempt would end with too."""


def is_dead_of(job: RunningJob, error: BaseException) -> bool:
    """Whether no other attempt would end otherwise: a group only where each of its leaves says so, as the one of a durable
    nursery that may have no more children. A task of `job.nursery` raises what a durable one is dead of in a group."""
    fatal = job.durability.fatal if hasattr(job, "durability") else None
    leaves = leaves_of(error)
    return all(issubclass(type(leaf), DEAD_AT_ONCE) for leaf in leaves) or (
        issubclass(type(fatal), DEAD_AT_ONCE) and any(leaf is fatal for leaf in leaves)
    )


def completed(claim: Claim, value: Any) -> Outcome:
    """The outcome of a handler that returned. Raises `UnfitValue` if JSON cannot carry the value."""
    if value is None:
        return Outcome(claim, "completed")
    return Outcome(claim, "completed", result=encode_result(claim.kind, value))


def completed_in_transaction(codec: Codec | None, claim: Claim, value: Any) -> Outcome:
    """The outcome of a job that its transaction completes. The caller has encoded the handler's own value."""
    return completed(claim, value if codec is None else coded_result(codec, claim.kind, claim.id, value))


def in_view_of(job: RunningJob, outcome: Outcome | None) -> Outcome | None:
    """The outcome of a job that has a deadline, or whose cancellation was requested."""
    if outcome is None:
        return None
    if outcome.kind == "completed":
        if job.reason == "suspended":
            return job.durability.suspended(returned=True)
        return replace(outcome, cancelling=True) if job.asked else outcome
    if job.cut is not None:
        outcome = _cut(job, outcome, job.cut)
    if job.job_deadline < math.inf and job.cancel_reason == "deadline":
        outcome = _overdue(job, outcome)
    # A retry that would begin after the job's deadline is due at the deadline, and is cancelled then: clients that wait for the
    # job wait no longer than that, and the failure is on record.
    left = max(0.0, job.job_deadline - trio.current_time())
    return replace(outcome, delay=left) if outcome.delay > left else outcome


def _overdue(job: RunningJob, outcome: Outcome) -> Outcome:
    """The outcome of a job whose deadline has passed while its handler ran, and that has ended otherwise than by that: with a
    failure of its clean-up, say, which gets no second try."""
    if outcome.kind == "snoozed":
        return outcome_of_cancel(job.claim, "deadline") or outcome
    if outcome.kind not in FAILURES or (hasattr(job, "durability") and not job.durability.cancelling.ends_job):
        return outcome
    return replace(outcome, delay=0.0, cancelling=True)


def _cut(job: RunningJob, outcome: Outcome, said: str) -> Outcome:
    """The outcome of a job whose clean-up was cut short: the list of attempts says so, as of one that failed. A job without a
    history ends with its deadline all the same."""
    if outcome.kind == "timeout":
        return replace(outcome, error=f"{outcome.error}\n\n{said}")
    if outcome.kind != "cancelled" or not (job.asked or hasattr(job, "durability")):
        return outcome
    return Outcome(job.claim, "failed", delay=retry_delay(job.claim), error=said)
