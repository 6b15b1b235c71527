"""One suite for every store: the real one and the fake that the worker's tests stand on, so that the fake cannot drift."""

from __future__ import annotations

from contextlib import AsyncExitStack, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import trio

from pulse_trio.client import request_by_name
from pulse_trio.handlers import QueueLimits, Rate, schedule
from pulse_trio.jobs import CancelRequest, Progress
from pulse_trio.store import ClaimCursor, WorkerStore, cancelling, stacks
from pulse_trio.testing.memory import MemoryDatabase, MemoryStore
from pulse_trio.timing import timing
from support.stores import Window, claim, claim_one, complete_alone, end, forged, open_kept_store

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator, Sequence

    from pulse_trio.handlers import Schedule
    from pulse_trio.jobs import Claim, OutcomeKind
    from pulse_trio.states import State
    from support.connections import KeptLinks

Store = WorkerStore | MemoryStore


class Real:
    """A database, and stores on it."""

    def __init__(self, window: Window, queue: str, stack: AsyncExitStack, links: list[KeptLinks]) -> None:
        self.window = window
        self.queue = queue
        self._stack = stack
        self._links = links

    async def store(self, queues: Sequence[str] | None = None) -> Store:
        return await self._stack.enter_async_context(open_kept_store(self.window.dsn, self._links, queues=queues))

    def enqueue(self, **options: Any) -> int:
        return self.window.enqueue(self.queue, **options)

    def state(self, job_id: int) -> State | str:
        return self.window.state(job_id)

    def facts(self, job_id: int) -> tuple[int, int]:
        """(attempt, max_attempts)."""
        job = self.window.job(job_id)
        return job["attempt"], job["max_attempts"]

    def progress(self, job_id: int) -> tuple[float, str | None] | None:
        job = self.window.job(job_id)
        return None if job["progress"] is None else (job["progress"], job["progress_message"])

    def history(self, job_id: int) -> list[tuple[int, int, str]]:
        return [
            (a["attempt"], a["worker"], a["outcome"]) for a in self.window.attempts(job_id) if a["outcome"] != "running"
        ]

    def expire(self, job_id: int) -> None:
        self.window.expire(job_id)

    def make_due(self, job_id: int) -> None:
        self.window.make_due(job_id)

    def cancel(self, job_id: int, reason: str | None = None) -> None:
        self.window.do(cancelling.cancel(job_id, reason=reason))

    def clean_up(self, job_id: int) -> None:
        """The waiting job is cancelled with its tree, and runs once more."""
        self.window.run("UPDATE job SET cancelling = true WHERE id = %s", job_id)
        self.window.run("INSERT INTO cancellation (job_id, cause, requested_by) VALUES (%s, 'parent', 'tree')", job_id)

    def cancelled(self, job_id: int) -> tuple[str | None, bool]:
        """(cancel_reason, whether the handler was told)."""
        (row,) = self.window.do(cancelling.cancellations(job_id))
        return self.window.job(job_id)["cancel_reason"], row.delivered_at is not None

    def ask_stack(self, job_id: int) -> int:
        return self.window.do(stacks.ask(job_id)).id

    def answer(self, request: int) -> str | None:
        """What was answered, and stays."""
        return self.window.value("SELECT answer FROM stack_request WHERE id = %s", request)

    def pause(self) -> None:
        self.window.run("INSERT INTO queue (name, paused_at) VALUES (%s, now())", self.queue)

    def pause_kind(self, kind: str) -> None:
        self.window.run("INSERT INTO paused_kind (kind) VALUES (%s)", kind)

    @contextmanager
    def lock(self, job_id: int) -> Generator[None]:
        with psycopg.connect(self.window.dsn) as connection:
            connection.execute("SELECT FROM pulse.job WHERE id = %s FOR UPDATE", [job_id])
            yield

    def move_schedule(self, name: str, seconds: float) -> None:
        self.window.run(
            "UPDATE schedule SET next_due = next_due - make_interval(secs => %s) WHERE name = %s", seconds, name
        )

    def pause_schedule(self, name: str) -> None:
        self.window.run("UPDATE schedule SET paused_at = now() WHERE name = %s", name)

    @contextmanager
    def take_schedule(self, name: str) -> Generator[None]:
        with psycopg.connect(self.window.dsn) as connection:
            connection.execute("SELECT FROM pulse.schedule WHERE name = %s FOR NO KEY UPDATE", [name])
            yield


