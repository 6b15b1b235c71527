"""A handler that cancels a nursery of Trio's own: what the durable calls in it get all the same comes again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio
from trio.testing import wait_all_tasks_blocked

from pulse_trio import Job, SyncClient

if TYPE_CHECKING:
    from support.trees import Trees


async def test_steps_that_end_after_it_have_their_results_again(trees: Trees) -> None:
    ways: list[list[Any]] = []
    calls: list[str] = []

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        way, cut = list[Any](), trio.Event()

        async def slow(name: str) -> str:
            calls.append(name)
            with trio.CancelScope(shield=True):
                await cut.wait()
            return name

        async def remind(name: str) -> None:
            way.append(await job.step(slow, name, key=name))
            await trio.lowlevel.checkpoint()
            way.append("not cut")

        async with trio.open_nursery() as nursery:
            for name in "abc":
                nursery.start_soon(remind, name)
            await wait_all_tasks_blocked()
            await job.step(_first)
            nursery.cancel_scope.cancel()
            cut.set()
        ways.append(sorted(way))
        await job.wait_for_event("go on")
        return "done"

    job_id = trees.enqueue("order")
    await trees.burst()
    SyncClient(trees.dsn).send_event(job_id, "go on")
    with trio.fail_after(30):
        await trees.burst()
    assert (trees.job(job_id)["error"], trees.job(job_id)["result"]) == (None, "done")
    assert sorted(calls) == ["a", "b", "c"]
    assert ways == [["a", "b", "c"]] * 2


async def _first() -> None: ...
