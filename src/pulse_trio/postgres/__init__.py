"""PostgreSQL from Trio: psycopg's connection with Trio's waiting and Trio's cancellation, and a structured pool.

    async with await TrioConnection.connect(dsn) as connection:
        async with connection.transaction():
            cursor = await connection.execute("SELECT 42")

Usable on its own by any Trio program; nothing here knows about jobs.
"""

from __future__ import annotations

from pulse_trio.postgres.blocking import connect_sync
from pulse_trio.postgres.cancelling import QueryTimeout
from pulse_trio.postgres.connection import TrioConnection
from pulse_trio.postgres.cursors import DEFAULTS, OwnAsyncCursor, OwnCursor
from pulse_trio.postgres.foreign import AsyncForeign, Foreign, adapt, adapt_async, cannot_be_used, foreign_failure
from pulse_trio.postgres.link import Link
from pulse_trio.postgres.on_asyncio import AsyncioPool, connect_on_asyncio, open_asyncio_pool
from pulse_trio.postgres.pins import PINNED, UNBOUNDED, pinned_for_transaction
from pulse_trio.postgres.pool import PoolTimeout, TrioPool, open_pool
from pulse_trio.postgres.pool_slots import RESET_SESSION, discard_all
from pulse_trio.postgres.pool_statistics import PoolStatistics
from pulse_trio.postgres.pooler import configure_session
from pulse_trio.postgres.reconnecting import connect_or_unavailable, reconnect_delay, wait_for_database
from pulse_trio.postgres.transaction import TrioPipeline, TrioTransaction

__all__ = [
    "DEFAULTS",
    "PINNED",
    "RESET_SESSION",
    "UNBOUNDED",
    "AsyncForeign",
    "AsyncioPool",
    "Foreign",
    "Link",
    "OwnAsyncCursor",
    "OwnCursor",
    "PoolStatistics",
    "PoolTimeout",
    "QueryTimeout",
    "TrioConnection",
    "TrioPipeline",
    "TrioPool",
    "TrioTransaction",
    "adapt",
    "adapt_async",
    "cannot_be_used",
    "configure_session",
    "connect_on_asyncio",
    "connect_or_unavailable",
    "connect_sync",
    "discard_all",
    "foreign_failure",
    "open_asyncio_pool",
    "open_pool",
    "pinned_for_transaction",
    "reconnect_delay",
    "wait_for_database",
]
