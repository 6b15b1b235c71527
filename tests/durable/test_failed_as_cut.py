"""A block fails, and a scope around it strikes while it closes: the failure goes on, as from a nursery of Trio's.

The job was completed as if nothing had failed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import Discard, Job, SyncClient

if TYPE_CHECKING:
    from collections.abc import Callable

    from pulse_trio.handlers import Handler
    from support.trees import Trees


class Yard:
    """Children: one that ends when the scope around its block has struck, and one that fails."""

    def __init__(self, trees: Trees) -> None:
        self.did: list[str] = []
        self.packs = trio.Event()
        self.scope: Any = None

        @trees.handlers.job
        async def pack(job: Job) -> None:
            self.packs.set()
            try:
                await trio.sleep_forever()
            finally:
                with job.cleanup():
                    while self.scope is not None and not self.scope.cancel_called:
                        await trio.lowlevel.checkpoint()  # noqa: ASYNC102 -- job.cleanup() is the shield

        @trees.handlers.job
        async def charge() -> None:
            raise Discard("no funds")

        self.pack: Handler[..., Any] = pack
        self.charge: Handler[..., Any] = charge

    async def note(self, what: str) -> None:
        self.did.append(what)

    async def refund(self) -> None:
        raise OSError("the bank is closed")


WAYS = ["the body", "a child", "a clean-up"]


def parents(trees: Trees, yard: Yard, way: str, scope: Callable[[Job], Any], *, dies: bool) -> None:
    @trees.handlers.job(durable=True, max_attempts=4)
    async def parent(job: Job) -> str:
        try:
            with scope(job) as yard.scope:
                async with job.durable_nursery() as nursery:
                    nursery.start_soon(yard.pack)
                    if way == "a child":
                        nursery.start_soon(yard.charge)
                    elif way == "the body":
                        await yard.packs.wait()
                        raise Discard("refused")
                    else:
                        try:
                            await job.sleep(60)
                        finally:
                            with job.cleanup():
                                await job.step(yard.refund)  # noqa: ASYNC102 -- job.cleanup() is the shield
            await job.step(yard.note, "went on")
        except Exception as error:
            await job.step(yard.note, "undone")  # noqa: ASYNC120 -- what is tried
            if dies and job.attempt == 1:
                await trees.dies(job)  # noqa: ASYNC120 -- the same
            raise Discard("undone") from error
        return "completed"


# (That a plain scope has struck is not remembered.)
@pytest.mark.parametrize(
    ("which", "dies"),
    [("move_on_after", False), ("move_on_after", True), ("fail_after", False), ("fail_after", True), ("plain", False)],
)
@pytest.mark.parametrize("way", WAYS)
async def test_the_failure_goes_on(trees: Trees, way: str, which: str, *, dies: bool) -> None:
    yard = Yard(trees)

    def scope(job: Job) -> Any:
        return trio.move_on_after(0.6) if which == "plain" else getattr(job, which)(0.6)

    parents(trees, yard, way, scope, dies=dies)
    job_id = trees.enqueue("parent")
    with trio.fail_after(30):
        await trees.burst(lease=3, heartbeat=0.1, log=False)
    found = await trees.ended(job_id)
    assert (found["state"], str(found["error"]).partition("\n")[0]) == ("dead", "Discard: undone")
    assert yard.did == ["undone"]


async def test_a_cancelled_job_ends_as_cancelled(trees: Trees) -> None:
    yard = Yard(trees)
    here = trio.Event()

    @trees.handlers.job(durable=True)
    async def parent(job: Job) -> None:
        async with job.durable_nursery() as nursery:
            nursery.start_soon(yard.pack)
            here.set()
            try:
                await trio.sleep_forever()
            except trio.Cancelled:
                raise ValueError("while it unwinds") from None  # noqa: ASYNC104 -- what is tried

    job_id = trees.enqueue("parent")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trees.burst)
        await here.wait()
        await trio.to_thread.run_sync(SyncClient(trees.dsn).cancel, job_id)
    assert (await trees.ended(job_id))["state"] == "cancelled"
