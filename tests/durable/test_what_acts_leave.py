"""What an operator's act leaves of a tree, and what the next act makes of that."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from pulse_trio import ChildFailed, Job, RetryAfter, SyncClient

if TYPE_CHECKING:
    from support.trees import Trees


class Order:
    """An order that is paid, packed by a child, and refunded when that fails."""

    def __init__(self, trees: Trees, *, ends: str = "") -> None:
        self.client = SyncClient(trees.dsn)
        self.did: list[str] = []

        @trees.handlers.job(queue="packers", durable=True, suspend_after=0)
        async def pack(job: Job) -> str:
            await job.step(self.do, "pack")
            return await job.wait_for_event("packed", type=str)

        @trees.handlers.job(durable=True, suspend_after=0, backoff_base=600, max_attempts=5)
        async def order(job: Job) -> str:
            refunded = False
            try:
                await job.step(self.do, "charge")
                if ends and "begun anew" not in self.did:
                    raise OSError("no courier")
                async with job.durable_nursery() as nursery:
                    parcel = nursery.start_soon(pack)
            except* ChildFailed:
                await job.step(self.do, "refund")
                refunded = True
            except* (OSError, trio.Cancelled):
                with job.cleanup():
                    await job.step(self.do, "undo")  # noqa: ASYNC102 -- job.cleanup() is the shield
                if ends == "afresh" and job.cancel_reason is None:
                    raise RetryAfter(600, afresh=True) from None  # noqa: ASYNC104 -- not where it is cancelled
                raise
            return "could not be packed" if refunded else parcel.result

    async def do(self, what: str) -> None:
        self.did.append(what)


@pytest.mark.parametrize("first", ["now alone", "a cancellation before"])
async def test_a_root_that_was_ended_now_goes_on_by_a_retry_and_fails_of_no_child(first: str, trees: Trees) -> None:
    """It took its children for ones that a person had cancelled, and wrote down that it had been refunded."""
    order = Order(trees)
    root = trees.enqueue("order")
    await trees.burst(queues=("default",))
    if first == "a cancellation before":
        order.client.cancel(root)
    assert order.client.cancel(root, now=True).state == "cancelled"
    child = trees.window.value("SELECT job_id FROM member")
    assert (trees.job(child)["state"], trees.job(child)["cancel_reason"]) == ("cancelled", "parent")
    assert order.client.retry(root)
    await trees.burst()
    order.client.send_event(child, "packed", "well")
    found = await trees.ended(root)
    assert (found["state"], found["result"], order.did) == ("completed", "well", ["charge", "pack"])


@pytest.mark.parametrize("asked", ["itself", "its parent"])
async def test_a_job_that_waits_to_begin_anew_has_nothing_to_undo(asked: str, trees: Trees) -> None:
    """It has said so. Cancelled while it waits, it ran once more, and was refunded twice."""
    order = Order(trees, ends="afresh")

    @trees.handlers.job(durable=True, suspend_after=0)
    async def parent(job: Job) -> None:
        async with job.durable_nursery() as nursery:
            nursery.start_soon(trees.handlers["order"])

    root = trees.enqueue("order" if asked == "itself" else "parent")
    await trees.burst()
    (waiting,) = (row["id"] for row in trees.window.run("SELECT id FROM jobs WHERE kind = 'order'"))
    assert (trees.job(waiting)["state"], order.did) == ("retryable", ["charge", "undo"])
    order.client.cancel(root)
    await trees.ended(root)
    assert (trees.job(waiting)["state"], order.did) == ("cancelled", ["charge", "undo"])
    if asked == "itself":
        # A retry begins anew.
        order.did.append("begun anew")
        assert order.client.retry(waiting)
        await trees.burst(queues=("default",))
        assert order.did[3:] == ["charge"]


async def test_the_children_of_the_lives_before_do_not_count_towards_the_limit(trees: Trees) -> None:
    order = Order(trees)
    root = trees.enqueue("order")
    await trees.burst()
    order.client.cancel(root)
    await trees.ended(root)
    trees.window.run("UPDATE durable_job SET children = 100000 WHERE job_id = %s", root)
    assert order.client.retry(root)
    await trees.burst()
    assert (trees.job(root)["state"], trees.job(root)["error"]) == ("suspended", None)
    assert [job.children for job in order.client.tree(root)] == [1, 0, 0]
