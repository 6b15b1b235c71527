"""An order: payment, packing on other machines, a person's approval, and a refund if anything goes wrong.

    pulse-trio run order:handlers --queues default,packers
    pulse-trio enqueue order '{"order_id": 42}'
    pulse-trio jobs tree 1

The order sleeps and waits for days without a worker's memory. Whatever ends it after the payment, a failure, a refusal or a
person's `pulse-trio jobs cancel`, the refund is paid once: it is a step, and its line is in the history.
"""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import msgspec

from pulse_trio import ChildFailed, Discard, Handlers, Job

handlers = Handlers()


class Approval(msgspec.Struct):
    """What the person who approves sends."""

    by: str
    yes: bool = True


async def new_key() -> str:
    """A key for the payment provider: as a step's result the same in all attempts, and another when the job begins anew."""
    return str(uuid4())


async def charge_card(order_id: int, key: str) -> str:
    """Stands for a call of the payment provider: a second one with the same key charges nothing. Returns its name for the
    charge."""
    return f"charge-{order_id}"


async def refund(charge: str) -> None:
    """Stands for the opposite call."""


@handlers.job
async def print_label(order_id: int) -> str:
    """Runs on any machine that serves the queue `default`."""
    return f"label-{order_id}.pdf"


@handlers.job(queue="packers")
async def pack(order_id: int, parcel: int) -> str:
    """Runs where the parcels are."""
    return f"order {order_id}, parcel {parcel}"


@handlers.job(durable=True)
async def order(job: Job, order_id: int, parcels: int = 2) -> str:
    """One order, from the payment to the approval. Returns the name of the label's file."""
    key = await job.step(new_key)
    charge = await job.step(charge_card, order_id, key)
    try:
        label = await packed(job, order_id, parcels)
        await approved(job)
    except BaseException:
        # A cancellation comes by here, too. While the job is only suspended the step is refused, and nothing is refunded.
        with job.cleanup():
            await job.step(refund, charge)  # noqa: ASYNC102 -- job.cleanup() is a shield with a deadline
        raise
    return label


async def packed(job: Job, order_id: int, parcels: int) -> str:
    """The label, once everything is packed: within an hour, or not at all. Raises `Discard`."""
    with job.move_on_after(3600) as patience:
        try:
            async with job.durable_nursery() as nursery:
                label = nursery.start_soon(print_label, order_id)
                for number in range(parcels):
                    nursery.start_soon(pack.options(child_key=f"parcel-{number}"), order_id, number)
        except* ChildFailed as failed:
            # The refund comes after this failure in the history, so no further attempt could succeed.
            raise Discard("it could not be packed") from failed
    if patience.cancelled_caught:
        raise Discard("it was not packed within an hour")
    return label.result


async def approved(job: Job) -> None:
    """Returns when a person has approved. Raises `Discard` if one refuses, or none answers in three days."""
    try:
        approval = await job.wait_for_event("approved", type=Approval, timeout=timedelta(days=3))
    except TimeoutError:
        raise Discard("nobody approved it in three days") from None
    if not approval.yes:
        raise Discard(f"refused by {approval.by}")
