"""A fan-out of many small jobs with a progress bar: one parent, as many children as there are pictures.

    pulse-trio run resizes:handlers
    pulse-trio enqueue resize_all '{"pictures": 10000}'
    pulse-trio jobs show 1
    pulse-trio jobs cancel 1

The cancellation reaches every child, on every machine; those that wait end at once. What is done stays done.

The task that tells the progress keeps the parent's slot, because it waits by `trio.sleep`: as many such parents as all workers
have slots would leave none to their children. Run fewer at once, or the children in a queue that other workers serve.
"""

from __future__ import annotations

import trio

from pulse_trio import Child, Handlers, Job

handlers = Handlers()


@handlers.job
async def resize(picture: int) -> int:
    """Stands for work. Returns the size in bytes."""
    await trio.sleep(0.01)
    return 1000 + picture


@handlers.job(durable=True)
async def resize_all(job: Job, pictures: int) -> int:
    """Resizes so many pictures, wherever there is room, and returns the sum of their sizes."""
    async with job.durable_nursery() as nursery:
        children = [nursery.start_soon(resize, picture) for picture in range(pictures)]
        job.nursery.start_soon(tell, job, children)
    return sum(child.result for child in children)


async def tell(job: Job, children: list[Child[int]]) -> None:
    """Reports the share of the children that have ended, until all have."""
    while True:
        ended = sum(child.state in ("completed", "dead", "cancelled") for child in children)
        await job.progress(ended / len(children), f"{ended:,} of {len(children):,}")
        if ended == len(children):
            return
        await trio.sleep(1)
