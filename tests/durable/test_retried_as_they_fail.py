"""A person retries a child that has failed, while its parent's block hears of that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import ChildFailed, Discard, Job, SyncClient, UsageError
from pulse_trio.worker.durable.block import Block

if TYPE_CHECKING:
    from support.trees import Trees


@pytest.mark.parametrize("when", ["before the block knows", "when it knows"])
async def test_the_block_waits_for_the_child_or_the_retry_is_refused(
    trees: Trees, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """A retry was accepted, the child was cancelled with its siblings, and the block's line said that it had failed: after a
    crash the parent was dead of a mismatch, and what it had begun was not undone."""
    retried: list[bool] = []
    client, fails_of, close = SyncClient(trees.dsn), Block._fails_of, Block.close  # pyright: ignore[reportPrivateUsage] -- no event tells of that moment

    def retry() -> None:
        if not retried:
            (child,) = trees.window.run("SELECT id FROM jobs WHERE kind = 'pay'")
            try:
                client.retry(child["id"])
            except UsageError:
                retried.append(False)
            else:
                retried.append(True)

    async def at_once(self: Block, ids: Any) -> bool:
        if when == "before the block knows":
            retry()
        return await fails_of(self, ids)

    async def then(self: Block, cause: Any) -> None:
        if when == "when it knows":
            retry()
        await close(self, cause)

    monkeypatch.setattr(Block, "_fails_of", at_once)
    monkeypatch.setattr(Block, "close", then)

    @trees.handlers.job
    async def pay(job: Job) -> str:
        if job.attempt == 1:
            raise Discard("no funds")
        return "paid"

    @trees.handlers.job
    async def waits() -> None:
        await trio.sleep_forever()

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        try:
            async with job.durable_nursery() as nursery:
                paid = nursery.start_soon(pay)
                if when == "when it knows":
                    nursery.start_soon(waits)
        except* ChildFailed:
            await job.step(refund)
        if job.attempt == 1:
            raise OSError("for a moment")
        return "refunded" if when == "when it knows" else paid.result

    async def refund() -> None: ...

    job_id = trees.enqueue("order")
    ended = await trees.ended(job_id)
    assert (ended["state"], ended["error"]) == ("completed", None)
    assert retried == [when == "before the block knows"]
    assert ended["result"] == ("refunded" if when == "when it knows" else "paid")
