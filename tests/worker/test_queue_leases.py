"""Queues with leases of their own: each job is beaten for, given up and rescued by the terms of its queue."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import ConfigurationError, Handlers, Job
from pulse_trio.handlers import QueueLease
from pulse_trio.observe import LeaseUnproven
from pulse_trio.store import ClaimCursor
from pulse_trio.testing.memory import MemoryStore, unavailable

if TYPE_CHECKING:
    from pulse_trio.jobs import Claim
    from support.stage import Recorder, Stage

# proven for: 9 - 2.91 (what two beats leave), 30 - 6, 90 - 6 seconds.
PROVEN = {"quick": 6.09, "default": 24.0, "slow": 84.0}


class Log:
    """When handlers began, and when and why they were cancelled, by queue."""

    def __init__(self) -> None:
        self.began: dict[str, list[float]] = {}
        self.cancelled: dict[str, tuple[float, str | None]] = {}


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def queues(stage: Stage, log: Log) -> Stage:
    """A stage with a handler `sleeper(seconds)`, a queue `quick` and a queue `slow`."""
    stage.handlers.queue("quick", lease=9)
    stage.handlers.queue("slow", lease=timedelta(seconds=90), heartbeat=20)

    @stage.handlers.job
    async def sleeper(job: Job, seconds: float) -> None:
        log.began.setdefault(job.queue, []).append(trio.current_time())
        try:
            await trio.sleep(seconds)
        except trio.Cancelled:
            log.cancelled[job.queue] = (trio.current_time(), job.cancel_reason)
            raise

    return stage


def enqueue_in_each(stage: Stage, seconds: float = 1000) -> dict[int, str]:
    """Their queues by the ids of new jobs."""
    return {stage.enqueue("sleeper", queue=queue, seconds=seconds): queue for queue in PROVEN}


def beats_of(stage: Stage, began: float) -> dict[str, list[float]]:
    """When each queue's jobs were beaten for."""
    found: dict[str, list[float]] = {}
    for time, claims in stage.store.sent_beats:
        for claim in claims:
            found.setdefault(claim.queue, []).append(time - began)
    return found


# Beats


async def test_each_queues_jobs_are_beaten_for_at_its_own_interval(queues: Stage) -> None:
    enqueue_in_each(queues, 41)
    began = trio.current_time()
    await queues.burst()
    beats = beats_of(queues, began)
    assert beats["quick"] == pytest.approx([3.0 * n for n in range(1, 14)], abs=0.4)
    assert beats["default"] == pytest.approx([10, 20, 30, 40], abs=0.6)
    assert beats["slow"] == pytest.approx([20, 40], abs=1.1)


async def test_jobs_of_several_queues_that_are_due_together_are_in_one_statement(queues: Stage) -> None:
    for _ in range(20):
        enqueue_in_each(queues, 29.5)
    await queues.burst()
    sizes = [len(claims) for _, claims in queues.store.sent_beats]
    # At 3, 6, ... 27: twenty each; with those of the default queue at 10 and 20, and of the slow one at 20.
    assert len(sizes) <= 9 + 2
    assert sum(sizes) == 20 * (9 + 2 + 1)


async def test_a_job_with_a_shorter_heartbeat_is_beaten_for_in_time_when_longer_ones_are_waited_for(
    queues: Stage,
) -> None:
    async with queues.working():
        began = trio.current_time()
        queues.enqueue("sleeper", queue="slow", seconds=19)
        await trio.sleep(2)
        queues.enqueue("sleeper", queue="quick", seconds=8)
        await trio.sleep(17)
    assert beats_of(queues, began) == {"quick": pytest.approx([5, 8], abs=0.1)}


async def test_of_more_than_a_statement_holds_the_shortest_leases_are_renewed_first(queues: Stage) -> None:
    for _ in range(1500):
        queues.enqueue("sleeper", queue="slow", seconds=26)
    async with queues.working(concurrency=4000):
        await trio.sleep(16)
        for _ in range(10):
            queues.enqueue("sleeper", queue="quick", seconds=8)
        # At 19 the quick ones are due, and the slow ones, due at 20, may come along.
        await trio.sleep(4.5)
        first = next(claims for _, claims in queues.store.sent_beats if len(claims) == 1000)
        assert [claim.queue for claim in first].count("quick") == 10


