"""A store in memory, on Trio's clock, so that the worker's rooms can be tested without waiting.

It must not drift from the real one: tests/store/test_conformance.py runs one suite against both.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import TYPE_CHECKING

import msgspec
import trio

from pulse_trio.errors import DatabaseUnavailable
from pulse_trio.jobs import DEFAULT_OPTIONS, Claim, JobOptions, Outcome, Progress
from pulse_trio.observe import WorkerStale
from pulse_trio.states import FINISHED, Event, State, decide, excused, is_suspect, next_state, suspected
from pulse_trio.store import (
    Beat,
    Broken,
    ClaimCursor,
    ClaimResult,
    Fired,
    Found,
    HandedBack,
    Limited,
    Rescue,
    Settlement,
    Sweep,
)
from pulse_trio.timing import due
from support.fake_limits import FakeLimits
from support.fake_transactions import FakeTransactions

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Sequence

    from pulse_trio.handlers import DeathHook, QueueLimits, Schedule

MIDNIGHT = datetime(2026, 1, 1, tzinfo=UTC)

RECENT = 0.05
"""Seconds a cursor trails the newest row, as in complete_and_claim.sql."""


EPOCH = 1_700_000_000.0
"""The database's clock when Trio's shows 0."""


@dataclass
class FakeJob:
    id: int
    queue: str
    priority: int
    kind: str
    args: str
    options: str | None
    max_attempts: int
    run_at: float
    key: str | None = None
    attempt: int = 0
    crashes: int = 0
    absolved: set[int] = field(default_factory=set)
    """Attempts whose crash was taken back: their worker lived."""
    suspect: bool = False
    deaths: int = 0
    quarantined: bool = False
    """It has been claimed since it became a suspect."""
    failures: int = 0
    session: int = 0
    lease_until: float = math.inf
    waits_after_failure: bool = False
    finished: State | None = None
    result: str | None = None
    error: str | None = None
    cancelling: bool = False
    wished: str | None = None
    """What the person said who asked for its cancellation."""
    cancel_reason: str | None = None
    delivered: bool = False
    progress: tuple[float, str | None] | None = None
    history: list[tuple[int, int, str]] = field(default_factory=list)
    """(attempt, session, outcome) of every attempt that ended."""

    @property
    def crash_limit(self) -> int:
        try:
            return msgspec.json.decode(self.options or "{}", type=JobOptions).crash_limit
        except msgspec.DecodeError:
            return DEFAULT_OPTIONS.crash_limit

    @property
    def state(self) -> State:
        if self.finished is not None:
            return self.finished
        if self.session:
            return State.RUNNING
        if self.run_at <= trio.current_time():
            return State.AVAILABLE
        return State.RETRYABLE if self.waits_after_failure else State.SCHEDULED


@dataclass
class FakeSchedule:
    schedule: Schedule
    next_due: datetime
    paused: bool = False
    fired: dict[datetime, int] = field(default_factory=dict)
    """The job of each occurrence."""


@dataclass
class FakeBatch:
    """A closed one. `callback` is the kind and queue of the job to enqueue when it has finished."""

    jobs: list[int]
    callback: tuple[str, str] | None = None
    finished: bool = False


class FakeDatabase:
    """What several fake stores share."""

    def __init__(self) -> None:
        self.jobs: dict[int, FakeJob] = {}
        self.batches: dict[int, FakeBatch] = {}
        self.locked: set[int] = set()
        self.paused: set[str] = set()
        self.paused_kinds: set[str] = set()
        self.limits = FakeLimits()
        self.crowded: set[int] = set()
        self.sessions: dict[int, bool] = {}
        self.seen: dict[int, tuple[float, float]] = {}
        """By session: its last sign of life, and after how many seconds without one it is stale."""
        self.told_of: dict[int, float] = {}
        """Stale sessions that a watchdog told of, by that sign of life."""
        self.ledger: list[str] = []
        """What handlers wrote in their transactions, and committed."""
        self.idle: set[FakeStore] = set()
        self.listeners: list[Callable[[str], None]] = []
        self.schedules: dict[str, FakeSchedule] = {}
        self.taken: set[str] = set()
        """Schedules that another worker is firing."""
        self.stacks: dict[int, tuple[int, str | None]] = {}
        self.questions: list[tuple[int, int, int]] = []
        """By request: the session that was asked, and its answer."""
        self.ids = count(1)
        self.new_session = count(1000)
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
        run_at = trio.current_time() + delay
        job = FakeJob(next(self.ids), queue, priority, kind, args, options, max_attempts, run_at, key)
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
        return self.jobs[job_id].state

    def states(self) -> list[State]:
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

    def cancel(self, job_id: int, reason: str | None = None, *, notify: bool = True) -> None:
        """Requests a job's cancellation; `notify` False: the notification is lost."""
        job = self.jobs[job_id]
        if job.state is State.RUNNING:
            job.cancelling, job.wished = True, job.wished or reason
            for listener in self.listeners if notify else ():
                listener(f"look_for_cancel {job.id}")
        elif job.finished is None:
            job.finished, job.cancel_reason = next_state(job.state, Event.CANCEL), reason or "user"

    def retry(self, job_id: int) -> bool:
        """A person retries a job: a finished one goes back, one that waits is due now. False for the others."""
        job = self.jobs[job_id]
        if job.state in (State.RUNNING, State.AVAILABLE):
            return False
        if job.finished is not None:
            assert next_state(job.finished, Event.RETRY) is State.AVAILABLE
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
        self.jobs[job_id].lease_until = trio.current_time() - 1


