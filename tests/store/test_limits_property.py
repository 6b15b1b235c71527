"""Limits as a property: whatever the limits, the jobs, and what becomes of them, with several claimers at once.

Judged by the database's own history: when each attempt began and ended.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pulse_trio.handlers import QueueLimits, Rate
from support.stores import Window, end, open_store

if TYPE_CHECKING:
    from pulse_trio.jobs import Claim, OutcomeKind
    from pulse_trio.store import WorkerStore

CLAIMERS = 4
ENDS: list[OutcomeKind | None] = ["completed", "completed", "failed", "released", "discarded", None]
"""None: the worker crashes, and the watchdog takes the job from it."""

limits = st.none() | st.integers(1, 3)
# So many in an hour: no token comes while an example runs, so the count is exact.
rates = st.none() | st.integers(1, 6).map(lambda starts: Rate(starts, 3600.0))
jobs = st.lists(st.tuples(st.sampled_from([None, "a", "b", "c"]), st.integers(0, 1)), min_size=1, max_size=14)
programs = st.lists(
    st.tuples(st.integers(1, 5), st.sampled_from(ENDS), st.integers(0, 3)), min_size=CLAIMERS, max_size=20
)
"""(jobs asked for, how they end, round trips until they do), for one claim after the other."""


class Play:
    """Several claimers at work on one queue, until there is nothing more that may start."""

    def __init__(
        self, window: Window, allowed: QueueLimits, program: list[tuple[int, OutcomeKind | None, int]]
    ) -> None:
        self.window = window
        self.allowed = allowed
        self.program = program
        self.step = 0
        self.held = 0
        self.answers: list[list[Claim]] = []

    async def run(self, dsn: str, wanted: list[tuple[str | None, int]]) -> None:
        async with open_store(dsn) as declarer:
            await declarer.declare_limits([self.allowed])
        for key, priority in wanted:
            self.window.enqueue(self.allowed.queue, key=key, priority=priority)
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for _ in range(CLAIMERS):
                    nursery.start_soon(self.claimer, dsn)

    async def claimer(self, dsn: str) -> None:
        async with open_store(dsn) as store:
            turns, nothing = "{}", 0
            # Three in a row: another claimer may have been at it, or have held what it gives back.
            while nothing < 3:
                most, outcome, pause = self.program[self.step % len(self.program)]
                self.step += 1
                answer = await store.claim_limited(self.allowed.queue, most, turns)
                turns = answer.turns
                if answer.claims:
                    nothing = 0
                    self.held += len(answer.claims)
                    self.answers.append(answer.claims)
                    for _ in range(pause):
                        await store.touch(1, draining=False)
                    await self.end(store, answer.claims, outcome)
                    self.held -= len(answer.claims)
                elif self.held == 0 and answer.again_in in (None, *[a for a in [answer.again_in] if a and a > 60]):
                    nothing += 1

    async def end(self, store: WorkerStore, claims: list[Claim], outcome: OutcomeKind | None) -> None:
        # Each job may end badly a few times only, or the example would last.
        # A second crash would make it a suspect, which other claims leave alone.
        outcomes = ["completed" if c.attempt > (1 if outcome is None else 2) else outcome for c in claims]
        for claim, how in zip(claims, outcomes, strict=True):
            if how is None:
                self.window.expire(claim.id)
        while any(how is None and self.runs(c) for c, how in zip(claims, outcomes, strict=True)):
            await store.rescue()
        await store.settle([end(c, how) for c, how in zip(claims, outcomes, strict=True) if how is not None])

    def runs(self, claim: Claim) -> bool:
        row = self.window.row(claim.id)
        return row is not None and (row["state"], row["attempt"]) == (2, claim.attempt)

    def attempts(self) -> list[dict[str, Any]]:
        """Every attempt with its key, by when it began."""
        return self.window.run(
            "SELECT a.job_id, a.attempt, a.started_at, a.ended_at,"
            "   coalesce((SELECT j.key FROM job j WHERE j.id = a.job_id), d.key, '') AS key,"
            "   coalesce(d.priority, (SELECT j.priority FROM job j WHERE j.id = a.job_id)) AS priority"
            " FROM attempts a LEFT JOIN job_archive d ON d.id = a.job_id"
            " WHERE a.job_id IN (SELECT id FROM jobs WHERE queue = %s) ORDER BY a.started_at",
            self.allowed.queue,
        )

    def left(self) -> Counter[str]:
        """Jobs that have not finished, by key."""
        found = self.window.run("SELECT coalesce(key, '') AS key FROM job WHERE queue = %s", self.allowed.queue)
        return Counter(row["key"] for row in found)


def most_at_once(attempts: list[dict[str, Any]]) -> int:
    changes = sorted([(a["started_at"], 1) for a in attempts] + [(a["ended_at"], -1) for a in attempts])
    running = most = 0
    for _, change in changes:
        running += change
        most = max(most, running)
    return most


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(limit=limits, rate=rates, key_limit=limits, key_rate=rates, wanted=jobs, program=programs)
def test_claimers_at_once_keep_every_limit_and_starve_nobody(
    room_dsn: str,
    window: Window,
    limit: int | None,
    rate: Rate | None,
    key_limit: int | None,
    key_rate: Rate | None,
    wanted: list[tuple[str | None, int]],
    program: list[tuple[int, OutcomeKind | None, int]],
) -> None:
    if limit is None and rate is None:
        # Jobs without a key would go the other way.
        wanted = [(key or "d", priority) for key, priority in wanted]
    allowed = QueueLimits(f"q-{uuid4().hex}", limit, rate, key_limit, key_rate)
    play = Play(window, allowed, program)
    trio.run(play.run, room_dsn, wanted)
    attempts = play.attempts()
    by_key = {key: [a for a in attempts if a["key"] == key] for key in {a["key"] for a in attempts}}

    # Never over a limit, never over a rate.
    assert limit is None or most_at_once(attempts) <= limit
    assert rate is None or len(attempts) <= rate.starts
    for key, ours in by_key.items():
        assert key == "" or key_limit is None or most_at_once(ours) <= key_limit
        assert key == "" or key_rate is None or len(ours) <= key_rate.starts

    # Nothing starves: what has not finished is what a rate forbids.
    for key in play.left():
        spent = key != "" and key_rate is not None and len(by_key.get(key, [])) == key_rate.starts
        assert spent or (rate is not None and len(attempts) == rate.starts)

    # First in, first out: within a key and a priority, in the order of the claims.
    began = {(a["job_id"], a["attempt"]): a["started_at"] for a in attempts}
    claimed_at = {
        c.id: min(began[c.id, c.attempt] for c in answer) for answer in play.answers for c in answer if c.attempt == 1
    }
    for ours in by_key.values():
        for level in (0, 1):
            first = sorted(a["job_id"] for a in ours if a["attempt"] == 1 and a["priority"] == level)
            times = [claimed_at[job_id] for job_id in first]
            assert times == sorted(times)
    for answer in play.answers:
        for key in {a["key"] for a in attempts}:
            ids = {a["job_id"] for a in by_key[key]}
            fresh = [(-c.priority, c.id) for c in answer if c.id in ids and c.attempt == 1]
            assert fresh == sorted(fresh)