class Fake:
    """The same in memory."""

    def __init__(self, queue: str) -> None:
        self.database = MemoryDatabase()
        self.queue = queue

    async def store(self, queues: Sequence[str] | None = None) -> Store:
        store = MemoryStore(self.database, queues=queues)
        await store.open_session()
        return store

    def enqueue(self, **options: Any) -> int:
        return self.database.enqueue(queue=self.queue, **options)

    def state(self, job_id: int) -> State | str:
        return self.database.state(job_id)

    def facts(self, job_id: int) -> tuple[int, int]:
        job = self.database.jobs[job_id]
        return job.attempt, job.max_attempts

    def progress(self, job_id: int) -> tuple[float, str | None] | None:
        return self.database.jobs[job_id].progress

    def history(self, job_id: int) -> list[tuple[int, int, str]]:
        return self.database.jobs[job_id].history

    def expire(self, job_id: int) -> None:
        self.database.expire(job_id)

    def make_due(self, job_id: int) -> None:
        self.database.jobs[job_id].run_at = trio.current_time()

    def cancel(self, job_id: int, reason: str | None = None) -> None:
        self.database.cancel(job_id, reason)

    def clean_up(self, job_id: int) -> None:
        self.database.jobs[job_id].cancelling = True

    def cancelled(self, job_id: int) -> tuple[str | None, bool]:
        job = self.database.jobs[job_id]
        return job.cancel_reason, job.delivered

    def ask_stack(self, job_id: int) -> int:
        return self.database.ask_stack(job_id)

    def answer(self, request: int) -> str | None:
        return self.database.stacks[request][1]

    def pause(self) -> None:
        self.database.paused.add(self.queue)

    def pause_kind(self, kind: str) -> None:
        self.database.paused_kinds.add(kind)

    def lock(self, job_id: int) -> Any:
        return self.database.lock(job_id)

    def move_schedule(self, name: str, seconds: float) -> None:
        self.database.schedules[name].next_due -= timedelta(seconds=seconds)

    def pause_schedule(self, name: str) -> None:
        self.database.schedules[name].paused = True

    @contextmanager
    def take_schedule(self, name: str) -> Generator[None]:
        self.database.taken.add(name)
        yield
        self.database.taken.discard(name)


House = Real | Fake


@pytest.fixture(params=["real", "fake"])
async def house(
    request: pytest.FixtureRequest, window: Window, queue: str, links: list[KeptLinks]
) -> AsyncGenerator[House]:
    async with AsyncExitStack() as stack:
        yield Real(window, queue, stack, links) if request.param == "real" else Fake(queue)


@pytest.fixture
async def store(house: House) -> Store:
    return await house.store()


@pytest.fixture
async def other(house: House) -> Store:
    return await house.store()


async def test_sessions_are_positive_and_differ(store: Store, other: Store) -> None:
    assert 0 < store.session != other.session > 0


async def test_a_paused_queue_is_not_claimed_from_by_who_knows_its_slot(house: House, store: Store) -> None:
    house.enqueue()
    house.pause()
    assert (await store.complete_and_claim(5, [ClaimCursor(house.queue, 0)])).claims == []


async def test_a_claim_carries_the_row_and_the_fence(house: House, store: Store) -> None:
    job_id = house.enqueue(kind="k", priority=4, max_attempts=3)
    before = trio.current_time()
    claims, sent, settlement, *_ = await store.complete_and_claim(5, [ClaimCursor(house.queue, 4)])
    (claimed,) = claims
    assert before <= sent <= trio.current_time()
    assert settlement == ([], [], [])
    assert (claimed.id, claimed.attempt, claimed.session) == (job_id, 1, store.session)
    assert (claimed.kind, claimed.queue, claimed.priority, claimed.args) == ("k", house.queue, 4, "{}")
    assert (claimed.max_attempts, claimed.failures, claimed.options) == (3, 0, None)
    assert house.state(job_id) == "running"


async def test_claims_are_first_in_first_out_up_to_the_limit(house: House, store: Store) -> None:
    ids = [house.enqueue() for _ in range(4)]
    house.enqueue(delay=3600)
    got = [c.id for c in await claim(store, house.queue, 3)]
    got += [c.id for c in await claim(store, house.queue, 3)]
    assert got == ids
    assert await claim(store, house.queue, 3) == []


async def test_slots_share_the_limit_in_the_order_given(house: House, store: Store) -> None:
    low = [house.enqueue() for _ in range(2)]
    high = [house.enqueue(priority=1) for _ in range(2)]
    claims = (await store.complete_and_claim(3, [ClaimCursor(house.queue, 1), ClaimCursor(house.queue, 0)])).claims
    assert {c.id for c in claims} == {*high, low[0]}
    # In the order of the slots, and first in, first out in each.
    assert [c.id for c in claims] == [*high, low[0]]


async def test_a_cursor_hides_what_stands_below_it_but_not_what_is_recent(house: House, store: Store) -> None:
    house.enqueue()
    first = await claim_one(store, house.queue)
    assert (await store.settle([end(first, "released")])).accepted
    above = ClaimCursor(house.queue, 0, first.run_at, 0)
    (again,) = (await store.complete_and_claim(1, [above])).claims
    assert again.id == first.id
    assert await claim(store, house.queue) == []


async def test_an_exchange_claims_and_completes_at_once(house: House, store: Store) -> None:
    ids = [house.enqueue() for _ in range(2)]
    done = end(await claim_one(store, house.queue), result="7")
    claims, _, settlement, *_ = await store.complete_and_claim(5, [ClaimCursor(house.queue, 0)], [done])
    assert [c.id for c in claims] == ids[1:]
    assert settlement == ([done], [], [])
    assert house.state(ids[0]) == "completed"


