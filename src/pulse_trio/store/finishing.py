"""Finishes batches, on a worker's connection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import DatabaseUnavailable, UsageError
from . import batches
from .held_up import is_held_up, waiting_briefly
from .operations import run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..postgres import TrioConnection
    from .held_up import HeldUp


class _SomeAreHeldUp(Exception):
    """The callbacks of these batches cannot be enqueued now: without them, once more."""

    def __init__(self, batch_ids: list[int]) -> None:
        super().__init__(batch_ids)
        self.batch_ids = batch_ids


async def finish_batches(connection: TrioConnection[Any], schema: str, held: HeldUp[int]) -> list[int] | None:
    """Finishes batches all of whose jobs have ended, and enqueues their callback jobs, in one transaction. Returns their ids;
    None when no batch is closed and unfinished. One of whose callback somebody else's open transaction has the unique key is
    `held` up: it finishes when its callback can be enqueued."""
    if not await run(connection, schema, batches.unfinished()):
        return None
    aside = held.turn()
    while True:
        try:
            async with connection.transaction():
                done = await _finish(connection, schema, aside, held)
        except _SomeAreHeldUp as some:
            aside += some.batch_ids
        else:
            held.turned()
            return done


async def _finish(connection: TrioConnection[Any], schema: str, aside: Sequence[int], held: HeldUp[int]) -> list[int]:
    found = await run(connection, schema, batches.due(aside))
    if not found:
        return []
    # The next live member is the first along the index; the settings for the watchdog's own statements forbid such walks.
    await connection.execute("SET LOCAL enable_indexscan = on")
    done = await run(connection, schema, batches.finish(found))
    waiting = [
        batch_id
        for batch_id, callback in done
        if callback is not None and not await _call(connection, schema, batch_id, callback, held)
    ]
    if waiting:
        raise _SomeAreHeldUp(waiting)
    return [batch_id for batch_id, _ in done]


async def _call(connection: TrioConnection[Any], schema: str, batch_id: int, callback: str, held: HeldUp[int]) -> bool:
    """Enqueues a callback, or notes why that cannot be. Returns whether it did; False if it is held up."""
    try:
        request = batches.callback_of(callback)
        if request.unique_key is None:
            async with connection.transaction():
                await run(connection, schema, batches.call(batch_id, request))
            return True
        try:
            async with connection.transaction(), waiting_briefly(connection):
                await run(connection, schema, batches.call(batch_id, request))
        except DatabaseUnavailable as error:
            if not is_held_up(error):
                raise
            held.put_off(batch_id, f"the finished batch {batch_id}", request)
            return False
    except UsageError as error:
        # The callback was valid when the batch was closed, and is not now: that must not keep the batch from finishing for
        # ever.
        await run(connection, schema, batches.refused(batch_id, error))
    return True
