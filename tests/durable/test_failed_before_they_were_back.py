"""A child has failed while no worker held its parent, whose handler stood further in its body: in a step, in another block.

The next attempt knows of the failure before it is back there, and cuts the body short. It did so in the middle of calls, and
gave these numbers that later attempts, cut short sooner, did not: the same code was a `ReplayMismatch`.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import ChildFailed, Discard, Job, SyncClient

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from support.trees import Trees

BODIES = ["a step", "a block", "a block with a key", "a block in a scope", "a block in a block"]


@pytest.mark.parametrize("undoes", ["nothing", "inside", "around"])
@pytest.mark.parametrize("flushes", [False, True])
@pytest.mark.parametrize("body", BODIES)
async def test_the_same_code_fits_its_history(trees: Trees, body: str, undoes: str, *, flushes: bool) -> None:
    done: list[str] = []
    stands = trio.Event()

    async def note(what: str) -> None:
        done.append(what)
        if what == "inside" and not stands.is_set():
            stands.set()
            await trio.sleep_forever()

    @trees.handlers.job(queue="bad")
    async def bad() -> None:
        raise Discard("no")

    @trees.handlers.job(durable=True, suspend_after=0, queue="good")
    async def good(job: Job) -> None:
        await job.wait_for_event("never")

    @asynccontextmanager
    async def undoing(job: Job, where: str) -> AsyncGenerator[None]:
        try:
            yield
        except BaseException:
            if where == undoes:
                with job.cleanup():
                    await job.step(note, "undone")  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise

    @asynccontextmanager
    async def in_a_block(job: Job, **key: Any) -> AsyncGenerator[None]:
        async with job.durable_nursery(**key) as inner:
            inner.start_soon(good)
            async with undoing(job, "inside"):
                yield

    async def stand(job: Job) -> None:
        if body == "a step":
            async with undoing(job, "inside"):
                await job.step(note, "inside")
            return
        key = {"key": "inner"} if body == "a block with a key" else {}
        if body == "a block in a scope":
            with job.move_on_after(3600):
                async with in_a_block(job):
                    await job.step(note, "inside")
        elif body == "a block in a block":
            async with in_a_block(job), in_a_block(job):
                await job.step(note, "inside")
        else:
            async with in_a_block(job, **key):
                await job.step(note, "inside")

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        said = "all packed"
        try:
            async with job.durable_nursery() as outer:
                outer.start_soon(bad)
                async with undoing(job, "around"):
                    if flushes:
                        await outer.flush()
                    await stand(job)
        except* ChildFailed:
            said = "a child failed"
        await job.step(note, "after")
        await job.wait_for_event("end")
        return said

    job_id = trees.enqueue("order")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: trees.burst(queues=("default",), lease=3, heartbeat=0.1))
        await stands.wait()
        await trees.lose(job_id, due=False)
        nursery.cancel_scope.cancel()
    with trio.fail_after(60):
        await trees.burst(queues=("bad",))
        trees.again()
        while "after" not in done:
            await trees.burst(queues=("default",))
            await trees.burst(queues=("good",))
        SyncClient(trees.dsn).send_event(job_id, "end")
        await trees.burst(queues=("default",))
    found = trees.job(job_id)
    assert (found["result"], found["error"]) == ("a child failed", None)
    levels = 2 if body == "a block in a block" else 1
    assert (done.count("undone") <= levels, done[-1]) == (True, "after")
    children = trees.window.run("SELECT state::text AS state FROM jobs WHERE kind = 'good'")
    assert {row["state"] for row in children} <= {"cancelled"}
