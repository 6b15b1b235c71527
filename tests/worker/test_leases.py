"""Heartbeats, fences and deadlines: a job runs only while its lease is proven."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from pulse_trio import Fixed, Job, Worker
from pulse_trio.observe import CleanupCut, DatabaseFound, DatabaseLost, FenceLost, JobEnded, LeaseUnproven
from pulse_trio.testing.memory import MemoryStore, unavailable

if TYPE_CHECKING:
    from support.stage import Recorder, Stage

# Defaults: lease 30, heartbeat 10, margin 6. A lease is proven for 24 s from the sending of a claim or beat.
PROVEN = 24.0


class Log:
    """What handlers saw, and when."""

    def __init__(self) -> None:
        self.entries: list[tuple[float, Any]] = []

    def __call__(self, entry: Any) -> None:
        self.entries.append((trio.current_time(), entry))

    @property
    def what(self) -> list[Any]:
        return [entry for _, entry in self.entries]

    def at(self, entry: Any) -> float:
        """When it came for the first time."""
        return next(time for time, e in self.entries if e == entry)


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def sleeper(stage: Stage, log: Log) -> Stage:
    """A stage with a handler `sleeper(seconds)` that logs its start, its end and why it was cancelled."""

    @stage.handlers.job
    async def sleeper(job: Job, seconds: float) -> None:
        log("start")
        try:
            await trio.sleep(seconds)
        except trio.Cancelled:
            log(job.cancel_reason)
            raise
        log("end")

    return stage


def beating_tasks() -> list[str]:
    """The heartbeat tasks that live now."""
    found: list[str] = []

    def walk(task: trio.lowlevel.Task) -> None:
        if task.name == "heartbeat":
            found.append(task.name)
        for nursery in task.child_nurseries:
            for child in nursery.child_tasks:
                walk(child)

    root = trio.lowlevel.current_root_task()
    assert root is not None
    walk(root)
    return found


# Beats


async def test_the_first_beat_is_due_one_interval_after_the_claim_and_then_every_interval(sleeper: Stage) -> None:
    sleeper.enqueue("sleeper", seconds=35)
    began = trio.current_time()
    await sleeper.burst()
    assert [time - began for time, _ in sleeper.store.sent_beats] == pytest.approx([10, 20, 30], abs=0.1)


async def test_the_heartbeat_joins_the_jobs_nursery_at_the_first_beat_and_leaves_at_its_end(sleeper: Stage) -> None:
    sleeper.enqueue("sleeper", seconds=25)
    async with sleeper.working():
        await trio.sleep(9)
        assert beating_tasks() == []
        await trio.sleep(2)
        assert beating_tasks() == ["heartbeat"]
        await trio.sleep(10)
        assert beating_tasks() == ["heartbeat"]
        await trio.sleep(5)
        assert beating_tasks() == []
    assert sleeper.outcomes() == ["completed"]


async def test_short_jobs_are_never_in_a_beat(sleeper: Stage) -> None:
    for _ in range(20):
        sleeper.enqueue("sleeper", seconds=9)
    await sleeper.burst(concurrency=3)
    assert sleeper.store.sent_beats == []
    assert len(sleeper.outcomes()) == 20


async def test_jobs_that_are_due_together_beat_together(sleeper: Stage) -> None:
    for _ in range(50):
        sleeper.enqueue("sleeper", seconds=25)
    await sleeper.burst()
    assert [len(claims) for _, claims in sleeper.store.sent_beats] == [50, 50]


async def test_beats_keep_a_long_job_for_ever(sleeper: Stage, log: Log) -> None:
    sleeper.enqueue("sleeper", seconds=1000)
    rival = sleeper.worker(MemoryStore(sleeper.database))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rival.run)
        await sleeper.burst()
        rival.stop()
    assert log.what == ["start", "end"]
    assert sleeper.outcomes() == ["completed"]


async def test_a_deadline_moves_on_with_every_beat(stage: Stage) -> None:
    left: list[float] = []

    @stage.handlers.job
    async def look(job: Job) -> None:
        for _ in range(5):
            left.append(job.deadline - trio.current_time())
            await trio.sleep(4)

    stage.enqueue("look")
    await stage.burst()
    assert left == pytest.approx([24, 20, 16, 22, 18], abs=0.1)


async def test_a_job_that_waits_for_its_report_keeps_its_lease(sleeper: Stage) -> None:
    sleeper.enqueue("sleeper", seconds=1)
    ready = trio.Event()
    sleeper.store.trouble["settle"] = ready.wait
    rival = sleeper.worker(MemoryStore(sleeper.database), watchdog=1.0)
    async with sleeper.working() as worker:
        await trio.sleep(0.5)
        worker.quiet()  # so that the report cannot travel with a claim
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rival.run)
            await trio.sleep(100)
            assert sleeper.database.states() == ["running"]
            assert len(sleeper.store.sent_beats) >= 9
            rival.stop()
        ready.set()
    assert sleeper.database.states() == ["completed"]


async def test_a_report_whose_lease_is_lost_is_beaten_for_no_more(sleeper: Stage) -> None:
    job_id = sleeper.enqueue("sleeper", seconds=1)
    ready = trio.Event()
    sleeper.store.trouble["settle"] = ready.wait
    async with sleeper.working() as worker:
        await trio.sleep(0.5)
        worker.quiet()
        sleeper.database.steal(job_id)
        await trio.sleep(100)
        assert len(sleeper.store.sent_beats) == 1
        ready.set()
    assert sleeper.store.settled == []


# The fence


async def test_zero_rows_on_a_beat_cancel_the_job_with_fence_lost(sleeper: Stage, log: Log, events: Recorder) -> None:
    job_id = sleeper.enqueue("sleeper", seconds=1000)
    async with sleeper.working():
        await trio.sleep(5)
        began = log.at("start")
        sleeper.database.steal(job_id)
        await trio.sleep(10)
        assert log.at("fence-lost") - began == pytest.approx(10, abs=0.1)
    assert events.of(FenceLost) == [FenceLost(job_id, "sleeper", 1, "heartbeat")]
    assert [e.outcome for e in events.of(JobEnded)] == ["lost"]
    # Nothing was reported: the new attempt is untouched.
    assert sleeper.store.settled == []
    assert sleeper.database.jobs[job_id].attempt == 2
    assert sleeper.database.state(job_id) == "running"


async def test_a_job_that_ended_before_the_loss_was_known_is_refused_and_says_so(
    sleeper: Stage, log: Log, events: Recorder
) -> None:
    job_id = sleeper.enqueue("sleeper", seconds=7)
    async with sleeper.working():
        await trio.sleep(5)
        sleeper.database.steal(job_id)
        await trio.sleep(5)
    assert log.what == ["start", "end"]
    assert events.of(FenceLost) == [FenceLost(job_id, "sleeper", 1, "report of completed")]
    assert sleeper.store.settled == []
    assert sleeper.database.jobs[job_id].attempt == 2


async def test_a_lost_job_that_goes_on_gets_its_report_refused(stage: Stage, events: Recorder) -> None:
    @stage.handlers.job
    async def stubborn() -> str:
        with trio.CancelScope(shield=True):
            await trio.sleep(14)  # it is lost at 10, and has ended before it counts as stuck
        return "too late"

    job_id = stage.enqueue("stubborn")
    async with stage.working():
        await trio.sleep(5)
        stage.database.steal(job_id)
        await trio.sleep(50)
    assert stage.store.settled == []
    assert stage.database.jobs[job_id].attempt == 2
    assert events.of(JobEnded)[0].outcome in ("lost", "completed")
    assert len(events.of(FenceLost)) == 1


async def test_the_same_workers_new_attempt_lives_when_its_old_one_is_lost(stage: Stage) -> None:
    ended: list[tuple[int, str | None]] = []

    @stage.handlers.job
    async def twice(job: Job) -> int:
        try:
            await trio.sleep(28 if job.attempt == 1 else 100)
        except trio.Cancelled:
            ended.append((job.attempt, job.cancel_reason))
            raise
        ended.append((job.attempt, None))
        return job.attempt

    job_id = stage.enqueue("twice")
    async with stage.working():
        await trio.sleep(2)
        # A supervisor took this worker for dead; the job comes back to the very same worker.
        handed = await MemoryStore(stage.database).rescue_sessions([stage.store.session])
        assert handed == (1, 0, ((job_id, "twice"),))
        await trio.sleep(120)
    assert ended == [(1, "fence-lost"), (2, None)]
    assert stage.database.jobs[job_id].result == "2"


async def test_children_are_cancelled_with_the_fence(stage: Stage, log: Log) -> None:
    @stage.handlers.job
    async def parent(job: Job) -> None:
        job.nursery.start_soon(child, job)

    async def child(job: Job) -> None:
        try:
            await trio.sleep_forever()
        finally:
            log(job.cancel_reason)

    job_id = stage.enqueue("parent")
    async with stage.working():
        await trio.sleep(5)
        stage.database.steal(job_id)
        await trio.sleep(10)
        assert log.what == ["fence-lost"]
    assert stage.store.settled == []


# The lease's deadline


async def test_without_beats_a_job_is_cancelled_before_its_lease_ends(
    sleeper: Stage, log: Log, events: Recorder
) -> None:
    job_id = sleeper.enqueue("sleeper", seconds=1000)
    async with sleeper.working():
        await trio.sleep(1)
        sleeper.store.trouble["beat"] = unavailable
        await trio.sleep(40)
        assert log.at("lease-unproven") - log.at("start") == pytest.approx(PROVEN, abs=0.1)
    assert events.of(LeaseUnproven)[0] == LeaseUnproven(job_id, "sleeper", 1)
    # It may still be ours: the fenced release gives it back sooner than the watchdog.
    assert sleeper.outcomes()[0] == "released"


@pytest.mark.parametrize("trouble", [unavailable, trio.sleep_forever])
async def test_the_deadline_counts_from_the_sending_of_the_last_accepted_beat(
    trouble: Any, sleeper: Stage, log: Log
) -> None:
    sleeper.enqueue("sleeper", seconds=1000)

    async def slow() -> None:
        await trio.sleep(3)

    async with sleeper.working():
        await trio.sleep(5)
        sleeper.store.trouble["beat"] = slow
        await trio.sleep(12)
        # Sent at 10, answered at 13.
        sleeper.store.trouble["beat"] = trouble
        await trio.sleep(30)
        assert log.at("lease-unproven") - log.at("start") == pytest.approx(10 + PROVEN, abs=0.1)


async def test_a_slow_claim_shortens_the_lease_by_its_own_time(sleeper: Stage, log: Log) -> None:
    async def slow() -> None:
        await trio.sleep(4)

    sleeper.store.silence["complete_and_claim"] = slow
    sleeper.enqueue("sleeper", seconds=1000)
    async with sleeper.working():
        sleeper.store.trouble["beat"] = unavailable
        await trio.sleep(40)
        assert log.at("lease-unproven") - log.at("start") == pytest.approx(PROVEN - 4, abs=0.1)


@pytest.mark.parametrize("late", [0.0, 0.5])
async def test_a_job_whose_lease_is_over_before_it_begins_is_not_begun(late: float, sleeper: Stage, log: Log) -> None:
    # The answer to its claim was read that late: the process was stopped, or another job of the batch held the loop.
    async def slow() -> None:
        del sleeper.store.silence["complete_and_claim"]
        await trio.sleep(PROVEN + late)

    sleeper.store.silence["complete_and_claim"] = slow
    job_id = sleeper.enqueue("sleeper", seconds=1)
    async with sleeper.working():
        await trio.sleep(PROVEN + late + 5)
        assert sleeper.events.of(LeaseUnproven)[0].job_id == job_id
        assert log.what == ["start", "end"]  # of the next attempt
    assert [how for _, _, how in sleeper.database.jobs[job_id].history] == ["released", "completed"]


@pytest.mark.parametrize("asks", [False, True], ids=["own shield", "job.cleanup"])
async def test_a_late_answer_does_not_save_a_handler_that_was_told_to_go(asks: bool, stage: Stage) -> None:
    @stage.handlers.job
    async def tidy(job: Job) -> None:
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            with job.cleanup() if asks else trio.CancelScope(shield=True):
                # The database is back while this tidies up: the lease is renewed, but the attempt is over.
                stage.store.trouble.clear()
                await trio.sleep(4)  # noqa: ASYNC102 -- shielded above
            raise

    job_id = stage.enqueue("tidy")
    async with stage.working() as worker:
        await trio.sleep(1)
        worker.quiet()
        stage.store.trouble["beat"] = unavailable
        await trio.sleep(40)
    assert stage.outcomes() == ["released"]
    assert stage.database.jobs[job_id].failures == 0


async def test_what_struck_first_stays_the_reason(stage: Stage) -> None:
    @stage.handlers.job
    async def tidy() -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(4)  # noqa: ASYNC102 -- shielded above

    stage.enqueue("tidy", timeout=5, max_attempts=1)
    async with stage.working() as worker:
        await trio.sleep(7)
        worker.stop_now()
    assert stage.outcomes() == ["timeout"]


async def test_an_outage_shorter_than_the_proof_is_survived(sleeper: Stage, log: Log, events: Recorder) -> None:
    sleeper.enqueue("sleeper", seconds=60)
    async with sleeper.working(grace=100):
        await trio.sleep(5)
        sleeper.store.trouble["beat"] = unavailable
        await trio.sleep(15)
        del sleeper.store.trouble["beat"]
        await trio.sleep(45)
    assert log.what == ["start", "end"]
    assert sleeper.outcomes() == ["completed"]
    assert [e.loop for e in events.of(DatabaseLost)] == ["heartbeats"]
    assert [e.loop for e in events.of(DatabaseFound)] == ["heartbeats"]


async def test_a_locked_row_is_asked_for_again_soon_and_not_taken_for_lost(sleeper: Stage, log: Log) -> None:
    job_id = sleeper.enqueue("sleeper", seconds=30)
    async with sleeper.working(grace=100):
        await trio.sleep(5)
        with sleeper.database.lock(job_id):
            await trio.sleep(12)
        await trio.sleep(20)
    assert log.what == ["start", "end"]
    times = [time - log.at("start") for time, _ in sleeper.store.sent_beats]
    assert times[:4] == pytest.approx([10, 12.5, 15, 17.5], abs=0.1)


async def test_a_row_that_stays_locked_costs_its_own_job_alone(sleeper: Stage, log: Log) -> None:
    locked, free = sleeper.enqueue("sleeper", seconds=100), sleeper.enqueue("sleeper", seconds=50)
    async with sleeper.working(grace=100) as worker:
        await trio.sleep(5)
        with sleeper.database.lock(locked):
            await trio.sleep(50)
        worker.stop()
    assert log.what == ["start", "start", "lease-unproven", "end"]
    assert sleeper.database.state(free) == "completed"
    assert sleeper.database.state(locked) == "available"


# Timeouts


async def test_a_timeout_cancels_fails_and_backs_off(sleeper: Stage, log: Log) -> None:
    job = await sleeper.ended("sleeper", seconds=1000, timeout=7)
    assert log.what == ["start", "timeout"]
    assert log.at("timeout") - log.at("start") == pytest.approx(7)
    assert sleeper.outcomes() == ["timeout"]
    assert (job.failures, job.error) == (1, "TimeoutError: ran longer than 7 s")


async def test_a_timeout_longer_than_the_lease_is_kept_by_beats(sleeper: Stage, log: Log) -> None:
    await sleeper.ended("sleeper", seconds=1000, timeout=123)
    assert log.at("timeout") - log.at("start") == pytest.approx(123)


async def test_a_timeout_on_the_last_attempt_is_dead(sleeper: Stage) -> None:
    job = await sleeper.ended("sleeper", seconds=1000, timeout=7, max_attempts=1)
    assert job.state == "dead"


@pytest.mark.parametrize("number", range(20))
async def test_a_timeout_that_falls_on_a_beat_ends_nothing_but_the_job(number: int, sleeper: Stage) -> None:
    # Trio runs what is due at one moment in random order.
    for _ in range(10):
        sleeper.enqueue("sleeper", seconds=1000, timeout=10, max_attempts=1)
    await sleeper.burst()
    assert sleeper.outcomes() == ["timeout"] * 10


async def test_the_timeout_is_named_even_if_the_handler_cleans_up_past_its_lease(stage: Stage, log: Log) -> None:
    @stage.handlers.job
    async def tidy(job: Job) -> None:
        try:
            await trio.sleep_forever()
        finally:
            log(job.cancel_reason)
            with job.cleanup():
                await trio.sleep(4)  # noqa: ASYNC102 -- job.cleanup() is the shield
            log(job.cancel_reason)

    await stage.ended("tidy", timeout=22)
    assert log.what == ["timeout", "timeout"]
    assert stage.outcomes() == ["timeout"]


# Cleaning up


async def test_cleanup_shields_for_its_time_and_the_lease_is_kept_meanwhile(stage: Stage, log: Log) -> None:
    @stage.handlers.job
    async def tidy(job: Job) -> None:
        began = trio.current_time()
        try:
            await trio.sleep_forever()
        finally:
            with job.cleanup():
                await trio.sleep(4.9)  # noqa: ASYNC102 -- job.cleanup() is the shield
                log("tidied")
            with job.cleanup():
                await trio.sleep(100)  # noqa: ASYNC102 -- job.cleanup() is the shield
                log("never")
            log(f"{trio.current_time() - began:g} s")

    job_id = stage.enqueue("tidy", timeout=8, max_attempts=1)
    async with stage.working():
        await trio.sleep(17)
        assert log.what == ["tidied", "13 s"]
        assert [claim.id for _, claims in stage.store.sent_beats for claim in claims] == [job_id]
        await trio.sleep(10)
    assert stage.outcomes() == ["timeout"]


async def test_a_setting_says_how_long_cleanup_may_take(stage: Stage) -> None:
    took: list[float] = []

    @stage.handlers.job
    async def tidy(job: Job) -> None:
        try:
            await trio.sleep_forever()
        finally:
            began = trio.current_time()
            with job.cleanup():
                await trio.sleep_forever()  # noqa: ASYNC102 -- job.cleanup() is the shield
            took.append(trio.current_time() - began)

    job_id = stage.enqueue("tidy", timeout=1, max_attempts=1)
    await stage.burst(cleanup=2.5)
    assert took == [2.5]
    (cut,) = stage.events.of(CleanupCut)
    assert (cut.job_id, cut.kind, cut.attempt, cut.seconds) == (job_id, "tidy", 1, 2.5)


async def test_a_handler_that_is_not_cancelled_is_not_hurried_in_its_cleanup(stage: Stage, log: Log) -> None:
    @stage.handlers.job
    async def tidy(job: Job) -> None:
        with job.cleanup():
            await trio.sleep(100)  # three leases long, each of them renewed
        log("tidied")

    stage.enqueue("tidy")
    await stage.burst(cleanup=2.5)
    assert (log.what, stage.outcomes(), stage.events.of(CleanupCut)) == (["tidied"], ["completed"], [])


@pytest.mark.parametrize("strikes", ["request", "timeout", "shutdown", "program", "own deadline", "own cancel"])
async def test_the_time_of_a_cleanup_begins_when_its_handler_is_cancelled(strikes: str, stage: Stage) -> None:
    cut: list[float] = []

    @stage.handlers.job
    async def tidy(job: Job) -> None:
        with trio.CancelScope(deadline=trio.current_time() + (20 if strikes == "own deadline" else 10_000)) as scope:
            if strikes == "own cancel":
                scope.cancel()
            with job.cleanup():
                await trio.sleep_forever()
            cut.append(trio.current_time())

    job_id = stage.enqueue("tidy", max_attempts=1, timeout=20 if strikes == "timeout" else 5_000)
    with trio.CancelScope() as program:
        async with stage.working(cleanup=2.5, grace=0.0) as worker:
            began = trio.current_time()
            await trio.sleep(20)
            match strikes:
                case "request":
                    stage.database.cancel(job_id)
                case "shutdown":
                    worker.stop()
                case "program":
                    program.cancel()
                case _:
                    pass
            with trio.CancelScope(shield=True):
                await trio.sleep(10)
    assert cut[0] - began == pytest.approx(2.5 if strikes == "own cancel" else 22.5, abs=0.2)


# Children


async def test_a_job_ends_when_its_last_child_has(stage: Stage, log: Log) -> None:
    @stage.handlers.job
    async def parent(job: Job) -> str:
        job.nursery.start_soon(child, 3)
        job.nursery.start_soon(child, 25)
        await job.nursery.start(started)
        log("returned")
        return "value"

    async def child(seconds: float) -> None:
        await trio.sleep(seconds)
        log(seconds)

    async def started(task_status: trio.TaskStatus[None]) -> None:
        await trio.sleep(1)
        task_status.started()
        await trio.sleep(1)
        log("started one")

    job_id = stage.enqueue("parent")
    async with stage.working(grace=100):
        await trio.sleep(20)
        assert stage.database.state(job_id) == "running"
        assert len(stage.store.sent_beats) == 1
    assert log.what == ["returned", "started one", 3, 25]
    assert stage.database.jobs[job_id].result == '"value"'


async def test_children_may_have_children(stage: Stage, log: Log) -> None:
    @stage.handlers.job
    async def parent(job: Job) -> None:
        job.nursery.start_soon(child, job, 3)

    async def child(job: Job, generations: int) -> None:
        await trio.sleep(6)
        if generations:
            job.nursery.start_soon(child, job, generations - 1)
        else:
            log("last")

    job = await stage.ended("parent")
    assert log.what == ["last"]
    assert job.state == "completed"


async def test_a_childs_failure_fails_the_job_and_cancels_the_rest(stage: Stage, log: Log) -> None:
    @stage.handlers.job
    async def parent(job: Job) -> None:
        job.nursery.start_soon(bad)
        try:
            await trio.sleep_forever()
        finally:
            log("cancelled")

    async def bad() -> None:
        await trio.sleep(12)
        raise ValueError("the child's")

    job = await stage.ended("parent")
    assert log.what == ["cancelled"]
    assert stage.outcomes() == ["failed"]
    assert job.error is not None
    assert "ValueError: the child's" in job.error


async def test_a_childs_failure_after_the_handler_returned_is_the_jobs(stage: Stage) -> None:
    @stage.handlers.job
    async def parent(job: Job) -> str:
        job.nursery.start_soon(bad)
        return "all well"

    async def bad() -> None:
        await trio.sleep(1)
        raise ValueError("not so")

    job = await stage.ended("parent")
    assert stage.outcomes() == ["failed"]
    assert job.result is None


async def test_a_handlers_failure_cancels_its_children(stage: Stage, log: Log) -> None:
    @stage.handlers.job
    async def parent(job: Job) -> None:
        job.nursery.start_soon(child)
        await trio.sleep(15)
        raise ValueError("mine")

    async def child() -> None:
        try:
            await trio.sleep_forever()
        finally:
            log("cancelled")

    job = await stage.ended("parent")
    assert log.what == ["cancelled"]
    assert job.error is not None
    assert job.error.startswith("ValueError: mine")


@pytest.mark.parametrize("seconds", [5, 15])
async def test_a_handler_that_cancels_its_own_nursery_fails_its_attempt(seconds: float, stage: Stage) -> None:
    @stage.handlers.job
    async def rash(job: Job) -> None:
        await trio.sleep(seconds)
        job.nursery.cancel_scope.cancel()
        await trio.sleep_forever()

    job = await stage.ended("rash")
    assert stage.outcomes() == ["failed"]
    assert job.error is not None
    assert "cancelled its own nursery" in job.error


@pytest.mark.parametrize(
    ("options", "outcome", "delay"),
    [
        ({"retry": Fixed(500)}, "failed", 500.0),
        ({"retry": {asyncio.CancelledError: Fixed(7)}}, "failed", 7.0),
        ({"retry": lambda _: None}, "discarded", 0.0),
        ({"retry_on": ValueError}, "discarded", 0.0),
        ({"discard_on": BaseException}, "discarded", 0.0),
    ],
    ids=["Fixed", "by-its-type", "none", "retry_on", "discard_on"],
)
async def test_the_retries_of_a_handler_decide_what_becomes_of_one_that_cancels_its_own_nursery(
    options: dict[str, Any], outcome: str, delay: float, stage: Stage
) -> None:
    """It was tried again after a random time, whatever they said."""

    @stage.handlers.job(**options)
    async def rash(job: Job) -> None:
        job.nursery.cancel_scope.cancel()
        await trio.sleep_forever()

    await stage.ended("rash")
    (found,) = stage.store.settled
    assert (found.kind, found.delay) == (outcome, delay)


async def test_a_job_whose_children_were_cut_short_is_not_complete(stage: Stage) -> None:
    @stage.handlers.job
    async def parent(job: Job) -> str:
        job.nursery.start_soon(trio.sleep_forever)
        return "value"

    job = await stage.ended("parent", timeout=5, max_attempts=1)
    assert stage.outcomes() == ["timeout"]
    assert job.result is None


async def test_a_child_that_cannot_be_started_does_not_keep_the_job(stage: Stage) -> None:
    @stage.handlers.job
    async def parent(job: Job) -> None:
        with pytest.raises(ValueError, match="no start"):
            await job.nursery.start(refuses)
        with trio.move_on_after(1):
            await job.nursery.start(never_starts)

    async def refuses(task_status: trio.TaskStatus[None]) -> None:
        raise ValueError("no start")

    async def never_starts(task_status: trio.TaskStatus[None]) -> None:
        await trio.sleep_forever()

    job = await stage.ended("parent")
    assert job.state == "completed"


async def test_a_nursery_of_a_job_that_has_ended_is_closed(stage: Stage) -> None:
    kept: list[Any] = []

    @stage.handlers.job
    async def leak(job: Job, use: bool) -> None:
        kept.append(job)
        if use:
            kept.append(job.nursery)

    for use in (False, True):
        await stage.ended("leak", use=use)
    unused, _, nursery = kept
    with pytest.raises(RuntimeError, match="only while the job runs"):
        _ = unused.nursery
    with pytest.raises(RuntimeError, match="only while the job runs"):
        nursery.start_soon(trio.sleep, 1)
    with pytest.raises(RuntimeError, match="only while the job runs"):
        await nursery.start(trio.sleep, 1)


async def test_the_failures_of_all_children_are_in_the_jobs_record(stage: Stage) -> None:
    @stage.handlers.job
    async def parent(job: Job) -> None:
        job.nursery.start_soon(bad, "one")
        job.nursery.start_soon(bad, "two")
        await trio.sleep(1)
        job.nursery.start_soon(worst)
        await trio.sleep_forever()

    async def worst() -> None:
        raise ValueError("the third's")

    async def bad(name: str) -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise KeyError(name)

    job = await stage.ended("parent", max_attempts=1)
    assert job.error is not None
    assert job.error.startswith("ExceptionGroup: ")
    for said in ("ValueError: the third's", "KeyError: 'one'", "KeyError: 'two'", "in bad"):
        assert said in job.error
    assert stage.outcomes() == ["failed"]


async def test_children_are_told_why_the_job_is_cancelled(stage: Stage, log: Log) -> None:
    @stage.handlers.job
    async def parent(job: Job) -> None:
        job.nursery.start_soon(child, job)

    async def child(job: Job) -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep(6)
        try:
            await trio.sleep_forever()
        finally:
            log(job.cancel_reason)

    await stage.ended("parent", timeout=5, max_attempts=1)
    assert log.what == ["timeout"]


async def test_a_scope_of_the_handlers_own_is_no_cancellation_of_the_job(stage: Stage, log: Log) -> None:
    @stage.handlers.job
    async def own(job: Job) -> str:
        with trio.move_on_after(1):
            try:
                await trio.sleep_forever()
            finally:
                log(job.cancel_reason)
                with job.cleanup():
                    await trio.sleep(1)  # noqa: ASYNC102 -- job.cleanup() is the shield
                    log(job.cancel_reason)
        with trio.CancelScope() as scope:
            scope.cancel()
            log(job.cancel_reason)
            await trio.lowlevel.checkpoint()
        return "well"

    job = await stage.ended("own")
    assert log.what == [None, None, None]
    assert job.state == "completed"


async def test_in_a_scope_of_its_own_a_handler_still_learns_of_the_jobs_cancellation(stage: Stage, log: Log) -> None:
    @stage.handlers.job
    async def own(job: Job) -> None:
        with trio.CancelScope(shield=True) as scope:
            scope.cancel()
            log(job.cancel_reason)
            await trio.lowlevel.checkpoint()
        with trio.CancelScope(shield=True):
            await trio.sleep(6)
            log(job.cancel_reason)

    await stage.ended("own", timeout=5, max_attempts=1)
    assert log.what == [None, "timeout"]


async def test_a_cancelled_program_is_told_to_handlers_at_once_shielded_or_not(stage: Stage, log: Log) -> None:
    @stage.handlers.job
    async def shielded(job: Job) -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep(2)
            log(job.cancel_reason)
        try:
            await trio.lowlevel.checkpoint()
        finally:
            log(job.cancel_reason)

    stage.enqueue("shielded")
    with trio.move_on_after(1):
        await stage.worker().run()
    assert log.what == ["shutdown", "shutdown"]
    assert stage.outcomes() == ["released"]


# Threads


async def test_a_thread_that_goes_on_keeps_slot_and_lease_and_its_late_result_counts(stage: Stage) -> None:
    began, release = threading.Event(), threading.Event()

    @stage.handlers.job(timeout=5)
    def stuck() -> str:
        began.set()
        release.wait(30)
        return "late"

    job_id = stage.enqueue("stuck", timeout=5)
    waiting = stage.enqueue("stuck")

    worker = stage.worker(concurrency=1)
    async with trio.open_nursery() as nursery:
        await nursery.start(worker.run)
        await has_begun(worker, began)
        await advance_until(lambda: len(stage.store.sent_beats) >= 3)
        assert worker.running == 1
        assert stage.database.state(job_id) == "running"
        assert stage.database.state(waiting) == "available"
        release.set()
        await advance_until(lambda: stage.database.state(waiting) == "completed")
        worker.stop()
    assert stage.database.jobs[job_id].result == '"late"'


async def test_a_threads_result_after_a_fence_loss_is_refused(stage: Stage, events: Recorder) -> None:
    began, release = threading.Event(), threading.Event()

    @stage.handlers.job
    def stuck() -> str:
        began.set()
        release.wait(30)
        return "late"

    job_id = stage.enqueue("stuck")
    worker = stage.worker(concurrency=1)
    async with trio.open_nursery() as nursery:
        await nursery.start(worker.run)
        await has_begun(worker, began)
        stage.database.steal(job_id)
        await advance_until(lambda: len(stage.store.sent_beats) >= 1)
        await advance_until(lambda: trio.current_time() > stage.store.sent_beats[0][0] + 20)
        # The slot is kept, though the job is no longer ours; nothing beats for it any more.
        assert worker.running == 1
        assert len(stage.store.sent_beats) == 1
        release.set()
        await advance_until(lambda: worker.running == 0)
        worker.stop()
    assert stage.store.settled == []
    assert len(events.of(FenceLost)) == 1
    assert stage.database.jobs[job_id].attempt == 2


async def has_begun(worker: Worker, began: threading.Event) -> None:
    """Virtual time outruns a thread, and a job that is cancelled before its thread has begun just ends."""
    await advance_until(lambda: worker.running == 1)
    limit = time.monotonic() + 30
    while not began.is_set():
        assert time.monotonic() < limit
        # Virtual time stands still meanwhile, and the thread may ask the loop for something.
        await wait_all_tasks_blocked()


async def advance_until(condition: Any) -> None:
    """Lets time pass in small steps, whatever threads do."""
    clock = trio.lowlevel.current_clock()
    assert isinstance(clock, trio.testing.MockClock)
    for _ in range(100_000):
        if condition():
            return
        await wait_all_tasks_blocked()
        clock.jump(0.1)
    raise AssertionError("it never came to that")


async def test_a_renewal_in_the_very_turn_in_which_the_deadline_passes_comes_too_late(
    sleeper: Stage, log: Log, events: Recorder
) -> None:
    clock = trio.lowlevel.current_clock()
    assert isinstance(clock, trio.testing.MockClock)

    async def at_the_last_moment() -> None:
        await trio.sleep_until(log.at("start") + PROVEN - 0.1)
        # Trio has not looked at its deadlines since.
        clock.jump(0.2)

    job_id = sleeper.enqueue("sleeper", seconds=100)
    sleeper.store.silence["beat"] = at_the_last_moment
    async with sleeper.working():
        await trio.sleep(PROVEN + 1)
        del sleeper.store.silence["beat"]
        assert log.what[:2] == ["start", "lease-unproven"]
        await trio.sleep(10)
    assert sleeper.database.jobs[job_id].attempt == 2
    assert [e.job_id for e in events.of(LeaseUnproven)] == [job_id]


async def test_a_thread_may_ask_why_it_should_stop(stage: Stage) -> None:
    began = threading.Event()

    @stage.handlers.job
    def polls(job: Job) -> str:
        assert job.cancel_reason is None
        began.set()
        while job.cancel_reason is None:
            pass
        return str(job.cancel_reason)

    job_id = stage.enqueue("polls", timeout=5)
    worker = stage.worker()
    async with trio.open_nursery() as nursery:
        await nursery.start(worker.run)
        await has_begun(worker, began)
        await advance_until(lambda: stage.database.state(job_id) == "completed")
        worker.stop()
    assert stage.database.jobs[job_id].result == '"timeout"'


async def test_settings_reach_the_leases(sleeper: Stage, log: Log) -> None:
    sleeper.enqueue("sleeper", seconds=1000)
    worker = Worker(
        sleeper.handlers, "", store=sleeper.store, lease=9.0, heartbeat=3.0, cleanup=1.0  # type: ignore[arg-type]
    )  # fmt: skip
    sleeper.store.lease = 9.0
    async with trio.open_nursery() as nursery:
        await nursery.start(worker.run)
        await trio.sleep(4)
        sleeper.store.trouble["beat"] = unavailable
        await trio.sleep(10)
        worker.stop()
    # Margin 2: 3 + 9 - 2.
    assert log.at("lease-unproven") - log.at("start") == pytest.approx(10, abs=0.1)
