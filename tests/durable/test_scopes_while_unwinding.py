"""A remembered scope that a handler enters while it unwinds, and its next attempt comes to the same place: nothing is
remembered of it, and the clean-up of a later cancellation has its whole time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import pytest
import trio

from pulse_trio import Discard, Job, SyncClient

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from pulse_trio.durable_calls import DurableScope
    from support.trees import Trees

Which = Literal["move_on_after", "fail_after"]


class Order:
    """An order that is charged, waits, and is packed within an hour. Its clean-up gives the refund a bounded time, and closes a
    connection in plain code."""

    def __init__(self, trees: Trees, which: Which = "move_on_after") -> None:
        self.trees = trees
        self.client = SyncClient(trees.dsn)
        self.done: list[str] = []
        self.closed: list[str | None] = []
        self.stands = trio.Event()
        self.seconds = 3.0
        """That the clean-up's scope has."""
        self.stuck = False
        """Whether the connection takes for ever to close."""

        def scope(job: Job) -> AbstractContextManager[DurableScope]:
            return job.move_on_after(self.seconds) if which == "move_on_after" else job.fail_after(self.seconds)

        async def clean_up(job: Job) -> None:
            with job.cleanup():
                try:
                    with scope(job) as bound:
                        await trio.sleep(math.inf if self.stuck else 0)
                        self.closed.append(job.cancel_reason)
                        await job.step(self.act, "refund")
                except trio.TooSlowError:
                    self.done.append("too slow")
                else:
                    if bound.cancelled_caught:
                        self.done.append("too slow")
                await job.step(self.act, "mail")

        async def pack(job: Job) -> str:
            with job.move_on_after(3600):
                return await job.step(self.act, "pack")
            raise Discard("not packed within an hour")

        @trees.handlers.job(durable=True, suspend_after=0)
        async def waits(job: Job) -> str:
            await job.step(self.act, "charge")
            try:
                await job.wait_for_event("approved")
                return await pack(job)
            except BaseException:
                await clean_up(job)  # noqa: ASYNC102 -- job.cleanup() is the shield
                raise

        @trees.handlers.job(durable=True)
        async def computes(job: Job) -> str:
            await job.step(self.act, "charge")
            try:
                if job.attempt == 1:
                    self.stands.set()
                    await trio.sleep_forever()
                return await pack(job)
            except BaseException:
                await clean_up(job)  # noqa: ASYNC102 -- the same
                raise

    async def act(self, what: str) -> str:
        self.done.append(what)
        return what

    async def suspended(self) -> int:
        job_id = self.trees.enqueue("waits")
        await self.burst()
        assert self.trees.job(job_id)["state"] == "suspended"
        return job_id

    async def burst(self) -> None:
        with trio.fail_after(30):
            await self.trees.burst()

    def deadlines(self, job_id: int) -> list[str]:
        """The remembered scopes of a job. All have passed after this."""
        found = self.trees.window.run(
            "UPDATE history SET value = to_json(extract(epoch FROM now())::float8 - 60)"
            " WHERE job_id = %s AND kind = 10 AND key LIKE '%%:scope' RETURNING key",
            job_id,
        )
        return [row["key"] for row in found]


@pytest.mark.parametrize("which", ["move_on_after", "fail_after"])
async def test_a_suspension_leaves_no_deadline_to_the_clean_up_of_a_cancellation_days_later(
    which: Which, trees: Trees
) -> None:
    order = Order(trees, which)
    job_id = await order.suspended()
    assert order.closed == ["suspended"]
    assert order.deadlines(job_id) == []
    assert trees.lines(job_id) == [(1, "1:step", "act")]
    order.client.cancel(job_id)
    await order.burst()
    assert trees.job(job_id)["state"] == "cancelled"
    assert (order.done, order.closed) == (["charge", "refund", "mail"], ["suspended", "user"])
    assert order.deadlines(job_id) == ["3:scope"]


async def test_the_main_paths_next_scope_has_its_whole_time_after_a_suspension(trees: Trees) -> None:
    order = Order(trees)
    job_id = await order.suspended()
    order.deadlines(job_id)
    order.client.send_event(job_id, "approved", None)
    await order.burst()
    assert trees.job(job_id)["result"] == "pack"
    assert order.done == ["charge", "pack"]