OUTCOMES: list[tuple[OutcomeKind, str, int]] = [
    ("completed", "completed", 2),
    ("failed", "retryable", 2),
    ("timeout", "retryable", 2),
    ("discarded", "dead", 2),
    ("cancelled", "cancelled", 2),
    ("snoozed", "scheduled", 3),
    ("released", "scheduled", 3),
    ("rescued", "retryable", 2),
]


@pytest.mark.parametrize(("kind", "state", "budget"), OUTCOMES, ids=[o[0] for o in OUTCOMES])
async def test_every_outcome_leads_where_it_should(
    kind: OutcomeKind, state: str, budget: int, house: House, store: Store
) -> None:
    job_id = house.enqueue(max_attempts=2)
    outcome = end(await claim_one(store, house.queue), kind, delay=600.0)
    assert await store.settle([outcome]) == ([outcome], [], [])
    assert house.state(job_id) == state
    assert house.facts(job_id) == (1, budget)
    assert house.history(job_id) == [(1, store.session, kind)]


@pytest.mark.parametrize("kind", ["failed", "timeout", "rescued"])
async def test_the_last_attempt_is_dead(kind: OutcomeKind, house: House, store: Store) -> None:
    job_id = house.enqueue(max_attempts=1)
    await store.settle([end(await claim_one(store, house.queue), kind, delay=600.0)])
    assert house.state(job_id) == "dead"


async def test_a_job_without_delay_is_available_again_with_the_next_attempt(house: House, store: Store) -> None:
    house.enqueue()
    for attempt in (1, 2, 3):
        claimed = await claim_one(store, house.queue)
        assert (claimed.attempt, claimed.failures) == (attempt, attempt - 1)
        await store.settle([end(claimed, "failed")])


@pytest.mark.parametrize("part", ["id", "attempt", "session"])
async def test_a_wrong_fence_is_refused_everywhere(part: str, house: House, store: Store) -> None:
    job_id = house.enqueue()
    ours = await claim_one(store, house.queue)
    wrong = forged(ours, **{part: getattr(ours, part) + 10**9})
    for outcome in (end(wrong), end(wrong, "failed")):
        assert (await store.settle([outcome])).refused == [outcome]
    assert (await store.complete_and_claim(0, [], [end(wrong)])).settlement.refused
    assert (await store.beat([wrong]))[1:] == (frozenset(), frozenset(), {})
    assert house.state(job_id) == "running"
    assert (await store.settle([end(ours)])).accepted


async def test_a_locked_row_is_skipped_by_claims_and_told_apart_by_beats_and_reports(
    house: House, store: Store
) -> None:
    locked = house.enqueue()
    ours = await claim_one(store, house.queue)
    waiting = house.enqueue()
    failed = end(ours, "failed")
    house.expire(locked)
    with house.lock(locked):
        assert await store.rescue() == (0, 0)
        assert (await store.beat([ours])).locked == {ours}
        assert await store.settle([failed]) == ([], [], [failed])
        completed = end(ours)
        assert await store.settle([completed]) == ([], [], [completed])
    with house.lock(waiting):
        assert await claim(store, house.queue) == []
    assert (await store.settle([failed])).accepted == [failed]


async def test_beats_tell_renewed_and_lost_apart(house: House, store: Store, other: Store) -> None:
    for _ in range(3):
        house.enqueue()
    renewed, settled, rescued = await claim(store, house.queue)
    await store.settle([end(settled)])
    house.expire(rescued.id)
    await other.rescue()
    living = await claim_one(other, house.queue)
    beat = await store.beat([renewed, settled, rescued, living])
    assert (beat.renewed, beat.locked) == ({renewed, living}, set())


async def test_a_beat_keeps_the_watchdog_away(house: House, store: Store) -> None:
    job_id = house.enqueue()
    ours = await claim_one(store, house.queue)
    house.expire(job_id)
    await store.beat([ours])
    assert await store.rescue() == (0, 0)


async def test_rescue_puts_back_what_expired_and_buries_what_is_used_up(
    house: House, store: Store, other: Store
) -> None:
    third = await house.store()
    back = house.enqueue()
    ours = await claim_one(store, house.queue)
    dead = house.enqueue(max_attempts=1)
    await claim_one(other, house.queue)
    alive = house.enqueue()
    await claim_one(third, house.queue)
    house.expire(back)
    house.expire(dead)
    assert await third.rescue() == (1, 1)
    assert [house.state(i) for i in (back, dead, alive)] == ["available", "dead", "running"]
    assert (await store.settle([end(ours)])).refused
    assert (await claim_one(other, house.queue)).failures == 0


async def crash(house: House, store: Store, *job_ids: int) -> None:
    """The worker that holds these dies; each lease runs out, and is noticed, after the other."""
    for job_id in job_ids:
        house.expire(job_id)
        await store.rescue()


