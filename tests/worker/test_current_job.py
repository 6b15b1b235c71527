"""`current_job()`: known anywhere below a handler, and nowhere else."""

from __future__ import annotations

import contextvars
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import Job, NoCurrentJob, current_job

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.stage import Stage

number: contextvars.ContextVar[int] = contextvars.ContextVar("number", default=0)


def here() -> int | None:
    try:
        return current_job().id
    except NoCurrentJob:
        return None


async def test_outside_of_a_job_there_is_none() -> None:
    with pytest.raises(LookupError, match="outside of a job"):
        current_job()


async def test_each_of_many_jobs_in_one_task_is_its_own(stage: Stage) -> None:
    seen: list[tuple[int, int | None]] = []
    tasks: set[trio.lowlevel.Task] = set()

    @stage.handlers.job
    async def work(job: Job, waits: bool) -> None:
        tasks.add(trio.lowlevel.current_task())
        seen.append((job.id, here()))
        if waits:
            await trio.sleep(1)
        seen.append((job.id, here()))

    for n in range(60):
        stage.enqueue("work", waits=n % 3 == 0)
    await stage.burst(concurrency=30)
    assert len(seen) == 120
    assert all(known == job_id for job_id, known in seen)
    assert len(tasks) < 60


@pytest.mark.parametrize("places", [512, 2])
async def test_children_and_threads_of_a_handler_know_its_job(
    places: int, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pulse_trio.worker.jobs.task_pool._PLACES", places)
    seen: list[tuple[int, int | None]] = []

    @stage.handlers.job
    async def work(job: Job) -> None:
        async def child() -> None:
            await trio.lowlevel.checkpoint()
            seen.append((job.id, here()))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(child)
        job.nursery.start_soon(child)
        seen.append((job.id, await trio.to_thread.run_sync(here)))
        seen.append((job.id, await trio.to_thread.run_sync(lambda: trio.run(as_async))))

    async def as_async() -> int | None:
        return here()

    for _ in range(5):
        stage.enqueue("work")
    await stage.burst(concurrency=10)
    assert len(seen) == 20
    assert all(known == job_id for job_id, known in seen)


async def test_a_task_that_outlives_its_job_is_of_no_job(stage: Stage) -> None:
    """The task that ran its job runs the next one by then."""
    seen: list[int | None] = []
    go_on = trio.Event()

    async with trio.open_nursery() as program:

        async def outliving() -> None:
            await go_on.wait()
            seen.append(here())

        @stage.handlers.job
        async def starts() -> None:
            program.start_soon(outliving)

        @stage.handlers.job
        async def later() -> None:
            go_on.set()
            await trio.sleep(1)

        stage.enqueue("starts")
        stage.enqueue("later")
        await stage.burst(concurrency=1)
    assert seen == [None]


async def test_a_handlers_own_context_variables_keep_the_job_and_end_with_it(stage: Stage) -> None:
    seen: list[tuple[int, int | None, int]] = []

    @stage.handlers.job
    async def work(job: Job) -> None:
        seen.append((job.id, here(), number.get()))
        number.set(number.get() + 1)
        await trio.lowlevel.checkpoint()
        seen.append((job.id, here(), number.get()))

    for _ in range(10):
        stage.enqueue("work")
    await stage.burst(concurrency=3)
    assert all(known == job_id for job_id, known, _ in seen)
    assert sorted(value for *_, value in seen) == [0] * 10 + [1] * 10


@pytest.mark.real_clock
async def test_a_thread_handler_knows_its_job_and_a_thread_of_its_own_in_a_copy_of_the_context(stage: Stage) -> None:
    seen: dict[str, Any] = {}

    def in_thread(function: Callable[[], object]) -> None:
        thread = threading.Thread(target=function)
        thread.start()
        thread.join()

    @stage.handlers.job
    def work(job: Job) -> None:
        seen["here"] = here() == job.id
        context = contextvars.copy_context()
        in_thread(lambda: seen.update(copied=context.run(here) == job.id))

    stage.enqueue("work")
    await stage.burst()
    assert seen == {"here": True, "copied": True}


@pytest.mark.real_clock
async def test_a_thread_that_its_job_has_abandoned_is_in_no_job_while_the_next_one_runs_in_its_task(
    stage: Stage,
) -> None:
    seen: dict[str, int | None] = {}
    started, goes_on, told = threading.Event(), threading.Event(), threading.Event()

    def in_thread() -> None:
        seen["before"] = here()
        started.set()
        goes_on.wait(20)
        seen["after"] = here()
        told.set()

    @stage.handlers.job
    async def leaves() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(trio.to_thread.run_sync, in_thread, abandon_on_cancel=True))
            await trio.to_thread.run_sync(started.wait)
            nursery.cancel_scope.cancel()

    @stage.handlers.job
    async def next_one() -> None:
        goes_on.set()
        await trio.to_thread.run_sync(told.wait)

    first = stage.enqueue("leaves")
    stage.enqueue("next_one")
    await stage.burst(concurrency=1)
    assert seen == {"before": first, "after": None}
