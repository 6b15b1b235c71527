"""A worker without a free slot claims cancelled jobs that run once more, for the slots that its waiting jobs lend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from pulse_trio.errors import StatementRefused
from pulse_trio.observe import ClaimRefused
from pulse_trio.testing.memory import MemoryStore
from support.stage import parts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pulse_trio.store import ClaimResult
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


class Refusing(MemoryStore):
    """There is a cancelled job that PostgreSQL refuses to claim: that is said where there is no other."""

    async def claim_cleanups(self, queues: Sequence[str] | None, limit: int) -> ClaimResult:
        claimed = await super().claim_cleanups(queues, limit)
        if not claimed.claims:
            raise StatementRefused("claiming jobs that clean up: job 7: not this one")
        return claimed


async def test_a_cancelled_job_that_the_database_refuses_is_said_and_the_worker_goes_on(stage: Stage) -> None:
    play = Play(stage)
    stage.enqueue("waits")
    async with stage.working(Refusing(stage.database), concurrency=1) as worker:
        await play.begun.wait()
        (job,) = parts(worker).jobs.held
        parts(worker).jobs.lend(job)
        for number in range(20):
            play.cancelled(number)
            await trio.sleep(1)
        assert play.ran == list(range(20))
        # After 5 and 10 seconds, not at every look.
        assert [(e.queue, e.retry_in) for e in stage.events.of(ClaimRefused)] == [
            (None, 5.0),
            (None, 10.0),
            (None, 20.0),
        ]
        # Its own slot comes free: it claims at once.
        other = stage.enqueue("quick", number=20)
        play.go_on.set()
        await trio.sleep(0.1)
        assert str(stage.database.state(other)) == "completed"


class Crowd(Play):
    """One more handler: `stays`, which runs until it is told, and is noted when it begins."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self.stayed: list[int] = []
        self.first, self.others = trio.Event(), trio.Event()

        @stage.handlers.job
        async def stays(number: int) -> None:
            self.stayed.append(number)
            await (self.first if number == 0 else self.others).wait()

    def stay(self, *numbers: int) -> None:
        for number in numbers:
            self.stage.enqueue("stays", number=number)


async def test_what_was_claimed_ahead_does_not_begin_in_a_lent_slot(
    stage: Stage, claim_ahead: Callable[[int], None]
) -> None:
    crowd = Crowd(stage)
    stage.enqueue("waits")
    crowd.stay(0, 1, 2)
    claim_ahead(2)
    async with stage.working(concurrency=2) as worker:
        await crowd.begun.wait()
        await trio.sleep(0.01)
        table = parts(worker).jobs
        assert (crowd.stayed, len(table.due)) == ([0], 2)
        job = next(job for job in table.held if job.claim.kind == "waits")
        table.lend(job)
        crowd.first.set()
        await trio.sleep(0.01)
        # The second has the slot of the first.
        assert (crowd.stayed, table.in_slots) == ([0, 1], 2)
        crowd.cancelled(1)
        await trio.sleep(5)
        assert (crowd.stayed, crowd.ran) == ([0, 1], [1])
        crowd.go_on.set()
        crowd.others.set()
        await trio.sleep(5)
    assert (crowd.stayed, crowd.ran) == ([0, 1, 2], [1])


async def test_a_cancelled_job_has_the_lent_slot_at_once_although_others_were_claimed_ahead(
    stage: Stage, claim_ahead: Callable[[int], None]
) -> None:
    crowd = Crowd(stage)
    stage.enqueue("waits")
    crowd.stay(1, 2)
    claim_ahead(2)
    async with stage.working(concurrency=1) as worker:
        await crowd.begun.wait()
        await trio.sleep(0.01)
        table = parts(worker).jobs
        assert (crowd.stayed, len(table.due)) == ([], 2)
        crowd.cancelled(1)
        table.lend(next(iter(table.held)))
        # Sooner than those are given back.
        await trio.sleep(0.05)
        assert (crowd.stayed, crowd.ran, table.in_slots) == ([], [1], 1)
        crowd.go_on.set()
        crowd.others.set()


async def test_a_worker_above_its_concurrency_begins_nothing_until_a_job_has_ended(
    stage: Stage, claim_ahead: Callable[[int], None]
) -> None:
    """The job that had lent its slot goes on, and the one that had borrowed it does not end. All before the first beat."""
    crowd = Crowd(stage)
    stage.enqueue("waits")
    crowd.stay(0)
    claim_ahead(2)
    async with stage.working(concurrency=2) as worker:
        await crowd.begun.wait()
        await trio.sleep(0.01)
        table = parts(worker).jobs
        lender = next(job for job in table.held if job.claim.kind == "waits")
        table.lend(lender)
        crowd.stay(1)
        (cancelled,) = [job for job in stage.database.jobs.values() if job.finished is None and not job.session]
        cancelled.cancelling = True
        await trio.sleep(1)
        assert (crowd.stayed, table.in_slots) == ([0, 1], 3)
        table.take_back(lender)
        crowd.stay(2, 3, 4)
        await trio.sleep(1)
        crowd.first.set()
        await trio.sleep(1)
        assert (crowd.stayed, table.in_slots) == ([0, 1], 2)
        crowd.go_on.set()
        await trio.sleep(1)
        assert (crowd.stayed, table.in_slots) == ([0, 1, 2], 2)
        crowd.others.set()
