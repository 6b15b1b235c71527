"""A small pool of psycopg's own connections, for a client that runs under asyncio.

For Trio there is `pool.py`. Under asyncio psycopg does not need our driver: a cancellation is raised once, and psycopg's
clean-up completes. (An anyio cancel scope raises it repeatedly; psycopg then closes the connection, which costs a reconnect
and loses nothing that was committed.) So this pool only hands out, checks and counts connections.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.waiting import Wait

from pulse_trio.errors import ConfigurationError, DatabaseUnavailable, UsageError
from pulse_trio.postgres.contract import ready_now
from pulse_trio.postgres.cursors import DEFAULTS
from pulse_trio.postgres.dsn import redact, with_liveliness
from pulse_trio.postgres.pins import PINNED
from pulse_trio.postgres.pooler import heed_pooler

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

_IDLE = psycopg.pq.TransactionStatus.IDLE
_CHECK_AFTER, _CHECK_SECONDS = 30.0, 5.0
"""Seconds of idleness after which a connection is checked with a round trip before it is handed out, and how long that may
take. As in the pool for Trio."""


async def connect_on_asyncio(dsn: str, **options: Any) -> psycopg.AsyncConnection[Any]:
    """psycopg's own connection, in autocommit mode; `options` as `psycopg.AsyncConnection.connect` takes them.

    Raises:
        DatabaseUnavailable: no server could be reached.
        ConfigurationError: the DSN is not a connection string; the message shows no password.
    """
    try:
        connection = await psycopg.AsyncConnection.connect(
            with_liveliness(dsn),
            autocommit=True,
            context=DEFAULTS,
            client_encoding=PINNED["client_encoding"],
            **options,
        )
        try:
            await heed_pooler(connection, PINNED)
        except BaseException:
            connection.pgconn.finish()
            raise
        return connection
    except psycopg.OperationalError as error:
        raise DatabaseUnavailable(redact(str(error), dsn).strip()) from None
    except psycopg.ProgrammingError as error:
        raise ConfigurationError(f"not a PostgreSQL connection string: {redact(str(error), dsn).strip()}") from None


class AsyncioPool:
    """At most `max_size` connections in autocommit mode, opened when needed, handed out first in, first out."""

    def __init__(self, dsn: str, max_size: int) -> None:
        self._dsn = dsn
        self._places = asyncio.Semaphore(max_size)
        self._free: list[tuple[psycopg.AsyncConnection[Any], float]] = []
        """The connections, and since when each is idle, on the loop's clock."""
        self._closed = False

    @asynccontextmanager
    async def connection(self) -> AsyncGenerator[psycopg.AsyncConnection[Any]]:
        """A connection for this task alone. One that comes back closed or in a transaction is not reused.

        Raises:
            DatabaseUnavailable: no server could be reached.
            ConfigurationError: the DSN is not a connection string; the message shows no password.
            UsageError: the pool is closed.
        """
        async with self._places:
            if self._closed:
                raise UsageError("The pool is closed: the block that opened it has ended.")
            connection = await self._take() or await connect_on_asyncio(self._dsn)
            try:
                yield connection
            finally:
                if self._closed or connection.closed or connection.info.transaction_status != _IDLE:
                    connection.pgconn.finish()
                else:
                    self._free.append((connection, asyncio.get_running_loop().time()))

    async def _take(self) -> psycopg.AsyncConnection[Any] | None:
        """An idle connection that works, as far as one can know before it is used."""
        while self._free:
            connection, since = self._free.pop()
            if _was_closed_by_server(connection):
                continue
            if asyncio.get_running_loop().time() - since < _CHECK_AFTER or await _answers(connection):
                return connection
        return None

    async def aclose(self) -> None:
        """Closes the free connections; a connection in use is closed when it comes back."""
        self._closed = True
        while self._free:
            await self._free.pop()[0].close()


def _was_closed_by_server(connection: psycopg.AsyncConnection[Any]) -> bool:
    """Whether an idle connection is closed. After a restart of the server its socket is readable; without this look each of the
    pool's connections failed one call, however long the server was back."""
    try:
        while not connection.closed and ready_now(connection.pgconn.socket, Wait.R):
            connection.pgconn.consume_input()
    except psycopg.OperationalError:
        connection.pgconn.finish()
    return connection.closed


async def _answers(connection: psycopg.AsyncConnection[Any]) -> bool:
    """Whether the server does, on a connection that was idle for long: a firewall may have forgotten it."""
    try:
        async with asyncio.timeout(_CHECK_SECONDS):
            await connection.execute("SELECT")
    except (psycopg.Error, TimeoutError):
        connection.pgconn.finish()
        return False
    except BaseException:  # cancelled while it was asked, so that its answer is still to come
        connection.pgconn.finish()
        raise
    return True


@asynccontextmanager
async def open_asyncio_pool(dsn: str, *, max_size: int = 10) -> AsyncGenerator[AsyncioPool]:
    """A pool that lives as long as the block. The first connection is made before it starts.

    Raises: as `AsyncioPool.connection`.
    """
    pool = AsyncioPool(dsn, max_size)
    try:
        async with pool.connection():
            pass
        yield pool
    finally:
        await pool.aclose()  # noqa: ASYNC102 -- psycopg's close never waits
