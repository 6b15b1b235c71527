"""A plain await that was cut short is quicker in the next attempt. It is cut at the same place all the same, so that the
clean-up which followed comes again."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import ChildFailed, Discard, Job, SyncClient
from pulse_trio.worker.durable.places import place_of_the_cut

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from support.trees import Trees


class Shop:
    """What a handler does. In the first attempt `remote` is cut short, in later ones it answers at once."""

    def __init__(self, *, fails: bool = False) -> None:
        self.calls: list[str] = []
        self.stands = trio.Event()
        self.fails = fails

    async def do(self, what: str) -> None:
        if what == "refund" and self.fails:
            self.fails = False
            self.calls.append("refund fails")
            raise ConnectionError("the bank is down for a moment")
        self.calls.append(what)

    async def remote(self, job: Job) -> None:
        self.calls.append("asked")
        self.stands.set()
        if job.attempt == 1:
            await trio.sleep_forever()
        await self.far_away(40)

    async def far_away(self, frames: int) -> None:
        """As a library's client, whose frames are many."""
        if frames:
            await self.far_away(frames - 1)
        else:
            await trio.lowlevel.checkpoint()

    async def refunds(self, job: Job, how: str, key: str | None = None) -> None:
        async def refund() -> None:
            with job.cleanup():
                await job.step(self.do, "refund", key=key)

        @asynccontextmanager
        async def undone() -> AsyncGenerator[None]:
            try:
                yield
            except BaseException:
                await refund()  # noqa: ASYNC102 -- shielded inside
                raise

        await trio.lowlevel.checkpoint()
        match how:
            case "except":
                try:
                    await self.remote(job)
                except BaseException:
                    await refund()  # noqa: ASYNC102 -- the same
                    raise
            case "finally":
                try:
                    await self.remote(job)
                finally:
                    await refund()  # noqa: ASYNC102 -- the same
            case _:
                async with undone():
                    await self.remote(job)


async def goes_on(trees: Trees, job_id: int) -> dict[str, Any]:
    with trio.fail_after(30):
        while (job := trees.job(job_id))["finished_at"] is None:
            if job["state"] == "suspended":
                SyncClient(trees.dsn).send_event(job_id, "go on")
            trees.again()
            await trees.burst()
    return job


@pytest.mark.parametrize("how", ["except", "finally", "a context manager"])
@pytest.mark.parametrize(
    ("cut_by", "fails"),
    # An attempt that has failed of its block starts the child again, and may not be cut at all.
    [
        ("a scope", False),
        ("a scope", True),
        ("a child's failure", False),
        ("a scope in a task", False),
        ("a scope in a task", True),
    ],
)
async def test_it_is_cut_at_the_same_place(trees: Trees, cut_by: str, how: str, fails: bool) -> None:
    shop = Shop(fails=fails)

    @trees.handlers.job
    async def bad() -> None:
        await shop.stands.wait()
        raise Discard("bad")

    @trees.handlers.job(durable=True, suspend_after=0, max_attempts=3)
    async def order(job: Job) -> str:
        await job.step(shop.do, "charge")

        async def scoped(key: str | None = None) -> None:
            with job.move_on_after(3600, key=key and f"{key} scope") as scope:
                if job.attempt == 1:
                    job.nursery.start_soon(cut, scope)
                await shop.refunds(job, how, key=key)

        async def cut(scope: Any) -> None:
            await shop.stands.wait()
            scope.cancel()

        match cut_by:
            case "a scope":
                await scoped()
            case "a child's failure":
                try:
                    async with job.durable_nursery() as nursery:
                        nursery.start_soon(bad)
                        await nursery.flush()
                        await shop.refunds(job, how)
                except* ChildFailed:
                    pass
            case _:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(scoped, "in a task")
        await job.step(shop.do, "ship")
        await job.wait_for_event("go on")
        return "ok"

    job_id = trees.enqueue("order")
    found = await goes_on(trees, job_id)
    assert (found["error"], found["result"]) == (None, "ok")
    wanted = ["charge", "refund", "ship"]
    assert [call for call in shop.calls if call != "asked"] == (
        ["charge", "refund fails", *wanted[1:]] if fails else wanted
    )


@pytest.mark.parametrize("how", ["except", "finally", "a context manager"])
async def test_a_cancelled_job_whose_clean_up_failed_does_the_rest_though_it_is_quicker_now(
    trees: Trees, how: str
) -> None:
    shop = Shop(fails=True)

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> None:
        await job.step(shop.do, "charge")
        await shop.refunds(job, how)

    job_id = trees.enqueue("order")
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trees.burst)
            await shop.stands.wait()
            SyncClient(trees.dsn).cancel(job_id)
    assert trees.job(job_id)["state"] == "cancelled"
    SyncClient(trees.dsn).retry(job_id)
    with trio.fail_after(30):
        await trees.burst()
    assert trees.job(job_id)["state"] == "cancelled"
    assert [call for call in shop.calls if call != "asked"] == ["charge", "refund fails", "refund"]


async def test_code_that_has_moved_is_cut_as_late_as_before(trees: Trees) -> None:
    """The place is not found, where the clean-up's code is another: what was is left is the time."""
    shop, ways = Shop(), ["except", "finally"]

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        with job.move_on_after(3600) as scope:
            if job.attempt == 1:
                job.nursery.start_soon(cut, scope)
            await job.step(shop.do, "charge")
            await shop.refunds(job, ways[min(job.attempt, 2) - 1])
        await job.wait_for_event("go on")
        return "ok"

    async def cut(scope: Any) -> None:
        await shop.stands.wait()
        scope.cancel()

    original = shop.remote

    async def slow(job: Job) -> None:
        if job.attempt > 1:
            await trio.sleep_forever()
        await original(job)

    shop.remote = slow  # type: ignore[method-assign]
    job_id = trees.enqueue("order")
    found = await goes_on(trees, job_id)
    assert (found["error"], found["result"], shop.calls) == (None, "ok", ["charge", "asked", "refund"])


async def test_outside_of_an_exception_there_is_no_place() -> None:
    assert place_of_the_cut() == ()
    try:
        raise KeyError
    except KeyError:
        found = place_of_the_cut()
        assert found
        assert found[-1].startswith("test_outside_of_an_exception_there_is_no_place:")
