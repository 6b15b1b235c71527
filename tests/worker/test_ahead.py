"""Claims ahead of the slots: short jobs are claimed before a slot is free, and given back if it does not become free soon."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from pulse_trio.observe import JobStarted
from pulse_trio.testing.memory import MemoryStore
from support.stage import parts as parts_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.stage import Stage


@pytest.mark.parametrize("concurrency", [1, 2, 7, 40])
@pytest.mark.parametrize("how", ["at once", "in a checkpoint", "after a wait", "mixed"])
async def test_no_more_handlers_run_than_there_are_slots(
    concurrency: int, how: str, stage: Stage, claim_ahead: Callable[[int], None]
) -> None:
    running = most = 0

    @stage.handlers.job
    async def count(number: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if how == "in a checkpoint" or (how == "mixed" and number % 3 == 1):
            await trio.lowlevel.checkpoint()
        elif how == "after a wait" or (how == "mixed" and number % 3 == 2):
            await trio.sleep(0.01)
        running -= 1

    claim_ahead(20)
    ids = [stage.enqueue("count", number=number) for number in range(200)]
    async with stage.working(concurrency=concurrency) as _:
        await trio.sleep(0.01 * 200 / concurrency + 60)
        assert stage.database.states() == ["completed"] * 200
    started = [each.job_id for each in stage.events.of(JobStarted)]
    # Two slots and fewer free none for all that are ahead within 0.1 s: some are given back, and others overtake them.
    assert started == ids or (sorted(started) == ids and concurrency <= 2 and how in ("after a wait", "mixed"))
    assert most <= concurrency
    assert most == concurrency or how in ("at once", "in a checkpoint")


async def test_jobs_claimed_ahead_begin_when_slots_become_free(
    stage: Stage, claim_ahead: Callable[[int], None]
) -> None:
    began: list[tuple[float, int]] = []

    @stage.handlers.job
    async def work(number: int) -> None:
        began.append((trio.current_time(), number))
        await trio.sleep(0.04)

    for number in range(6):
        stage.enqueue("work", number=number)
    claim_ahead(4)
    async with stage.working(concurrency=2) as worker:
        await trio.sleep(0.01)
        jobs = parts_of(worker).jobs
        assert (jobs.running, jobs.in_slots, worker.running, jobs.startable) == (6, 2, 2, 0)
        await trio.sleep(1)
        assert stage.database.states() == ["completed"] * 6
        assert all(job.attempt == 1 for job in stage.database.jobs.values())
    assert [number for _, number in began] == list(range(6))


async def test_jobs_that_find_no_slot_soon_are_given_back(stage: Stage, claim_ahead: Callable[[int], None]) -> None:
    """The jobs before them have become longer all at once. Another worker, with free slots, runs them."""

    @stage.handlers.job
    async def work(seconds: float) -> None:
        await trio.sleep(seconds)

    long = [stage.enqueue("work", seconds=100) for _ in range(2)]
    short = [stage.enqueue("work", seconds=0) for _ in range(3)]
    claim_ahead(4)
    async with stage.working(concurrency=2, grace=200) as worker:
        await trio.sleep(0.05)
        jobs = parts_of(worker).jobs
        assert stage.database.states() == ["running"] * 5
        await trio.sleep(0.2)
        assert [stage.database.state(job) for job in long] == ["running", "running"]
        assert [stage.database.state(job) for job in short] == ["available"] * 3
        assert (jobs.running, jobs.slots.ahead, len(jobs.due)) == (2, 0, 0)
        async with stage.working(MemoryStore(stage.database), concurrency=2):
            await trio.sleep(5)
            assert [stage.database.state(job) for job in short] == ["completed"] * 3
            assert [stage.database.state(job) for job in long] == ["running", "running"]


async def test_a_worker_that_stops_gives_back_at_once_what_has_no_slot(
    stage: Stage, claim_ahead: Callable[[int], None]
) -> None:
    @stage.handlers.job
    async def work() -> None:
        await trio.sleep(1)

    jobs = [stage.enqueue("work") for _ in range(5)]
    claim_ahead(3)
    async with stage.working(concurrency=2, grace=10) as worker:
        await trio.sleep(0.05)
        assert stage.database.states() == ["running"] * 5
        worker.stop()
        await trio.sleep(0.01)
        assert [stage.database.state(job) for job in jobs] == ["running"] * 2 + ["available"] * 3
    assert [stage.database.state(job) for job in jobs] == ["completed"] * 2 + ["available"] * 3
