"""What the stores in memory share: one database, with what other programs do to it."""

from __future__ import annotations

import math
from contextlib import contextmanager
from datetime import datetime, timedelta
from itertools import count
from typing import TYPE_CHECKING

import trio

from ...states import Event, State, next_state
from .limits import MemoryLimits
from .rows import MIDNIGHT, MemoryBatch, MemoryJob, MemorySchedule

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from ...jobs import CancelReason
    from .store import MemoryStore


class SessionRows:
    """Workers' sessions, and what the watchdogs know of them."""

    def __init__(self) -> None:
        self.sessions: dict[int, bool] = {}
        """Whether each session is still open."""
        self.new_session = count(1000)
        self.seen: dict[int, tuple[float, float]] = {}
        """By session: its last sign of life, and after how many seconds without one it is stale."""
        self.told_of: dict[int, float] = {}
        """Stale sessions that a watchdog told of, by that sign of life."""
        self.crowded: set[int] = set()
        """Sessions that died with several jobs."""
        self.stacks: dict[int, tuple[int, str | None]] = {}
        """By request: the session that was asked, and its answer."""
        self.questions: list[tuple[int, int, int]] = []
        """(request, session, job) of what is not answered."""


class QueueRows:
    """What is set for queues, kinds and schedules."""

    def __init__(self) -> None:
        self.paused: set[str] = set()
        self.paused_kinds: set[str] = set()
        self.limits = MemoryLimits()
        self.schedules: dict[str, MemorySchedule] = {}
        self.taken: set[str] = set()
        """Schedules that another worker is firing."""


class MemoryDatabase(SessionRows, QueueRows):
    """What several stores in memory share. Make it in the Trio run that uses it: its clock is Trio's."""

    def __init__(self) -> None:
        SessionRows.__init__(self)
        QueueRows.__init__(self)
        self.jobs: dict[int, MemoryJob] = {}
        self.ids = count(1)
        self.batches: dict[int, MemoryBatch] = {}
        self.locked: set[int] = set()
        """Jobs whose row another transaction holds."""
        self.ledger: list[str] = []
        """What handlers wrote in their transactions, and committed."""
        self.idle: set[MemoryStore] = set()
        self.listeners: list[Callable[[str], None]] = []
        self.upkeep = 0
        """How often maintenance says that there is more to do."""

    def enqueue(
        self,
        kind: str = "noop",
        args: str = "{}",
        *,
        queue: str = "default",
        priority: int = 0,
        max_attempts: int = 20,
        delay: float = 0.0,
        options: str | None = None,
        key: str | None = None,
    ) -> int:
        """Enqueues a job, due after `delay` seconds; returns its id."""
        run_at = trio.current_time() + delay
        job = MemoryJob(next(self.ids), queue, priority, kind, args, options, max_attempts, run_at, key)
        self.jobs[job.id] = job
        if delay <= 0:
            self.wake(queue)
        return job.id

    def wake(self, queue: str) -> None:
        """Notifies all listeners that a queue has a due job, if a worker waits idle for it."""
        if any(store.queues is None or queue in store.queues for store in self.idle):
            for listener in self.listeners:
                listener(queue)

    def clock(self) -> datetime:
        """The server's: virtual seconds since a midnight."""
        return MIDNIGHT + timedelta(seconds=trio.current_time())

    def state(self, job_id: int) -> State:
        """A job's state."""
        return self.jobs[job_id].state

    def states(self) -> list[State]:
        """The states of all jobs."""
        return [job.state for job in self.jobs.values()]

    @contextmanager
    def lock(self, job_id: int) -> Generator[None]:
        """Another transaction holds the row."""
        self.locked.add(job_id)
        try:
            yield
        finally:
            self.locked.discard(job_id)

    def steal(self, job_id: int) -> int:
        """A stranger rescues a running job and claims it, at once; returns the stranger's session."""
        job = self.jobs[job_id]
        job.history.append((job.attempt, job.session, "rescued"))
        job.attempt, job.session, job.lease_until = job.attempt + 1, next(self.new_session), math.inf
        return job.session

    def cancel(
        self, job_id: int, reason: str | None = None, *, cause: CancelReason = "user", notify: bool = True
    ) -> None:
        """Requests a job's cancellation, as a person does, or with the cause that its tree has; `notify` False: the
        notification is lost."""
        job = self.jobs[job_id]
        if not job.cancelling:
            job.cause = cause
        if job.state is State.RUNNING:
            job.cancelling, job.wished = True, job.wished or reason
            for listener in self.listeners if notify else ():
                listener(f"look_for_cancel {job.id}")
        elif job.finished is None:
            job.finished, job.cancel_reason = next_state(job.state, Event.CANCEL), reason or cause

    def retry(self, job_id: int) -> bool:
        """A person retries a job: a finished one goes back, one that waits is due now. False for the others."""
        job = self.jobs[job_id]
        if job.state in (State.RUNNING, State.AVAILABLE):
            return False
        if job.finished is not None:
            next_state(job.finished, Event.RETRY)  # raises where the table has no such row
            job.max_attempts = max(job.max_attempts, job.attempt + 1)
            job.failures = job.crashes = job.deaths = 0
            job.finished, job.suspect, job.waits_after_failure, job.cancelling = None, False, False, False
            job.result = job.error = job.cancel_reason = job.wished = None
        job.run_at = trio.current_time()
        self.wake(job.queue)
        return True

    def ask_stack(self, job_id: int) -> int:
        """Requests a running job's stack; returns the request."""
        request, session = len(self.stacks) + 1, self.jobs[job_id].session
        self.stacks[request] = (session, None)
        self.questions.append((request, session, job_id))
        for listener in self.listeners:
            listener(f"look_for_stack {job_id}")
        return request

    def expire(self, job_id: int) -> None:
        """Lets a job's lease run out."""
        self.jobs[job_id].lease_until = trio.current_time() - 1
