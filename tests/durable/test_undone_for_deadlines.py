"""A remembered deadline has struck or a step has failed, plain code of the handler fails because of it, and the compensation is
cut off half-way or fails: the next attempt comes to the same place and does the rest."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import ChildFailed, Discard, Job, StepFailed

if TYPE_CHECKING:
    from support.trees import Trees


class Bank:
    """Its first refund does not work: the worker is `lost` in it, or it fails."""

    def __init__(self, trees: Trees, *, lost: bool) -> None:
        self.book: list[str] = []
        self._trees = trees
        self._lost = lost

    async def charge(self) -> None:
        self.book.append("charged")

    async def refund(self, job: Job) -> None:
        self.book.append("refund")
        if self.book.count("refund") == 1:
            if not self._lost:
                raise ConnectionError("the bank is down")
            await self._trees.lose(job.id)
            await trio.sleep_forever()
        self.book.append("refunded")


Inside = Callable[[Job, Any], Awaitable[None]]


async def in_block(job: Job, pack: Any) -> None:
    async with job.durable_nursery() as nursery:
        nursery.start_soon(pack)


async def in_step(job: Job, pack: Any) -> None:
    await job.step(trio.sleep, 60)


async def in_event(job: Job, pack: Any) -> None:
    await job.wait_for_event("packed")


async def in_sleep(job: Job, pack: Any) -> None:
    await job.sleep(3600)


INSIDE: dict[str, Inside] = {"a block": in_block, "a step": in_step, "an event": in_event, "a sleep": in_sleep}


@pytest.mark.parametrize("lost", [True, False], ids=["lost", "failed"])
@pytest.mark.parametrize(
    ("inside", "suspended"),
    [(inside, when) for inside in INSIDE for when in (True, False) if not (when and inside == "a step")],
)
async def test_a_refund_that_does_not_work_at_once_is_paid(
    trees: Trees, inside: str, *, suspended: bool, lost: bool
) -> None:
    """In most of these the job was dead with a mismatch, and its charge was open for good."""
    bank = Bank(trees, lost=lost)

    @trees.handlers.job(queue="unserved")
    async def pack() -> None: ...

    @trees.handlers.job(durable=True, suspend_after=0 if suspended else 60, max_attempts=5)
    async def order(job: Job) -> None:
        await job.step(bank.charge)
        try:
            with job.move_on_after(600 if suspended else 0.3) as patience:
                await INSIDE[inside](job, pack)
            if patience.cancelled_caught:
                raise Discard("not packed in time")
        except BaseException:
            with job.cleanup():
                await job.step(bank.refund, job)  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise

    job_id = trees.enqueue("order")
    await trees.burst(queues=["default"], watchdog=5, lease=3, heartbeat=0.3)
    if suspended:
        trees.time_passes(job_id)
        await trees.burst(queues=["default"], watchdog=5, lease=3, heartbeat=0.3)
    with trio.fail_after(30):
        while trees.job(job_id)["finished_at"] is None:
            trees.again()
            await trees.burst(queues=["default"], log=False)
    found = trees.job(job_id)
    assert (found["state"], bank.book) == ("dead", ["charged", "refund", "refund", "refunded"])
    assert str(found["error"]).startswith("Discard: not packed in time")


@pytest.mark.parametrize("lost", [True, False], ids=["lost", "failed"])
@pytest.mark.parametrize("ends", ["in its place", "behind it", "of a child"])
async def test_a_refund_for_an_answered_failure_is_paid(trees: Trees, ends: str, *, lost: bool) -> None:
    bank = Bank(trees, lost=lost)

    async def ship() -> None:
        raise OSError("no lorry")

    shipped = trees.handlers.job(max_attempts=1)(ship)

    @trees.handlers.job(durable=True, max_attempts=5)
    async def order(job: Job) -> None:
        await job.step(bank.charge)
        try:
            failed = False
            try:
                if ends == "of a child":
                    async with job.durable_nursery() as nursery:
                        nursery.start_soon(shipped)
                else:
                    await job.step(ship)
            except* (StepFailed, ChildFailed):
                failed = True
                if ends == "in its place":
                    raise Discard("not shipped") from None
            if failed:
                raise Discard("not shipped")
        except BaseException:
            with job.cleanup():
                await job.step(bank.refund, job)  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise

    job_id = trees.enqueue("order")
    with trio.fail_after(30):
        while trees.job(job_id)["finished_at"] is None:
            await trees.burst(log=False, watchdog=5, lease=3, heartbeat=0.3)
            trees.again()
    assert (trees.job(job_id)["state"], bank.book) == ("dead", ["charged", "refund", "refund", "refunded"])
