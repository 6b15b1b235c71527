"""A store in memory, on Trio's clock: what a worker needs of a database, without one and without waiting.

It must not drift from the real one: tests/store/test_conformance.py runs one suite against both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from ...errors import DatabaseUnavailable
from ...jobs import CancelRequest, Claim, Outcome, Progress
from ...observe import WorkerStale
from ...states import State, excused
from ...store import Beat, Broken, Fired, HandedBack, Rescue
from ...store.trees import Rechecked
from ...timing import due
from .claims import MemoryClaims
from .rows import MemoryJob, MemorySchedule
from .transactions import MemoryTransactions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Self

    from ...handlers import Schedule
    from .database import MemoryDatabase


class MemoryStore(MemoryClaims):
    """One worker's."""

    def __init__(self, database: MemoryDatabase, *, lease: float = 30.0, queues: Sequence[str] | None = None) -> None:
        super().__init__(database, lease=lease, queues=queues)
        self.idle = False
        self.closed = False
        self.sent_beats: list[tuple[float, list[Claim]]] = []
        self.written_progress: list[tuple[float, dict[int, float]]] = []
        self.transactions = MemoryTransactions(self)

    @property
    def parts(self) -> Self:
        """It is each of the parts that the real store consists of: what a test replaces here, every part of a worker meets."""
        return self

    startup = sessions = claims = reports = beats = progress = requests = waking = upkeep = firing = figures = (
        histories
    ) = trees = receipts = lineage = parts

    async def recheck(self, limit: int = 100) -> Rechecked:
        """No job in memory has children."""
        await trio.lowlevel.checkpoint()
        return Rechecked(0, None)

    async def take_turn(self, who: int, seconds: float) -> bool:
        """No process counts the queues of a database in memory."""
        await trio.lowlevel.checkpoint()
        return False

    async def answers(self, patience: float) -> None:
        """The database answers, unless a test has taken it away."""
        await self.trip("answers")

    @property
    def current(self) -> int:
        """The session, as the part of the sessions calls it."""
        return self.session

    async def aclose(self, *, started: bool = True) -> None:
        await trio.lowlevel.checkpoint()
        self.closed = True
        self._withdraw()

    # Leases

    async def beat(self, claims: Sequence[Claim]) -> Beat:
        sent = trio.current_time()
        await self.trip("beat")
        ours = [claim for claim in claims if self.ours(claim)]
        for claim in claims:
            if claim not in ours:
                self._absolve(claim)
        locked = frozenset(claim for claim in ours if claim.id in self.database.locked)
        renewed = frozenset(ours) - locked
        for claim in renewed:
            job = self.database.jobs[claim.id]
            job.lease_until = trio.current_time() + self.leases.get(job.queue, self.lease)
        self.sent_beats.append((sent, list(claims)))
        await self.answered("beat")
        wished = {claim: self.database.jobs[claim.id] for claim in renewed}
        cancelling = {claim: CancelRequest(job.cause, job.wished) for claim, job in wished.items() if job.cancelling}
        return Beat(sent, renewed, locked, cancelling)

    async def rescue(self, limit: int = 1000) -> Rescue:
        await self.trip("rescue")
        now = trio.current_time()
        return self._rescue([job for job in self.database.jobs.values() if job.lease_until < now][:limit])

    async def rescue_sessions(self, sessions: Sequence[int], limit: int = 1000) -> HandedBack:
        await self.trip("rescue_sessions")
        held = [job for job in self.database.jobs.values() if job.state is State.RUNNING and job.session in sessions]
        rescued, dead = self._rescue(held[:limit])
        return HandedBack(rescued, dead, tuple((job.id, job.kind) for job in held[:limit]))

    def _rescue(self, jobs: Sequence[MemoryJob]) -> Rescue:
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

    async def requested(self, job_ids: Sequence[int]) -> dict[tuple[int, int, int], CancelRequest]:
        await self.trip("requested")
        jobs = [self.database.jobs[i] for i in job_ids if i in self.database.jobs]
        return {
            (job.id, job.attempt, job.session): CancelRequest(job.cause, job.wished)
            for job in jobs
            if job.cancelling and job.state is State.RUNNING
        }

    async def running_fences(self, job_ids: Sequence[int]) -> set[tuple[int, int, int]]:
        await self.trip("running_fences")
        jobs = [self.database.jobs[i] for i in job_ids if i in self.database.jobs]
        return {(job.id, job.attempt, job.session) for job in jobs if job.state is State.RUNNING}

    async def record_delivered(self, claims: Sequence[Claim]) -> None:
        await self.trip("record_delivered")
        for claim in claims:
            job = self.ours(claim)
            if job is not None and job.cancelling:
                job.delivered = True

    async def stack_questions(self, sessions: Sequence[int]) -> list[tuple[int, int, int]]:
        await self.trip("stack_questions")
        return [asked for asked in self.database.questions if asked[1] in sessions]

    async def answer_stack(self, request: int, session: int, answer: str) -> None:
        await self.trip("answer_stack")
        asked, found = self.database.stacks[request]
        if asked == session and found is None:
            self.database.stacks[request] = (session, answer)
            self.database.questions = [asked for asked in self.database.questions if asked[0] != request]

    async def stale_workers(self) -> list[WorkerStale]:
        await self.trip("stale_workers")
        now, found = trio.current_time(), list[WorkerStale]()
        for session, (seen, after) in self.database.seen.items():
            silent = self.database.sessions.get(session, False) and session != self.session and seen + after < now
            if silent and self.database.told_of.get(session) != seen:
                self.database.told_of[session] = seen
                found.append(WorkerStale(session, "host", session, now - seen, 0))
        return found

    async def close_cancellations(self) -> None:
        await self.trip("close_cancellations")

    async def tend_trees(self) -> bool:
        await self.trip("tend_trees")
        return False

    async def maintain(self, retention: float) -> bool:
        await self.trip("maintain")
        more = self.database.upkeep > 0
        self.database.upkeep -= more
        return more

    # Schedules

    async def declare_schedules(self, declared: Sequence[Schedule]) -> None:
        await self.trip("declare_schedules")
        for made in declared:
            next_due = made.timing.after(self.database.clock())
            if next_due is None:
                raise ValueError(f"the schedule {made.name} has no next occurrence")
            found = self.database.schedules.setdefault(made.name, MemorySchedule(made, next_due))
            if found.schedule.timing != made.timing:
                found.next_due = next_due
            found.schedule = made

    async def next_schedule(self) -> float | None:
        await self.trip("next_schedule")
        found = [s.next_due for s in self.database.schedules.values() if not s.paused]
        return (min(found) - self.database.clock()).total_seconds() if found else None

    async def fire_schedules(self) -> tuple[list[Fired], list[Broken]]:
        await self.trip("fire_schedules")
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
        await self.answered("fire_schedules")
        return fired, []

    async def prune_fires(self, retention: float) -> None:
        await self.trip("prune_fires")

    # Batches

    async def finish_batches(self) -> list[int] | None:
        await self.trip("finish_batches")
        if all(batch.finished for batch in self.database.batches.values()):
            return None
        done: list[int] = []
        for batch_id, batch in self.database.batches.items():
            if not batch.finished and all(self.database.jobs[i].finished is not None for i in batch.jobs):
                batch.finished = True
                done.append(batch_id)
                if batch.callback is not None:
                    self.database.enqueue(batch.callback[0], queue=batch.callback[1])
        await self.answered("finish_batches")
        return done

    async def prune_results(self, retention: float) -> None:
        await self.trip("prune_results")

    # Progress

    async def write_progress(self, said: Sequence[Progress]) -> None:
        await self.trip("write_progress")
        self.written_progress.append((trio.current_time(), {s.claim.id: s.fraction for s in said}))
        for s in said:
            if (job := self.ours(s.claim)) is not None:
                job.progress = (s.fraction, s.message)
        await self.answered("write_progress")

    # Waking

    async def announce_idle(self) -> None:
        await self.trip("announce_idle")
        self.idle = True
        self.database.idle.add(self)

    async def withdraw_idle(self) -> None:
        await self.trip("withdraw_idle")
        self._withdraw()

    def _withdraw(self) -> None:
        self.idle = False
        self.database.idle.discard(self)

    async def listen(self, on_notify: Callable[[str], None]) -> None:
        await self.trip("listen")
        self.database.listeners.append(on_notify)
        try:
            on_notify("")
            await trio.sleep_forever()
        finally:
            self.database.listeners.remove(on_notify)


async def unavailable() -> None:
    """For `trouble` and `silence`: the database is gone."""
    raise DatabaseUnavailable("the test took the database away")
