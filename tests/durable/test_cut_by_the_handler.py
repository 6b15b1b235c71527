"""A handler cuts its own scope short, after plain code: later attempts run that code again before they are cut there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import Job  # noqa: TC001 -- a handler's annotations are read

if TYPE_CHECKING:
    from support.trees import Trees

ATTEMPTS = 3


class Ordering:
    """Notes what its steps are called with."""

    def __init__(self) -> None:
        self.done: list[str] = []

    async def act(self, what: str) -> str:
        self.done.append(what)
        return what


async def ends(trees: Trees, job_id: int) -> tuple[object, object]:
    """Runs attempts until the job is settled."""
    with trio.fail_after(30):
        while trees.job(job_id)["finished_at"] is None:
            await trees.burst(log=False)
            trees.again()
    found = trees.job(job_id)
    return found["state"], found["result"]


def fails_for_now(job: Job) -> None:
    if job.attempt < ATTEMPTS:
        raise ValueError("for now")


@pytest.mark.parametrize("before", ["nothing", "a step before the scope", "a step in the scope"])
@pytest.mark.parametrize("cut", ["a step", "a plain await", "a block", "nothing"])
async def test_what_plain_code_has_found_before_it_is_there_again(before: str, cut: str, trees: Trees) -> None:
    ordering = Ordering()

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> list[object]:
        stock = "unknown"
        if before == "a step before the scope":
            await job.step(ordering.act, "first")
        with job.move_on_after(3600) as scope:
            if before == "a step in the scope":
                await job.step(ordering.act, "first")
            await trio.sleep(0.01)
            stock = "none"
            scope.cancel()
            if cut == "a step":
                await job.step(ordering.act, "never")
            elif cut == "a plain await":
                await trio.sleep_forever()
            elif cut == "a block":
                async with job.durable_nursery():
                    await job.step(ordering.act, "never")
        await job.step(ordering.act, "after")
        fails_for_now(job)
        return [await job.step(ordering.act, f"stock {stock}"), scope.cancel_called, scope.cancelled_caught]

    found = await ends(trees, trees.enqueue("order"))
    assert found == ("completed", ["stock none", True, cut != "nothing"])
    assert ordering.done == [*["first"] * (before != "nothing"), "after", "stock none"]


async def test_a_later_attempt_that_does_not_come_to_it_is_cut_before_its_next_call(trees: Trees) -> None:
    ordering = Ordering()

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        with job.move_on_after(3600) as scope:
            await trio.sleep(0.01)
            if job.attempt == 1:
                scope.cancel()
            await job.step(ordering.act, "never")
        await job.step(ordering.act, "after")
        fails_for_now(job)
        return f"cut {scope.cancelled_caught}"

    assert await ends(trees, trees.enqueue("order")) == ("completed", "cut True")
    assert ordering.done == ["after"]


async def test_a_later_attempt_that_leaves_the_scope_without_it_is_told(trees: Trees) -> None:
    ordering = Ordering()

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> None:
        with job.move_on_after(3600) as scope:
            await trio.sleep(0.01)
            if job.attempt == 1:
                scope.cancel()
                await job.step(ordering.act, "never")
        await job.step(ordering.act, "after")
        fails_for_now(job)

    job_id = trees.enqueue("order")
    assert (await ends(trees, job_id))[0] == "dead"
    assert trees.job(job_id)["error"].startswith("ReplayMismatch")
    assert ordering.done == ["after"]


async def test_a_clean_up_in_the_scope_is_made_once(trees: Trees) -> None:
    ordering = Ordering()

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        with job.move_on_after(3600) as scope:
            await job.step(ordering.act, "charge")
            found = "nothing"
            try:
                await trio.sleep(0.01)
                found = "no stock"
                scope.cancel()
                await trio.sleep_forever()
            finally:
                with job.cleanup():
                    await job.step(ordering.act, f"refund: {found}")  # noqa: ASYNC102 -- job.cleanup() is the shield
                    fails_for_now(job)
        return await job.step(ordering.act, "after")

    assert await ends(trees, trees.enqueue("order")) == ("completed", "after")
    assert ordering.done == ["charge", "refund: no stock", "after"]


async def test_a_second_task_cuts_its_own_scope(trees: Trees) -> None:
    ordering = Ordering()

    async def packs(job: Job) -> None:
        stock = "unknown"
        with job.move_on_after(3600, key="packing") as scope:
            await job.step(ordering.act, "look", key="look")
            await trio.sleep(0.01)
            stock = "none"
            scope.cancel()
            await job.step(ordering.act, "never", key="never")
        await job.step(ordering.act, "after", key="after")
        if job.attempt == ATTEMPTS:
            await job.step(ordering.act, f"stock {stock}", key="stock")

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(packs, job)
        fails_for_now(job)
        return "packed"

    assert await ends(trees, trees.enqueue("order")) == ("completed", "packed")
    assert ordering.done == ["look", "after", "stock none"]


async def test_another_task_cuts_the_scope_and_a_later_attempt_does_not_wait_for_it(trees: Trees) -> None:
    """Which of them is faster is the machine's."""
    ordering = Ordering()

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> str:
        async def button(scope: Any) -> None:
            if job.attempt > 1:
                await trio.sleep_forever()
            scope.cancel()

        with job.move_on_after(3600) as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(button, scope)
                await trio.sleep_forever()
        await job.step(ordering.act, "after")
        fails_for_now(job)
        return f"cut {scope.cancelled_caught}"

    assert await ends(trees, trees.enqueue("order")) == ("completed", "cut True")
    assert ordering.done == ["after"]


async def test_a_scope_that_the_handler_has_cut_before_hurries_no_other_one(trees: Trees) -> None:
    """The replay waits for the first `cancel`, and a scope that struck late comes between that and the second one."""
    ordering = Ordering()

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> list[str]:
        async def slow() -> None:
            with trio.CancelScope(shield=True):
                while not late.cancel_called:  # noqa: ASYNC110 -- it has no event
                    await trio.sleep(0.01)

        found: list[str] = []
        for what in ("early", "late"):
            with job.move_on_after(3600) as scope:
                await job.step(ordering.act, what)
                await trio.sleep(0.05)
                found.append(what)
                scope.cancel()
                await trio.sleep_forever()
            if what == "early":
                with job.move_on_after(0.01) as late:
                    await job.step(slow)
                    await trio.lowlevel.cancel_shielded_checkpoint()
                    await trio.lowlevel.cancel_shielded_checkpoint()
                await job.step(ordering.act, "between")
        await job.step(ordering.act, "after")
        fails_for_now(job)
        return found

    assert await ends(trees, trees.enqueue("order")) == ("completed", ["early", "late"])
    assert ordering.done == ["early", "between", "late", "after"]
