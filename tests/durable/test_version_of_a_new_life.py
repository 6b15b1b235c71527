"""A durable job begins anew, and its code is deployed in another version: `job.version`, and the row that tells which jobs
need the old branch, are of the code that has begun the new life."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from pulse_trio import Discard, Handlers, Job, RetryAfter, SyncClient

if TYPE_CHECKING:
    from support.trees import Trees

NEEDS_OLD_BRANCH = (
    "SELECT count(*) FROM jobs j JOIN durable_job d ON d.job_id = j.id"
    " WHERE j.kind = 'order' AND j.finished_at IS NULL AND d.version < 2"
)
"""As docs/how-to/change-durable-code.md has it."""


class Shop:
    """An order that waits for its parcel. In version 2 it looks at its stock first, and the parcel has another key."""

    def __init__(self, trees: Trees, waits_for: str, *, reserves: bool) -> None:
        self.trees, self.waits_for, self.reserves = trees, waits_for, reserves
        self.client = SyncClient(trees.dsn)
        self.done: list[str] = []
        self.seen: list[tuple[int, int]] = []
        """The version of each attempt's code, and what that is told."""

    async def do(self, what: str) -> None:
        self.done.append(what)

    def deploy(self, version: int) -> None:
        handlers = self.trees.handlers = Handlers()

        @handlers.job(durable=True, suspend_after=0)
        async def pack(job: Job) -> str:
            await job.step(self.do, "pack")
            return await job.wait_for_event("packed", type=str)

        @handlers.job(durable=True, suspend_after=0, version=version)
        async def order(job: Job) -> str:
            self.seen.append((version, job.version))
            if job.version >= 2:
                await job.step(self.do, "look")
            if self.reserves:
                await job.step(self.do, "reserve")
            try:
                if self.waits_for == "its child":
                    async with job.durable_nursery() as nursery:
                        parcel = nursery.start_soon(pack.options(child_key=f"in version {job.version}"))
                    how = parcel.result
                else:
                    how = await job.wait_for_event("packed", type=str)
            except trio.Cancelled:
                with job.cleanup():
                    await job.step(self.do, "undo")  # noqa: ASYNC102 -- job.cleanup() is the shield
                raise
            if how == "damaged":
                raise RetryAfter(0, afresh=True)
            if how == "lost":
                raise Discard(how)
            return how

    async def run(self) -> None:
        with trio.fail_after(60):
            await self.trees.burst(log=False)

    async def packed(self, how: str) -> None:
        """Somebody says so to each job that waits for it."""
        kind = "pack" if self.waits_for == "its child" else "order"
        for row in self.trees.window.run("SELECT id FROM jobs WHERE kind = %s AND finished_at IS NULL", kind):
            self.client.send_event(row["id"], "packed", how)
        await self.run()

    async def first_life(self, ends: str) -> int:
        """Ends so that the job begins anew with its next attempt, which waits then for somebody to run it."""
        job_id = self.trees.enqueue("order")
        await self.run()
        if ends == "it is cancelled and retried":
            self.client.cancel(job_id)
            await self.trees.ended(job_id)
            assert self.client.retry(job_id)
        elif ends == "it is dead and retried afresh":
            await self.packed("lost")
            assert self.client.retry(job_id, afresh=True)
        else:
            # The burst goes on with it.
            await self.packed("damaged")
        return job_id


ENDS = ("its handler says so", "it is cancelled and retried", "it is dead and retried afresh")


@pytest.mark.parametrize("ends", ENDS)
async def test_code_of_version_2_goes_on_with_a_second_life_that_version_1_has_begun(ends: str, trees: Trees) -> None:
    """What that has begun is in no line: it has children, and no more."""
    shop = Shop(trees, "its child", reserves=ends == "it is cancelled and retried")
    shop.deploy(1)
    job_id = await shop.first_life(ends)
    await shop.run()
    assert trees.job(job_id)["state"] == "suspended"
    packed = shop.done.count("pack")
    assert trees.window.value(NEEDS_OLD_BRANCH) == 1
    shop.deploy(2)
    await shop.packed("well")
    job = trees.job(job_id)
    assert (job["state"], job["result"]) == ("completed", "well"), job["error"]
    assert shop.seen[-1] == (2, 1)
    assert shop.done.count("pack") == packed
    assert "look" not in shop.done


@pytest.mark.parametrize("waits_for", ["its child", "an event"])
@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1)])
async def test_the_row_says_the_version_that_has_begun_the_second_life(
    first: int, second: int, waits_for: str, trees: Trees
) -> None:
    shop = Shop(trees, waits_for, reserves=True)
    shop.deploy(first)
    job_id = await shop.first_life("it is cancelled and retried")
    shop.deploy(second)
    await shop.run()
    assert trees.job(job_id)["state"] == "suspended"
    assert shop.seen[-1] == (second, second)
    assert trees.window.value(NEEDS_OLD_BRANCH) == (second == 1)
    shop.deploy(2)
    await shop.packed("well")
    assert (trees.job(job_id)["state"], shop.seen[-1]) == ("completed", (2, second))
