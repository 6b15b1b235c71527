"""What a block does that the handler's scopes must not cut short: it waits for its children, and writes how they ended."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from .durable import Durable


@asynccontextmanager
async def shielded_from_scopes(durable: Durable, nursery: trio.Nursery) -> AsyncGenerator[None]:
    """Shields the block from the scopes of the handler, but not from those of the job, in whose `nursery` a task listens."""
    shield, over = trio.CancelScope(shield=True), trio.CancelScope()

    async def listen() -> None:
        with over, durable.suspension.closes():
            try:
                await trio.sleep_forever()
            finally:
                if not over.cancel_called:
                    shield.cancel()

    nursery.start_soon(listen, name="a block's end")
    try:
        with shield:
            yield
    finally:
        over.cancel()
