"""Handlers for the pages' tests in a browser: one that runs until it is cancelled, one that fails, and a durable tree."""

from __future__ import annotations

import trio

from pulse_trio import Handlers, Job

handlers = Handlers()


@handlers.job(queue="reports")
async def report(job: Job, title: str) -> None:
    """Runs until it is cancelled."""
    await job.progress(0.4, f"page 2 of 5 of {title}")
    await _waiting_for_the_printer()


async def _waiting_for_the_printer() -> None:
    await trio.sleep_forever()


@handlers.job(queue="mail", max_attempts=1)
async def send(address: str) -> str:
    """Fails for one address."""
    if address == "nobody":
        raise ConnectionRefusedError(f"no server takes mail for {address}")
    return f"sent to {address}"


@handlers.job(queue="packers")
async def pack(parcel: int) -> str:
    """A child."""
    return f"parcel {parcel}"


@handlers.job(queue="orders", durable=True, suspend_after=0)
async def order(job: Job, order_id: int) -> str:
    """Packs two parcels, and waits for an event."""
    async with job.durable_nursery() as nursery:
        for number in range(2):
            nursery.start_soon(pack, number)
    return str(await job.wait_for_event("approved"))
