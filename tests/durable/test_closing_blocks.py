"""A block that closes waits for its cancelled children. Those with a history run once more to clean up, also where the slot or
the permit that they need is the block's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import ChildFailed, Handlers, Job, open_client

if TYPE_CHECKING:
    from support.trees import Trees

LONG = 60
"""Seconds after which a test has failed. Nothing would end a block that waits for a child which waits for its slot."""


class Careful:
    """A durable child with a history, which waits for ever and cleans up when it is cancelled."""

    def __init__(self, handlers: Handlers, **options: Any) -> None:
        self.charged = trio.Event()
        self.refunds = 0

        async def charge() -> None:
            self.charged.set()

        @handlers.job(durable=True, suspend_after=0, **options)
        async def careful(job: Job) -> None:
            await job.step(charge)
            try:
                await job.wait_for_event("never")
            finally:
                if job.cancel_reason != "suspended":
                    self.refunds += 1

        self.handler = careful


async def ended(trees: Trees, job_ids: list[int], **settings: Any) -> list[str]:
    """The states of these jobs, once a worker has ended them."""
    with trio.fail_after(LONG):
        async with trio.open_nursery() as nursery, open_client(trees.dsn) as client:
            worker = trees.worker(log=False, **settings)
            nursery.start_soon(worker.run)
            states = [str((await client.wait(job_id)).state) for job_id in job_ids]
            worker.stop_now()
    return states


async def tell(trees: Trees, job_ids: list[int]) -> None:
    """Sends these jobs the event `now` once each of them has a child that waits with a history: what runs would be told."""
    waiting = (
        "SELECT count(*) FROM job j JOIN durable_job d ON d.job_id = j.id"
        " WHERE j.kind = 'careful' AND j.state <> 2 AND d.suspended = j.attempt"
    )
    async with open_client(trees.dsn) as client:
        while trees.window.value(waiting) < len(job_ids):  # noqa: ASYNC110 -- only the database knows
            await trio.sleep(0.05)
        for job_id in job_ids:
            await client.send_event(job_id, "now", None)


@pytest.mark.parametrize("where", ["one slot", "a queue's limit of 1", "a key's limit of 1", "a rate that is used up"])
async def test_a_cancelled_child_cleans_up_although_the_block_that_waits_for_it_has_the_only_place(
    where: str, trees: Trees
) -> None:
    keyed: dict[str, Any] = {"key": "shared", "limit": 1} if where == "a key's limit of 1" else {}
    if where == "a queue's limit of 1":
        trees.handlers.queue("default", limit=1)
    if where == "a rate that is used up":
        # The parent, its children, and the parent again.
        trees.handlers.queue("default", rate="4/h")
    careful = Careful(trees.handlers, **keyed)

    @trees.handlers.job(max_attempts=1)
    async def bad() -> None:
        await careful.charged.wait()
        raise ValueError("no")

    @trees.handlers.job(durable=True, suspend_after=0, max_attempts=1, **keyed)
    async def parent(job: Job) -> str:
        try:
            async with job.durable_nursery() as nursery:
                nursery.start_soon(careful.handler)
                nursery.start_soon(bad)
        except* ChildFailed:
            pass
        return "went on"

    job_id = trees.enqueue("parent")
    assert await ended(trees, [job_id], concurrency=1 if where == "one slot" else 10) == ["completed"]
    assert careful.refunds == 1
    assert trees.job(job_id)["result"] == "went on"


async def test_as_many_blocks_as_there_are_slots_close_at_once(trees: Trees) -> None:
    count = 4
    careful = Careful(trees.handlers)
    here, all_here = 0, trio.Event()

    @trees.handlers.job(durable=True, suspend_after=3600, max_attempts=1)
    async def parent(job: Job) -> None:
        nonlocal here
        async with job.durable_nursery() as nursery:
            nursery.start_soon(careful.handler)
            # In a full worker it is suspended here: its child runs, and waits with a history.
            await job.wait_for_event("now")
            here += 1
            if here == count:
                all_here.set()
            await all_here.wait()
            raise ValueError("the body failed")

    job_ids = [trees.enqueue("parent") for _ in range(count)]

    async with trio.open_nursery() as nursery:
        nursery.start_soon(tell, trees, job_ids)
        assert await ended(trees, job_ids, concurrency=count) == ["dead"] * count
    assert careful.refunds == count


async def test_a_second_task_that_only_waits_does_not_keep_the_slot(trees: Trees) -> None:
    careful = Careful(trees.handlers)

    @trees.handlers.job(durable=True, suspend_after=3600, max_attempts=1)
    async def parent(job: Job) -> str:
        async def listen() -> None:
            await job.wait_for_event("never", key="listener")

        async with trio.open_nursery() as tasks:
            tasks.start_soon(listen)
            try:
                async with job.durable_nursery() as nursery:
                    nursery.start_soon(careful.handler)
                    await job.wait_for_event("now", key="body")
                    raise ValueError("the body failed")
            except* ValueError:
                tasks.cancel_scope.cancel()
        return "went on"

    job_id = trees.enqueue("parent")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tell, trees, [job_id])
        assert await ended(trees, [job_id], concurrency=1) == ["completed"]
    assert careful.refunds == 1


async def test_a_lent_slot_is_for_cancelled_jobs_alone(trees: Trees) -> None:
    careful = Careful(trees.handlers)
    running: list[str] = []
    seen: list[list[str]] = []

    @trees.handlers.job(max_attempts=1)
    async def bad() -> None:
        raise ValueError("no")

    @trees.handlers.job
    async def other() -> None:
        seen.append([*running])

    @trees.handlers.job(durable=True, suspend_after=0)
    async def parent(job: Job) -> None:
        running.append("parent")
        try:
            async with job.durable_nursery() as nursery:
                nursery.start_soon(careful.handler)
                nursery.start_soon(bad)
        except* ChildFailed:
            pass
        finally:
            running.remove("parent")

    job_id = trees.enqueue("parent")
    # Behind everything that the tree needs.
    others = [trees.enqueue("other", priority=-1) for _ in range(5)]
    assert await ended(trees, [job_id, *others], concurrency=1) == ["completed"] * 6
    assert careful.refunds == 1
    assert seen == [[]] * 5