class FakeStore:
    """One worker's. `trouble[operation]` is awaited before the operation is done, `silence[operation]` after it: what they
    raise is what the caller sees, and a silence that raises is a reply that was lost."""

    def __init__(self, database: FakeDatabase, *, lease: float = 30.0, queues: Sequence[str] | None = None) -> None:
        self.database = database
        self.lease = lease
        self.leases: dict[str, float] = {}
        """Of queues that have one of their own."""
        self.queues = queues
        self.stale = 0.0
        self.session = 0
        self.epoch_offset = EPOCH
        self.idle = False
        self.closed = False
        self.calls: list[str] = []
        self.beats: list[tuple[float, list[Claim]]] = []
        self.settled: list[Outcome] = []
        self.progress: list[tuple[float, dict[int, float]]] = []
        self.trouble: dict[str, Callable[[], Awaitable[None]]] = {}
        self.silence: dict[str, Callable[[], Awaitable[None]]] = {}
        self.draining = False
        self.paused_kinds: list[str] = []
        self.transactions = FakeTransactions(self)
        # What its transactions need of it.
        self.trip, self.answered, self.ours, self.write = self._done, self._answered, self._ours, self._write

    async def _done(self, operation: str) -> None:
        """The way to the server."""
        self.calls.append(operation)
        if operation in self.trouble:
            await self.trouble[operation]()
        await trio.lowlevel.checkpoint()

    async def _answered(self, operation: str) -> None:
        """The way back. An answer that is there is not lost to a cancellation (TrioConnection's complete or cancel)."""
        if operation in self.silence:
            await self.silence[operation]()

    # Sessions

    async def check_schema(self) -> None:
        await self._done("check_schema")

    async def open_session(self) -> int:
        await self._done("open_session")
        self.session = next(self.database.new_session)
        self.database.sessions[self.session] = True
        self.database.seen[self.session] = (trio.current_time(), self.stale or self.lease)
        return self.session

    async def touch(self, running: int, *, draining: bool) -> None:
        await self._done("touch")
        self.draining = draining
        self.database.seen[self.session] = (trio.current_time(), self.stale or self.lease)

    async def end_sessions(self) -> None:
        await self._done("end_sessions")
        self.database.sessions[self.session] = False

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()
        self.closed = True
        self._withdraw()

    # Claiming and settling

    async def complete_and_claim(
        self, limit: int, slots: Sequence[ClaimCursor], completed: Sequence[Outcome] = ()
    ) -> ClaimResult:
        sent = trio.current_time()
        await self._done("complete_and_claim")
        settlement = self._write(completed)
        claims = [self._claim(job) for job in self._due(limit, slots)]
        await self._answered("complete_and_claim")
        return ClaimResult(sorted(claims, key=lambda c: (float(c.run_at), c.id)), sent, settlement)

    def _due(self, limit: int, slots: Sequence[ClaimCursor]) -> list[FakeJob]:
        now = trio.current_time()
        found: list[FakeJob] = []
        for slot in slots:
            if slot.queue in self.database.paused or self.database.limits.limited(slot.queue):
                continue
            cursor = (float(slot.cursor_run_at), slot.cursor_id)
            if cursor[0] > now - RECENT:
                cursor = (now - RECENT, 0)
            jobs = [
                job
                for job in self.database.jobs.values()
                if (job.queue, job.priority) == (slot.queue, slot.priority)
                and job.state is State.AVAILABLE
                and job.key is None
                and job.kind not in self.paused_kinds
                and not job.suspect
                and (job.run_at, job.id) >= cursor
                and job.id not in self.database.locked
            ]
            found += sorted(jobs, key=lambda job: (job.run_at, job.id))
        return found[:limit]

    def _claim(self, job: FakeJob, session: int = 0) -> Claim:
        job.attempt += 1
        job.progress = None
        job.quarantined = job.suspect
        job.session = session or self.session
        job.lease_until = trio.current_time() + self.leases.get(job.queue, self.lease)
        return Claim(
            job.id, job.attempt, job.max_attempts, job.failures, job.priority, repr(job.run_at), job.queue, job.kind,
            job.args, job.options, job.session,
        )  # fmt: skip

    async def settle(self, outcomes: Sequence[Outcome], *, unsure: bool = False) -> Settlement:
        await self._done("settle")
        accepted, refused, again = self._write(outcomes)
        if unsure:
            known = [o for o in refused if self._was_ours(o)]
            accepted, refused = accepted + known, [o for o in refused if o not in known]
        await self._answered("settle")
        return Settlement(accepted, refused, again)

    def _was_ours(self, outcome: Outcome) -> bool:
        claim = outcome.claim
        job = self.database.jobs.get(claim.id)
        ended = [] if job is None else [h[2] for h in job.history if h[:2] == (claim.attempt, claim.session)]
        return any(outcome != "rescued" for outcome in ended)

    def _write(self, outcomes: Sequence[Outcome]) -> Settlement:
        settlement = Settlement([], [], [])
        for outcome in outcomes:
            job = self._ours(outcome.claim)
            if job is None:
                settlement.refused.append(outcome)
                self._absolve(outcome.claim)
            elif job.id in self.database.locked:
                settlement.again.append(outcome)
            else:
                self._end(job, outcome)
                self.settled.append(outcome)
                settlement.accepted.append(outcome)
        return settlement

    def _absolve(self, claim: Claim) -> None:
        job = self.database.jobs.get(claim.id)
        if job is None or (claim.attempt, claim.session, "rescued") not in job.history:
            return
        if job.crashes and claim.attempt not in job.absolved:
            job.absolved.add(claim.attempt)
            job.crashes -= 1
            if job.state is not State.RUNNING:
                job.suspect = is_suspect(job.crashes, job.crash_limit)

    def _ours(self, claim: Claim) -> FakeJob | None:
        """The fence."""
        job = self.database.jobs.get(claim.id)
        if job is None or job.state is not State.RUNNING:
            return None
        return job if (job.attempt, job.session) == (claim.attempt, claim.session) else None

    def _end(self, job: FakeJob, outcome: Outcome, *, alone: bool = False) -> None:
        decided = decide(
            "crashed" if alone else outcome.kind,
            job.attempt,
            job.max_attempts,
            cancelling=job.cancelling,
            deaths=job.deaths,
            crash_limit=job.crash_limit,
        )
        event, state = decided.event, decided.state
        job.history.append((job.attempt, job.session, decided.outcome))
        job.failures += decided.failures
        job.error = outcome.error or job.error
        job.session, job.lease_until = 0, math.inf
        if state in FINISHED:
            job.finished, job.result = state, outcome.result
            if event is Event.COMPLETE:
                job.error = None
            if event is Event.CANCEL:
                told = outcome.error if outcome.kind == "cancelled" else None
                job.cancel_reason, job.error = told or job.wished or "user", None
            return
        job.crashes += decided.crashes
        job.deaths += decided.deaths
        job.max_attempts += decided.refunds
        if event is not Event.RELEASE:
            job.quarantined &= job.suspect
        job.suspect = suspected(event, job.suspect, job.crashes, job.crash_limit)
        job.run_at = trio.current_time() + outcome.delay
        job.waits_after_failure = state is State.RETRYABLE
        if event in (Event.RELEASE, Event.RESCUE) and outcome.delay <= 0:
            self.database.wake(job.queue)

    async def sweep(self, queues: Sequence[str] | None, notified: Sequence[str] = ()) -> Sweep:
        await self._done("sweep")
        now = trio.current_time()
        due: dict[tuple[str, int], list[float]] = {}
        apart: set[str] = set()
        self.paused_kinds = sorted(self.database.paused_kinds)
        for job in self.database.jobs.values():
            if (
                job.finished is None
                and job.queue not in self.database.paused
                and (queues is None or job.queue in queues)
            ):
                if job.key is not None or self.database.limits.limited(job.queue):
                    apart.add(job.queue)
                else:
                    due.setdefault((job.queue, job.priority), []).append(job.run_at)
        return Sweep(
            found=[
                Found(queue, priority, min((t - now for t in times if t > now), default=None))
                for (queue, priority), times in sorted(due.items())
            ],
            limited=sorted(apart),
            paused_kinds=self.paused_kinds,
            swept_at=repr(now),
            suspect_due_in=min((job.run_at - now for job in self._suspects(queues)), default=None),
        )

    async def declare_deaths(self, hooks: Sequence[DeathHook], others: Sequence[str]) -> None:
        await self._done("declare_deaths")

    async def declare_limits(self, limits: Sequence[QueueLimits]) -> None:
        await self._done("declare_limits")
        for one in limits:
            self.database.limits.by_queue[one.queue] = one

    async def suspects_are_due(self, queues: Sequence[str] | None) -> bool:
        await self._done("suspects_are_due")
        return any(job.state is State.AVAILABLE for job in self._suspects(queues))

    async def claim_suspect(
        self, queues: Sequence[str] | None, *, session: int | None = None, fresh: bool = True
    ) -> ClaimResult:
        sent = trio.current_time()
        await self._done("claim_suspect")
        due = [
            job
            for job in self._suspects(queues)
            if job.state is State.AVAILABLE
            and job.id not in self.database.locked
            and (fresh or not (job.quarantined or job.key or self.database.limits.limited(job.queue)))
        ]
        claims = [
            self._claim(job, session or 0) for job in sorted(due, key=lambda j: (-j.priority, j.run_at, j.id))[:1]
        ]
        await self._answered("claim_suspect")
        return ClaimResult(claims, sent, Settlement([], [], []))

    async def report_crash(self, claim: Claim, seen: str, *, alone: bool) -> bool | None:
        await self._done("report_crash")
        job = self._ours(claim)
        if job is None:
            return False
        if job.id in self.database.locked:
            return None
        self._end(job, Outcome(claim, "rescued", error=seen), alone=alone)
        return True

    def _suspects(self, queues: Sequence[str] | None) -> list[FakeJob]:
        return [
            job
            for job in self.database.jobs.values()
            if job.suspect
            and job.finished is None
            and not job.session
            and job.queue not in self.database.paused
            and (queues is None or job.queue in queues)
        ]

    async def claim_limited(self, queue: str, limit: int, turns: str = "{}") -> Limited:
        sent = trio.current_time()
        await self._done("claim_limited")
        jobs = [job for job in self.database.jobs.values() if job.queue == queue and queue not in self.database.paused]
        chosen, again_in, blocked, turns = self.database.limits.choose(
            queue, [job for job in jobs if job.finished is None], limit, turns,
            skip=lambda job: job.suspect or job.id in self.database.locked or job.kind in self.paused_kinds,
        )  # fmt: skip
        claims = [self._claim(job) for job in chosen]
        await self._answered("claim_limited")
        return Limited(claims, sent, again_in, blocked, turns)

    async def prune_permits(self) -> None:
        await self._done("prune_permits")

    # Leases

    async def beat(self, claims: Sequence[Claim]) -> Beat:
        sent = trio.current_time()
        await self._done("beat")
        ours = [claim for claim in claims if self._ours(claim)]
        for claim in claims:
            if claim not in ours:
                self._absolve(claim)
        locked = frozenset(claim for claim in ours if claim.id in self.database.locked)
        renewed = frozenset(ours) - locked
        for claim in renewed:
            job = self.database.jobs[claim.id]
            job.lease_until = trio.current_time() + self.leases.get(job.queue, self.lease)
        self.beats.append((sent, list(claims)))
        await self._answered("beat")
        wished = {claim: self.database.jobs[claim.id] for claim in renewed}
        cancelling = {claim: job.wished for claim, job in wished.items() if job.cancelling}
        return Beat(sent, renewed, locked, cancelling)

    async def rescue(self, limit: int = 1000) -> Rescue:
        await self._done("rescue")
        now = trio.current_time()
        return self._rescue([job for job in self.database.jobs.values() if job.lease_until < now][:limit])

    async def rescue_sessions(self, sessions: Sequence[int], limit: int = 1000) -> HandedBack:
        await self._done("rescue_sessions")
        held = [job for job in self.database.jobs.values() if job.state is State.RUNNING and job.session in sessions]
        rescued, dead = self._rescue(held[:limit])
        return HandedBack(rescued, dead, tuple((job.id, job.kind) for job in held[:limit]))

    def _rescue(self, jobs: Sequence[FakeJob]) -> Rescue:
        ends: list[State] = []
        running = [job.session for job in self.database.jobs.values() if job.state is State.RUNNING]
        self.database.crowded |= {job.session for job in jobs if running.count(job.session) > 1}
        for job in jobs:
            if job.id not in self.database.locked:
                job.max_attempts += excused(job.session in self.database.crowded, job.suspect)
                claim = Claim(job.id, job.attempt, 0, 0, 0, "", "", "", "", None, job.session)
                self._end(job, Outcome(claim, "rescued", error="the worker was gone"))
                ends.append(job.state)
        return Rescue(ends.count(State.AVAILABLE), ends.count(State.DEAD))

    async def requested(self, job_ids: Sequence[int]) -> dict[tuple[int, int, int], str | None]:
        await self._done("requested")
        jobs = [self.database.jobs[i] for i in job_ids if i in self.database.jobs]
        return {
            (job.id, job.attempt, job.session): job.wished
            for job in jobs
            if job.cancelling and job.state is State.RUNNING
        }

    async def running_fences(self, job_ids: Sequence[int]) -> set[tuple[int, int, int]]:
        await self._done("running_fences")
        jobs = [self.database.jobs[i] for i in job_ids if i in self.database.jobs]
        return {(job.id, job.attempt, job.session) for job in jobs if job.state is State.RUNNING}

    async def record_delivered(self, claims: Sequence[Claim]) -> None:
        await self._done("record_delivered")
        for claim in claims:
            job = self._ours(claim)
            if job is not None and job.cancelling:
                job.delivered = True

    async def stack_questions(self, sessions: Sequence[int]) -> list[tuple[int, int, int]]:
        await self._done("stack_questions")
        return [asked for asked in self.database.questions if asked[1] in sessions]

    async def answer_stack(self, request: int, session: int, answer: str) -> None:
        await self._done("answer_stack")
        asked, found = self.database.stacks[request]
        if asked == session and found is None:
            self.database.stacks[request] = (session, answer)
            self.database.questions = [asked for asked in self.database.questions if asked[0] != request]

    async def stale_workers(self) -> list[WorkerStale]:
        await self._done("stale_workers")
        now, found = trio.current_time(), list[WorkerStale]()
        for session, (seen, after) in self.database.seen.items():
            silent = self.database.sessions.get(session, False) and session != self.session and seen + after < now
            if silent and self.database.told_of.get(session) != seen:
                self.database.told_of[session] = seen
                found.append(WorkerStale(session, "host", session, now - seen, 0))
        return found

    async def close_cancellations(self) -> None:
        await self._done("close_cancellations")

    async def maintain(self, retention: float) -> bool:
        await self._done("maintain")
        more = self.database.upkeep > 0
        self.database.upkeep -= more
        return more

    # Schedules

    async def declare_schedules(self, declared: Sequence[Schedule]) -> None:
        await self._done("declare_schedules")
        for made in declared:
            next_due = made.timing.after(self.database.clock())
            assert next_due is not None
            found = self.database.schedules.setdefault(made.name, FakeSchedule(made, next_due))
            if found.schedule.timing != made.timing:
                found.next_due = next_due
            found.schedule = made

    async def next_schedule(self) -> float | None:
        await self._done("next_schedule")
        found = [s.next_due for s in self.database.schedules.values() if not s.paused]
        return (min(found) - self.database.clock()).total_seconds() if found else None

    async def fire_schedules(self) -> tuple[list[Fired], list[Broken]]:
        await self._done("fire_schedules")
        now, fired = self.database.clock(), list[Fired]()
        for name, row in sorted(self.database.schedules.items()):
            if row.paused or row.next_due > now or name in self.database.taken:
                continue
            for moment in due(row.schedule.timing, row.next_due, now, row.schedule.catch_up):
                if moment not in row.fired:
                    request = row.schedule.request_at(moment)
                    row.fired[moment] = self.database.enqueue(
                        request.kind, request.args, queue=request.queue, priority=request.priority
                    )
                    fired.append(Fired(name, moment, row.fired[moment], (now - moment).total_seconds(), True))
            row.next_due = row.schedule.timing.after(now) or now
        await self._answered("fire_schedules")
        return fired, []

    async def prune_fires(self, retention: float) -> None:
        await self._done("prune_fires")

    # Batches

    async def finish_batches(self) -> list[int] | None:
        await self._done("finish_batches")
        if all(batch.finished for batch in self.database.batches.values()):
            return None
        done: list[int] = []
        for batch_id, batch in self.database.batches.items():
            if not batch.finished and all(self.database.jobs[i].finished is not None for i in batch.jobs):
                batch.finished = True
                done.append(batch_id)
                if batch.callback is not None:
                    self.database.enqueue(batch.callback[0], queue=batch.callback[1])
        await self._answered("finish_batches")
        return done

    async def prune_results(self, retention: float) -> None:
        await self._done("prune_results")

    # Progress

    async def write_progress(self, said: Sequence[Progress]) -> None:
        await self._done("write_progress")
        self.progress.append((trio.current_time(), {s.claim.id: s.fraction for s in said}))
        for s in said:
            if (job := self._ours(s.claim)) is not None:
                job.progress = (s.fraction, s.message)
        await self._answered("write_progress")

    # Waking

    async def announce_idle(self) -> None:
        await self._done("announce_idle")
        self.idle = True
        self.database.idle.add(self)

    async def withdraw_idle(self) -> None:
        await self._done("withdraw_idle")
        self._withdraw()

    def _withdraw(self) -> None:
        self.idle = False
        self.database.idle.discard(self)

    async def listen(self, on_notify: Callable[[str], None]) -> None:
        await self._done("listen")
        self.database.listeners.append(on_notify)
        try:
            on_notify("")
            await trio.sleep_forever()
        finally:
            self.database.listeners.remove(on_notify)


async def unavailable() -> None:
    """For `trouble` and `silence`: the database is gone."""
    raise DatabaseUnavailable("the test took the database away")