async def test_a_rescue_gives_the_attempt_back_to_all_that_had_company(house: House, other: Store) -> None:
    ids = [house.enqueue(max_attempts=1) for _ in range(3)]
    dying = await house.store()
    await claim(dying, house.queue)
    await crash(house, other, *ids)
    assert [(house.state(i), house.facts(i)) for i in ids] == [("available", (1, 2))] * 3


async def test_a_job_that_crashes_in_company_too_often_is_run_alone(house: House, other: Store) -> None:
    poison, neighbour = house.enqueue(), house.enqueue()
    for attempt in (1, 2):
        dying = await house.store()
        assert {c.id for c in await claim(dying, house.queue)} == {poison, neighbour}
        swept = await other.sweep([house.queue])
        assert swept.suspect_due_in is None
        await crash(house, other, poison, neighbour)
        assert house.facts(poison) == (attempt, 20 + attempt)
    # Now both are suspects, for both were there: neither is claimed with others.
    assert await claim(other, house.queue) == []
    swept = await other.sweep([house.queue])
    assert swept.suspect_due_in is not None
    assert swept.suspect_due_in <= 0
    alone = await house.store()
    assert [c.id for c in (await alone.claim_suspect([house.queue])).claims] == [poison]
    well = await house.store()
    (ran_well,) = (await well.claim_suspect(None)).claims
    assert ran_well.id == neighbour
    assert (await well.settle([end(ran_well)])).accepted
    assert (await well.claim_suspect([house.queue])).claims == []
    # Whatever took the worker along, it took along who could have seen why.
    await crash(house, other, poison)
    assert house.state(poison) == "available"
    assert house.state(neighbour) == "completed"


async def test_a_suspect_that_fails_without_a_crash_is_one_no_longer(house: House, other: Store) -> None:
    job_id = house.enqueue()
    for _ in range(2):
        await claim(await house.store(), house.queue)
        await crash(house, other, job_id)
    (released,) = (await other.claim_suspect([house.queue])).claims
    await other.settle([end(released, "released")])
    assert await claim(other, house.queue) == []
    (failed,) = (await other.claim_suspect([house.queue])).claims
    await other.settle([end(failed, "failed", error="x")])
    assert [c.id for c in await claim(other, house.queue)] == [job_id]


async def suspected(house: House, other: Store) -> int:
    job_id = house.enqueue()
    for _ in range(2):
        await claim(await house.store(), house.queue)
        await crash(house, other, job_id)
    return job_id


async def test_the_next_crash_of_a_suspect_that_was_cleared_makes_it_a_suspect_again_at_once(
    house: House, other: Store
) -> None:
    job_id = await suspected(house, other)
    (failed,) = (await other.claim_suspect([house.queue])).claims
    await other.settle([end(failed, "failed", error="x")])
    assert [c.id for c in await claim(await house.store(), house.queue)] == [job_id]
    await crash(house, other, job_id)
    assert await claim(other, house.queue) == []
    assert [c.id for c in (await other.claim_suspect([house.queue])).claims] == [job_id]


async def test_a_job_is_dead_when_its_own_process_was_seen_to_die_at_its_crash_limit(
    house: House, store: Store, other: Store
) -> None:
    job_id = await suspected(house, other)
    for number in (1, 2, 3):
        assert await other.suspects_are_due([house.queue])
        (claimed,) = (await other.claim_suspect([house.queue], session=4000 + number)).claims
        assert claimed.session == 4000 + number
        assert not await other.suspects_are_due([house.queue])
        assert await store.report_crash(claimed, "killed by signal 9 (SIGKILL)", alone=True)
        assert not await store.report_crash(claimed, "killed by signal 9 (SIGKILL)", alone=True)
        assert house.state(job_id) == ("dead" if number == 3 else "available")


async def test_crashes_that_nobody_saw_or_that_another_job_may_have_caused_do_not_count(
    house: House, store: Store, other: Store
) -> None:
    job_id = await suspected(house, other)
    for number in range(5):
        (claimed,) = (await store.claim_suspect([house.queue])).claims
        if number % 2:
            await store.report_crash(claimed, "killed by signal 9 (SIGKILL)", alone=False)
        else:
            await crash(house, other, job_id)
        assert house.state(job_id) == "available"


async def test_a_process_that_ran_another_job_takes_only_suspects_that_have_not_been_in_quarantine(
    house: House, store: Store, other: Store
) -> None:
    job_id = await suspected(house, other)
    (claimed,) = (await store.claim_suspect([house.queue], fresh=False)).claims
    await store.settle([end(claimed, "released")])
    assert (await store.claim_suspect([house.queue], fresh=False)).claims == []
    (claimed,) = (await store.claim_suspect([house.queue])).claims
    assert claimed.id == job_id


