"""The spans of a worker's attempts, from the call of the handler to the end of the job.

A span begins in the job's own task, right around the call, so that what the handler does belongs to it: in its task, in the
tasks of its nursery, in its thread or on the asyncio loop, whose contexts are copies of that task's. It is current for no
longer than the call; it ends with the job, once the outcome is known and the job's last task has ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...tracing import Ending

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ...jobs import Claim
    from ...tracing import OpenSpan, Traces
    from .running_job import RunningJob

    Call = Callable[[RunningJob, str], Awaitable[Any]]


class RunSpans:
    """The open spans of one worker's jobs."""

    def __init__(self, traces: Traces) -> None:
        self.traces = traces
        self._open: dict[Claim, OpenSpan] = {}

    def traced(self, call: Call) -> Call:
        """The call of a handler, within a span."""

        async def traced(running: RunningJob, args: str) -> Any:
            claim = running.claim
            span = self.traces.begin_run(claim)
            if span is None:
                return await call(running, args)
            self._open[claim] = span
            try:
                return await call(running, args)
            finally:
                self.traces.leave(span)

        return traced

    def ended(self, claim: Claim, outcome: str, error: str | None, failure: BaseException | None) -> str | None:
        """The job has ended; if its handler was called, so does its span. Returns the traceparent of an attempt that another
        may follow."""
        if (span := self._open.pop(claim, None)) is None:
            return None
        self.traces.end(span, Ending(outcome, failure, error))
        return None if outcome == "completed" else self.traces.traceparent_of(span)
