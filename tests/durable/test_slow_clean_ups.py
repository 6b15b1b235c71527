"""Clean-ups in scopes of a durable handler whose job nobody cancels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from pulse_trio import Job, SyncClient

if TYPE_CHECKING:
    from support.trees import Trees


@pytest.mark.parametrize("how", ["a deadline", "a race"])
async def test_a_clean_up_takes_as_long_as_it_needs(how: str, trees: Trees) -> None:
    """The handler goes on after the scope. The clean-up was cut short after the worker's seconds, and no line said so: the
    refund was lost, and the next attempt, which came to it again, was dead."""
    done, hurried = list[str](), list[bool]()

    async def act(what: str) -> str:
        if what == "refund":
            hurried.append(trio.current_effective_deadline() < trio.current_time() + 5)
        done.append(what)
        return what

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        async def pays() -> None:
            await job.step(act, "charge", key="charge")
            try:
                await job.wait_for_event("packed", key="packed")
            except BaseException:
                with job.cleanup():
                    await job.step(act, "refund", key="refund")  # noqa: ASYNC102 -- job.cleanup() is the shield
                raise

        async def wins(nursery: trio.Nursery) -> None:
            await job.step(trio.sleep, 0.1, key="wins")
            nursery.cancel_scope.cancel()

        if how == "a race":
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pays)
                nursery.start_soon(wins, nursery)
        else:
            with job.move_on_after(0.1):
                await pays()
        await job.step(act, "note")
        await job.wait_for_event("go on")
        return "ok"

    job_id = trees.enqueue("order")
    with trio.fail_after(10):
        while trees.job(job_id)["state"] == "available" or "note" not in done:
            await trees.burst(cleanup=0.1)
    SyncClient(trees.dsn).send_event(job_id, "go on")
    with trio.fail_after(10):
        await trees.burst(cleanup=0.1)
    assert (trees.job(job_id)["error"], trees.job(job_id)["result"]) == (None, "ok")
    assert (done, hurried) == (["charge", "refund", "note"], [False])