async def test_rescue_of_sessions_needs_no_expiry(house: House, store: Store, other: Store) -> None:
    job_id = house.enqueue()
    await claim_one(store, house.queue)
    assert await other.rescue_sessions([other.session]) == (0, 0, ())
    assert await other.rescue_sessions([store.session]) == (1, 0, ((job_id, "noop"),))
    assert house.state(job_id) == "available"


async def test_an_unsure_report_counts_if_it_was_written_and_only_then(
    house: House, store: Store, other: Store
) -> None:
    for _ in range(3):
        house.enqueue()
    completed, failed, lost = await claim(store, house.queue)
    written = [end(completed), end(failed, "failed", delay=60.0)]
    await store.settle(written)
    house.expire(lost.id)
    await other.rescue()
    accepted, refused, again = await store.settle([*written, end(lost)], unsure=True)
    assert {o.claim for o in accepted} == {completed, failed}
    assert ([o.claim for o in refused], again) == ([lost], [])
    assert len((await store.settle(written)).refused) == 2


async def test_progress_is_the_running_attempts_own(house: House, store: Store, other: Store) -> None:
    for _ in range(3):
        house.enqueue()
    first, second, ended = await claim(store, house.queue)
    await store.write_progress([Progress(second, 0.5, 'half\n"way"'), Progress(first, 0.25)])
    await store.write_progress([Progress(first, 0.75, None)])
    assert house.progress(first.id) == (0.75, None)
    assert house.progress(second.id) == (0.5, 'half\n"way"')
    await store.settle([end(ended)])
    house.expire(first.id)
    await other.rescue()
    assert house.progress(first.id) == (0.75, None)
    again = await claim_one(other, house.queue)
    assert house.progress(first.id) is None
    # The fence: what an attempt says after its end, or after another began, is not heard.
    await store.write_progress([Progress(first, 0.9), Progress(ended, 0.9)])
    assert house.progress(ended.id) is None
    assert house.progress(first.id) is None
    await other.write_progress([Progress(again, 0.1)])
    await store.write_progress([Progress(first, 0.9)])
    assert house.progress(first.id) == (0.1, None)


async def test_slots_are_the_pairs_with_live_jobs_and_their_next_due_time(house: House, store: Store) -> None:
    def ours(found: Any) -> list[tuple[int, bool]]:
        return sorted((f.priority, f.next_due_in is not None) for f in found if f.queue == house.queue)

    done = house.enqueue(priority=9)
    house.enqueue()
    house.enqueue(priority=2, delay=600)
    await store.settle([end(await claim_one(store, house.queue, priority=9))])
    assert house.state(done) == "completed"
    assert (
        ours((await store.sweep(None)).found)
        == ours((await store.sweep([house.queue])).found)
        == [(0, False), (2, True)]
    )
    (due,) = [f.next_due_in for f in (await store.sweep([house.queue])).found if f.next_due_in]
    assert 500 < due <= 600
    assert (await store.sweep(["elsewhere"])).found == []
    # A running job is a live one: its slot is known when it comes back.
    await claim_one(store, house.queue)
    assert ours((await store.sweep(None)).found) == [(0, False), (2, True)]
    house.pause()
    assert ours((await store.sweep(None)).found) == []


@pytest.mark.parametrize("named", [False, True])
async def test_producers_wake_listeners_only_while_somebody_is_idle(named: bool, house: House) -> None:
    store = await house.store(["another", house.queue] if named else None)
    elsewhere = await house.store(["another"])
    heard: list[str] = []
    got = trio.Event()

    def on_notify(queue: str) -> None:
        heard.append(queue)
        if queue or len(heard) == 1:
            got.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.listen, on_notify)
        await got.wait()
        got = trio.Event()
        assert heard == [""]
        assert not store.idle
        house.enqueue()
        # Somebody waits, but not for this queue.
        await elsewhere.announce_idle()
        house.enqueue()
        await store.announce_idle()
        assert store.idle
        house.enqueue(delay=60)
        house.enqueue()
        await got.wait()
        await store.withdraw_idle()
        assert not store.idle
        house.enqueue()
        await store.touch(0, set(), draining=False)
        assert heard == ["", house.queue]
        nursery.cancel_scope.cancel()


async def test_the_rest_of_a_workers_life_is_accepted(store: Store) -> None:
    await store.check_schema()
    await store.touch(3, set(), draining=True)
    assert await store.maintain(86400.0) is False
    await store.prune_results(86400.0)
    await store.end_sessions()


async def test_a_waiting_job_that_is_cancelled_is_claimed_no_more(house: House, store: Store) -> None:
    job_id = house.enqueue()
    house.cancel(job_id, "why")
    assert house.state(job_id) == "cancelled"
    assert house.cancelled(job_id) == ("why", False)
    assert await claim(store, house.queue) == []


