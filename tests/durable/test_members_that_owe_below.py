"""Members that owe their clean-up, and are children of such a member, of a root that lives, or dead of a timeout."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from pulse_trio import InvalidTransition, Job, SyncClient
from pulse_trio.store import family

if TYPE_CHECKING:
    from support.trees import Trees

STANDING = "SELECT count(*) FROM jobs WHERE root_id = %s AND state = 'suspended'"


class Levels:
    """A root, whose scope cuts a parent, which is cut in its block of one child. Both undo in a step; the bank is `down`."""

    def __init__(self, trees: Trees, *, root_waits: bool = False) -> None:
        self.trees = trees
        self.client = SyncClient(trees.dsn)
        self.bank: list[str] = []
        self.down = True

        async def undo(who: str) -> None:
            if self.down:
                raise OSError("the bank is down")
            self.bank.append(who)

        async def note() -> None:
            pass

        @trees.handlers.job
        async def noop() -> None:
            pass

        @trees.handlers.job(durable=True, suspend_after=0)
        async def child(job: Job) -> None:
            await job.step(note)
            try:
                await job.sleep(3600)
            finally:
                with job.cleanup():
                    await job.step(undo, "child")  # noqa: ASYNC102 -- job.cleanup() is the shield

        @trees.handlers.job(durable=True, suspend_after=0)
        async def parent(job: Job) -> None:
            await job.step(note)
            try:
                async with job.durable_nursery() as nursery:
                    nursery.start_soon(child)
            finally:
                with job.cleanup():
                    await job.step(undo, "parent")  # noqa: ASYNC102 -- the same

        @trees.handlers.job(durable=True, suspend_after=0)
        async def root(job: Job) -> str:
            with job.move_on_after(3600):
                async with job.durable_nursery() as nursery:
                    nursery.start_soon(parent)
            if root_waits:
                await job.wait_for_event("go on")
            return "settled"

    async def cut(self, *, until: str = "completed") -> tuple[int, int, int]:
        """The ids of root, parent and child, when the root is in this state."""
        root = self.trees.enqueue("root")
        with trio.fail_after(60):
            # The deadline strikes when all three stand.
            while self.trees.window.value(STANDING, root) < 3:
                await self.trees.burst()
            self.trees.time_passes(root)
            while self.trees.job(root)["state"] != until or len(self.owing(root)) < 2:
                await self.trees.burst()
                # Woken too early, it suspends itself again.
                self.trees.window.run(
                    "UPDATE job SET run_at = clock_timestamp() WHERE state <> 2 AND run_at < '9000-01-01'"
                )
        below = self.trees.window.run("SELECT job_id FROM member WHERE root_id = %s ORDER BY job_id", root)
        parent, child = (row["job_id"] for row in below)
        self.down = False
        return root, parent, child

    def owing(self, root: int) -> list[int]:
        return self.trees.window.do(family.owing_members([root]))

    def state(self, job_id: int) -> str:
        return str(self.trees.job(job_id)["state"])


@pytest.mark.parametrize("order", ["together", "the child first", "the parent first"])
async def test_members_below_each_other_are_retried_together_or_one_after_the_other(order: str, trees: Trees) -> None:
    levels = Levels(trees)
    root, parent, child = await levels.cut()
    assert levels.owing(root) == [parent, child]
    match order:
        case "together":
            assert levels.client.retry_many(state="cancelled").retried == [parent, child]
            await trees.burst()
        case "the child first":
            for each in (child, parent):
                levels.client.retry(each)
                await trees.burst()
        case _:
            levels.client.retry(parent)
            with pytest.raises(
                InvalidTransition, match=rf"Job {child} owes its clean-up, .* retry it when job {parent} is settled"
            ):
                levels.client.retry(child)
            await trees.burst()
            assert (levels.bank, levels.owing(root)) == (["parent"], [child])
            levels.client.retry(child)
            await trees.burst()
    assert sorted(levels.bank) == ["child", "parent"]
    assert levels.owing(root) == trees.window.run("SELECT FROM job") == []
    assert [levels.state(each) for each in (root, parent, child)] == ["completed", "cancelled", "cancelled"]
    assert trees.window.run("SELECT FROM cancellations WHERE ended_at IS NULL") == []


async def test_a_root_that_lives_is_no_hindrance_where_the_parent_is_settled(trees: Trees) -> None:
    levels = Levels(trees, root_waits=True)
    root, parent, child = await levels.cut(until="suspended")
    levels.client.retry(child)
    await trees.burst()
    assert (levels.bank, levels.owing(root)) == (["child"], [parent])
    assert (levels.state(root), levels.state(child)) == ("suspended", "cancelled")
    levels.client.send_event(root, "go on", None)
    await trees.burst()
    assert trees.job(root)["result"] == "settled"


async def test_it_runs_within_the_limit_of_its_queue_and_gives_its_place_back(trees: Trees) -> None:
    levels = Levels(trees)
    _, _, child = await levels.cut()
    levels.client.limit_queue("default", limit=1)
    levels.client.retry(child)
    await trees.burst()
    assert levels.bank == ["child"]
    another = trees.enqueue("noop")
    await trees.burst()
    assert levels.state(another) == "completed"


async def test_a_child_that_died_of_a_timeout_and_owes_its_clean_up_does_it_and_ends_as_cancelled(trees: Trees) -> None:
    bank: list[str] = []
    down = [True]

    async def charge() -> None:
        bank.append("charged")

    async def refund() -> None:
        if down:
            raise OSError("the bank is down")
        bank.append("refunded")

    @trees.handlers.job(durable=True, timeout=0.3, max_attempts=1)
    async def order(job: Job) -> None:
        await job.step(charge)
        try:
            await job.wait_for_event("approved")
        except BaseException:
            with job.cleanup():
                await job.step(refund)  # noqa: ASYNC102 -- job.cleanup() is the shield
            raise

    @trees.handlers.job(durable=True, suspend_after=0)
    async def parent(job: Job) -> None:
        async with job.durable_nursery(collect=True) as nursery:
            nursery.start_soon(order)

    root = trees.enqueue("parent")
    with trio.fail_after(30):
        while trees.job(root)["finished_at"] is None:
            await trees.burst()
    (child,) = trees.window.do(family.owing_members([root]))
    assert trees.job(child)["state"] == "dead"
    down.clear()
    client = SyncClient(trees.dsn)
    client.retry(child)
    await trees.burst()
    assert (trees.job(child)["state"], bank) == ("cancelled", ["charged", "refunded"])
    assert trees.window.do(family.owing_members([root])) == []
    assert trees.window.run("SELECT FROM cancellations WHERE ended_at IS NULL") == []
