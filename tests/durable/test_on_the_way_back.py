"""A job that is cancelled between two attempts, and whose handler awaits something plain on its way back to where it stood."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from pulse_trio import Job, SyncClient
from support.trees import cut_clean_ups, running_of

if TYPE_CHECKING:
    from support.trees import Trees


@pytest.mark.parametrize(
    "between", ["nothing", "a checkpoint", "a pause", "a nursery", "a channel", "a scope", "a block"]
)
@pytest.mark.parametrize("stood", ["in a step", "in a wait"])
async def test_it_is_cancelled_where_it_stood_and_undoes_what_may_have_been_done(
    trees: Trees, between: str, stood: str
) -> None:
    """It was cancelled in that await: the money that a lost attempt had charged stayed out, and nothing said so."""
    undone: list[str] = []
    charged: list[int] = []
    client = SyncClient(trees.dsn)

    @trees.handlers.job
    async def packs() -> None: ...

    async def passes(job: Job) -> None:
        match between:
            case "a checkpoint":
                await trio.lowlevel.checkpoint()
            case "a pause":
                await trio.sleep(0.05)
            case "a nursery":
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(trio.lowlevel.checkpoint)
            case "a channel":
                send, receive = trio.open_memory_channel[int](1)
                await send.send(1)
                await receive.receive()
            case "a scope":
                with job.move_on_after(0.05):
                    await job.wait_for_event("coupon")
            case "a block":
                with job.move_on_after(3600) as scope:
                    async with job.durable_nursery(collect=True) as nursery:
                        child = nursery.start_soon(packs)
                        while child.outcome is None:  # noqa: ASYNC110 -- as a user writes it
                            await trio.sleep(0.01)
                        scope.cancel()
            case _:
                pass

    async def charge(job: Job) -> None:
        charged.append(job.attempt)
        if len(charged) == 1:
            # Where nobody claims, so that the next attempt begins after the cancellation.
            trees.window.run("UPDATE job SET queue = 'elsewhere' WHERE id = %s", job.id)
            await trees.lose(job.id, due=False)
            client.cancel(job.id)
            cut_clean_ups(running_of(job))
            trees.window.run("UPDATE job SET queue = 'default' WHERE id = %s", job.id)
            trees.again()
            await trio.sleep_forever()

    async def begin() -> None: ...

    async def refund() -> None:
        undone.append("refund")

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> None:
        await job.step(begin)
        await passes(job)
        try:
            if stood == "in a step":
                await job.step(charge, job)
            else:
                await job.wait_for_event("approved")
        except BaseException:
            with job.cleanup():
                await job.step(refund)  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise

    job_id = trees.enqueue("order")
    await trees.burst(log=False, lease=3, heartbeat=0.1, queues=("default",))
    if stood == "in a wait":
        client.cancel(job_id)
    ended = await trees.ended(job_id)
    assert (ended["state"], undone) == ("cancelled", ["refund"])
