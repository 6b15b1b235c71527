"""Limits as a property: whatever the limits, the jobs, and what becomes of them, with several claimers at once.

Judged by the database's own history: when each attempt began and ended.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pulse_trio import Handlers, SyncClient, Worker
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
changes = st.lists(st.tuples(st.integers(1, 8), limits, rates), max_size=3)
"""(claims since the last change, the queue's limit and rate from then on)."""


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
        self.changes: list[tuple[int, int | None, Rate | None]] = []
        self.changed: list[tuple[Any, int | None, Rate | None]] = []
        """When the queue's limit and rate changed, by the database's clock."""

    def change(self) -> None:
        """Makes the next change, between two claims: a claim under way would be judged by a limit that it did not see."""
        _, limit, rate = self.changes.pop(0)
        with self.window.connection.transaction():
            self.window.run("SELECT FROM claim_turn WHERE queue = %s FOR UPDATE", self.allowed.queue)
            self.window.run(
                "UPDATE queue SET max_running = %s, rate_count = %s, rate_seconds = %s WHERE name = %s",
                limit,
                rate and rate.starts,
                rate and rate.seconds,
                self.allowed.queue,
            )
            self.changed.append((self.window.value("SELECT clock_timestamp()"), limit, rate))

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
                if self.changes and self.step >= self.changes[0][0] + CLAIMERS:
                    self.change()
                    nothing = 0
                answer = await store.claim_limited(self.allowed.queue, most, turns)
                turns = answer.turns
                if answer.claims:
                    nothing = 0
                    self.held += len(answer.claims)
                    self.answers.append(answer.claims)
                    for _ in range(pause):
                        await store.touch(1, set(), draining=False)
                    await self.end(store, answer.claims, outcome)
                    self.held -= len(answer.claims)
                elif self.held == 0 and answer.again_in in (None, *[a for a in [answer.again_in] if a and a > 60]):
                    nothing += 1

    async def end(self, store: WorkerStore, claims: list[Claim], outcome: OutcomeKind | None) -> None:
        # Each job may end badly a few times only, or the example would last.
        # A second crash would make it a suspect, which other claims leave alone.
        outcomes: list[OutcomeKind | None] = [
            "completed" if c.attempt > (1 if outcome is None else 2) else outcome for c in claims
        ]
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


class Bucket:
    """What a rate of the queue allows, whatever it was before: tokens that were taken count, but no more than it holds."""

    def __init__(self) -> None:
        self.missing = 0

    def start(self, rate: Rate | None) -> bool:
        """Takes a token; whether there was one. Each example is over long before another comes."""
        if rate is None:
            return True
        self.missing = min(self.missing, rate.starts) + 1
        return self.missing <= rate.starts


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(limit=limits, rate=rates, changes=changes, wanted=jobs, program=programs)
def test_limits_that_change_while_claimers_are_at_work_hold_from_the_next_claim_on(
    room_dsn: str,
    window: Window,
    limit: int | None,
    rate: Rate | None,
    changes: list[tuple[int, int | None, Rate | None]],
    wanted: list[tuple[str | None, int]],
    program: list[tuple[int, OutcomeKind | None, int]],
) -> None:
    # Jobs without a key go the other way while their queue has neither a limit nor a rate.
    wanted = [(key or "d", priority) for key, priority in wanted]
    play = Play(window, QueueLimits(f"q-{uuid4().hex}", limit, rate), program)
    steps = [sum(claims for claims, *_ in changes[: n + 1]) for n in range(len(changes))]
    play.changes = [(step, *change[1:]) for step, change in zip(steps, changes, strict=True)]
    trio.run(play.run, room_dsn, wanted)
    attempts = play.attempts()

    # Never over what held when the attempt began. Who began without a limit has no permit, and is not counted.
    bucket = Bucket()
    pending = list(play.changed)
    permitted: list[dict[str, Any]] = []
    for attempt in attempts:
        while pending and pending[0][0] < attempt["started_at"]:
            _, limit, rate = pending.pop(0)
        assert bucket.start(rate)
        if limit is not None:
            permitted.append(attempt)
            assert sum(attempt["started_at"] < a["ended_at"] for a in permitted) <= limit

    # Nothing starves: what has not finished is what the last rate forbids.
    for _, _, last_rate in pending:
        rate = last_rate
    if play.left():
        assert rate is not None
        assert bucket.missing >= rate.starts


async def test_a_job_that_ends_while_another_claim_looks_frees_its_key_for_the_highest_priority(dsn: str) -> None:
    """A claim looks at one priority after the other, and a job that ended between two of them freed its key for the lower one
    alone: 8 to 22 of 200 jobs started before others of their key that came first."""
    handlers, started = Handlers(), list[int]()

    @handlers.job(key="one", limit=1)
    async def note(priority: int) -> None:
        started.append(priority)

    draw = random.Random(7)
    chosen = [draw.choice([0, 3]) for _ in range(200)]
    SyncClient(dsn).enqueue_many([note.options(priority=priority).request(priority) for priority in chosen])
    await Worker(handlers, dsn, concurrency=1, burst=True, log=False).run()
    assert started == sorted(chosen, reverse=True)
