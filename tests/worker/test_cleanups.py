"""A worker without a free slot claims cancelled jobs that run once more, for the slots that its waiting jobs lend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from support.stage import parts

if TYPE_CHECKING:
    from support.stage import Stage


class Play:
    """Handlers `waits`, which runs until it is told, and `quick`, each of which is noted when it runs."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.ran: list[int] = []
        self.begun, self.go_on, self.quick = trio.Event(), trio.Event(), trio.Event()

        @stage.handlers.job
        async def waits() -> None:
            self.begun.set()
            await self.go_on.wait()

        @stage.handlers.job
        async def quick(number: int) -> None:
            self.ran.append(number)
            self.quick.set()

    def cancelled(self, number: int) -> int:
        """A job that is cancelled and runs once more."""
        job_id = self.stage.enqueue("quick", number=number)
        self.stage.database.jobs[job_id].cancelling = True
        return job_id


async def test_a_lent_slot_runs_cancelled_jobs_alone_one_after_the_other_and_their_ends_are_written(
    stage: Stage,
) -> None:
    play = Play(stage)
    stage.enqueue("waits")
    async with stage.working(concurrency=1) as worker:
        await play.begun.wait()
        table = parts(worker).jobs
        (job,) = table.held
        other = stage.enqueue("quick", number=0)
        cancelled = [play.cancelled(number) for number in range(1, 4)]
        await trio.sleep(10)
        assert play.ran == []
        began = trio.current_time()
        table.lend(job)
        await play.quick.wait()
        assert trio.current_time() - began < 0.1
        # Before the first of the polls: the end of each asks for the next.
        await trio.sleep(0.5)
        assert play.ran == [1, 2, 3]
        assert {str(stage.database.state(job_id)) for job_id in cancelled} == {"completed"}
        play.cancelled(4)
        await trio.sleep(2)
        assert play.ran == [1, 2, 3, 4]
        assert worker.running == 1
        table.take_back(job)
        play.cancelled(5)
        await trio.sleep(10)
        assert play.ran == [1, 2, 3, 4]
        play.go_on.set()
        await trio.sleep(10)
        assert sorted(play.ran) == [0, 1, 2, 3, 4, 5]
        assert str(stage.database.state(other)) == "completed"


async def test_a_worker_with_a_free_slot_claims_as_ever_while_one_is_lent(stage: Stage) -> None:
    play = Play(stage)
    stage.enqueue("waits")
    async with stage.working(concurrency=2) as worker:
        await play.begun.wait()
        (job,) = parts(worker).jobs.held
        parts(worker).jobs.lend(job)
        stage.enqueue("quick", number=1)
        await trio.sleep(5)
        assert play.ran == [1]
        assert "claim_cleanups" not in stage.store.calls
        play.go_on.set()


async def test_a_burst_does_not_end_before_the_job_that_has_lent_its_slot(stage: Stage) -> None:
    play = Play(stage)
    stage.enqueue("waits")
    worker = stage.worker(burst=True, concurrency=1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        await play.begun.wait()
        (job,) = parts(worker).jobs.held
        parts(worker).jobs.lend(job)
        play.cancelled(1)
        await trio.sleep(30)
        assert play.ran == [1]
        play.cancelled(2)
        parts(worker).jobs.take_back(job)
        play.go_on.set()
    assert sorted(play.ran) == [1, 2]
