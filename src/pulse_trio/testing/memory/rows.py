"""What a database in memory holds: jobs, schedules, batches."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec
import trio

from ...jobs import DEFAULT_OPTIONS, CancelReason, JobOptions
from ...states import State

if TYPE_CHECKING:
    from ...handlers import Schedule

MIDNIGHT = datetime(2026, 1, 1, tzinfo=UTC)
"""The server's clock when Trio's shows 0."""
EPOCH = 1_700_000_000.0
"""The database's clock when Trio's shows 0, as a worker's session counts it."""


@dataclass
class EnqueuedJob:
    """What the producer wrote."""

    id: int
    queue: str
    priority: int
    kind: str
    args: str
    options: str | None
    max_attempts: int
    run_at: float
    key: str | None = None

    @property
    def crash_limit(self) -> int:
        """How many crashes put it in quarantine."""
        try:
            return msgspec.json.decode(self.options or "{}", type=JobOptions).crash_limit
        except msgspec.DecodeError:
            return DEFAULT_OPTIONS.crash_limit


@dataclass
class CountedJob(EnqueuedJob):
    """What its attempts have cost it."""

    attempt: int = 0
    failures: int = 0
    crashes: int = 0
    absolved: set[int] = field(default_factory=set[int])
    """Attempts whose crash was taken back: their worker lived."""
    suspect: bool = False
    deaths: int = 0
    quarantined: bool = False
    """It has been claimed since it became a suspect."""
    history: list[tuple[int, int, str]] = field(default_factory=list[tuple[int, int, str]])
    """(attempt, session, outcome) of every attempt that ended."""
    attempt_error: str | None = None
    """What the last attempt that has ended said, whatever became of the job."""


@dataclass
class MemoryJob(CountedJob):
    """A job with its state."""

    session: int = 0
    lease_until: float = math.inf
    waits_after_failure: bool = False
    finished: State | None = None
    result: str | None = None
    error: str | None = None
    cancelling: bool = False
    wished: str | None = None
    """The reason that the request for its cancellation gave."""
    cause: CancelReason = "user"
    """Why its cancellation was requested."""
    cancel_reason: str | None = None
    delivered: bool = False
    progress: tuple[float, str | None] | None = None

    @property
    def state(self) -> State:
        """Its state now, which the time may decide."""
        if self.finished is not None:
            return self.finished
        if self.session:
            return State.RUNNING
        if self.run_at <= trio.current_time():
            return State.AVAILABLE
        return State.RETRYABLE if self.waits_after_failure else State.SCHEDULED


@dataclass
class MemorySchedule:
    """A declared schedule."""

    schedule: Schedule
    next_due: datetime
    paused: bool = False
    fired: dict[datetime, int] = field(default_factory=dict[datetime, int])
    """The job of each occurrence."""


@dataclass
class MemoryBatch:
    """A closed one. `callback` is the kind and queue of the job to enqueue when it has finished."""

    jobs: list[int]
    callback: tuple[str, str] | None = None
    finished: bool = False
