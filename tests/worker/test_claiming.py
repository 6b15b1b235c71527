"""The accept loop: what is claimed, when, and when a burst is over."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import Discard, Job, RetryAfter, Snooze
from pulse_trio.observe import DatabaseFound, DatabaseLost, FenceLost, JobsRescued, JobStarted
from pulse_trio.store import ClaimCursor
from pulse_trio.testing.memory import MemoryBatch, MemoryStore, unavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pulse_trio.jobs import Outcome
    from pulse_trio.store import ClaimResult
    from support.stage import Recorder, Stage


@pytest.fixture
def noop(stage: Stage) -> Stage:
    """A stage with a handler `noop(seconds)`."""

    @stage.handlers.job
    async def noop(seconds: float = 0) -> None:
        await trio.sleep(seconds)

    return stage


# Slots of the worker


@pytest.mark.parametrize("concurrency", [1, 2, 3, 10, 100])
async def test_claims_never_exceed_the_free_slots(concurrency: int, stage: Stage) -> None:
    running = most = 0

    @stage.handlers.job
    async def count(seconds: float) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        held = sum(job.state == "running" for job in stage.database.jobs.values())
        # What has ended and waits for its report is still held, and claims travel with reports.
        assert held <= 2 * concurrency
        await trio.sleep(seconds)
        running -= 1

    rng = random.Random(concurrency)
    for _ in range(60):
        stage.enqueue("count", seconds=rng.choice([0, 0.1, 1, 3]))
    report = await stage.burst(concurrency=concurrency)
    assert report.ended == {"completed": 60}
    assert most == concurrency if concurrency <= 10 else most > 40


async def test_a_full_worker_does_not_claim(noop: Stage) -> None:
    for _ in range(3):
        noop.enqueue("noop", seconds=100)
    async with noop.working(concurrency=2, grace=200) as worker:
        await trio.sleep(50)
        assert worker.running == 2
        assert noop.database.states() == ["running", "running", "available"]
        calls = noop.store.calls.count("complete_and_claim")
        await trio.sleep(30)
        assert noop.store.calls.count("complete_and_claim") == calls


@pytest.mark.parametrize(("concurrency", "most"), [(20, 20), (300, 200), (1000, 500)])
async def test_one_claim_takes_few_slots_at_once_and_half_of_many(concurrency: int, most: int, noop: Stage) -> None:
    asked: list[int] = []
    exchange = noop.store.complete_and_claim

    async def spy(limit: int, *rest: Any) -> ClaimResult:
        asked.append(limit)
        return await exchange(limit, *rest)

    noop.store.complete_and_claim = spy  # type: ignore[method-assign]
    for _ in range(50):
        noop.enqueue("noop", seconds=1)
    await noop.burst(concurrency=concurrency)
    assert max(asked) == most


async def test_jobs_start_in_the_order_of_priority_queue_and_age(noop: Stage, events: Recorder) -> None:
    ids = {
        (priority, queue, n): noop.enqueue("noop", queue=queue, priority=priority)
        for n in range(2)
        for priority in (0, 7)
        for queue in ("b", "a")
    }
    await noop.burst(concurrency=1, queues=("b", "a"))
    started = [e.job_id for e in events.of(JobStarted)]
    assert started == [ids[p, q, n] for p in (7, 0) for q in ("b", "a") for n in range(2)]


async def test_only_the_named_queues_are_worked(noop: Stage) -> None:
    mine, other = noop.enqueue("noop", queue="mine"), noop.enqueue("noop", queue="other")
    await noop.burst(queues=("mine",))
    assert noop.database.state(mine) == "completed"
    assert noop.database.jobs[other].attempt == 0


async def test_a_paused_queue_rests_until_it_is_resumed(noop: Stage) -> None:
    job_id = noop.enqueue("noop")
    noop.database.paused.add("default")
    async with noop.working():
        await trio.sleep(10)
        assert noop.database.jobs[job_id].attempt == 0
        noop.database.paused.clear()
        await trio.sleep(2)
        assert noop.database.state(job_id) == "completed"


# Waking


async def test_a_notification_starts_a_job_at_once(noop: Stage, events: Recorder) -> None:
    async with noop.working(poll=1000, watchdog=10_000):
        await trio.sleep(100)
        for queue in ("default", "another", "default"):
            before = trio.current_time()
            noop.enqueue("noop", queue=queue)
            await trio.sleep(30)
            assert events.when(JobStarted)[-1] - before < 0.1


@pytest.mark.parametrize("queue", ["default", "narrow", "keyed", "elsewhere", "random", ""])
async def test_forged_wake_ups_cost_a_few_looks_and_delay_no_job_by_much(
    queue: str, noop: Stage, events: Recorder
) -> None:
    noop.handlers.queue("narrow", limit=1)
    for name in ("default", "narrow"):
        noop.enqueue("noop", queue=name)
    noop.enqueue("noop", queue="keyed", key="a")
    async with noop.working(poll=1000, watchdog=10_000):
        await trio.sleep(100)
        noop.store.calls.clear()
        for n in range(2000):
            for listener in noop.database.listeners:
                listener(f"q{n}" if queue == "random" else queue)
            await trio.sleep(0.001)
        looks = [call for call in noop.store.calls if call in ("complete_and_claim", "sweep", "claim_limited")]
        assert 4 < len(looks) <= 32
        for real in ("default", "narrow", "new"):
            began = trio.current_time()
            job_id = noop.enqueue("noop", queue=real)
            for _ in range(300):
                for listener in noop.database.listeners:
                    listener(queue)
                await trio.sleep(0.001)
            assert noop.database.state(job_id) == "completed"
            assert events.when(JobStarted)[-1] - began < 0.3


async def test_two_looks_in_vain_cost_the_next_job_nothing(noop: Stage, events: Recorder) -> None:
    noop.enqueue("noop")
    async with noop.working(poll=1000, watchdog=10_000):
        await trio.sleep(100)
        for _ in range(3):
            for _ in range(2):
                for listener in noop.database.listeners:
                    listener("default")
                await trio.sleep(0.1)
            before = trio.current_time()
            noop.enqueue("noop")
            await trio.sleep(0.1)
            assert events.when(JobStarted)[-1] == before


async def test_a_flood_does_not_keep_a_burst_from_ending(noop: Stage) -> None:
    async def flood() -> None:
        while True:
            for listener in noop.database.listeners:
                listener("default")
            await trio.sleep(0.001)

    job_id = noop.enqueue("noop")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(flood)
        with trio.fail_after(10):
            await noop.burst()
        nursery.cancel_scope.cancel()
    assert noop.database.state(job_id) == "completed"


async def test_without_notifications_the_poll_finds_jobs(noop: Stage, events: Recorder) -> None:
    noop.store.trouble["listen"] = unavailable
    async with noop.working(poll=2):
        await trio.sleep(20.3)
        before = trio.current_time()
        noop.enqueue("noop")
        await trio.sleep(10)
        assert events.when(JobStarted)[-1] - before <= 2.1


async def test_a_delayed_job_starts_when_it_is_due_and_not_at_the_next_poll(noop: Stage, events: Recorder) -> None:
    async with noop.working(poll=1000, watchdog=10_000):
        await trio.sleep(10)
        due = trio.current_time() + 33.3
        noop.enqueue("noop", delay=33.3)
        # A job that is not due wakes nobody; whoever looks for another reason learns its due time.
        noop.enqueue("noop")
        await trio.sleep(100)
    assert events.when(JobStarted)[-1] == pytest.approx(due, abs=0.1)


async def test_a_retry_starts_when_it_is_due(stage: Stage, events: Recorder) -> None:
    @stage.handlers.job
    async def again(job: Job) -> None:
        if job.attempt == 1:
            raise RetryAfter(7.5)

    stage.enqueue("again")
    async with stage.working(poll=1):
        await trio.sleep(20)
    first, second = events.when(JobStarted)
    assert second - first == pytest.approx(7.5, abs=1.1)


async def test_a_row_below_the_cursor_starts_within_two_seconds(noop: Stage, events: Recorder) -> None:
    async with noop.working():
        for _ in range(10):
            noop.enqueue("noop")
            await trio.sleep(0.3)
        late = noop.enqueue("noop")
        noop.database.jobs[late].run_at -= 3600
        committed = trio.current_time()
        for _ in range(20):
            noop.enqueue("noop")
            await trio.sleep(0.1)
        started = [time for time, e in events.all if isinstance(e, JobStarted) and e.job_id == late]
        assert started[0] - committed <= 2


async def test_an_idle_worker_does_little(noop: Stage) -> None:
    async with noop.working(poll=1):
        await trio.sleep(10)
        before = len(noop.store.calls)
        await trio.sleep(100)
        per_second = (len(noop.store.calls) - before) / 100
    assert per_second < 3


async def test_a_stream_of_jobs_is_looked_for_and_nobody_need_notify(noop: Stage) -> None:
    async with noop.working():
        await trio.sleep(1)
        assert noop.store.idle
        for number in range(100):
            job_id = noop.enqueue("noop")
            await trio.sleep(0.005)
            assert noop.database.state(job_id) == "completed"
            # The first is told of; from the second on it is a stream.
            assert noop.store.idle == (number == 0)
        await trio.sleep(1)
        assert noop.store.idle


async def test_jobs_that_come_one_by_one_are_told_of(noop: Stage) -> None:
    async with noop.working():
        await trio.sleep(1)
        for _ in range(20):
            noop.enqueue("noop")
            await trio.sleep(0.05)
            assert noop.store.idle
        assert "withdraw_idle" not in noop.store.calls


async def test_a_busy_worker_withdraws_its_idleness(noop: Stage) -> None:
    async with noop.working():
        await trio.sleep(5)
        assert noop.store.idle
        for _ in range(200):
            noop.enqueue("noop", seconds=0.01)
        await trio.sleep(0.02)
        assert not noop.store.idle
        await trio.sleep(5)
        assert noop.store.idle


async def test_a_worker_whose_sweeps_are_slow_does_not_claim_in_vain_until_the_next_one(
    noop: Stage, events: Recorder
) -> None:
    async def slowly() -> None:
        await trio.sleep(0.2)  # the next sweep has to rest for 4 s

    noop.store.trouble["sweep"] = slowly
    async with noop.working(poll=1000, watchdog=10_000):
        await trio.sleep(20)
        for _ in range(100):
            noop.enqueue("noop")
        await trio.sleep(0.5)
        assert len(events.of(JobStarted)) == 100
        assert noop.store.idle
        noop.store.calls.clear()
        await trio.sleep(0.5)
        assert noop.store.calls.count("complete_and_claim") <= 2
        assert "sweep" not in noop.store.calls
        before = trio.current_time()
        noop.enqueue("noop")
        await trio.sleep(0.1)
        assert events.when(JobStarted)[-1] == before


async def test_what_is_committed_while_the_worker_says_that_it_waits_is_found_at_once(noop: Stage) -> None:
    came: list[int] = []

    async def just_before() -> None:
        if not came:
            came.append(noop.enqueue("noop", queue="mine"))

    # Nobody waits yet, so nobody is told.
    noop.store.trouble["announce_idle"] = just_before
    async with noop.working(queues=("mine",), poll=1000, watchdog=10_000):
        await trio.sleep(0.5)
        assert [noop.database.state(job_id) for job_id in came] == ["completed"]


async def test_a_worker_of_named_queues_is_told_of_those(noop: Stage) -> None:
    async with noop.working(queues=("one", "two"), poll=1000, watchdog=10_000):
        await trio.sleep(100)
        swept = noop.store.calls.count("sweep")
        other = noop.enqueue("noop", queue="other")
        await trio.sleep(1)
        assert noop.store.calls.count("sweep") == swept
        mine = noop.enqueue("noop", queue="two")
        await trio.sleep(1)
        assert [noop.database.state(job_id) for job_id in (mine, other)] == ["completed", "available"]


@pytest.mark.parametrize("way", ["quiet", "stop"])
async def test_who_does_not_claim_any_more_makes_nobody_notify(way: str, noop: Stage) -> None:
    noop.enqueue("noop", seconds=50)
    async with noop.working(grace=100, concurrency=4) as worker:
        await trio.sleep(5)
        assert noop.store.idle
        getattr(worker, way)()
        await trio.sleep(1)
        assert (worker.running, noop.store.idle) == (1, False)


async def test_a_worker_stops_though_it_cannot_say_that_it_waits_no_more(noop: Stage) -> None:
    noop.store.trouble["withdraw_idle"] = unavailable
    job_id = noop.enqueue("noop", seconds=50)
    async with noop.working(grace=100, concurrency=4):
        await trio.sleep(5)
        assert noop.store.idle
    assert noop.store.calls.count("withdraw_idle") == 1
    assert noop.database.state(job_id) == "completed"


# Bursts


async def test_a_burst_with_nothing_to_do_ends_at_once(noop: Stage) -> None:
    began = trio.current_time()
    report = await noop.burst()
    assert report.ended == {}
    assert trio.current_time() - began < 2


async def test_a_burst_does_everything_that_is_due_and_leaves_the_rest(noop: Stage) -> None:
    due = [noop.enqueue("noop", seconds=n % 7, queue=f"q{n % 3}", priority=n % 2) for n in range(50)]
    later = noop.enqueue("noop", delay=1000)
    report = await noop.burst(concurrency=7)
    assert report.ended == {"completed": 50}
    assert {noop.database.state(i) for i in due} == {"completed"}
    assert noop.database.state(later) == "scheduled"


@pytest.mark.parametrize("number", range(40))
async def test_a_burst_does_what_its_jobs_enqueue_whenever_they_do(number: int, stage: Stage) -> None:
    rng = random.Random(number)

    @stage.handlers.job
    async def chain(depth: int) -> None:
        for _ in range(rng.randrange(6)):
            await trio.lowlevel.checkpoint()
        await trio.sleep(rng.choice([0, 0, 0.5, 1.0, 1.5]))
        if depth:
            for _ in range(rng.randrange(1, 3)):
                stage.enqueue("chain", depth=depth - 1)
        for _ in range(rng.randrange(4)):
            await trio.lowlevel.checkpoint()

    stage.enqueue("chain", depth=6)
    await stage.burst(concurrency=3)
    assert {str(state) for state in stage.database.states()} == {"completed"}


async def test_a_burst_outlives_the_jobs_it_runs(noop: Stage) -> None:
    noop.enqueue("noop", seconds=500)
    began = trio.current_time()
    report = await noop.burst()
    assert report.ended == {"completed": 1}
    assert 500 <= trio.current_time() - began < 502


async def test_a_burst_waits_for_its_reports(noop: Stage) -> None:
    async def slow() -> None:
        await trio.sleep(5)

    noop.store.trouble["settle"] = slow
    job_id = noop.enqueue("noop")
    await noop.burst()
    assert noop.database.state(job_id) == "completed"


async def test_a_burst_without_a_database_waits_for_it(noop: Stage) -> None:
    job_id = noop.enqueue("noop")
    noop.store.trouble["sweep"] = unavailable
    async with trio.open_nursery() as nursery:
        nursery.start_soon(noop.burst)
        await trio.sleep(60)
        assert noop.database.jobs[job_id].attempt == 0
        noop.store.trouble.clear()
    assert noop.database.state(job_id) == "completed"


# Reports that meet trouble


async def test_reports_go_out_again_until_the_database_is_back(noop: Stage, events: Recorder) -> None:
    ids = [noop.enqueue("noop", seconds=1) for _ in range(3)]
    async with noop.working(grace=100):
        await trio.sleep(0.5)
        for operation in ("complete_and_claim", "settle", "sweep"):
            noop.store.trouble[operation] = unavailable
        await trio.sleep(8)
        assert noop.database.states() == ["running"] * 3
        noop.store.trouble.clear()
        await trio.sleep(10)
        assert {noop.database.state(i) for i in ids} == {"completed"}
    assert {e.loop for e in events.of(DatabaseLost)} >= {"claimer", "settler"}
    assert {e.loop for e in events.of(DatabaseFound)} >= {"claimer", "settler"}
    assert events.of(FenceLost) == []


@pytest.mark.parametrize("operation", ["complete_and_claim", "settle"])
async def test_a_lost_reply_to_a_completion_counts_once_the_database_says_so(
    operation: str, noop: Stage, events: Recorder
) -> None:
    ids = [noop.enqueue("noop", seconds=1) for _ in range(3)]
    lost = 0

    async def once() -> None:
        nonlocal lost
        if noop.store.settled and not lost:
            lost += 1
            await unavailable()

    async with noop.working(grace=100, concurrency=4) as worker:
        await trio.sleep(0.5)
        if operation == "settle":
            worker.quiet()
        else:
            for _ in range(10):
                noop.enqueue("noop", seconds=1)
        noop.store.silence[operation] = once
        await trio.sleep(60)
        stopped = trio.current_time()
    assert lost == 1
    # Nothing is still waited for.
    assert trio.current_time() - stopped < 1
    assert {noop.database.state(i) for i in ids} == {"completed"}
    assert events.of(FenceLost) == []


@pytest.mark.parametrize("number", range(2, 8))
async def test_completions_whose_claim_never_left_go_another_way(number: int, noop: Stage) -> None:
    async def once() -> None:
        if noop.store.calls.count("complete_and_claim") == number:
            await unavailable()

    ids = [noop.enqueue("noop") for _ in range(50)]
    noop.store.trouble["complete_and_claim"] = once
    began = trio.current_time()
    await noop.burst(concurrency=4)
    assert {noop.database.state(i) for i in ids} == {"completed"}
    assert trio.current_time() - began < 10


@pytest.mark.parametrize("kind", ["failed", "snoozed", "discarded"])
async def test_a_lost_reply_to_another_outcome_counts_too(kind: str, stage: Stage, events: Recorder) -> None:
    @stage.handlers.job
    async def wish() -> None:
        raise {"failed": ValueError(), "snoozed": Snooze(500), "discarded": Discard()}[kind]

    lost = 0

    async def once() -> None:
        nonlocal lost
        lost += 1
        if lost == 1:
            await unavailable()

    stage.store.silence["settle"] = once
    job = await stage.ended("wish")
    assert lost == 2
    assert [outcome for _, _, outcome in job.history] == [kind]
    assert events.of(FenceLost) == []


async def test_a_lost_reply_to_a_claim_leaves_the_job_to_the_watchdog(noop: Stage, events: Recorder) -> None:
    job_id = noop.enqueue("noop")
    lost = 0

    async def once() -> None:
        nonlocal lost
        lost += 1
        if lost == 1:
            await unavailable()

    noop.store.silence["complete_and_claim"] = once
    async with noop.working():
        began = trio.current_time()
        await trio.sleep(60)
    job = noop.database.jobs[job_id]
    assert [outcome for _, _, outcome in job.history] == ["rescued", "completed"]
    # Lease 30, watchdog 5.
    assert events.when(JobsRescued)[0] - began <= 36


async def test_a_locked_row_delays_its_own_report_only(noop: Stage) -> None:
    locked, free = noop.enqueue("noop"), noop.enqueue("noop")
    async with noop.working(grace=100):
        with noop.database.lock(free):
            pass
        noop.database.locked.add(locked)
        await trio.sleep(1)
        assert noop.database.state(free) == "completed"
        noop.database.locked.clear()
        await trio.sleep(3)
        assert noop.database.state(locked) == "completed"


async def test_a_report_of_a_locked_row_is_sent_again_without_haste(noop: Stage) -> None:
    job_id = noop.enqueue("noop", seconds=1)
    async with noop.working(grace=100) as worker:
        await trio.sleep(0.5)
        worker.quiet()
        with noop.database.lock(job_id):
            await trio.sleep(20)
            assert noop.database.state(job_id) == "running"
            assert 20 <= noop.store.calls.count("settle") <= 60
    assert noop.database.state(job_id) == "completed"


async def test_a_stuck_report_does_not_hold_up_the_others(noop: Stage) -> None:
    stuck = noop.enqueue("noop")
    noop.database.locked.add(stuck)
    noop.database.locked.clear()
    async with noop.working(grace=100):
        await trio.sleep(0.1)
        others = [noop.enqueue("noop", seconds=0.1) for _ in range(100)]
        noop.database.locked.add(others[0])
        await trio.sleep(0.05)
        await trio.sleep(10)
        states = [noop.database.state(i) for i in others[1:]]
        noop.database.locked.clear()
    assert set(states) == {"completed"}


async def test_while_64_mib_of_results_wait_to_be_written_nothing_is_claimed(stage: Stage) -> None:
    gate = trio.Event()
    started = 0

    @stage.handlers.job
    async def large() -> str:
        nonlocal started
        started += 1
        return "x" * (1024 * 1024 - 2)

    ids = [stage.enqueue("large") for _ in range(100)]
    stage.store.trouble["settle"] = gate.wait
    async with stage.working(concurrency=10, grace=600):
        await trio.sleep(60)
        # Those that ran when the limit was passed end too.
        assert 64 < started <= 64 + 10
        await trio.sleep(60)
        assert 64 < started <= 64 + 10
        gate.set()
        await trio.sleep(60)
        assert [stage.database.state(i) for i in ids] == ["completed"] * 100


async def test_reports_travel_with_the_next_claim_while_there_is_work(noop: Stage) -> None:
    travelled = 0
    exchange = noop.store.complete_and_claim

    async def spy(limit: int, slots: Sequence[ClaimCursor], completed: Sequence[Outcome] = ()) -> ClaimResult:
        nonlocal travelled
        travelled += len(completed)
        return await exchange(limit, slots, completed)

    noop.store.complete_and_claim = spy  # type: ignore[method-assign]
    for _ in range(400):
        noop.enqueue("noop")
    await noop.burst(concurrency=20)
    assert travelled > 300


async def test_a_burst_of_two_workers_shares_the_work(noop: Stage) -> None:
    for _ in range(100):
        noop.enqueue("noop", seconds=1)
    stores = [MemoryStore(noop.database), MemoryStore(noop.database)]
    async with trio.open_nursery() as nursery:
        for store in stores:
            nursery.start_soon(noop.worker(store, burst=True, concurrency=10).run)
    counts = [len(store.settled) for store in stores]
    assert sum(counts) == 100
    assert min(counts) >= 30


# The watchdog


async def test_the_watchdog_rescues_and_the_job_starts_again(noop: Stage, events: Recorder) -> None:
    job_id = noop.enqueue("noop")
    dead = MemoryStore(noop.database)
    await dead.open_session()
    await dead.complete_and_claim(1, [ClaimCursor("default", 0)])
    noop.enqueue("noop", delay=0)
    began = trio.current_time()
    async with noop.working(watchdog=5, poll=1000):
        await trio.sleep(60)
    job = noop.database.jobs[job_id]
    assert [outcome for _, _, outcome in job.history] == ["rescued", "completed"]
    assert events.of(JobsRescued) == [JobsRescued(1, 0)]
    assert events.when(JobsRescued)[0] - began <= 30 + 5.1
    assert events.when(JobStarted)[-1] - events.when(JobsRescued)[0] < 0.2


async def test_the_watchdog_survives_an_outage(noop: Stage, events: Recorder) -> None:
    noop.store.trouble["rescue"] = unavailable
    async with noop.working():
        await trio.sleep(60)
        noop.store.trouble.clear()
        await trio.sleep(60)
    loops = [e.loop for e in events.of(DatabaseLost)], [e.loop for e in events.of(DatabaseFound)]
    assert loops == (["watchdog"], ["watchdog"])


async def test_the_watchdog_maintains_the_archive_now_and_every_hour(noop: Stage) -> None:
    async with noop.working(poll=500, watchdog=100, heartbeat=1000, lease=3000):
        await trio.sleep(10)
        assert noop.store.calls.count("maintain") == 1
        # Every 54 to 60 minutes, at the next tick.
        await trio.sleep(3.2 * 3600)
    assert noop.store.calls.count("maintain") == 4


async def test_maintenance_that_has_more_to_do_goes_on_with_the_next_tick(noop: Stage) -> None:
    noop.database.upkeep = 3
    async with noop.working(poll=500, watchdog=100, heartbeat=1000, lease=3000):
        await trio.sleep(350)
        assert noop.store.calls.count("maintain") == 4
        await trio.sleep(1000)
    assert noop.store.calls.count("maintain") == 4


async def test_one_slow_sweep_does_not_keep_jobs_in_new_slots_waiting_for_long(noop: Stage) -> None:
    # What took long may have been the network: at 20 times its cost, 4 s of it kept the next sweep away for 80 s.
    async def slow() -> None:
        del noop.store.trouble["sweep"]
        await trio.sleep(4)

    noop.enqueue("noop")
    noop.store.trouble["sweep"] = slow
    async with noop.working():
        await trio.sleep(5)
        late = noop.enqueue("noop", queue="new")
        await trio.sleep(6)
        assert noop.database.state(late) == "completed"


async def test_one_slow_look_does_not_keep_batches_unfinished_for_long(noop: Stage) -> None:
    async def slow() -> None:
        del noop.store.trouble["finish_batches"]
        await trio.sleep(4)

    job_id = noop.enqueue("noop", seconds=6)
    batch = noop.database.batches[1] = MemoryBatch([job_id])
    noop.store.trouble["finish_batches"] = slow
    async with noop.working():
        await trio.sleep(4 + 5 + 0.5)
        assert batch.finished


async def test_a_dear_tick_makes_the_watchdog_rarer(noop: Stage) -> None:
    async def dear() -> None:
        await trio.sleep(2)

    noop.store.trouble["rescue"] = dear
    async with noop.working(watchdog=10):
        await trio.sleep(420)
    assert noop.store.calls.count("rescue") <= 11


async def test_one_slow_answer_does_not_keep_the_watchdog_away_for_long(noop: Stage) -> None:
    # What took long may have been the network: at 20 times its cost, 2 s of it were a pause of 40 s.
    async def slow() -> None:
        del noop.store.trouble["rescue"]
        await trio.sleep(2)

    noop.store.trouble["rescue"] = slow
    async with noop.working(watchdog=1):
        await trio.sleep(2 + 6 + 0.5)
        assert noop.store.calls.count("rescue") == 2
