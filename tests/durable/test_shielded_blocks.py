"""A durable block in a shield of its handler's, whose job is cancelled: nothing tells the block, but its children end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import ChildFailed, Job, SyncClient
from pulse_trio.store import family

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from support.trees import Trees


def plain(_: Job) -> AbstractContextManager[object]:
    return trio.CancelScope(shield=True)


def in_clean_up(job: Job) -> AbstractContextManager[object]:
    return job.cleanup()


@pytest.mark.parametrize("shield", [plain, in_clean_up])
async def test_a_block_that_collects_goes_on_with_the_ends_of_its_children(
    shield: Callable[[Job], AbstractContextManager[object]], trees: Trees
) -> None:
    """It waited for ever: its children had been cancelled with the job, so they counted as not ended."""
    runs, bank = trio.Event(), list[str]()

    async def ship() -> None:
        raise ValueError("no stock")

    async def refund() -> None:
        bank.append("refunded")

    @trees.handlers.job
    async def undo() -> None:
        runs.set()
        await trio.sleep_forever()

    @trees.handlers.job(durable=True, max_attempts=1)
    async def order(job: Job) -> None:
        try:
            await job.step(ship)
        except BaseException:
            with shield(job):
                async with job.durable_nursery(collect=True) as nursery:  # noqa: ASYNC102 -- the handler's own shield is what is tried
                    child = nursery.start_soon(undo)
                bank.append(child.state.value)
                await job.step(refund)  # noqa: ASYNC102 -- the handler's own shield is what is tried
            raise

    await cancelled_once(trees, "order", runs)
    assert bank == ["cancelled", "refunded"]


@pytest.mark.parametrize("polls", [False, True])
async def test_a_block_fails_of_its_children(polls: bool, trees: Trees) -> None:
    runs, bank = trio.Event(), list[Any]()

    async def refund() -> None:
        bank.append("refunded")

    @trees.handlers.job
    async def pack() -> None:
        runs.set()
        await trio.sleep_forever()

    @trees.handlers.job(durable=True, max_attempts=1)
    async def order(job: Job) -> None:
        try:
            with trio.CancelScope(shield=True):
                async with job.durable_nursery() as nursery:
                    child = nursery.start_soon(pack)
                    while polls and child.outcome is None:  # noqa: ASYNC110 -- as a user writes it
                        await trio.sleep(0.01)
        except BaseException as error:
            bank.append([type(one) for one in error.exceptions] if isinstance(error, BaseExceptionGroup) else error)
            with job.cleanup():
                await job.step(refund)  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise

    await cancelled_once(trees, "order", runs)
    assert bank == [[ChildFailed], "refunded"]


async def cancelled_once(trees: Trees, kind: str, runs: trio.Event) -> None:
    """Runs a job of this kind, which is cancelled when the event is set, in one attempt."""
    job_id = trees.enqueue(kind)
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trees.burst)
            await runs.wait()
            await trio.to_thread.run_sync(SyncClient(trees.dsn).cancel, job_id)
    job = trees.job(job_id)
    assert (job["state"], job["attempt"]) == ("cancelled", 1)


async def test_a_job_whose_handler_did_not_end_when_it_was_cancelled_owes_its_clean_up(trees: Trees) -> None:
    """Its worker is replaced, and nothing is undone. Nothing said so, and a retry went on as if nobody had cancelled it."""
    stands, over, bank = trio.Event(), trio.Event(), list[str]()

    async def pay(what: str) -> None:
        bank.append(what)

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        await job.step(pay, "charged")
        try:
            stands.set()
            with trio.CancelScope(shield=True):
                await over.wait()
            await job.sleep(0)
        except BaseException:
            if job.attempt > 1:  # the process of the first one is gone by now
                with job.cleanup():
                    await job.step(pay, "refunded")  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise
        return "shipped"

    job_id = trees.enqueue("order")
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def cancel() -> None:
            await stands.wait()
            await trio.to_thread.run_sync(SyncClient(trees.dsn).cancel, job_id)

        await trees.replaced(over)
    assert (trees.job(job_id)["state"], bank) == ("cancelled", ["charged"])
    assert trees.window.do(family.unfinished_clean_ups([job_id])) == [job_id]
    SyncClient(trees.dsn).retry(job_id)
    await trees.burst()
    assert (trees.job(job_id)["state"], bank) == ("cancelled", ["charged", "refunded"])
    assert trees.window.do(family.unfinished_clean_ups([job_id])) == []
