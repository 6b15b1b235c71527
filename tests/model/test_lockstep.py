"""A plain model of jobs and the real PostgreSQL, step by step: after every step both say the same of every job.

The model decides with `states.TRANSITIONS` and `decide`; PostgreSQL with its own statements, through two stores and the
operations of clients. Reports are drawn from every claim ever made, so most of them are stale. Two queues: a plain one that is
sometimes paused, and one with a limit, whose jobs may belong to somebody who may run one at a time.

`PULSE_TRIO_LOCKSTEP=1000` plays so many runs, drawn anew each time; without it a fixed few.
"""

from __future__ import annotations

import json
import os
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from anyio.from_thread import start_blocking_portal
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from pulse_trio.errors import InvalidTransition, UnknownJob
from pulse_trio.handlers import QueueLimits
from pulse_trio.states import FINISHED, TRANSITIONS, Event, State, decide, excused, is_suspect, next_state, suspected
from pulse_trio.store import cancelling, history, operations, queues
from support.stores import Window, claim, complete_alone, end, open_store

if TYPE_CHECKING:
    from collections.abc import Generator

    from anyio.from_thread import BlockingPortal

    from pulse_trio.jobs import Claim, Outcome, OutcomeKind
    from pulse_trio.store import WorkerStore
    from support.databases import Databases

RUNS = os.environ.get("PULSE_TRIO_LOCKSTEP")
HOUR = 3600.0
QUEUE = "q"
NARROW = "narrow"
PLACES = 2
"""How many jobs of NARROW may run at once."""
CRASH_LIMIT = 3
REPORTS: tuple[OutcomeKind, ...] = ("completed", "failed", "timeout", "discarded", "snoozed", "released", "cancelled")


@dataclass
class Modelled:
    """One job, as it should be."""

    id: int
    queue: str
    owner: str | None
    """Whose it is, who may run one at a time."""
    key: str | None
    priority: int
    max_attempts: int
    due: bool
    attempt: int = 0
    failures: int = 0
    crashes: int = 0
    suspect: bool = False
    quarantined: bool = False
    """It was claimed while it was a suspect."""
    deaths: int = 0
    session: int = 0
    expired: bool = False
    cancelling: bool = False
    put_back: bool = False
    """It waits after a failure or a rescue, not after a snooze, a release or its birth."""
    finished: State | None = None
    result: Any = None

    @property
    def state(self) -> State:
        if self.finished is not None:
            return self.finished
        if self.session:
            return State.RUNNING
        if self.due:
            return State.AVAILABLE
        return State.RETRYABLE if self.put_back else State.SCHEDULED

    @property
    def claimable(self) -> bool:
        return self.state is State.AVAILABLE and not self.suspect

    @property
    def suspected(self) -> bool:
        return self.state is State.AVAILABLE and self.suspect

    def claim(self, session: int) -> None:
        assert next_state(self.state, Event.CLAIM) is State.RUNNING
        self.session, self.attempt, self.expired = session, self.attempt + 1, False
        self.quarantined = self.suspect

    def end(self, kind: OutcomeKind, delay: float, result: Any = None, *, seen_alone: bool = False) -> None:
        """The current attempt ends, as it was accepted to."""
        decided = decide(
            "crashed" if seen_alone else kind,
            self.attempt,
            self.max_attempts,
            cancelling=self.cancelling,
            deaths=self.deaths,
            crash_limit=CRASH_LIMIT,
        )
        self.failures += decided.failures
        if decided.state in FINISHED:
            self.finished, self.cancelling, self.result = decided.state, False, result
        else:
            self.max_attempts += decided.refunds
            self.put_back = decided.state is State.RETRYABLE
            self.due = delay <= 0
            self.crashes += decided.crashes
            self.deaths += decided.deaths
            if decided.event is not Event.RELEASE:
                self.quarantined &= self.suspect
            self.suspect = suspected(decided.event, self.suspect, self.crashes, CRASH_LIMIT)
        self.session, self.expired = 0, False

    def retry(self) -> None:
        if self.finished is not None:
            self.max_attempts = max(self.max_attempts, self.attempt + 1)
            self.failures = self.crashes = self.deaths = 0
            self.suspect = self.put_back = self.quarantined = False
        self.finished, self.due, self.result = None, True, None


