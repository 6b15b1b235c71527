"""Claiming and settling, by the rules of the statements in sql/ and of `states`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import trio

from ...jobs import Claim, Outcome
from ...states import FINISHED, Event, State, decide, is_suspect, reported, suspected
from ...store import ClaimCursor, ClaimResult, Found, Limited, Settlement, Sweep
from ...store.claimed import cursors_after, in_slot_order
from .link import MemoryLink

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...handlers import DeathHook, QueueLimits
    from .database import MemoryDatabase
    from .rows import MemoryJob

RECENT = 0.05
"""Seconds a cursor trails the newest row, as in complete_and_claim.sql."""


class MemoryClaims(MemoryLink):
    """Claims, and how attempts end."""

    def __init__(self, database: MemoryDatabase, *, lease: float = 30.0, queues: Sequence[str] | None = None) -> None:
        super().__init__(database, lease=lease, queues=queues)
        self.settled: list[Outcome] = []
        self.paused_kinds: list[str] = []

    async def complete_and_claim(
        self, limit: int, slots: Sequence[ClaimCursor], completed: Sequence[Outcome] = ()
    ) -> ClaimResult:
        sent = trio.current_time()
        await self.trip("complete_and_claim")
        settlement = self.write(completed)
        claims = [self._claim(job) for job in self._due(limit, slots)]
        await self.answered("complete_and_claim")
        claims = in_slot_order(sorted(claims, key=lambda c: (float(c.run_at), c.id)), slots)
        return ClaimResult(claims, sent, settlement, cursors=cursors_after(claims))

    def _due(self, limit: int, slots: Sequence[ClaimCursor]) -> list[MemoryJob]:
        now = trio.current_time()
        found: list[MemoryJob] = []
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

    def _claim(self, job: MemoryJob, session: int = 0) -> Claim:
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
        await self.trip("settle")
        accepted, refused, again = self.write(outcomes)
        if unsure:
            known = [o for o in refused if self._was_ours(o)]
            accepted, refused = accepted + known, [o for o in refused if o not in known]
        await self.answered("settle")
        return Settlement(accepted, refused, again)

    def _was_ours(self, outcome: Outcome) -> bool:
        claim = outcome.claim
        job = self.database.jobs.get(claim.id)
        ended = [] if job is None else [h[2] for h in job.history if h[:2] == (claim.attempt, claim.session)]
        return any(outcome != "rescued" for outcome in ended)

    def write(self, outcomes: Sequence[Outcome]) -> Settlement:
        settlement = Settlement([], [], [])
        for outcome in outcomes:
            job = self.ours(outcome.claim)
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

    def ours(self, claim: Claim) -> MemoryJob | None:
        """The fence."""
        job = self.database.jobs.get(claim.id)
        if job is None or job.state is not State.RUNNING:
            return None
        return job if (job.attempt, job.session) == (claim.attempt, claim.session) else None

    def _end(self, job: MemoryJob, outcome: Outcome, *, alone: bool = False) -> None:
        decided = decide(
            "crashed" if alone else reported(outcome),
            job.attempt,
            job.max_attempts,
            cancelling=job.cancelling,
            deaths=job.deaths,
            crash_limit=job.crash_limit,
        )
        event, state = decided.event, decided.state
        job.history.append((job.attempt, job.session, decided.outcome))
        job.failures += decided.failures
        job.error, job.attempt_error = outcome.error or job.error, outcome.error
        job.session, job.lease_until = 0, math.inf
        if state in FINISHED:
            job.finished, job.result = state, outcome.result
            if event is Event.COMPLETE:
                job.error = None
            if event is Event.CANCEL:
                told = outcome.error if outcome.kind == "cancelled" else None
                job.cancel_reason, job.error = told or job.wished or (job.cause if job.cancelling else "deadline"), None
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
        await self.trip("sweep")
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
        await self.trip("declare_deaths")

    async def declare_limits(self, limits: Sequence[QueueLimits]) -> None:
        await self.trip("declare_limits")
        for one in limits:
            self.database.limits.by_queue[one.queue] = one

    async def suspects_are_due(self, queues: Sequence[str] | None) -> bool:
        await self.trip("suspects_are_due")
        return any(job.state is State.AVAILABLE for job in self._suspects(queues))

    async def claim_suspect(
        self, queues: Sequence[str] | None, *, session: int | None = None, fresh: bool = True
    ) -> ClaimResult:
        sent = trio.current_time()
        await self.trip("claim_suspect")
        due = [
            job
            for job in self._suspects(queues)
            if job.state is State.AVAILABLE
            and job.id not in self.database.locked
            and (fresh or not (job.quarantined or job.key or self.database.limits.limited(job.queue)))
        ]
        due.sort(key=lambda job: (-job.priority, job.run_at, job.id))
        chosen = next(filter(self._has_place, due), None)
        claims = [] if chosen is None else [self._claim(chosen, session or 0)]
        await self.answered("claim_suspect")
        return ClaimResult(claims, sent, Settlement([], [], []))

    def _has_place(self, suspect: MemoryJob) -> bool:
        """Whether the limits of its queue, and of its key, let it run."""
        limits, queue = self.database.limits, suspect.queue
        if not (suspect.key or limits.limited(queue)):
            return True
        jobs = [job for job in self.database.jobs.values() if job.queue == queue and job.finished is None]
        chosen, *_ = limits.choose(queue, jobs, 1, "{}", skip=lambda job: job is not suspect)
        return bool(chosen)

    async def report_crash(self, claim: Claim, seen: str, *, alone: bool) -> bool | None:
        await self.trip("report_crash")
        job = self.ours(claim)
        if job is None:
            return False
        if job.id in self.database.locked:
            return None
        self._end(job, Outcome(claim, "rescued", error=seen), alone=alone)
        return True

    def _suspects(self, queues: Sequence[str] | None) -> list[MemoryJob]:
        return [
            job
            for job in self.database.jobs.values()
            if job.suspect
            and job.finished is None
            and not job.session
            and job.queue not in self.database.paused
            and (queues is None or job.queue in queues)
        ]

    async def claim_limited(self, queue: str, limit: int, turns: str = "{}", *, wait: float = 0.0) -> Limited:
        sent = trio.current_time()
        await self.trip("claim_limited")
        jobs = [job for job in self.database.jobs.values() if job.queue == queue and queue not in self.database.paused]
        chosen, again_in, blocked, turns = self.database.limits.choose(
            queue, [job for job in jobs if job.finished is None], limit, turns,
            skip=lambda job: job.suspect or job.id in self.database.locked or job.kind in self.paused_kinds,
        )  # fmt: skip
        claims = [self._claim(job) for job in chosen]
        if blocked and (cleaning := self._cleanups([queue], limit - len(claims))):
            claims += [self._claim(job) for job in cleaning]
            again_in = 0.0
        await self.answered("claim_limited")
        return Limited(claims, sent, again_in, blocked, turns)

    async def claim_cleanups(self, queues: Sequence[str] | None, limit: int) -> ClaimResult:
        sent = trio.current_time()
        await self.trip("claim_cleanups")
        claims = [self._claim(job) for job in self._cleanups(queues, limit)]
        await self.answered("claim_cleanups")
        return ClaimResult(claims, sent, Settlement([], [], []))

    def _cleanups(self, queues: Sequence[str] | None, limit: int) -> list[MemoryJob]:
        due = [
            job
            for job in self.database.jobs.values()
            if job.cancelling
            and job.state is State.AVAILABLE
            and not job.suspect
            and job.id not in self.database.locked
            and job.queue not in self.database.paused
            and job.kind not in self.database.paused_kinds
            and (queues is None or job.queue in queues)
        ]
        return sorted(due, key=lambda job: (job.run_at, job.id))[:limit]

    async def prune_permits(self) -> None:
        await self.trip("prune_permits")
