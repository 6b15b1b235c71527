"""One reserved, self-reconnecting connection: a worker's claims, reports and heartbeats use one each.

A pool would be wrong for these: a heartbeat must not queue behind a hundred handlers that hold every connection, and the
worker must know when its claiming connection was lost (its session is then void; see the fence in the contract). So each has
a `Link`: first come, first served, one statement at a time, with its own deadline, because a peer that vanished silently (a
pulled cable, a dropped NAT entry) answers nothing, not even an error.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import trio
from psycopg import errors as e

from pulse_trio.errors import DatabaseUnavailable
from pulse_trio.postgres.dsn import redact, shown_dsn
from pulse_trio.postgres.lock import HandoverLock
from pulse_trio.postgres.reconnecting import connect_or_unavailable
from pulse_trio.postgres.shield import Mode, running_in

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from pulse_trio.postgres.connection import TrioConnection
    from pulse_trio.postgres.reconnecting import Configure

_LIBPQ = (e.DatabaseError, e.OperationalError)
"""What psycopg makes of an error that is libpq's own, and not the server's: "out of memory for query result". The
connection may go on, but the answer is lost, and what was asked may be done."""
_NO_MEMORY = "this process has no memory left for what the database answers"


class Link:
    """A self-reconnecting connection, used by one task at a time.

    Args:
        dsn: the connection string. Keepalives, `tcp_user_timeout` and `connect_timeout` are added unless it has them.
        name: its purpose; appears in errors and, by default, in `pg_stat_activity.application_name`.
        configure: called with each new connection, for the session's SETs. Connections are in autocommit mode.
        statement_timeout: seconds a `use()` block may take. Enforced on this side of the network: the server's own
        statement_timeout cannot help when the server is unreachable. application_name: instead of `pulse-trio NAME`.
    """

    cancel_timeout: float = 2.0
    """Seconds the server has to answer a cancel request after the deadline; then the connection is given up."""

    def __init__(
        self,
        dsn: str,
        *,
        name: str,
        configure: Configure | None = None,
        statement_timeout: float = 10.0,
        application_name: str | None = None,
    ) -> None:
        self.name = name
        self.statement_timeout = statement_timeout
        self.generation = 0
        """Grows by one each time a new connection is made; 0 means none yet."""
        self._dsn = dsn
        self._configure = configure
        self._application_name = application_name or f"pulse-trio {name}"
        self._lock = HandoverLock()
        self._connection: TrioConnection[Any] | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"<Link {self.name!r} generation={self.generation} {shown_dsn(self._dsn)!r}>"

    @asynccontextmanager
    async def use(self, *, timeout: float | None = None) -> AsyncGenerator[TrioConnection[Any]]:  # noqa: ASYNC109 - raises our own
        """The connection, for this task alone, in turn.

        Connects (once) if there is no usable connection. On cancellation the connection is left usable or closed. A
        transaction left open is rolled back.

        Args:
            timeout: seconds for the whole block, counted from having the connection's turn; default
            `statement_timeout`.

        Raises:
            DatabaseUnavailable: no connection could be made, the connection was lost, the time was up, or the block raised
                `MemoryError`.
            trio.ClosedResourceError: `aclose` was called.
        """
        seconds = self.statement_timeout if timeout is None else timeout
        async with self._lock:
            with trio.move_on_after(seconds) as deadline:
                try:
                    connection = await self._connected()
                except MemoryError:
                    raise DatabaseUnavailable(f"{self.name}: {_NO_MEMORY}") from None
                try:
                    yield connection
                except MemoryError:
                    # The answer, or part of it, is lost, as with a broken connection, and is handled in the same way.
                    await connection.close()  # noqa: ASYNC120 - never waits
                    raise DatabaseUnavailable(f"{self.name}: {_NO_MEMORY}") from None
                except e.Error as ex:
                    if connection.closed and isinstance(ex, (e.OperationalError, e.InterfaceError)):
                        raise DatabaseUnavailable(f"{self.name}: connection lost: {self._clean(ex)}") from ex
                    if ex.sqlstate is None and type(ex) in _LIBPQ:
                        await connection.close()  # noqa: ASYNC120 - never waits
                        raise DatabaseUnavailable(f"{self.name}: the answer was lost: {self._clean(ex)}") from ex
                    raise
                finally:
                    await connection.make_idle()  # noqa: ASYNC102 - bounded by its mode
        if deadline.cancelled_caught:
            raise DatabaseUnavailable(f"{self.name}: the database did not answer within {seconds:g} s")

    async def aclose(self) -> None:
        """Close the connection after the blocks that wait for it; `use` is refused from now on.

        Bounded when cancelled.
        """
        self._closed = True
        try:
            with running_in(Mode.FINISH):
                async with self._lock:
                    pass
        finally:
            if self._connection is not None:
                await self._connection.close()  # noqa: ASYNC102 - never waits

    def adopt(self, connection: TrioConnection[Any]) -> None:
        """Use this open connection, which another link with the same arguments released, instead of making one."""
        self._connection = connection
        self.generation += 1

    def release(self) -> TrioConnection[Any] | None:
        """Part with the connection, which stays open; None if there is none, or it is in use."""
        connection = self._connection
        if connection is None or connection.closed or self._lock.locked():
            return None
        self._connection = None
        return connection

    def hang_up(self) -> None:
        """Close the connection at once, whoever uses it; no Trio run is told. For a program that plays the death of another."""
        if self._connection is not None:
            self._connection.pgconn.finish()

    async def _connected(self) -> TrioConnection[Any]:
        if self._closed:
            raise trio.ClosedResourceError(f"link {self.name!r} is closed")
        if self._connection is None or self._connection.closed:
            self._connection = await self._connect()
            self.generation += 1
        return self._connection

    async def _connect(self) -> TrioConnection[Any]:
        try:
            connection = await connect_or_unavailable(
                self._dsn, self._configure, own=True, autocommit=True, application_name=self._application_name
            )
        except DatabaseUnavailable as ex:
            raise DatabaseUnavailable(f"{self.name}: {ex}") from None
        connection.cancel_timeout = self.cancel_timeout
        return connection

    def _clean(self, ex: e.Error) -> str:
        return redact(str(ex), self._dsn)