class Lockstep(RuleBasedStateMachine):
    """Two workers' stores and a client, beside the model."""

    dsn: ClassVar[str]
    portal: ClassVar[BlockingPortal]

    jobs = Bundle("jobs")
    claims = Bundle("claims")

    @initialize()
    def open(self) -> None:
        self.model: dict[int, Modelled] = {}
        self.ended: dict[tuple[int, int, int], str] = {}
        """How attempts ended, by fence: what a report that is sent again is looked up in."""
        self.crowded: set[int] = set()
        self.paused = False
        self.opened = ExitStack()
        self.window = self.opened.enter_context(Window(self.dsn))
        # It looks at all jobs after every step, and PostgreSQL, which thinks that a table that was never counted has ten pages,
        # would start two processes for each look: half of what this test costs.
        self.window.run("SET max_parallel_workers_per_gather = 0")
        self.window.run("TRUNCATE job, job_archive, attempt, cancellation, unique_hold, queue, permit RESTART IDENTITY")
        self.stores = [
            self.opened.enter_context(self.portal.wrap_async_context_manager(open_store(self.dsn))) for _ in (0, 1)
        ]
        for store in self.stores:
            self.opened.enter_context(self.portal.wrap_async_context_manager(store.transactions.open()))
        self.portal.call(self.stores[0].declare_limits, [QueueLimits(NARROW, limit=PLACES)])

    def teardown(self) -> None:
        if hasattr(self, "opened"):
            self.opened.close()

    # Producers and operators

    @rule(
        target=jobs,
        key=st.sampled_from((None, None, "a", "b")),
        priority=st.sampled_from((0, 0, 1)),
        max_attempts=st.sampled_from((1, 5, 20)),
        delay=st.sampled_from((None, None, None, HOUR)),
    )
    def enqueue(self, key: str | None, priority: int, max_attempts: int, delay: float | None) -> int:
        holder = next((j.id for j in self.model.values() if key and j.key == key and j.finished is None), None)
        job_id = self.window.enqueue(QUEUE, unique_key=key, priority=priority, max_attempts=max_attempts, delay=delay)
        if holder is not None:
            assert job_id == holder
        else:
            assert job_id not in self.model
            self.model[job_id] = Modelled(job_id, QUEUE, None, key, priority, max_attempts, due=delay is None)
        return job_id

    @rule(
        target=jobs,
        owner=st.sampled_from((None, "x", "x", "y")),
        priority=st.sampled_from((0, 0, 1)),
        max_attempts=st.sampled_from((1, 5)),
        delay=st.sampled_from((None, None, None, HOUR)),
    )
    def enqueue_where_few_may_run(
        self, owner: str | None, priority: int, max_attempts: int, delay: float | None
    ) -> int:
        whose = {} if owner is None else {"key": owner, "limit": 1}
        job_id = self.window.enqueue(NARROW, priority=priority, max_attempts=max_attempts, delay=delay, **whose)
        self.model[job_id] = Modelled(job_id, NARROW, owner, None, priority, max_attempts, due=delay is None)
        return job_id

    @rule(job_id=jobs, reason=st.sampled_from((None, "no more")))
    def cancel(self, job_id: int, reason: str | None) -> None:
        job = self.model.get(job_id)
        if job is None:
            with pytest.raises(UnknownJob):
                self.window.do(cancelling.cancel(job_id, reason=reason))
            return
        result = self.window.do(cancelling.cancel(job_id, reason=reason))
        if job.state is State.RUNNING:
            job.cancelling = True
        elif job.finished is None:
            job.finished = next_state(job.state, Event.CANCEL)
        assert result.state is job.state

    @rule(job_id=jobs)
    def retry(self, job_id: int) -> None:
        job = self.model.get(job_id)
        operation = operations.retry(job_id)
        if job is None:
            with pytest.raises(UnknownJob):
                self.window.do(operation)
        elif Event.RETRY not in TRANSITIONS[job.state] or (job.finished is not None and self.key_is_taken(job)):
            with pytest.raises(InvalidTransition):
                self.window.do(operation)
        else:
            assert self.window.do(operation) is next_state(job.state, Event.RETRY)
            job.retry()

    def key_is_taken(self, job: Modelled) -> bool:
        return job.key is not None and any(j.key == job.key and j.finished is None for j in self.model.values())

    @rule(job_id=jobs)
    def delete(self, job_id: int) -> None:
        job = self.model.get(job_id)
        if job is None or job.state is State.RUNNING:
            with pytest.raises(UnknownJob if job is None else InvalidTransition):
                self.window.do(history.delete(job_id))
        else:
            self.window.do(history.delete(job_id))
            del self.model[job_id]
            self.ended = {fence: how for fence, how in self.ended.items() if fence[0] != job_id}

    @rule(pause=st.sampled_from((False, False, False, True)))
    def pause_or_resume(self, pause: bool) -> None:
        self.window.do(queues.pause(QUEUE) if pause else queues.resume(QUEUE))
        self.paused = pause

    @rule(job_id=jobs)
    def time_passes_until_it_is_due(self, job_id: int) -> None:
        if (job := self.model.get(job_id)) is not None and job.finished is None and not job.session:
            self.window.make_due(job_id)
            job.due = True

    # Workers

    @rule(target=claims, worker=st.integers(0, 1), limit=st.integers(1, 3), priority=st.sampled_from((0, 0, 1)))
    def claim(self, worker: int, limit: int, priority: int) -> Any:
        store = self.stores[worker]
        claimed = self.portal.call(lambda: claim(store, QUEUE, limit, priority=priority))
        wanted = [
            j.id
            for j in self.model.values()
            if j.claimable and j.queue == QUEUE and j.priority == priority and not self.paused
        ]
        assert {c.id for c in claimed} <= set(wanted)
        assert len(claimed) == min(limit, len(wanted))
        return multiple(*(self.claimed(c, store) for c in claimed))

    @rule(target=claims, worker=st.integers(0, 1), limit=st.integers(1, 3))
    def claim_where_few_may_run(self, worker: int, limit: int) -> Any:
        store = self.stores[worker]
        claimed = self.portal.call(store.claim_limited, NARROW, limit, "{}").claims
        wanted = [j for j in self.model.values() if j.queue == NARROW and j.claimable]
        assert {c.id for c in claimed} <= {j.id for j in wanted}
        assert len(claimed) == min(limit, self.fitting(wanted))
        return multiple(*(self.claimed(c, store) for c in claimed))

    def fitting(self, waiting: list[Modelled]) -> int:
        """How many of these jobs of NARROW may run beside those that do."""
        running = [j for j in self.model.values() if j.queue == NARROW and j.session]
        busy = {j.owner for j in running} - {None}
        owned = {j.owner for j in waiting} - {None} - busy
        return min(PLACES - len(running), len(owned) + sum(j.owner is None for j in waiting))

    @rule(target=claims, worker=st.integers(0, 1), fresh=st.booleans())
    def claim_suspect(self, worker: int, fresh: bool) -> Any:
        store = self.stores[worker]
        claimed = self.portal.call(lambda: store.claim_suspect([QUEUE, NARROW], fresh=fresh)).claims
        wanted = [j for j in self.model.values() if j.suspected and not (self.paused and j.queue == QUEUE)]
        if not fresh:
            wanted = [j for j in wanted if j.queue == QUEUE and not j.quarantined]
        fitting = self.fitting([j for j in wanted if j.queue == NARROW])
        assert len(claimed) == min(1, fitting + sum(j.queue == QUEUE for j in wanted))
        assert all(self.model[c.id] in wanted for c in claimed)
        return multiple(*(self.claimed(c, store) for c in claimed))

    def claimed(self, claim: Claim, store: WorkerStore) -> Claim:
        job = self.model[claim.id]
        job.claim(store.session)
        assert (claim.attempt, claim.session) == (job.attempt, job.session)
        assert (claim.max_attempts, claim.failures) == (job.max_attempts, job.failures)
        assert (claim.queue, claim.priority) == (job.queue, job.priority)
        return claim

    def holder(self, claim: Claim) -> Modelled | None:
        """The job, if this claim is its current attempt."""
        job = self.model.get(claim.id)
        return job if job is not None and (job.attempt, job.session) == (claim.attempt, claim.session) else None

    @rule(
        claim=claims, worker=st.integers(0, 1), kind=st.sampled_from(REPORTS), delay=st.sampled_from((0.0, HOUR)),
        unsure=st.booleans(), result=st.sampled_from((None, "x", [1, {"a": None}])),
    )  # fmt: skip
    def report(
        self, claim: Claim, worker: int, kind: OutcomeKind, delay: float, unsure: bool, result: Any = None
    ) -> None:
        job = self.holder(claim)
        fence = (claim.id, claim.attempt, claim.session)
        result = result if kind == "completed" else None
        outcome = end(claim, kind, delay=delay, error=None if kind == "completed" else "x", result=json.dumps(result))
        accepted, refused, again = self.portal.call(lambda: self.stores[worker].settle([outcome], unsure=unsure))
        assert again == []
        done_before = unsure and not self.ended.get(fence, "rescued").startswith("rescued")
        assert (accepted, refused) == (([outcome], []) if job is not None or done_before else ([], [outcome]))
        if job is not None:
            self.ended[fence] = kind
            job.end(kind, delay, result)
        elif not done_before:
            self.came_back(claim)

    @rule(claim=claims, worker=st.integers(0, 1), commits=st.booleans())
    def complete_in_a_transaction(self, claim: Claim, worker: int, commits: bool) -> None:
        job = self.holder(claim)
        done = self.portal.call(in_transaction, self.stores[worker], end(claim, result='"t"'), commits)
        assert done is (job is not None)
        if job is not None and commits:
            self.ended[claim.id, claim.attempt, claim.session] = "completed"
            job.end("completed", 0.0, "t")

    def came_back(self, claim: Claim) -> None:
        """Who reports or beats has not died: the crash that its rescue counted is taken back, once."""
        fence = (claim.id, claim.attempt, claim.session)
        job = self.model.get(claim.id)
        if job is None or self.ended.get(fence) != "rescued":
            return
        self.ended[fence] = "rescued, and came back"
        if job.finished is None and job.crashes:
            job.crashes -= 1
            if not job.session:
                job.suspect = is_suspect(job.crashes, CRASH_LIMIT)

    @rule(claims=st.lists(claims, min_size=1, max_size=4, unique_by=id), worker=st.integers(0, 1))
    def beat(self, claims: list[Claim], worker: int) -> None:
        beat = self.portal.call(self.stores[worker].beat, claims)
        ours = [c for c in claims if self.holder(c) is not None]
        assert beat.renewed == set(ours)
        assert beat.locked == set()
        assert set(beat.cancelling) == {c for c in ours if self.model[c.id].cancelling}
        for c in ours:
            self.model[c.id].expired = False
        for c in claims:
            if c not in ours:
                self.came_back(c)

    @rule(claim=claims)
    def lease_runs_out(self, claim: Claim) -> None:
        if (job := self.holder(claim)) is not None:
            self.window.expire(job.id)
            job.expired = True

    @rule(worker=st.integers(0, 1))
    def rescue(self, worker: int) -> None:
        running = [j for j in self.model.values() if j.session]
        lost = [j for j in running if j.expired]
        sessions = [j.session for j in running]
        self.crowded |= {j.session for j in lost if sessions.count(j.session) > 1}
        for job in lost:
            job.max_attempts += excused(job.session in self.crowded, job.suspect)
            self.ended[job.id, job.attempt, job.session] = "rescued"
            job.end("rescued", 0.0)
        ends = [j.state for j in lost]
        assert self.portal.call(self.stores[worker].rescue) == (ends.count(State.AVAILABLE), ends.count(State.DEAD))

    @rule(claim=claims, worker=st.integers(0, 1), alone=st.booleans())
    def a_witness_reports_a_crash(self, claim: Claim, worker: int, alone: bool) -> None:
        job = self.holder(claim)
        if job is not None and not job.suspect:
            return  # nobody runs it in quarantine
        written = self.portal.call(lambda: self.stores[worker].report_crash(claim, "killed", alone=alone))
        assert written is (job is not None)
        if job is not None:
            # Nobody takes this crash back: it was seen.
            self.ended[claim.id, claim.attempt, claim.session] = "rescued by its witness"
            job.end("rescued", 0.0, seen_alone=alone)

    @rule(target=claims, claim=claims, kind=st.sampled_from(REPORTS), unsure=st.booleans())
    def somebody_else_takes_over_before_the_report(self, claim: Claim, kind: OutcomeKind, unsure: bool) -> Any:
        """What makes reports stale, in one step: drawn one by one it comes too seldom."""
        if self.holder(claim) is None or self.paused:
            return multiple()
        self.lease_runs_out(claim)
        self.rescue(0)
        claimed = self.claim(1, 3, claim.priority)
        self.report(claim, 0, kind, 0.0, unsure)
        return claimed

    # What holds after every step

    @invariant()
    def model_and_database_say_the_same(self) -> None:
        if not hasattr(self, "opened"):
            return
        shown = self.window.run(
            "SELECT s.id, s.state, s.attempt, s.max_attempts,"
            " CASE s.state WHEN 'running' THEN s.worker ELSE 0 END AS worker, s.unique_key, s.priority,"
            " coalesce(j.failures, a.failures) AS failures, coalesce(j.cancelling, false) AS cancelling,"
            " coalesce(j.crashes, 0) AS crashes, coalesce(j.suspect, false) AS suspect,"
            " coalesce(j.deaths, 0) AS deaths, s.queue, a.result"
            " FROM jobs s LEFT JOIN job j ON j.id = s.id LEFT JOIN job_archive a ON a.id = s.id ORDER BY s.id"
        )
        assert [tuple(row.values()) for row in shown] == [
            (j.id, j.state, j.attempt, j.max_attempts, j.session, j.key, j.priority, j.failures, j.cancelling,
             j.crashes if j.finished is None else 0, j.suspect and j.finished is None,
             j.deaths if j.finished is None else 0, j.queue, j.result)
            for j in sorted(self.model.values(), key=lambda j: j.id)
        ]  # fmt: skip

    @invariant()
    def a_job_is_live_or_finished_and_never_both(self) -> None:
        if hasattr(self, "opened"):
            assert self.window.run("SELECT FROM job JOIN job_archive USING (id)") == []


class Undone(Exception):
    """Rolls back."""


async def in_transaction(store: WorkerStore, outcome: Outcome, commits: bool) -> bool | None:
    """Completes a job in a transaction, which is committed or rolled back."""
    done = None
    with suppress(Undone):
        async with store.transactions.begin() as begun:
            if not commits:
                done = await complete_alone(begun, outcome)
                raise Undone
            done = await begun.complete(outcome)
    return done


@pytest.fixture(scope="module")
def lockstep(databases: Databases) -> Generator[type[Lockstep]]:
    with databases.migrated() as dsn, start_blocking_portal("trio") as portal:
        Lockstep.dsn, Lockstep.portal = dsn, portal
        yield Lockstep


# On Python 3.14 the collector does not see who refers to Hypothesis's own generator: a thread's local does.
@pytest.mark.filterwarnings("ignore:It looks like `register_random` was passed:hypothesis.errors.HypothesisWarning")
def test_model_and_database_move_in_lockstep(lockstep: type[Lockstep]) -> None:
    run_state_machine_as_test(
        lockstep,
        settings=settings(
            max_examples=int(RUNS or 12),
            stateful_step_count=40,
            derandomize=RUNS is None,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=[HealthCheck(check) for check in HealthCheck],
        ),
    )
