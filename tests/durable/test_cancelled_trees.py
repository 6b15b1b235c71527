"""A cancellation of a tree, from the client's call to the handlers of its members."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from pulse_trio import Handlers, Job, Worker, open_client

if TYPE_CHECKING:
    from support.databases import Databases


async def test_a_cancelled_parent_ends_after_its_children_each_of_which_hears_why(databases: Databases) -> None:
    handlers = Handlers()
    heard: list[tuple[str, str | None, str | None]] = []
    all_run = trio.Event()
    began: list[int] = []

    @handlers.job
    async def child(job: Job, number: int) -> None:
        began.append(number)
        if len(began) == 3:
            all_run.set()
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            heard.append((f"child {number}", job.cancel_reason, job.cancel_message))
            raise

    @handlers.job(durable=True)
    async def parent(job: Job) -> None:
        try:
            async with job.durable_nursery() as nursery:
                for number in range(3):
                    nursery.start_soon(child, number)
        except trio.Cancelled:
            heard.append(("parent", job.cancel_reason, job.cancel_message))
            raise

    with databases.migrated() as dsn:
        async with trio.open_nursery() as nursery, open_client(dsn) as client:
            worker = Worker(handlers, dsn=dsn, log=False)
            nursery.start_soon(worker.run)
            ref = await client.enqueue(parent)
            with trio.fail_after(60):
                await all_run.wait()
                ended = await client.cancel(ref.id, reason="enough", wait=True)
            tree = await client.tree(ref.id)
            worker.stop_now()
    assert ended.state == "cancelled"
    assert [(job.state, job.cancel_reason) for job in tree] == [("cancelled", "enough"), *[("cancelled", "parent")] * 3]
    assert sorted(heard[:3]) == [(f"child {number}", "parent", None) for number in range(3)]
    assert heard[3:] == [("parent", "user", "enough")]
