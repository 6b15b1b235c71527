"""What handlers say of their progress: handed over at once, written at most once a second, the newest only."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import assert_checkpoints

from pulse_trio import Job  # noqa: TC001 -- handlers' annotations are read
from pulse_trio.observe import DatabaseFound, DatabaseLost
from pulse_trio.testing.memory import unavailable
from pulse_trio.worker.holding import progress

if TYPE_CHECKING:
    from support.stage import Recorder, Stage


async def test_the_newest_value_is_written_once_a_second_and_the_last_one_too(stage: Stage) -> None:
    @stage.handlers.job
    async def work(job: Job) -> None:
        for step in range(1, 26):
            await job.progress(step / 100, f"step {step}")
            await trio.sleep(0.1)
        await trio.sleep(10)

    job = stage.database.jobs[stage.enqueue("work")]
    async with stage.working():
        await trio.sleep(9)
        assert job.progress == (0.25, "step 25")
    times = [time for time, _ in stage.store.written_progress]
    assert len(times) == 4
    assert all(later - earlier >= 1 for earlier, later in pairwise(times))
    assert stage.store.written_progress[0][1] == {job.id: 0.01}
    assert stage.store.written_progress[-1][1] == {job.id: 0.25}


async def test_all_jobs_share_one_statement(stage: Stage) -> None:
    @stage.handlers.job
    async def work(job: Job) -> None:
        await trio.sleep(1)
        await job.progress(0.5)
        await trio.sleep(5)

    ids = [stage.enqueue("work") for _ in range(20)]
    async with stage.working():
        await trio.sleep(3)
    assert [set(said) for _, said in stage.store.written_progress] == [set(ids)]


async def test_a_handler_does_not_wait_for_the_database(stage: Stage) -> None:
    took: list[float] = []
    stage.store.trouble["write_progress"] = trio.sleep_forever

    @stage.handlers.job
    async def work(job: Job) -> None:
        began = trio.current_time()
        for step in range(100):
            await job.progress(step / 100)
        took.append(trio.current_time() - began)

    assert (await stage.ended("work")).state == "completed"
    assert took == [0]


async def test_saying_it_is_a_checkpoint(stage: Stage) -> None:
    @stage.handlers.job
    async def work(job: Job) -> None:
        with assert_checkpoints():
            await job.progress(0.5)

    assert (await stage.ended("work")).state == "completed"


async def test_a_thread_can_say_it(stage: Stage) -> None:
    written, seen = trio.Event(), trio.Event()

    async def note() -> None:
        written.set()

    stage.store.silence["write_progress"] = note

    @stage.handlers.job
    def work(job: Job) -> None:
        trio.from_thread.run(job.progress, 0.5, "from a thread")
        trio.from_thread.run(seen.wait)

    job = stage.database.jobs[stage.enqueue("work")]
    async with stage.working():
        await written.wait()
        assert job.progress == (0.5, "from a thread")
        seen.set()


@pytest.mark.parametrize("wrong", [-0.1, 1.1, float("nan"), float("inf")])
async def test_what_is_no_fraction_fails_the_job(stage: Stage, wrong: float) -> None:
    @stage.handlers.job
    async def work(job: Job) -> None:
        await job.progress(wrong)

    job = await stage.ended("work", max_attempts=1)
    assert job.state == "dead"
    assert f"Progress is a fraction from 0 to 1, got {wrong}" in (job.error or "")
    assert stage.store.written_progress == []


async def test_a_message_is_cut_and_cleaned(stage: Stage) -> None:
    @stage.handlers.job
    async def work(job: Job) -> None:
        await job.progress(1, "a\x00\ud800b" + "x" * 1000)
        await trio.sleep(2)

    job = stage.database.jobs[stage.enqueue("work")]
    async with stage.working():
        await trio.sleep(1)
        assert job.progress == (1.0, "a\ufffd\ufffdb" + "x" * 496)


async def test_what_cannot_be_written_for_long_is_forgotten(monkeypatch: pytest.MonkeyPatch, stage: Stage) -> None:
    monkeypatch.setattr(progress, "_MOST", 3)
    monkeypatch.setattr(progress, "_BATCH", 1)

    @stage.handlers.job
    async def work(job: Job) -> None:
        await job.progress(0.5)
        await trio.sleep(200)

    jobs = [stage.database.jobs[stage.enqueue("work")] for _ in range(20)]
    stage.store.trouble["write_progress"] = unavailable
    async with stage.working(concurrency=20, grace=0):
        await trio.sleep(20)
        del stage.store.trouble["write_progress"]
        await trio.sleep(30)
        assert sum(job.progress is not None for job in jobs) == 3


async def test_a_lost_database_delays_progress_and_says_so_once(stage: Stage, events: Recorder) -> None:
    @stage.handlers.job
    async def work(job: Job) -> None:
        await job.progress(0.1)
        await trio.sleep(5)
        await job.progress(0.2)
        await trio.sleep(60)

    job = stage.database.jobs[stage.enqueue("work")]
    stage.store.trouble["write_progress"] = unavailable
    async with stage.working():
        await trio.sleep(8)
        assert job.progress is None
        del stage.store.trouble["write_progress"]
        await trio.sleep(10)
        assert job.progress == (0.2, None)
    assert [e.loop for e in events.of(DatabaseLost)] == ["progress"]
    assert [e.loop for e in events.of(DatabaseFound)] == ["progress"]


async def test_progress_of_ended_jobs_is_not_sent(stage: Stage) -> None:
    @stage.handlers.job
    async def work(job: Job, seconds: float) -> None:
        await job.progress(0.5)
        await trio.sleep(seconds)

    for _ in range(100):
        stage.enqueue("work", seconds=0.2)
    long = stage.enqueue("work", seconds=10)
    async with stage.working(concurrency=101):
        await trio.sleep(0.1)
        for _ in range(100):
            stage.enqueue("work", seconds=0.2)
        await trio.sleep(8)
    _, *later = [set(said) for _, said in stage.store.written_progress]
    assert later == [{long}]
