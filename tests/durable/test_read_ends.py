"""A person retries a child whose end its parent has read, and acted on, while the block is open."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from pulse_trio import Discard, Job, SyncClient, UsageError

if TYPE_CHECKING:
    from support.trees import Trees


@pytest.mark.parametrize("acts", [True, False])
async def test_the_retry_is_refused_once_the_parent_has_acted_on_it(trees: Trees, acts: bool) -> None:
    """The next attempt read another end in the same place: an order was refunded and shipped."""
    done: list[str] = []
    client = SyncClient(trees.dsn)

    @trees.handlers.job
    async def pack(job: Job) -> None:
        if job.attempt == 1:
            raise Discard("no box")

    async def act(what: str) -> None:
        done.append(what)

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> None:
        async with job.durable_nursery(collect=True) as nursery:
            packed = nursery.start_soon(pack)
            if acts:
                while packed.outcome is None:  # noqa: ASYNC110 -- as a user writes it
                    await trio.sleep(0.01)
                await job.step(act, "refund" if packed.state == "dead" else "invoice")
            await job.wait_for_event("go on")
        await job.step(act, "close" if packed.state == "dead" else "ship")

    job_id = trees.enqueue("order")
    await trees.burst(log=False)
    (child,) = trees.window.run("SELECT id FROM jobs WHERE kind = 'pack'")
    if acts:
        with pytest.raises(UsageError, match="has gone on"):
            client.retry(child["id"])
    else:
        client.retry(child["id"])
    client.send_event(job_id, "go on")
    ended = await trees.ended(job_id)
    assert (ended["error"], done) == (None, ["refund", "close"] if acts else ["ship"])
