"""The events of a job's life. For every job the path only checks whether any instrument listens for an event."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio
from msgspec.structs import replace

from ...observe import AttemptFailed, JobEnded, JobStarted
from .job_states import LOST

if TYPE_CHECKING:
    from ...observe import Observer
    from .run_spans import RunSpans
    from .running_job import RunningJob

_FAILURES = ("failed", "timeout", "discarded")


class JobEvents:
    """Emits the events of one worker's jobs."""

    __slots__ = ("_ended_wanted", "_failures_wanted", "_observer", "_spans", "ends_wanted", "starts_wanted")

    def __init__(self, observer: Observer, spans: RunSpans | None = None) -> None:
        self._observer = observer
        self._spans = spans
        self.starts_wanted = observer.wanted(JobStarted)
        self._ended_wanted = observer.wanted(JobEnded)
        self.ends_wanted = spans is not None or self._ended_wanted
        self._failures_wanted = observer.wanted(AttemptFailed)

    def started(self, job: RunningJob) -> None:
        """The job's handler begins."""
        claim = job.claim
        self._observer.emit(JobStarted(claim.id, claim.kind, claim.queue, claim.attempt))

    def failed(self, job: RunningJob) -> None:
        """If its outcome says so, the job has ended in a failure."""
        claim, outcome = job.claim, job.outcome
        if not self._failures_wanted or outcome is None or outcome.kind not in _FAILURES:
            return
        seconds = trio.current_time() - job.sent
        error = job.said[0] if job.said is not None else None
        event = AttemptFailed(
            claim.id, claim.kind, claim.queue, claim.attempt, outcome.kind, seconds, outcome.error, error
        )
        self._observer.emit(event)

    def ended(self, job: RunningJob) -> None:
        """The job has ended."""
        # What a thread returns after its job was lost is reported all the same, and refused: another attempt counts.
        claim, outcome = job.claim, None if job.state is LOST else job.outcome
        kind, error = (outcome.kind, outcome.error) if outcome is not None else ("lost", None)
        if self._spans is not None:
            span = self._spans.ended(claim, kind, error, job.said[0] if job.said is not None else None)
            if span is not None and outcome is not None:
                job.outcome = replace(outcome, span=span)
        if not self._ended_wanted:
            return
        seconds = trio.current_time() - job.sent
        self._observer.emit(JobEnded(claim.id, claim.kind, claim.queue, claim.attempt, kind, seconds, error))
