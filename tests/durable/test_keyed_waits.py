"""Plain code that fails before an attempt has come to a sleep with a key, which is under way, is no reason to undo it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
import trio

from pulse_trio import Job  # noqa: TC001 -- read by the registry

if TYPE_CHECKING:
    from support.trees import Trees

MOMENT = datetime.now(UTC) + timedelta(minutes=1)


async def note(what: str) -> str:
    return what


class Till:
    """What is refunded because plain code has failed."""

    def __init__(self) -> None:
        self.refunds = 0

    async def refund(self) -> None:
        self.refunds += 1

    async def answer(self, job: Job, error: BaseException) -> None:
        if job.cancel_reason is None and isinstance(error, OSError):
            with job.cleanup():
                await job.step(self.refund)


@pytest.mark.parametrize("until", [False, True])
@pytest.mark.parametrize("key", [None, "pause"])
async def test_what_fails_before_a_sleep_that_is_under_way_is_not_refunded(
    trees: Trees, key: str | None, until: bool
) -> None:
    till = Till()

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        await job.step(note, "charged")
        try:
            if job.attempt == 2:
                raise OSError("no connection")
            await (job.sleep_until(MOMENT, key=key) if until else job.sleep(60, key=key))
        except BaseException as error:
            await till.answer(job, error)  # noqa: ASYNC102 -- its job.cleanup() is the shield
            raise
        return "done"

    job_id = trees.enqueue("order")
    for _ in range(3):
        await trees.burst(log=False)
        trees.time_passes(job_id)
    assert (trees.job(job_id)["state"], till.refunds) == ("completed", 0)


async def over_before_it_begins(job: Job) -> None:
    async def wins(nursery: trio.Nursery) -> None:
        await job.step(note, "first", key="first")
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wins, nursery)
        nursery.start_soon(lambda: job.sleep(60, key="pause"))


async def over_after_it_began(job: Job) -> None:
    async def wins(nursery: trio.Nursery) -> None:
        await job.step(note, "first", key="first")
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: job.sleep(60, key="pause"))
        nursery.start_soon(wins, nursery)


async def cut_by_a_plain_deadline(job: Job) -> None:
    with trio.move_on_after(0.05):
        await job.sleep(60, key="pause")


async def cut_by_a_remembered_deadline(job: Job) -> None:
    with job.move_on_after(0.05, key="limit"):
        await job.sleep(60, key="pause")


WAYS = [over_before_it_begins, over_after_it_began, cut_by_a_plain_deadline, cut_by_a_remembered_deadline]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
async def test_what_fails_after_one_that_was_cut_short_is_refunded(trees: Trees, way: object) -> None:
    till = Till()

    @trees.handlers.job(durable=True, max_attempts=2)
    async def order(job: Job) -> None:
        await way(job)  # type: ignore[operator]
        await job.step(note, "charged", key="charged")
        try:
            raise ValueError("once") if job.attempt == 1 else OSError("no connection")
        except Exception as error:
            await till.answer(job, error)  # noqa: ASYNC120 -- its job.cleanup() is the shield
            raise

    job_id = trees.enqueue("order")
    for _ in range(2):
        await trees.burst(log=False)
        trees.time_passes(job_id)
    assert (trees.job(job_id)["state"], till.refunds) == ("dead", 1), trees.job(job_id)["error"]
