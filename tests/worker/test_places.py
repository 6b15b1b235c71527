"""Tasks that are used again: nothing of one job is seen by the next."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

import pytest
import trio
import trio.lowlevel
import trio.testing

from pulse_trio.worker.places import Places

if TYPE_CHECKING:
    from support.stage import Stage

number: ContextVar[int] = ContextVar("number", default=0)


async def test_context_variables_of_a_job_end_with_it(stage: Stage) -> None:
    seen: list[int] = []
    tasks: set[trio.lowlevel.Task] = set()

    @stage.handlers.job
    async def count() -> None:
        tasks.add(trio.lowlevel.current_task())
        seen.append(number.get())
        number.set(number.get() + 1)
        await trio.lowlevel.checkpoint()
        seen.append(number.get())

    for _ in range(20):
        stage.enqueue("count")
    await stage.burst(concurrency=2)
    assert seen == [0, 1] * 20 or sorted(seen) == [0] * 20 + [1] * 20
    assert len(tasks) <= 4


async def test_the_starters_context_is_seen_by_every_job() -> None:
    seen: list[int] = []

    async def run(_claim: object, _sent: float) -> None:
        seen.append(number.get())
        number.set(-1)

    places = Places(run)  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        for value in (1, 2, 3):
            number.set(value)
            places.start(nursery, object(), 0.0)  # type: ignore[arg-type]
            await trio.testing.wait_all_tasks_blocked()
        places.close()
    assert seen == [1, 2, 3]


async def test_a_place_that_waits_goes_when_closed_and_one_that_runs_goes_with_its_job() -> None:
    free = trio.Event()

    async def run(claim: object, _sent: float) -> None:
        if claim == "long":
            await free.wait()

    places = Places(run)  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        for claim in ("short", "long", "short"):
            places.start(nursery, claim, 0.0)  # type: ignore[arg-type]
        await trio.testing.wait_all_tasks_blocked()
        assert len(nursery.child_tasks) == 3
        places.close()
        await trio.testing.wait_all_tasks_blocked()
        assert len(nursery.child_tasks) == 1
        free.set()


async def test_a_cancelled_place_is_not_used_again() -> None:
    async def run(_claim: object, _sent: float) -> None:
        pass

    places = Places(run)  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        places.start(nursery, object(), 0.0)  # type: ignore[arg-type]
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    places.close()


async def test_many_jobs_at_once_do_not_all_stay_as_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pulse_trio.worker.places._PLACES", 3)
    free = trio.Event()

    async def run(_claim: object, _sent: float) -> None:
        await free.wait()

    places = Places(run)  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        for _ in range(10):
            places.start(nursery, object(), 0.0)  # type: ignore[arg-type]
        await trio.testing.wait_all_tasks_blocked()
        assert len(nursery.child_tasks) == 10
        free.set()
        await trio.testing.wait_all_tasks_blocked()
        assert len(nursery.child_tasks) == 3
        places.close()


async def test_what_a_job_raises_past_its_runner_ends_the_place() -> None:
    async def run(_claim: object, _sent: float) -> None:
        raise KeyError

    places = Places(run)  # type: ignore[arg-type]
    with pytest.RaisesGroup(KeyError):
        async with trio.open_nursery() as nursery:
            places.start(nursery, object(), 0.0)  # type: ignore[arg-type]
    places.close()
