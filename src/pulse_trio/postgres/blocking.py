"""A blocking connection, for commands, scripts and migrations: the same defaults and the same errors as Trio's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg

from pulse_trio.errors import ConfigurationError, DatabaseUnavailable
from pulse_trio.postgres.cursors import DEFAULTS
from pulse_trio.postgres.dsn import redact, with_liveliness
from pulse_trio.postgres.pins import PINNED
from pulse_trio.postgres.pooler import heed_pooler_sync

if TYPE_CHECKING:
    from collections.abc import Mapping


def connect_sync(dsn: str, pins: Mapping[str, str] = PINNED) -> psycopg.Connection[Any]:
    """Connect, in autocommit mode, with keepalive parameters unless the DSN has its own, and with these settings.

    Raises:
        DatabaseUnavailable: no server could be reached.
        SchemaError: the database's encoding is not UTF8.
        ConfigurationError: the DSN is not a connection string; the message shows no password.
    """
    try:
        connection = psycopg.connect(
            with_liveliness(dsn), autocommit=True, context=DEFAULTS, client_encoding=PINNED["client_encoding"]
        )
        try:
            heed_pooler_sync(connection, pins)
        except BaseException:
            connection.close()
            raise
        return connection
    except psycopg.OperationalError as error:
        raise DatabaseUnavailable(f"Cannot connect to PostgreSQL: {redact(str(error), dsn).strip()}") from None
    except psycopg.ProgrammingError as error:
        raise ConfigurationError(
            f"The DSN cannot be read: {redact(str(error), dsn).strip()}. "
            "It looks like postgresql://user@host:5432/database"
        ) from None
