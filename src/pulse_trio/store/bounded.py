"""Limits the time of a statement: PostgreSQL stops it, and afterwards the connection's own settings are as before."""

from __future__ import annotations

import math
import time
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import InvalidArguments
from ..postgres import OwnAsyncCursor, OwnCursor
from .blocks import block, block_sync

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    import psycopg

    from .operations import Operation

T = TypeVar("T")

# Local to the transaction. In a transaction of the caller's, we have to put the setting back. When the statement is stopped,
# the savepoint restores it.
_BOUND = "SELECT current_setting('statement_timeout'), set_config('statement_timeout', %s, true)"
_PUT_BACK = "SELECT set_config('statement_timeout', %s, true)"


@asynccontextmanager
async def bounded(connection: psycopg.AsyncConnection[Any], seconds: float | None) -> AsyncGenerator[None]:
    """Statements inside are stopped after `seconds` (None: never), with psycopg's `QueryCanceled`."""
    if seconds is None:
        yield
        return
    async with block(connection), OwnAsyncCursor(connection) as cursor:
        await cursor.execute(_BOUND, [_setting(seconds)])
        row: Any = await cursor.fetchone()
        yield
        await cursor.execute(_PUT_BACK, [row[0]])


@contextmanager
def bounded_sync(connection: psycopg.Connection[Any], seconds: float | None) -> Generator[None]:
    """The same over a blocking connection."""
    if seconds is None:
        yield
        return
    with block_sync(connection), OwnCursor(connection) as cursor:
        cursor.execute(_BOUND, [_setting(seconds)])
        row: Any = cursor.fetchone()
        yield
        cursor.execute(_PUT_BACK, [row[0]])


def ending_by(operation: Operation[T], until: float) -> Operation[T]:
    """Runs the operation with each of its statements stopped by the server at `until`, a moment of `time.monotonic()`."""
    try:
        query = next(operation)
        while True:
            rows = yield query._replace(timeout=max(0.0, until - time.monotonic()))
            query = operation.send(rows)
    except StopIteration as stop:
        return stop.value


def _setting(seconds: float) -> str:
    if not 0 <= seconds < math.inf:
        raise InvalidArguments(f"timeout must be seconds from 0 on, or None for no limit; got {seconds!r}.")
    # 0 would mean that there is no limit.
    return f"{max(1, round(seconds * 1000))}ms"
