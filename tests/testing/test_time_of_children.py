"""`run_job`: time that passes in a child passes for the whole tree, as in production."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing

from pulse_trio import Handlers, Job
from pulse_trio.states import State
from pulse_trio.testing import run_job

handlers = Handlers()


@handlers.job(durable=True)
async def pack(job: Job, seconds: float) -> str:
    await job.sleep(seconds)
    return f"packed in {seconds:g} s"


@handlers.job(durable=True)
async def fill(job: Job, seconds: float) -> str:
    """A child with one of its own."""
    async with job.durable_nursery() as nursery:
        below = nursery.start_soon(pack, seconds)
    return below.result


@handlers.job(durable=True)
async def waits(job: Job) -> None:
    await job.wait_for_event("never")


@handlers.job(durable=True)
async def order(job: Job, kinds: list[str], seconds: float, fails: bool = False) -> str:
    by = {"pack": pack, "fill": fill}
    try:
        with (job.fail_after if fails else job.move_on_after)(5) as patience:
            async with job.durable_nursery() as nursery:
                for kind in kinds:
                    if kind == "waits":
                        nursery.start_soon(waits)
                    else:
                        nursery.start_soon(by[kind], seconds)
    except trio.TooSlowError:
        return "too late"
    return "late" if patience.cancelled_caught else "in time"


@pytest.mark.parametrize(
    ("kinds", "seconds", "result", "states"),
    [
        (["pack"], 500, "late", [State.CANCELLED]),
        (["pack"], 4, "in time", [State.COMPLETED]),
        (["fill"], 500, "late", [State.CANCELLED]),
        (["fill"], 4, "in time", [State.COMPLETED]),
        (["pack", "fill", "pack"], 4, "in time", [State.COMPLETED] * 3),
        (["pack", "waits"], 4, "late", [State.COMPLETED, State.CANCELLED]),
    ],
)
async def test_a_remembered_deadline_strikes_over_a_child_that_sleeps_for_longer(
    kinds: list[str], seconds: float, result: str, states: list[State]
) -> None:
    run = await run_job(order, kinds, seconds, handlers=handlers)
    assert run.exception is None
    assert (run.result, [child.state for child in run.children]) == (result, states)


async def test_a_deadline_that_fails_the_block_does_so_too(autojump_clock: Any) -> None:
    run = await run_job(order, ["pack"], 500, fails=True, handlers=handlers)
    assert run.exception is None, run
    assert (run.result, run.children[0].state) == ("too late", State.CANCELLED)


async def test_each_sleep_of_a_child_counts_and_so_does_a_time_before_it_was_started() -> None:
    many = Handlers()

    @many.job(durable=True)
    async def walk(job: Job) -> str:
        for _ in range(4):
            await job.sleep(20)
        return "there"

    @many.job(durable=True)
    async def tour(job: Job, patience: float) -> str:
        await job.sleep(30 * 86400)
        with job.move_on_after(patience) as scope:
            async with job.durable_nursery() as nursery:
                # The child's own deadline counts from here on.
                nursery.start_soon(walk.options(deadline=600))
        return "late" if scope.cancelled_caught else "in time"

    for patience, result in ((79, "late"), (81, "in time")):
        run = await run_job(tour, patience, handlers=many)
        assert run.exception is None
        assert run.result == result


async def test_a_child_waits_with_its_sleep_for_what_its_parent_does_meanwhile() -> None:
    """Both take their time at once: 3 seconds of 5."""
    both = Handlers()
    begun = trio.Event()

    def works() -> None:
        trio.from_thread.run_sync(begun.set)
        # The child stands in its sleep.
        trio.from_thread.run(trio.testing.wait_all_tasks_blocked)

    @both.job(durable=True)
    async def child(job: Job) -> None:
        await begun.wait()
        await job.sleep(3)

    @both.job(durable=True)
    async def parent(job: Job) -> str:
        with job.move_on_after(5) as patience:
            async with job.durable_nursery() as nursery:
                nursery.start_soon(child)
                await nursery.flush()
                await job.step(works)
                await job.sleep(3)
        return "late" if patience.cancelled_caught else "in time"

    run = await run_job(parent, handlers=both)
    assert run.exception is None
    assert run.result == "in time"


async def test_a_parent_that_waits_in_a_plain_await_for_its_child_does_not_stop_the_time(autojump_clock: Any) -> None:
    plain = Handlers()
    packed = trio.Event()

    @plain.job(durable=True)
    async def child(job: Job) -> None:
        await job.sleep(86400)
        packed.set()

    @plain.job(durable=True)
    async def parent(job: Job) -> str:
        async with job.durable_nursery() as nursery:
            nursery.start_soon(child)
            await nursery.flush()
            await packed.wait()
        return "packed"

    run = await run_job(parent, handlers=plain)
    assert run.exception is None
    assert run.result == "packed"


async def test_a_cancellation_comes_in_the_time_of_the_tree() -> None:
    run = await run_job(order, ["pack"], 4, handlers=handlers, cancel_after=3)
    assert (run.outcome, run.children[0].state) == ("cancelled", State.CANCELLED)
    run = await run_job(order, ["pack"], 2, handlers=handlers, cancel_after=3)
    assert (run.result, run.children[0].state) == ("in time", State.COMPLETED)


async def test_who_waits_for_what_never_comes_gives_up_from_below() -> None:
    never = Handlers()
    never._add(waits)  # pyright: ignore[reportPrivateUsage]

    @never.job(durable=True)
    async def parent(job: Job) -> None:
        async with job.durable_nursery() as nursery:
            nursery.start_soon(waits)

    run = await run_job(parent, handlers=never)
    assert (run.outcome, run.waits_for, run.children[0].state) == ("suspended", "its children", State.SUSPENDED)