@pytest.mark.parametrize("which", ["move_on_after", "fail_after"])
async def test_a_worker_that_stops_leaves_no_deadline_to_the_next(which: Which, trees: Trees) -> None:
    order = Order(trees, which)
    job_id = trees.enqueue("computes")
    with trio.fail_after(30):
        async with trio.open_nursery() as running:
            worker = trees.worker(grace=0)
            running.start_soon(worker.run)
            await order.stands.wait()
            worker.stop_now()
    assert order.closed == ["shutdown"]
    assert order.deadlines(job_id) == []
    trees.again()
    await order.burst()
    assert trees.job(job_id)["result"] == "pack"
    assert order.done == ["charge", "pack"]


@pytest.mark.parametrize("which", ["move_on_after", "fail_after"])
async def test_such_a_scope_still_bounds_what_is_in_it(which: Which, trees: Trees) -> None:
    order = Order(trees, which)
    order.seconds, order.stuck = 0.05, True
    job_id = await order.suspended()
    assert order.done == ["charge", "too slow"]
    assert order.deadlines(job_id) == []
    assert trees.lines(job_id) == [(1, "1:step", "act")]


async def test_a_timeout_in_a_replay_leaves_no_deadline_to_the_next_attempt(trees: Trees) -> None:
    done: list[str] = []

    async def act(what: str) -> None:
        done.append(what)

    @trees.handlers.job(durable=True, timeout=1)
    async def order(job: Job) -> bool:
        try:
            await job.step(act, "charge")
            if job.attempt == 2:
                await trio.sleep_forever()
            with job.move_on_after(3600) as hour:
                await job.step(act, "pack")
                if job.attempt == 1:
                    raise ValueError("for now")
        except trio.Cancelled:
            with job.cleanup(), job.move_on_after(3, key="closing"):
                done.append("closed")
            raise
        return hour.cancelled_caught

    job_id = trees.enqueue("order")
    for _ in range(3):
        trees.again()
        await trees.burst()
    assert (trees.job(job_id)["result"], done) == (False, ["charge", "pack", "closed"])
    found = trees.window.run("SELECT key FROM history WHERE job_id = %s AND kind = 10", job_id)
    assert sorted(row["key"] for row in found) == ["0:failed", "2:scope"]


@pytest.mark.parametrize("ends", ["cancelled", "completed"])
async def test_a_deadline_that_a_worker_of_the_version_before_has_left_so_behind_a_wait_is_not_kept(
    ends: str, trees: Trees
) -> None:
    order = Order(trees)
    job_id = await order.suspended()
    trees.window.run(
        "INSERT INTO history (job_id, line, kind, key, name, value, attempt) VALUES (%s, 2, 10, '3:scope', NULL, '1.0', 1)",
        job_id,
    )
    if ends == "cancelled":
        order.client.cancel(job_id)
    else:
        order.client.send_event(job_id, "approved", None)
    await order.burst()
    assert trees.job(job_id)["state"] == ends
    assert order.done == ["charge", *(["refund", "mail"] if ends == "cancelled" else ["pack"])]


async def test_the_deadline_of_a_clean_up_that_has_begun_is_kept_by_a_retry(trees: Trees) -> None:
    """It was remembered in the clean-up itself, and is no one's but that."""
    done: list[str] = []

    async def act(what: str) -> None:
        done.append(what)

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> None:
        await job.step(act, "charge")
        try:
            await job.wait_for_event("approved")
        except BaseException:
            with job.cleanup(), job.move_on_after(3600):
                if job.cancel_reason == "user" and not done[1:]:
                    done.append("fails")
                    raise ConnectionError("for now") from None  # noqa: ASYNC104 -- a clean-up that fails
                await job.step(act, "refund")  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise

    client = SyncClient(trees.dsn)
    job_id = trees.enqueue("order")
    await trees.burst()
    client.cancel(job_id)
    await trees.burst()
    assert done == ["charge", "fails"]
    trees.window.run(
        "UPDATE history SET value = to_json(extract(epoch FROM now())::float8) WHERE job_id = %s AND key = '3:scope'",
        job_id,
    )
    client.retry(job_id)
    with trio.fail_after(30):
        while trees.job(job_id)["finished_at"] is None:
            await trees.burst()
            trees.again()
    assert (trees.job(job_id)["state"], done) == ("cancelled", ["charge", "fails"])
