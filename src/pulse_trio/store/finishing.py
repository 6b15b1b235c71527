"""Finishes batches, on a worker's connection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from . import batches
from .operations import run

if TYPE_CHECKING:
    from ..postgres import TrioConnection


async def finish_batches(connection: TrioConnection[Any], schema: str) -> list[int] | None:
    """Finishes batches all of whose jobs have ended, and enqueues their callback jobs, in one transaction. Returns their ids;
    None when no batch is closed and unfinished."""
    if not await run(connection, schema, batches.unfinished()):
        return None
    async with connection.transaction():
        found = await run(connection, schema, batches.due())
        if not found:
            return []
        # The next live member is the first along the index; the settings for the watchdog's own statements forbid such walks.
        await connection.execute("SET LOCAL enable_indexscan = on")
        done = await run(connection, schema, batches.finish(found))
        for batch_id, callback in done:
            if callback is not None:
                await _call(connection, schema, batch_id, callback)
    return [batch_id for batch_id, _ in done]


async def _call(connection: TrioConnection[Any], schema: str, batch_id: int, callback: str) -> None:
    try:
        async with connection.transaction():
            await run(connection, schema, batches.call(batch_id, callback))
    except UsageError as error:
        # The callback was valid when the batch was closed, and is not now: that must not keep the batch from finishing for
        # ever.
        await run(connection, schema, batches.refused(batch_id, error))
