"""What a job offers to a handler that does not run in Trio but in a thread or on asyncio."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from ..job_states import not_durable

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager, AbstractContextManager

    from ....durable_calls import DurableCalls
    from ....jobs import CancelReason, JobNursery, JobTransaction
    from ..running_job import RunningJob


class OutsideTrio:
    """Wraps the worker's `JobRuntime` and leaves out what only a Trio task can do."""

    __slots__ = ("_running", "_runs")

    def __init__(self, running: RunningJob, runs: str) -> None:
        self._running = running
        self._runs = runs

    @property
    def cancel_reason(self) -> CancelReason | None:
        return self._running.cancel_reason

    @property
    def cancel_message(self) -> str | None:
        return self._running.cancel_message

    @property
    def deadline(self) -> float:
        return self._running.deadline

    @property
    def nursery(self) -> JobNursery:
        raise RuntimeError(f"job.nursery is for Trio handlers; this one has runs={self._runs!r}.")

    def cleanup(self) -> AbstractContextManager[object]:
        # Nothing to shield: no Cancelled reaches a thread, and asyncio cancels a single await.
        return nullcontext()

    def progress(self, fraction: float, message: str | None) -> None:
        self._running.progress(fraction, message)

    def open_transaction(self, result: Any) -> AbstractAsyncContextManager[JobTransaction]:
        raise RuntimeError(f"job.transaction() is for Trio handlers; this one has runs={self._runs!r}.")

    def durable(self) -> DurableCalls:
        raise not_durable(self._running.claim.kind, self._running.claim.id, self._runs)
