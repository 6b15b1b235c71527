"""A handler that swallows the `Cancelled` of a plain await in a scope that has struck, or of its job, and goes on as if that
were over.

The first attempt went on; the next one stood in that await for ever, because the line of the scope says that it had cut nothing
short.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import ChildFailed, Discard, Job, SyncClient
from pulse_trio.jobs import CancelRequest
from pulse_trio.worker.durable import swallowed
from support.trees import running_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from support.trees import Trees


@contextmanager
def swallowing() -> Generator[None]:
    try:
        yield
    except trio.Cancelled:  # noqa: ASYNC103 -- what the test is about
        pass


async def in_a_body(job: Job, bad: Any) -> None:
    try:
        async with job.durable_nursery() as nursery:
            nursery.start_soon(bad)
            with swallowing():
                await trio.sleep_forever()
    except* ChildFailed:
        pass


async def in_a_scope(job: Job, _: Any) -> None:
    with job.move_on_after(0.1), swallowing():
        await trio.sleep_forever()


async def in_a_scope_that_is_cancelled(job: Job, _: Any) -> None:
    with job.move_on_after(3600) as scope:
        scope.cancel()
        with swallowing():
            await trio.sleep_forever()


async def before_a_block_ends(job: Job, bad: Any) -> None:
    with job.move_on_after(0.1):
        async with job.durable_nursery() as nursery:
            nursery.start_soon(bad.options(delay=3600))
            with swallowing():
                await trio.sleep_forever()
        raise AssertionError("the block was not cut short")


async def before_a_step(job: Job, _: Any) -> None:
    with job.move_on_after(0.1):
        with swallowing():
            await trio.sleep_forever()
        await job.step(trio.lowlevel.checkpoint)
        raise AssertionError("the step was not cut short")


async def before_a_wait(job: Job, _: Any) -> None:
    with job.move_on_after(0.1):
        with swallowing():
            await trio.sleep_forever()
        await job.wait_for_event("never")


async def before_a_block(job: Job, _: Any) -> None:
    with job.move_on_after(0.1):
        with swallowing():
            await trio.sleep_forever()
        async with job.durable_nursery():
            raise AssertionError("the block was opened")


async def before_a_step_in_a_body(job: Job, bad: Any) -> None:
    try:
        async with job.durable_nursery() as nursery:
            nursery.start_soon(bad)
            with swallowing():
                await trio.sleep_forever()
            await job.step(trio.lowlevel.checkpoint)
            raise AssertionError("the step was not cut short")
    except* ChildFailed:
        pass


async def around_a_plain_nursery(job: Job, _: Any) -> None:
    async def sleeps() -> None:
        with swallowing():
            await trio.sleep_forever()

    with job.move_on_after(0.1):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sleeps)


PLACES = [
    in_a_body,
    in_a_scope,
    in_a_scope_that_is_cancelled,
    before_a_block_ends,
    before_a_step,
    before_a_wait,
    before_a_block,
    before_a_step_in_a_body,
    around_a_plain_nursery,
]


@pytest.mark.parametrize("lines_before", [0, 2])
@pytest.mark.parametrize("place", PLACES)
async def test_a_handler_goes_on_in_the_next_attempt_too(
    trees: Trees, place: Callable[[Job, Any], Any], lines_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swallowed, "WITHIN", 0.2)
    done: list[str] = []

    async def note(what: str) -> None:
        done.append(what)

    @trees.handlers.job
    async def bad() -> None:
        raise Discard("no")

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        for n in range(lines_before):
            await job.step(note, f"before {n}")
        await place(job, bad)
        await job.step(note, "after")
        return await job.wait_for_event("ok", type=str)

    job_id = trees.enqueue("order")
    with trio.fail_after(30):
        await trees.burst()
        SyncClient(trees.dsn).send_event(job_id, "ok", "good")
        await trees.burst()
    found = trees.job(job_id)
    assert (found["result"], found["error"]) == ("good", None)
    assert done == [f"before {n}" for n in range(lines_before)] + ["after"]


async def a_step(job: Job) -> None:
    await job.step(trio.lowlevel.checkpoint)


async def a_block(job: Job) -> None:
    async with job.durable_nursery():
        pass


async def a_wait(job: Job) -> None:
    await job.wait_for_event("never")


@pytest.mark.parametrize("lines_before", [0, 2])
@pytest.mark.parametrize("then", [a_step, a_block, a_wait])
async def test_a_cancelled_job_comes_to_its_clean_up_after_a_lost_worker(
    trees: Trees, then: Callable[[Job], Any], lines_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler swallows the cancellation of its job, and is cut short in the call after it."""
    monkeypatch.setattr(swallowed, "WITHIN", 0.2)
    done: list[str] = []

    async def note(what: str, job: Job) -> None:
        done.append(what)
        if done.count("undo") == 1:
            await trees.lose(job.id)
            await trio.sleep_forever()

    @trees.handlers.job(durable=True, max_attempts=6)
    async def order(job: Job) -> None:
        for n in range(lines_before):
            await job.step(note, f"before {n}", job)
        if "undo" not in done:
            await trio.to_thread.run_sync(SyncClient(trees.dsn).cancel, job.id)
            running_of(job).ask(CancelRequest("user", None))
        try:
            with swallowing():
                await trio.sleep_forever()
            await then(job)
        finally:
            with job.cleanup():
                await job.step(note, "undo", job)  # noqa: ASYNC102 -- job.cleanup() is the shield

    job_id = trees.enqueue("order")
    with trio.fail_after(30):
        while trees.job(job_id)["finished_at"] is None:
            trees.again()
            await trees.burst(log=False, lease=3, heartbeat=0.1)
    assert trees.job(job_id)["state"] == "cancelled"
    assert done == [f"before {n}" for n in range(lines_before)] + ["undo", "undo"]