async def test_a_running_job_that_is_cancelled_is_in_the_next_beat_and_ends_so(house: House, store: Store) -> None:
    for _ in range(2):
        house.enqueue()
    asked, other = await claim(store, house.queue)
    house.cancel(asked.id, "why")
    assert house.state(asked.id) == "running"
    assert (await store.beat([asked, other])).cancelling == {asked: CancelRequest(message="why")}
    await store.record_delivered([asked])
    await store.close_cancellations()
    await store.settle([end(asked, "failed", delay=60.0), end(other, "failed", delay=60.0)])
    assert [house.state(c.id) for c in (asked, other)] == ["cancelled", "retryable"]
    assert house.cancelled(asked.id) == ("why", True)


async def test_a_completion_of_a_job_being_cancelled_is_a_completion(house: House, store: Store) -> None:
    for _ in range(2):
        house.enqueue()
    told, crossed = await claim(store, house.queue)
    for claimed in (told, crossed):
        house.cancel(claimed.id)
    outcomes = [end(told, cancelling=True), end(crossed)]
    assert set((await store.settle(outcomes)).accepted) == set(outcomes)
    assert [house.state(c.id) for c in (told, crossed)] == ["completed", "completed"]


async def test_a_question_where_a_job_is_is_answered_by_the_session_that_runs_it(
    house: House, store: Store, other: Store
) -> None:
    house.enqueue()
    claimed = await claim_one(store, house.queue)
    heard: list[str] = []
    listening, asked = trio.Event(), trio.Event()

    def on_notify(payload: str) -> None:
        heard.append(payload)
        (asked if payload.startswith("look_for_stack ") else listening).set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.listen, on_notify)
        await listening.wait()
        request = house.ask_stack(claimed.id)
        await asked.wait()
        nursery.cancel_scope.cancel()
    assert f"look_for_stack {claimed.id}" in heard
    assert await store.stack_questions([store.session]) == [(request, store.session, claimed.id)]
    assert await store.stack_questions([other.session]) == []
    await other.answer_stack(request, other.session, "not mine")
    assert house.answer(request) is None
    await store.answer_stack(request, store.session, "here")
    await store.answer_stack(request, store.session, "later")
    assert house.answer(request) == "here"
    assert await store.stack_questions([store.session]) == []


async def test_the_row_says_which_attempt_is_to_be_cancelled_and_why(house: House, store: Store) -> None:
    for _ in range(4):
        house.enqueue()
    asked, silent, untouched, waiting = await claim(store, house.queue)
    await store.settle([end(waiting, "released")])
    house.cancel(asked.id, "why")
    house.cancel(asked.id, "again")
    house.cancel(silent.id)
    ids = [asked.id, silent.id, untouched.id, waiting.id, 2**62]
    assert await store.requested(ids) == {
        (asked.id, asked.attempt, store.session): CancelRequest(message="why"),
        (silent.id, silent.attempt, store.session): CancelRequest(),
    }


async def test_a_cancelled_jobs_reason_is_its_reports_else_the_requests(house: House, store: Store) -> None:
    for _ in range(3):
        house.enqueue()
    named, asked, neither = await claim(store, house.queue)
    house.cancel(asked.id, "asked")
    house.cancel(neither.id)
    house.cancel(named.id, "asked")
    await store.settle([end(named, "cancelled", error="deadline"), end(asked, "cancelled"), end(neither, "released")])
    assert [house.cancelled(c.id)[0] for c in (named, asked, neither)] == ["deadline", "asked", "user"]


# Schedules


def hourly(name: str, **how: Any) -> Schedule:
    return schedule(name, lambda args: request_by_name("noop", args), None, timing(None, 3600, None), **how)


async def test_declared_schedules_are_known_and_not_yet_due(house: House, store: Store, queue: str) -> None:
    await store.declare_schedules([hourly(queue)])
    assert 0 < (await store.next_schedule() or 0) <= 3600
    assert queue not in [f.name for f in (await store.fire_schedules())[0]]


async def test_an_occurrence_is_fired_by_one_store_and_once(
    house: House, store: Store, other: Store, queue: str
) -> None:
    await store.declare_schedules([hourly(queue)])
    house.move_schedule(queue, 3600)
    # Another test's may be due in the same database.
    fired = [f for s in (store, other, store) for f in (await s.fire_schedules())[0] if f.name == queue]
    assert [house.state(f.job_id) for f in fired] == ["available"]
    # Declared anew, it stays where it is.
    await other.declare_schedules([hourly(queue)])
    assert queue not in [f.name for f in (await other.fire_schedules())[0]]


@pytest.mark.parametrize(("catch_up", "count"), [("skip", 0), ("last", 1), ("all", 5)])
async def test_what_was_missed_is_caught_up_by_policy(
    catch_up: str, count: int, house: House, store: Store, queue: str
) -> None:
    await store.declare_schedules([hourly(queue, catch_up=catch_up)])
    house.move_schedule(queue, 5 * 3600)
    assert len([f for f in (await store.fire_schedules())[0] if f.name == queue]) == count
    assert queue not in [f.name for f in (await store.fire_schedules())[0]]


