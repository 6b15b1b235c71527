"""The ends of a worker whose slots are lent: a burst, one that is told to stop, to stop at once, or is cancelled.
Nothing hangs, is lost, or is done twice."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import ChildFailed, Discard, Job, SyncClient
from pulse_trio.observe import SuspectAlone
from support.stage import parts

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from pulse_trio import Worker
    from support.trees import Trees

LONG = 60
"""Seconds after which a test has failed."""


class Order:
    """A parent with a child that fails and one that has a history, which cleans up in a step of some length when it is
    cancelled, by the worker whose one slot the parent has. `pauses`: nobody may run it any more when its sibling fails."""

    def __init__(self, trees: Trees, *, pauses: bool = False) -> None:
        self.trees = trees
        self.charged, self.cleans, self.go_on = trio.Event(), trio.Event(), trio.Event()
        self.refunds = self.charges = 0
        handlers = trees.handlers

        async def charge() -> None:
            self.charges += 1
            self.charged.set()

        async def refund() -> None:
            self.cleans.set()
            await self.go_on.wait()
            self.refunds += 1

        @handlers.job(durable=True, suspend_after=0)
        async def careful(job: Job) -> None:
            await job.step(charge)
            try:
                await job.wait_for_event("never")
            finally:
                if job.cancel_reason in ("sibling", "parent", "user"):
                    with job.cleanup():
                        await job.step(refund)  # noqa: ASYNC102 -- job.cleanup() is the shield

        @handlers.job(max_attempts=1)
        async def bad() -> None:
            await self.charged.wait()
            if pauses:
                trees.window.run("INSERT INTO paused_kind (kind) VALUES ('careful')")
            raise ValueError("no")

        @handlers.job(durable=True, suspend_after=0, max_attempts=1)
        async def parent(job: Job) -> str:
            try:
                async with job.durable_nursery() as nursery:
                    nursery.start_soon(careful)
                    nursery.start_soon(bad)
            except* ChildFailed:
                pass
            return "went on"

        self.id = trees.enqueue("parent")

    @property
    def states(self) -> dict[str, str]:
        found = self.trees.window.run("SELECT kind, state::text AS state FROM jobs ORDER BY id")
        return {row["kind"]: row["state"] for row in found}

    @asynccontextmanager
    async def cleaning(self, **settings: Any) -> AsyncGenerator[tuple[Worker, trio.CancelScope]]:
        """A worker of one slot, which the parent has lent to the child that cleans up, and the scope around it."""
        worker = self.trees.worker(log=False, concurrency=1, **settings)
        with trio.fail_after(LONG):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(worker.run)
                await self.cleans.wait()
                yield worker, nursery.cancel_scope

    async def finish(self) -> None:
        """Another worker ends what was left."""
        self.go_on.set()
        self.trees.again()
        with trio.fail_after(LONG):
            await self.trees.burst(log=False, concurrency=1)


ENDED = {"parent": "completed", "careful": "cancelled", "bad": "dead"}


async def test_a_burst_ends_when_the_block_has_that_lent_its_slot(trees: Trees) -> None:
    order = Order(trees)
    order.go_on.set()
    with trio.fail_after(LONG):
        await trees.burst(log=False, concurrency=1)
    assert order.states == ENDED
    assert (order.charges, order.refunds) == (1, 1)


async def test_a_worker_that_is_told_to_stop_lets_the_block_and_what_it_waits_for_end_within_the_grace(
    trees: Trees,
) -> None:
    order = Order(trees)
    async with order.cleaning(grace=LONG) as (worker, _):
        worker.stop()
        order.go_on.set()
    assert order.states == ENDED
    assert (order.charges, order.refunds) == (1, 1)


@pytest.mark.parametrize("how", ["told to stop twice", "cancelled"])
async def test_a_worker_that_ends_at_once_lets_the_child_clean_up_and_another_goes_on_with_the_parent(
    how: str, trees: Trees
) -> None:
    order = Order(trees)
    async with order.cleaning(grace=LONG, cleanup=LONG) as (worker, scope):
        if how == "cancelled":
            scope.cancel()
        else:
            worker.stop()
            worker.stop_now()
        order.go_on.set()
    states = order.states
    assert states["parent"] == "available"
    # A worker that its program has cancelled gives the child back too, and its history has what it has done.
    assert states["careful"] == ("cancelled" if how == "told to stop twice" else "scheduled")
    assert (order.charges, order.refunds) == (1, 1)
    await order.finish()
    assert order.states == ENDED
    assert (order.charges, order.refunds) == (1, 1)
    # It was not begun anew, only to be cancelled again: what begins anew loses its lines.
    (careful,) = [row["id"] for row in trees.window.run("SELECT id FROM jobs WHERE kind = 'careful'")]
    assert [name for _, _, name in trees.lines(careful)] == ["charge", "", "refund"]


async def test_a_worker_whose_grace_is_over_gives_the_parent_back_that_waits_for_a_child_which_nobody_may_run(
    trees: Trees,
) -> None:
    order = Order(trees, pauses=True)
    order.go_on.set()
    with trio.fail_after(LONG):
        async with trio.open_nursery() as nursery:
            worker = trees.worker(log=False, concurrency=1, grace=0.1)
            nursery.start_soon(worker.run)
            while worker._parts is None or not parts(worker).jobs.slots.lenders:  # noqa: ASYNC110 -- it tells nobody
                await trio.sleep(0.01)
            worker.stop()
    assert order.states == ENDED | {"parent": "available", "careful": "available"}
    trees.window.run("DELETE FROM paused_kind")
    await order.finish()
    assert order.states == ENDED
    assert (order.charges, order.refunds) == (1, 1)


async def test_a_parent_that_runs_alone_lets_its_cancelled_children_clean_up(trees: Trees) -> None:
    """It had crashed its worker before, so nothing else was claimed until it had ended: it waited for them for ever."""
    undone: list[str] = []

    async def undo() -> None:
        undone.append("unpacked")

    async def begin() -> None: ...

    @trees.handlers.job(durable=True, suspend_after=0)
    async def pack(job: Job) -> None:
        await job.step(begin)
        try:
            await job.wait_for_event("packed")
        except trio.Cancelled:
            with job.cleanup():
                await job.step(undo)  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise

    @trees.handlers.job(durable=True, suspend_after=0)
    async def print_label(job: Job) -> None:
        await job.wait_for_event("printed")
        raise Discard("no paper")

    @trees.handlers.job(durable=True, suspend_after=0)
    async def order(job: Job) -> str:
        said = "packed"
        try:
            async with job.durable_nursery() as nursery:
                nursery.start_soon(pack)
                nursery.start_soon(print_label)
        except* ChildFailed:
            said = "not packed"
        return said

    job_id = trees.enqueue("order")
    with trio.fail_after(60):
        await trees.burst()
        trees.window.run("UPDATE job SET suspect = true, crashes = 2 WHERE id = %s", job_id)
        (label,) = trees.window.run("SELECT id FROM jobs WHERE kind = 'print_label'")
        SyncClient(trees.dsn).send_event(label["id"], "printed")
        await trees.burst()
    assert (trees.job(job_id)["result"], undone) == ("not packed", ["unpacked"])
    assert [event.job_id for event in trees.events.of(SuspectAlone)] == [job_id]
