"""What `run_job` tells of an attempt, and how that is gathered."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import trio

from ..states import FAILURES, FINISHED, State
from .durable_runs import ChildRun, StepRun
from .jsonb import from_jsonb

if TYPE_CHECKING:
    from collections.abc import Generator

    from ..jobs import JobRequest
    from .memory import MemoryJob


@dataclass(frozen=True, slots=True)
class JobRun:
    """What one attempt of a handler did."""

    outcome: str
    """As in `pulse.attempts`: completed, failed, timeout, discarded, cancelled, snoozed or released; "lost" if the attempt had
    lost its lease or its fence, and so reported nothing."""
    state: State
    """What the job is afterwards: completed, retryable, dead, cancelled, scheduled (snoozed) or available (released)."""
    result: Any = None
    """What the handler returned, as `client.job(id).result` has it: through PostgreSQL's JSON, not as its annotated type."""
    error: str | None = None
    """The error of the attempt as it is stored; or the reason of a cancellation that ended it."""
    exception: BaseException | None = None
    """What the handler raised; None if it ran in another process."""
    delay: float | None = None
    """Seconds until the job is due again; None if it has ended."""
    progress: list[tuple[float, str | None]] = field(default_factory=list[tuple[float, "str | None"]])
    """Every (fraction, message) that it reported, in order."""
    log: list[logging.LogRecord] = field(default_factory=list[logging.LogRecord])
    """What was logged while it ran, from INFO on; not what the worker logged."""
    steps: list[StepRun] = field(default_factory=list[StepRun])
    """Of a durable handler: the steps that it remembers, in order."""
    children: list[ChildRun] = field(default_factory=list[ChildRun])
    """Of a durable handler: what it started in durable nurseries, in order."""
    enqueued: list[JobRequest] = field(default_factory=list["JobRequest"])
    """What was enqueued with the client that the handler (its middleware, a child) asks for, in order, as
    `handler.request(...)` makes it."""
    waits_for: str | None = None
    """What a suspended job waits for that nothing brought: "the event 'approved'"."""


@contextmanager
def logged() -> Generator[list[logging.LogRecord]]:
    """What is logged meanwhile, from INFO on, but for the worker's own events."""
    kept: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.name.partition(".")[0] not in ("pulse_trio", "asyncio"):
                kept.append(record)

    root, keep = logging.getLogger(), Keep()
    level = root.level
    root.addHandler(keep)
    root.setLevel(min(level, logging.INFO))
    try:
        yield kept
    finally:
        root.setLevel(level)
        root.removeHandler(keep)


def run_of(
    job: MemoryJob,
    said: list[tuple[float, str | None]],
    log: list[logging.LogRecord],
    exception: BaseException | None,
    waits_for: str,
) -> JobRun:
    """The attempt of a job that has ended."""
    state, now = State.SUSPENDED if waits_for else job.state, trio.current_time()
    ours = [outcome for attempt, _, outcome in job.history if attempt == job.attempt and outcome != "rescued"]
    outcome = ours[-1] if ours else "lost"
    # A cancelled job whose clean-up failed, say: the job has been cancelled, and its attempt has an error of its own.
    its_own = job.attempt_error if outcome in FAILURES else None
    return JobRun(
        outcome,
        state,
        None if job.result is None else from_jsonb(job.result),
        its_own or job.cancel_reason or job.error,
        exception,
        None if state in FINISHED or waits_for else max(0.0, job.run_at - now),
        said,
        log,
        waits_for=waits_for or None,
    )