async def test_a_paused_or_taken_schedule_is_not_fired(house: House, store: Store, queue: str) -> None:
    await store.declare_schedules([hourly(queue)])
    house.move_schedule(queue, 3600)
    with house.take_schedule(queue):
        assert queue not in [f.name for f in (await store.fire_schedules())[0]]
    house.pause_schedule(queue)
    assert queue not in [f.name for f in (await store.fire_schedules())[0]]
    await store.prune_fires(3600.0)


async def test_limits_are_counted_over_all_stores(house: House, store: Store, other: Store) -> None:
    await store.declare_limits([QueueLimits(house.queue, limit=2)])
    ids = [house.enqueue() for _ in range(4)]
    swept = await store.sweep([house.queue])
    assert house.queue not in [f.queue for f in swept.found]
    assert swept.limited == [house.queue]
    assert await claim(store, house.queue) == []
    answer = await store.claim_limited(house.queue, 5)
    assert [c.id for c in answer.claims] == ids[:2]
    second = await other.claim_limited(house.queue, 5)
    assert (second.claims, second.again_in, second.blocked) == ([], None, True)
    await store.settle([end(answer.claims[0])])
    assert [c.id for c in (await other.claim_limited(house.queue, 5)).claims] == [ids[2]]
    await store.prune_permits()


async def test_keys_take_turns_and_have_limits_of_their_own(house: House, store: Store) -> None:
    for n in range(6):
        house.enqueue(kind="abb"[n % 3], key="abb"[n % 3])
    await store.declare_limits([QueueLimits(house.queue, key_limit=2)])
    swept = await store.sweep([house.queue])
    assert [f.queue for f in swept.found] == []
    assert swept.limited == [house.queue]
    first = await store.claim_limited(house.queue, 1)
    second = await store.claim_limited(house.queue, 1, first.turns)
    third = await store.claim_limited(house.queue, 5, second.turns)
    assert [c.kind for c in first.claims + second.claims + third.claims] == ["a", "b", "a", "b"]
    assert third.again_in == 0
    fourth = await store.claim_limited(house.queue, 5, third.turns)
    assert (fourth.claims, fourth.blocked) == ([], True)


async def test_a_rate_says_when_the_next_may_start(house: House, store: Store) -> None:
    await store.declare_limits([QueueLimits(house.queue, rate=Rate(2, 600.0))])
    for _ in range(3):
        house.enqueue()
    assert len((await store.claim_limited(house.queue, 5)).claims) == 2
    answer = await store.claim_limited(house.queue, 5)
    assert answer.claims == []
    assert answer.again_in == pytest.approx(300, abs=10)


async def test_a_paused_kind_is_claimed_neither_way(house: House, store: Store) -> None:
    house.pause_kind(f"k-{house.queue}")
    house.enqueue(kind=f"k-{house.queue}")
    house.enqueue(kind=f"k-{house.queue}", key="a")
    ids = [house.enqueue(), house.enqueue(key="a")]
    swept = await store.sweep([house.queue])
    assert f"k-{house.queue}" in swept.paused_kinds
    assert [c.id for c in await claim(store, house.queue)] == ids[:1]
    assert [c.id for c in (await store.claim_limited(house.queue, 5)).claims] == ids[1:]


@pytest.mark.parametrize("limited", ["limit", "key_limit", "rate"])
async def test_a_cancelled_job_that_runs_once_more_waits_for_no_limit(
    limited: str, house: House, store: Store, other: Store
) -> None:
    limits = {"limit": 1, "key_limit": 1, "rate": Rate(1, 3600.0)}
    await store.declare_limits([QueueLimits(house.queue, **{limited: limits[limited]})])
    ids = [house.enqueue(key="a") for _ in range(4)]
    (first,) = (await store.claim_limited(house.queue, 5)).claims
    assert first.id == ids[0]
    house.clean_up(ids[2])
    answer = await other.claim_limited(house.queue, 5)
    assert [(c.id, c.session) for c in answer.claims] == [(ids[2], other.session)]
    assert answer.blocked
    assert [c.id for c in (await store.claim_limited(house.queue, 5)).claims] == []
    # It counts: the others stay below the limit together with it.
    await store.settle([end(first)])
    assert (await store.claim_limited(house.queue, 5)).claims == []
    assert [(house.state(i)) for i in ids] == ["completed", "available", "running", "available"]
    await other.settle([end(answer.claims[0])])
    assert len((await store.claim_limited(house.queue, 5)).claims) == (0 if limited == "rate" else 1)