# The local deadline


async def test_without_beats_each_queues_jobs_are_cancelled_before_their_own_lease_ends(
    queues: Stage, log: Log, events: Recorder
) -> None:
    jobs = enqueue_in_each(queues)
    async with queues.working() as worker:
        await trio.sleep(1)
        worker.quiet()
        queues.store.trouble["beat"] = unavailable
        await trio.sleep(100)
    for queue, proven in PROVEN.items():
        assert log.cancelled[queue] == (pytest.approx(log.began[queue][0] + proven, abs=0.1), "lease-unproven")
    assert [jobs[event.job_id] for event in events.of(LeaseUnproven)] == ["quick", "default", "slow"]


@pytest.mark.parametrize("first", ["quick", "slow"])
async def test_a_nursery_that_another_queues_job_left_has_not_its_deadline(first: str, queues: Stage, log: Log) -> None:
    second = {"quick": "slow", "slow": "quick"}[first]
    queues.enqueue("sleeper", queue=first, priority=1, seconds=0)
    queues.enqueue("sleeper", queue=second, seconds=1000)
    async with queues.working(concurrency=1) as worker:
        await trio.sleep(1)
        worker.quiet()
        queues.store.trouble["beat"] = unavailable
        await trio.sleep(100)
    assert log.cancelled[second][0] - log.began[second][0] == pytest.approx(PROVEN[second], abs=0.1)


async def test_an_interrupted_database_is_asked_again_in_time_for_the_shortest_lease_held(
    queues: Stage, log: Log
) -> None:
    enqueue_in_each(queues, 30)
    async with queues.working() as worker:
        await trio.sleep(1)
        worker.quiet()
        queues.store.trouble["beat"] = unavailable
        await trio.sleep_until(log.began["quick"][0] + 5.5)
        queues.store.trouble.clear()
        await trio.sleep(30)
    assert log.cancelled == {}


# The rescue


async def hold(stage: Stage) -> None:
    """A worker claims a job of each queue, and is gone."""
    enqueue_in_each(stage, 0)
    dead = MemoryStore(stage.database)
    dead.leases = {queue: its.lease for queue, its in stage.handlers.queue_leases.items()}
    await dead.open_session()
    assert len((await dead.complete_and_claim(9, [ClaimCursor(queue, 0) for queue in PROVEN])).claims) == 3


async def test_a_vanished_workers_jobs_are_rescued_when_the_lease_of_their_queue_is_over(
    queues: Stage, log: Log
) -> None:
    await hold(queues)
    began = trio.current_time()
    async with queues.working():
        await trio.sleep(110)
    waited = {queue: times[0] - began for queue, times in log.began.items()}
    # The watchdog looks every half of the shortest lease: every 4.5 s instead of 5.
    for queue, lease in {"quick": 9, "default": 30, "slow": 90}.items():
        assert lease <= waited[queue] <= lease + 4.6, queue


@pytest.mark.parametrize(("lease", "tick"), [(1.0, 1.0), (4.0, 2.0), (60.0, 5.0)])
async def test_the_watchdog_looks_often_enough_for_the_shortest_lease_and_not_more_than_once_a_second(
    lease: float, tick: float, stage: Stage
) -> None:
    stage.handlers.queue("own", lease=lease)
    async with stage.working():
        await trio.sleep(20.5)
        looks = stage.store.calls.count("rescue")
    assert looks == pytest.approx(20 / tick + 1, abs=1)


async def test_a_queue_that_the_worker_does_not_claim_from_changes_nothing(stage: Stage) -> None:
    stage.handlers.queue("own", lease=1)
    async with stage.working(queues=("default",)) as worker:
        await trio.sleep(20.5)
        assert worker.leases == (30, 30)
        assert stage.store.calls.count("rescue") == pytest.approx(5, abs=1)


# What others are told


