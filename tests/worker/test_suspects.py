"""A job that crashed too often runs alone, in a worker whose handlers no other process can load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import Job  # noqa: TC001 -- the registry reads annotations
from pulse_trio.observe import SuspectAlone
from pulse_trio.testing.memory import MemoryStore

if TYPE_CHECKING:
    from support.stage import Stage


@pytest.fixture
def counted(stage: Stage) -> Stage:
    """`sleeper` notes which jobs run together."""
    running: set[int] = set()
    stage.together = []  # type: ignore[attr-defined]

    @stage.handlers.job
    async def sleeper(job: Job, seconds: float = 1) -> None:
        running.add(job.id)
        stage.together.append(frozenset(running))  # type: ignore[attr-defined]
        try:
            await trio.sleep(seconds)
        finally:
            running.discard(job.id)

    return stage


def suspect(stage: Stage, **how: Any) -> int:
    job_id = stage.enqueue("sleeper", **how)
    stage.database.jobs[job_id].suspect, stage.database.jobs[job_id].crashes = True, 2
    return job_id


def alone(stage: Stage, job_id: int) -> bool:
    return [t for t in stage.together if job_id in t] == [{job_id}]  # type: ignore[attr-defined]


async def test_a_suspect_runs_when_nothing_else_does_and_nothing_starts_meanwhile(counted: Stage) -> None:
    before = [counted.enqueue("sleeper", seconds=3) for _ in range(5)]
    async with counted.working():
        await trio.sleep(1)
        poison = suspect(counted, seconds=5)
        await trio.sleep(4)
        assert [counted.database.state(i) for i in before] == ["completed"] * 5
        assert counted.database.state(poison) == "running"
        later = counted.enqueue("sleeper")
        await trio.sleep(3)
        assert counted.database.state(later) == "available"
        await trio.sleep(4)
        assert counted.database.state(later) == "completed"
    assert alone(counted, poison)


async def test_suspects_run_one_after_the_other(counted: Stage) -> None:
    ids = [suspect(counted, seconds=2) for _ in range(3)]
    await counted.burst()
    assert [e.job_id for e in counted.events.of(SuspectAlone)] == ids
    assert all(alone(counted, i) for i in ids)
    assert [counted.database.state(i) for i in ids] == ["completed"] * 3


async def test_a_worker_whose_jobs_do_not_end_runs_a_suspect_beside_them_after_30_s(counted: Stage) -> None:
    counted.enqueue("sleeper", seconds=200)
    async with counted.working(concurrency=4, grace=300):
        await trio.sleep(1)
        poison = suspect(counted)
        await trio.sleep(2)
        waiting = counted.enqueue("sleeper")
        await trio.sleep(25)
        assert counted.database.state(waiting) == "available"
        assert counted.database.jobs[poison].session
        await trio.sleep(10)
        assert counted.database.state(waiting) == "completed"
        assert counted.database.state(poison) == "completed"
    (event,) = counted.events.of(SuspectAlone)
    assert event.beside == 1
    assert counted.database.jobs[poison].attempt == 1


async def test_a_worker_without_a_free_slot_runs_a_suspect_beside_its_jobs_too(counted: Stage) -> None:
    for _ in range(2):
        counted.enqueue("sleeper", seconds=200)
    async with counted.working(concurrency=2, grace=300):
        await trio.sleep(1)
        poison = suspect(counted)
        await trio.sleep(40)
        assert counted.database.state(poison) == "completed"


async def test_one_of_several_workers_makes_room_and_the_others_go_on(counted: Stage) -> None:
    other = MemoryStore(counted.database)
    counted.enqueue("sleeper", seconds=20)
    async with counted.working(grace=100):
        await trio.sleep(1)
        suspect(counted)
        await trio.sleep(3)
        async with counted.working(other):
            # The suspect is the first worker's, which waits for its long job.
            await trio.sleep(1)
            later = counted.enqueue("sleeper")
            await trio.sleep(3)
            assert counted.database.state(later) == "completed"


async def test_the_lease_of_a_suspect_is_renewed_while_room_is_made_for_it(counted: Stage) -> None:
    counted.enqueue("sleeper", seconds=25)
    async with counted.working(grace=100, lease=6, heartbeat=2, cleanup=1):
        await trio.sleep(1)
        poison = suspect(counted)
        await trio.sleep(27)
        assert counted.database.state(poison) == "completed"
    assert counted.database.jobs[poison].history[0][0] == 1
    assert alone(counted, poison)


async def test_a_suspect_that_is_lost_while_room_is_made_does_not_begin(counted: Stage) -> None:
    counted.enqueue("sleeper", seconds=25)
    async with counted.working(grace=100):
        await trio.sleep(1)
        poison = suspect(counted)
        await trio.sleep(3)
        (job,) = [job for job in counted.database.jobs.values() if job.id == poison]
        assert job.session
        await MemoryStore(counted.database).rescue_sessions([job.session])
        await trio.sleep(40)
    assert [attempt for attempt, _, _ in job.history].count(1) == 1
    assert job.state == "completed"


async def test_a_worker_that_is_stopped_while_it_makes_room_gives_the_suspect_back(counted: Stage) -> None:
    counted.enqueue("sleeper", seconds=20)
    async with counted.working(grace=100):
        await trio.sleep(1)
        poison = suspect(counted)
        await trio.sleep(3)
        assert counted.database.state(poison) == "running"
    assert counted.database.state(poison) == "available"
    assert [kind for _, _, kind in counted.database.jobs[poison].history] == ["released"]
    assert counted.database.jobs[poison].suspect


async def test_a_burst_does_not_end_before_its_suspects_have_run(counted: Stage) -> None:
    plain, poison = counted.enqueue("sleeper"), suspect(counted)
    await counted.burst()
    assert [counted.database.state(i) for i in (plain, poison)] == ["completed"] * 2