@pytest.mark.parametrize("limited", ["limit", "key_limit"])
@pytest.mark.parametrize("how", ["beside others", "in a lent slot"])
async def test_a_cancelled_job_that_runs_once_more_counts_also_where_it_has_run_before(
    how: str, limited: str, house: House, store: Store, other: Store
) -> None:
    limits: dict[str, Any] = {limited: 1}
    await store.declare_limits([QueueLimits(house.queue, **limits)])
    ids = [house.enqueue(key="a") for _ in range(3)]
    (before,) = (await store.claim_limited(house.queue, 5)).claims
    assert before.id == ids[0]
    # It leaves its permit, as it does when it is suspended.
    await store.settle([end(before, "released", delay=60.0)])
    (first,) = (await store.claim_limited(house.queue, 5)).claims
    assert first.id == ids[1]
    house.make_due(ids[0])
    house.clean_up(ids[0])
    if how == "in a lent slot":
        (again,) = (await other.claim_cleanups([house.queue], 5)).claims
    else:
        (again,) = (await other.claim_limited(house.queue, 5)).claims
    assert (again.id, again.attempt) == (ids[0], 2)
    await store.settle([end(first)])
    assert (await store.claim_limited(house.queue, 5)).claims == []
    await other.settle([end(again)])
    assert [c.id for c in (await store.claim_limited(house.queue, 5)).claims] == ids[2:]


async def test_as_many_cancelled_jobs_are_claimed_beyond_the_limits_as_the_worker_has_room_for(
    house: House, store: Store
) -> None:
    await store.declare_limits([QueueLimits(house.queue, limit=1)])
    ids = [house.enqueue() for _ in range(5)]
    assert [c.id for c in (await store.claim_limited(house.queue, 1)).claims] == ids[:1]
    for job_id in ids[2:]:
        house.clean_up(job_id)
    first = await store.claim_limited(house.queue, 2)
    assert [c.id for c in first.claims] == ids[2:4]
    assert first.again_in == 0
    assert [c.id for c in (await store.claim_limited(house.queue, 2)).claims] == ids[4:]
    assert (await store.claim_limited(house.queue, 2)).claims == []


async def test_cancelled_jobs_that_run_once_more_are_claimed_from_all_queues_and_nothing_else(
    house: House, store: Store, other: Store
) -> None:
    await store.declare_limits([QueueLimits(house.queue, limit=1)])
    plain = house.enqueue()
    (running,) = (await store.claim_limited(house.queue, 1)).claims
    assert running.id == plain
    limited, keyed, later, locked, parted = (house.enqueue(**how) for how in ({}, {"key": "k"}, {"delay": 60}, {}, {}))
    for job_id in (limited, keyed, later, locked):
        house.clean_up(job_id)
    assert (await store.claim_cleanups([f"{house.queue}-other"], 5)).claims == []
    with house.lock(locked):
        before = trio.current_time()
        (one,), sent, *_ = await store.claim_cleanups([house.queue], 1)
        assert (one.id, one.attempt, one.session) == (limited, 1, store.session)
        assert before <= sent <= trio.current_time()
        assert [c.id for c in (await other.claim_cleanups([house.queue], 5)).claims] == [keyed]
    assert [c.id for c in (await other.claim_cleanups([house.queue], 5)).claims] == [locked]
    assert (await other.claim_cleanups([house.queue], 5)).claims == []
    assert [house.state(i) for i in (later, parted)] == ["scheduled", "available"]


async def test_a_pause_holds_cancelled_jobs_that_run_once_more_too(house: House, store: Store) -> None:
    kind = f"k-{house.queue}"
    job_id = house.enqueue(kind=kind)
    house.clean_up(job_id)
    house.pause_kind(kind)
    assert (await store.claim_cleanups([house.queue], 5)).claims == []
    other = house.enqueue()
    house.clean_up(other)
    house.pause()
    assert (await store.claim_cleanups([house.queue], 5)).claims == []


async def test_a_fenced_transaction_completes_its_job_or_nothing(house: House, store: Store, other: Store) -> None:
    job_id = house.enqueue()
    claimed = await claim_one(store, house.queue)
    async with store.transactions.open(), other.transactions.open():
        assert await store.transactions.committed(claimed) is False
        with pytest.raises(ZeroDivisionError):
            await _transaction(store, claimed, fail=True)
        assert house.state(job_id) == "running"
        with house.lock(job_id):
            assert await _transaction(store, claimed) is None
        assert await _transaction(other, forged(claimed, session=other.session)) is False
        assert await _transaction(store, claimed) is True
        assert await store.transactions.committed(claimed) is True
    assert house.state(job_id) == "completed"
    assert (await store.settle([end(claimed, "failed")])).accepted == []


async def _transaction(store: Store, claimed: Claim, *, fail: bool = False) -> bool | None:
    async with store.transactions.begin() as begun:
        await begun.connection.execute("SELECT 1")
        if fail:
            await complete_alone(begun, end(claimed))
            raise ZeroDivisionError
        return await begun.complete(end(claimed))


async def test_a_row_that_a_transaction_has_completed_but_not_committed_is_locked_to_beats(
    house: House, store: Store
) -> None:
    house.enqueue()
    claimed = await claim_one(store, house.queue)
    async with store.transactions.open():
        async with store.transactions.begin() as begun:
            await complete_alone(begun, end(claimed))
            beat = await store.beat([claimed])
            assert (beat.renewed, beat.locked) == (frozenset(), {claimed})
        beat = await store.beat([claimed])
        assert (beat.renewed, beat.locked) == (frozenset(), frozenset())
