"""A block of statements that are done together, or not at all, on a connection that may be the caller's.

psycopg's own `connection.transaction()` is a savepoint inside a transaction, and elsewhere a whole one, which it commits. On a
caller's connection without autocommit that is wrong: there the first statement begins the caller's transaction, and the caller
ends it. So the block begins that transaction first, as any statement would, and is a savepoint in it.
"""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from psycopg.pq import TransactionStatus

from ..postgres import OwnAsyncCursor, OwnCursor

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    import psycopg

# Whatever psycopg executes begins the transaction. This takes no snapshot and reads nothing.
_NOTHING = ""


@asynccontextmanager
async def block(connection: psycopg.AsyncConnection[Any]) -> AsyncGenerator[None]:
    """A savepoint in a transaction, or about to begin one; with autocommit and outside of any, a transaction of its own."""
    if _begins_one(connection):
        async with OwnAsyncCursor(connection) as cursor:
            await cursor.execute(_NOTHING, prepare=False)
    async with connection.transaction():
        yield


@contextmanager
def block_sync(connection: psycopg.Connection[Any]) -> Generator[None]:
    """The same on a blocking connection."""
    if _begins_one(connection):
        with OwnCursor(connection) as cursor:
            cursor.execute(_NOTHING, prepare=False)
    with connection.transaction():
        yield


def _begins_one(connection: psycopg.AsyncConnection[Any] | psycopg.Connection[Any]) -> bool:
    # Not only where it is idle: another task's statement may be under way, and this one then has to come after it.
    return not connection.autocommit and connection.pgconn.transaction_status != TransactionStatus.INTRANS
