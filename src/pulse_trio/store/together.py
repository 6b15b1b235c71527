"""Statements that take effect together or not at all, on our own connection or on a caller's.

psycopg's `transaction()` is a savepoint inside of a transaction, and otherwise a transaction of its own, which it commits. A
connection without autocommit is a caller's, and its transaction begins with its first statement, whichever that is; the caller
ends it. If the first is ours, the transaction must have begun before `transaction()` looks.
"""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from psycopg.pq import TransactionStatus

from ..postgres import OwnAsyncCursor, OwnCursor

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    import psycopg

_FIRST = "SELECT 1"
"""A statement for psycopg to send its BEGIN with."""


@asynccontextmanager
async def together(connection: psycopg.AsyncConnection[Any]) -> AsyncGenerator[None]:
    """A savepoint in the caller's transaction, which begins here if it has not; in autocommit mode a transaction."""
    if _begins(connection):
        async with OwnAsyncCursor(connection) as cursor:
            await cursor.execute(_FIRST, prepare=False)
    async with connection.transaction():
        yield


@contextmanager
def together_sync(connection: psycopg.Connection[Any]) -> Generator[None]:
    """The same on a blocking connection."""
    if _begins(connection):
        with OwnCursor(connection) as cursor:
            cursor.execute(_FIRST, prepare=False)
    with connection.transaction():
        yield


def _begins(connection: psycopg.AsyncConnection[Any] | psycopg.Connection[Any]) -> bool:
    return not connection.autocommit and connection.pgconn.transaction_status == TransactionStatus.IDLE
