"""A blocking connection, for commands, scripts and migrations: the same defaults and the same errors as Trio's."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg
from psycopg import capabilities, waiting
from psycopg import errors as e
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pulse_trio.errors import ConfigurationError, DatabaseUnavailable
from pulse_trio.postgres.cancelling import QueryTimeout
from pulse_trio.postgres.connecting import summary
from pulse_trio.postgres.contract import WaitTimeout, adopt_adapters, conninfo_attempts, timeout_from_conninfo
from pulse_trio.postgres.cursors import DEFAULTS
from pulse_trio.postgres.dsn import redact, with_liveliness
from pulse_trio.postgres.pins import PINNED
from pulse_trio.postgres.pooler import heed_pooler_sync

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

    from psycopg.abc import ConnDict, PQGen

T = TypeVar("T")

_INTERVAL = 0.1
"""Seconds after which a wait looks for Ctrl-C, as psycopg's own does."""
_CANCELLING = 0.5
"""Seconds the server has to take a cancel request. It is for the server alone: the connection is closed in any case."""


def connect_sync(dsn: str, pins: Mapping[str, str] = PINNED, *, until: float | None = None) -> psycopg.Connection[Any]:
    """Connect, in autocommit mode, with keepalive parameters unless the DSN has its own, and with these settings.

    `until`, a moment of `time.monotonic()`, is the end of everything that waits for the server, connecting included: a
    statement that has no answer by then is cancelled, the connection closed, and `QueryTimeout` raised. It is kept on this
    side of the network, so a server that cannot be reached does not delay it; only the look-up of a host's name does.

    Raises:
        DatabaseUnavailable: no server could be reached, or none answered by `until` (then its cause is a `QueryTimeout`).
        SchemaError: the database's encoding is not UTF8.
        ConfigurationError: the DSN is not a connection string; the message shows no password.
    """
    try:
        connection = _connect(with_liveliness(dsn), until)
        try:
            heed_pooler_sync(connection, pins)
        except BaseException:
            connection.close()
            raise
        return connection
    except QueryTimeout as error:
        raise DatabaseUnavailable(f"Cannot connect to PostgreSQL: {error}") from error
    except psycopg.OperationalError as error:
        raise DatabaseUnavailable(f"Cannot connect to PostgreSQL: {redact(str(error), dsn).strip()}") from None
    except psycopg.ProgrammingError as error:
        raise ConfigurationError(
            f"The DSN cannot be read: {redact(str(error), dsn).strip()}. "
            "It looks like postgresql://user@host:5432/database"
        ) from None


def _connect(conninfo: str, until: float | None) -> psycopg.Connection[Any]:
    encoding = PINNED["client_encoding"]
    if until is None:
        return psycopg.connect(conninfo, autocommit=True, context=DEFAULTS, client_encoding=encoding)
    return BoundedConnection.connect_until(until, conninfo_to_dict(conninfo, client_encoding=encoding))


class BoundedConnection(psycopg.Connection[Any]):
    """A blocking connection that waits for the server until one moment, and is closed then."""

    _until: float

    @classmethod
    def connect_until(cls, until: float, params: ConnDict) -> Self:
        """Connects, each address in turn, in autocommit mode. psycopg's own `connect` gives each at least two seconds.

        Raises:
            QueryTimeout: no server answered by then.
            psycopg.OperationalError: no server could be reached.
        """
        patience = timeout_from_conninfo(params)
        failures: list[tuple[ConnDict, e.Error]] = []
        for attempt in conninfo_attempts(params):
            left = until - time.monotonic()
            connecting = cls._connect_gen(make_conninfo("", **attempt))
            try:
                connection = waiting.wait_conn(connecting, _INTERVAL, max(0.0, min(patience, left)))
            except WaitTimeout:
                if left <= patience:
                    raise _no_answer() from None
                failures.append((attempt, e.ConnectionTimeout("connection timeout expired")))
            except e.Error as error:
                failures.append((attempt, error))
            else:
                connection._until = until
                connection.autocommit = True
                adopt_adapters(connection, DEFAULTS.adapters)
                return connection
            finally:
                connecting.close()  # an unfinished attempt owns a socket
        raise summary(failures)

    def wait(self, gen: PQGen[T], interval: float = _INTERVAL, timeout: float | None = None) -> T:
        """Run one of psycopg's generators on this connection, until its moment; `timeout` is not used."""
        try:
            return super().wait(gen, interval, max(0.0, self._until - time.monotonic()))
        except WaitTimeout:
            self._give_up()
            raise _no_answer() from None

    def _give_up(self) -> None:
        # A statement that waits for a lock would go on in the server. libpq before 17 can only ask blocking, without end.
        try:
            if capabilities.has_cancel_safe():
                self.cancel_safe(timeout=_CANCELLING)
        except e.Error:
            pass  # a server that is away does not take it, and ends the statement when it notices the closed connection
        finally:
            self.pgconn.finish()


def _no_answer() -> QueryTimeout:
    return QueryTimeout("the server did not answer in time")
