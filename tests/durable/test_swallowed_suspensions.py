"""A durable handler that swallows its suspension: it is stuck as one that swallows its cancellation is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from pulse_trio import Job  # noqa: TC001 -- read by the registry
from pulse_trio.doctor import diagnose
from pulse_trio.observe import HandlerOverran, JobEnded
from pulse_trio.store import health, life, operations, why
from pulse_trio.worker.diagnosis.stuck import StuckHandlers
from support.stage import parts
from support.stores import Window

if TYPE_CHECKING:
    from pulse_trio.worker.jobs.running_job import RunningJob
    from support.trees import Trees


@pytest.mark.parametrize("max_attempts", [1, 2])
async def test_a_handler_that_swallows_its_suspension_fails_of_it_and_its_neighbours_do_not(
    max_attempts: int, trees: Trees
) -> None:
    over, both = trio.Event(), trio.Event()

    @trees.handlers.job(durable=True, suspend_after=0)
    async def stubborn(job: Job) -> None:
        await both.wait()
        while not over.is_set():
            try:
                await job.wait_for_event("go")
            except BaseException:  # noqa: ASYNC103 -- what is tried
                await trio.lowlevel.cancel_shielded_checkpoint()

    @trees.handlers.job
    async def innocent() -> None:
        both.set()
        await trio.sleep_forever()

    stuck, beside = trees.enqueue("stubborn", max_attempts=max_attempts), trees.enqueue("innocent")
    await trees.replaced(over)
    job, neighbour = trees.job(stuck), trees.job(beside)
    assert (job["state"], job["max_attempts"]) == ("dead" if max_attempts == 1 else "retryable", max_attempts)
    (attempt,) = trees.window.run("SELECT outcome, error FROM attempts WHERE job_id = %s", stuck)
    assert attempt["outcome"] == "failed"
    assert attempt["error"].startswith("HandlerStuck: did not end within")
    assert "(suspended)" in attempt["error"]
    assert (neighbour["state"], neighbour["attempt"], neighbour["max_attempts"]) == ("available", 1, 21)
    (attempt,) = trees.window.run("SELECT outcome, error FROM attempts WHERE job_id = %s", beside)
    assert (attempt["outcome"], attempt["error"]) == (
        "released",
        f"the handler of job {stuck} (stubborn) did not end when it was cancelled, so its worker was replaced",
    )
    # It is no error of its own.
    failed = [
        life.last_error(trees.window.do(operations.job(job_id)), trees.window.do(operations.attempts(job_id)))[1]
        for job_id in (beside, stuck)
    ]
    assert failed == [None, 1]


async def test_a_handler_whose_line_cannot_be_written_is_not_taken_for_stuck(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its timeout struck meanwhile, as in an outage: the worker was replaced, and what ran beside it was cancelled."""
    does, ends, looks = trio.Event(), trio.Event(), list[object]()
    is_left_alone = StuckHandlers._is_left_alone  # pyright: ignore[reportPrivateUsage] -- tells of each look

    def look(stuck: StuckHandlers, job: RunningJob) -> bool:
        looks.append(job)
        return is_left_alone(stuck, job)

    monkeypatch.setattr(StuckHandlers, "_is_left_alone", look)

    async def charge() -> None:
        does.set()
        await ends.wait()

    @trees.handlers.job(durable=True, timeout=1.0)
    async def order(job: Job) -> None:
        await job.step(charge)

    job_id = trees.enqueue("order")
    worker = trees.worker(cleanup=0.1, lease=600, heartbeat=60)
    with trio.fail_after(60), Window(trees.dsn) as holder:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.run)
            await does.wait()
            with holder.connection.transaction():
                # The row is locked, so no line is written.
                holder.run("SELECT FROM job WHERE id = %s FOR UPDATE", job_id)
                ends.set()
                (job,) = parts(worker).jobs.held
                while job.cancel_reason is None:
                    await trio.lowlevel.checkpoint()
                assert job.cancel_reason == "timeout"
                # Four looks are as long as a handler has that does not end.
                while len(looks) < 8:
                    await trio.lowlevel.checkpoint()
                assert trees.events.of(HandlerOverran) == []
            await trees.events.first(JobEnded)
            worker.stop_now()
    assert trees.lines(job_id) == [(1, "1:step", "charge")]


async def test_who_asks_why_a_job_was_released_is_not_sent_to_look_for_its_handler(trees: Trees) -> None:
    begun: list[int] = []
    runs = trio.Event()

    @trees.handlers.job
    async def innocent(job: Job) -> None:
        begun.append(job.attempt)
        runs.set()
        await trio.sleep_forever()

    job_id = trees.enqueue("innocent")
    said = "the handler of job 7 (stubborn) did not end when it was cancelled, so its worker was replaced"
    for _ in range(3):
        worker, runs = trees.worker(), trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.run)
            await runs.wait()
            worker._stops.stop_now(said)  # pyright: ignore[reportPrivateUsage]
        trees.again()
    assert begun == [1, 2, 3]
    found = trees.window.do(health.health(trees.window.do(health.server())))
    (finding,) = [each for each in diagnose(found) if each.check in ("released jobs", "unknown kind")]
    assert finding.check == "released jobs"
    assert said in finding.what
    assert "Mend that handler" in (finding.do or "")
    assert [reason.code for reason in trees.window.do(why.why(job_id))] == ["no_worker"]