async def test_a_supervisor_is_told_of_a_short_lease_before_the_job_begins(queues: Stage, log: Log) -> None:
    told: list[tuple[float, bool]] = []
    worker = queues.worker(on_lease=lambda lease: told.append((lease, "quick" in log.began)))
    assert worker.leases == (9, 90)
    assert worker.shortest_held == 30
    async with trio.open_nursery() as nursery:
        await nursery.start(worker.run)
        queues.enqueue("sleeper", queue="quick", seconds=5)
        await trio.sleep(2)
        assert (told[0], worker.shortest_held) == ((9, False), 9)
        await trio.sleep(5)
        assert worker.shortest_held == 30
        queues.enqueue("sleeper", queue="slow", seconds=5)
        await trio.sleep(2)
        assert worker.shortest_held == 90
        worker.stop()


class Orders:
    """What a quarantine process is told to run: one job."""

    session = 4711
    came = True

    def __init__(self, claim: Claim, sent: float, lease: float) -> None:
        self._orders = [(claim, sent, lease)]
        self.finished: list[int] = []

    async def next(self) -> Any:
        await trio.lowlevel.checkpoint()
        if not self._orders:
            await trio.sleep_forever()
        return self._orders.pop()

    def taken(self, claim: Claim) -> None:
        pass

    def ended(self, claims: list[Claim]) -> None:
        self.finished += [claim.id for claim in claims]

    def last_job_ended(self) -> None:
        pass


async def test_a_quarantine_process_believes_no_longer_lease_than_was_written(queues: Stage, log: Log) -> None:
    """Handlers were deployed between the claim and the start of the process: the queue's lease was 40 s, and is 90 s."""
    job_id = queues.enqueue("sleeper", queue="slow", seconds=1000)
    sent = trio.current_time()
    queues.store.leases = {"slow": 40.0}
    (claim,) = (await queues.store.complete_and_claim(1, [ClaimCursor("slow", 0)])).claims
    orders = Orders(claim, sent, 40.0)
    worker = queues.worker(orders=orders)
    async with trio.open_nursery() as nursery:
        await nursery.start(worker.run)
        queues.store.trouble["beat"] = unavailable
        await trio.sleep(60)
        assert log.cancelled["slow"] == (pytest.approx(sent + 40 - 6, abs=0.1), "lease-unproven")
        assert orders.finished == [job_id]
        worker.stop()


# What may be declared


def test_a_registry_holds_the_leases_of_its_queues_and_takes_in_anothers() -> None:
    first, second = Handlers(), Handlers()
    first.queue("video", lease=600)
    first.queue("video", limit=3)
    second.queue("pay", lease=timedelta(seconds=4), heartbeat=timedelta(seconds=2), retention=timedelta(days=1))
    second.queue("video", lease=600.0)
    first.include(second)
    assert first.queue_leases == {"video": QueueLease(600, 200), "pay": QueueLease(4, 2)}
    assert first.queues == ["pay", "video"]
    # A lease alone is no limit: nothing of it is written to the database.
    assert {(limits.queue, limits.limit) for limits in first.queue_limits} == {("video", 3), ("pay", None)}
    with pytest.raises(ConfigurationError, match="'video' is given two different leases"):
        first.queue("video", lease=60)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"lease": 0}, "lease must be above 0"),
        ({"lease": -1.0}, "lease must be above 0"),
        ({"lease": float("nan")}, "lease must be above 0"),
        ({"lease": float("inf")}, "at most a thousand years"),
        ({"lease": 30, "heartbeat": 0}, "heartbeat must be above 0"),
        ({"lease": 30, "heartbeat": 16}, r"heartbeat must be at most half of the lease \(30 s\)"),
        ({"lease": "30"}, "lease must be seconds or a timedelta"),
        ({"lease": True}, "lease must be seconds or a timedelta"),
        ({"heartbeat": 5}, "give lease too"),
    ],
)
def test_a_lease_that_cannot_work_is_refused(given: dict[str, Any], said: str) -> None:
    handlers = Handlers()
    with pytest.raises(ConfigurationError, match=f"Queue 'video': .*{said}"):
        handlers.queue("video", **given)
    assert handlers.queues == []


async def test_a_heartbeat_above_a_third_of_a_queues_lease_is_warned_of(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.handlers.queue("video", lease=60, heartbeat=30)
    stage.handlers.queue("mail", lease=60, heartbeat=20)
    await stage.burst()
    said = [record.getMessage() for record in caplog.records if "heartbeat" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("heartbeat of the queue video is 30 s, above a third of the lease (60 s): one beat")
