"""Durable nurseries that are cut short beside other tasks of their handler: they end when their children have, and a later
attempt, in which these have ended before it begins, leaves them where the first one did."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from pulse_trio import Job, SyncClient

if TYPE_CHECKING:
    from support.trees import Trees


@pytest.mark.parametrize("first", ["the block", "the event"])
async def test_a_race_that_a_block_which_was_cut_short_has_won_or_lost_has_the_same_winner(
    trees: Trees, first: str
) -> None:
    decided: list[tuple[list[str], list[str]]] = []
    begun, late_is_received, client = trio.Event(), trio.Event(), SyncClient(trees.dsn)

    async def remember(order: list[str]) -> list[str]:
        return order

    @trees.handlers.job
    async def child(job: Job, parent: int) -> None:
        begun.set()
        try:
            await trio.sleep_forever()
        finally:
            if first == "the event":
                with job.cleanup():
                    await trio.to_thread.run_sync(client.send_event, parent, "late")  # noqa: ASYNC102 -- job.cleanup() is the shield
                    await late_is_received.wait()  # noqa: ASYNC102 -- as above

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> None:
        ended: list[str] = []

        async def asks() -> None:
            with job.move_on_after(3600, key="ask") as ask:
                async with job.durable_nursery(key="kids") as kids:
                    kids.start_soon(child, job.id)
                    await kids.flush()
                    await begun.wait()
                    await job.step(remember, ["won"], key="won")
                    ask.cancel()
            ended.append("the block")
            if first == "the block" and job.attempt == 1:
                await trio.to_thread.run_sync(client.send_event, job.id, "late")

        async def gives_up() -> None:
            await job.wait_for_event("late", key="late")
            ended.append("the event")
            late_is_received.set()

        async with trio.open_nursery() as tasks:
            tasks.start_soon(asks)
            tasks.start_soon(gives_up)
        decided.append((await job.step(remember, ended), ended))
        await job.wait_for_event("go")

    job_id = trees.enqueue("order")
    with trio.fail_after(30):
        await trees.burst()
        client.send_event(job_id, "go")
        await trees.burst()
    assert trees.job(job_id)["state"] == "completed"
    order_of_ends = ["the block", "the event"] if first == "the block" else ["the event", "the block"]
    assert decided == [(order_of_ends, order_of_ends)] * 2


async def test_blocks_that_are_cut_short_together_end_in_the_same_order(trees: Trees) -> None:
    decided: list[tuple[list[str], list[str]]] = []
    left = {name: trio.Event() for name in "abc"}
    begun = {name: trio.Event() for name in "abc"}
    before = {"a": "b", "b": "c", "c": None}

    async def remember(order: list[str]) -> list[str]:
        return order

    @trees.handlers.job
    async def child(job: Job, name: str) -> None:
        begun[name].set()
        try:
            await trio.sleep_forever()
        finally:
            if (other := before[name]) is not None:
                with job.cleanup():
                    await left[other].wait()  # noqa: ASYNC102 -- job.cleanup() is the shield

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> None:
        ended: list[str] = []

        async def part(name: str) -> None:
            try:
                async with job.durable_nursery(key=name) as nursery:
                    nursery.start_soon(child, name)
            finally:
                ended.append(name)
                left[name].set()

        with job.move_on_after(3600) as scope:
            async with trio.open_nursery() as tasks:
                for name in "abc":
                    tasks.start_soon(part, name)
                for one in begun.values():
                    await one.wait()
                scope.cancel()
        decided.append((await job.step(remember, ended), ended))
        await job.wait_for_event("go")

    job_id = trees.enqueue("order")
    with trio.fail_after(30):
        await trees.burst()
        SyncClient(trees.dsn).send_event(job_id, "go")
        await trees.burst()
    assert trees.job(job_id)["state"] == "completed"
    assert decided == [(["c", "b", "a"], ["c", "b", "a"])] * 2


async def test_a_block_that_a_deadline_cuts_short_beside_a_progress_bar_is_left_after_that_deadline(
    trees: Trees,
) -> None:
    """Ten seconds in each later attempt, before: the block was to be left before the deadline's line, and waited for it."""
    begun = trio.Event()

    async def note(what: str) -> str:
        return what

    @trees.handlers.job
    async def child() -> None:
        begun.set()
        await trio.sleep_forever()

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        async def progress() -> None:
            while True:  # noqa: ASYNC110 -- a progress bar waits for no event
                await trio.sleep(0.01)

        async with trio.open_nursery() as tasks:
            tasks.start_soon(progress)
            with job.move_on_after(0.3, key="patience") as patience:
                async with job.durable_nursery(key="block") as nursery:
                    nursery.start_soon(child)
                    await nursery.flush()
                    await begun.wait()
            cut = await job.step(note, f"cut {patience.cancelled_caught}", key="cut")
            tasks.cancel_scope.cancel()
        await job.wait_for_event("go")
        return cut

    job_id = trees.enqueue("order")
    with trio.fail_after(30):
        await trees.burst()
        SyncClient(trees.dsn).send_event(job_id, "go")
        await trees.burst()
    assert trees.job(job_id)["result"] == "cut True"
