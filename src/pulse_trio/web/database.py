"""The pages' way to the database: a few connections, each statement bounded in time.

The connections are made when they are needed and by the task that needs them, so that there is nothing to start: an app that
is mounted in another one gets no lifespan. They belong to the event loop that made them.
"""

from __future__ import annotations

import contextlib
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import psycopg
import sniffio
from anyio.lowlevel import RunVar

from ..errors import DatabaseUnavailable
from ..postgres import OwnAsyncCursor, connect_on_asyncio, connect_or_unavailable
from ..store import operations
from ..store.audit import acting

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from ..store.operations import Operation

T = TypeVar("T")
CONNECTIONS = 4
"""The most connections of one app: an operator's pages must not take the workers' places."""
PATIENCE = 2.0
"""Seconds that each statement of a page may take; then PostgreSQL ends it."""
PATIENCE_TO_ACT = 10.0
"""Seconds that each statement of an action may take."""
PATIENCE_TO_CONNECT = 5
"""Seconds until a server that does not answer counts as away. libpq takes whole seconds."""
_MOST_STATEMENTS = 3
"""So many times its patience an operation may take in all, and the time to connect: a server that does not answer at all ends
no statement."""
_APPLICATION = "pulse-trio web"
_BOUND = "SELECT set_config('statement_timeout', %s, true)"
_READS = ", set_config('transaction_read_only', 'on', true)"
"""For reading alone. A writing transaction keeps the session's default: a standby, and a server that its owner made read-only,
refuse the write, and say so."""
_IDLE = psycopg.pq.TransactionStatus.IDLE


class _Pool:
    """The connections of one event loop."""

    def __init__(self) -> None:
        self.places = anyio.Semaphore(CONNECTIONS)
        self.idle: list[psycopg.AsyncConnection[Any]] = []


class Database:
    """One database, for all pages of an app."""

    def __init__(self, dsn: str, schema: str) -> None:
        self.schema = schema
        self.dsn = dsn
        self._pools: RunVar[_Pool] = RunVar(f"pulse-trio web {id(self)}")

    async def read(self, operation: Operation[T], *, patience: float = PATIENCE) -> T:
        """Runs one of the store's operations, which may only read.

        Raises `DatabaseUnavailable`, `TookTooLong` after `patience` seconds, and what the operation raises.
        """
        async with self.reading(patience=patience) as connection:
            return await operations.run(connection, self.schema, operation)

    async def act(self, operation: Operation[T], actor: str | None, *, patience: float = PATIENCE_TO_ACT) -> T:
        """Runs an operation that changes something, in one transaction; `actor` is the user's name in the audit trail.

        Raises as `read` does.
        """
        async with self._transaction(patience, writes=True) as connection:
            return await operations.run(connection, self.schema, acting(operation, actor))

    @asynccontextmanager
    async def reading(self, *, patience: float = PATIENCE) -> AsyncGenerator[psycopg.AsyncConnection[Any]]:
        """A connection in a transaction that can only read, for several operations with `operations.run`."""
        async with self._transaction(patience, writes=False) as connection:
            yield connection

    @asynccontextmanager
    async def _transaction(self, patience: float, *, writes: bool) -> AsyncGenerator[psycopg.AsyncConnection[Any]]:
        limit = _MOST_STATEMENTS * patience + PATIENCE_TO_CONNECT
        with anyio.move_on_after(limit) as scope:
            async with self._connection() as connection:
                try:
                    async with connection.transaction():
                        async with OwnAsyncCursor(connection) as cursor:
                            bounds = _BOUND if writes else _BOUND + _READS
                            await cursor.execute(bounds, [f"{round(patience * 1000)}ms"])
                        yield connection
                except (psycopg.OperationalError, psycopg.InterfaceError) as error:
                    if not connection.closed:
                        raise
                    raise DatabaseUnavailable("the connection to the database was lost") from error
        if scope.cancelled_caught:
            raise DatabaseUnavailable(f"the database has not answered within {limit:g} s")

    @asynccontextmanager
    async def _connection(self) -> AsyncGenerator[psycopg.AsyncConnection[Any]]:
        pool = self._pool()
        async with pool.places:
            connection = _alive(pool.idle) or await self._connect()
            try:
                yield connection
            finally:
                if connection.closed or connection.info.transaction_status != _IDLE:
                    connection.pgconn.finish()
                else:
                    pool.idle.append(connection)

    async def _connect(self) -> psycopg.AsyncConnection[Any]:
        options: dict[str, Any] = {"application_name": _APPLICATION, "connect_timeout": PATIENCE_TO_CONNECT}
        if sniffio.current_async_library() == "asyncio":
            return await connect_on_asyncio(self.dsn, **options)
        return await connect_or_unavailable(self.dsn, own=True, autocommit=True, **options)

    def _pool(self) -> _Pool:
        pool = self._pools.get(None)
        if pool is None:
            pool = _Pool()
            self._pools.set(pool)
        return pool

    async def aclose(self) -> None:
        """Closes the idle connections of this event loop."""
        idle = self._pool().idle
        while idle:
            with contextlib.suppress(psycopg.Error):
                await idle.pop().close()


def _alive(idle: list[psycopg.AsyncConnection[Any]]) -> psycopg.AsyncConnection[Any] | None:
    """An idle connection that the server has not closed; the most recently used first."""
    while idle:
        connection = idle.pop()
        if not connection.closed and not _readable(connection):
            return connection
        connection.pgconn.finish()
    return None


def _readable(connection: psycopg.AsyncConnection[Any]) -> bool:
    # An idle connection has nothing to say, unless the server ended it. Nothing listens on these, so no notification comes.
    import select

    try:
        poll = select.poll()
        poll.register(connection.fileno(), select.POLLIN)
        return bool(poll.poll(0))
    except (OSError, psycopg.Error):
        return True
