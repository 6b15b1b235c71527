"""A blocking connection, for commands, scripts and migrations: the same defaults and the same errors as Trio's."""

from __future__ import annotations

from typing import Any

import psycopg

from pulse_trio.errors import ConfigurationError, DatabaseUnavailable
from pulse_trio.postgres.dsn import redact, with_liveliness


def connect_sync(dsn: str) -> psycopg.Connection[Any]:
    """Connect, in autocommit mode, with liveliness parameters unless the DSN has its own.

    Raises:
        DatabaseUnavailable: no server could be reached.
        ConfigurationError: the DSN is not a connection string; the message shows no password.
    """
    try:
        return psycopg.connect(with_liveliness(dsn), autocommit=True)
    except psycopg.OperationalError as error:
        raise DatabaseUnavailable(f"Cannot connect to PostgreSQL: {redact(str(error), dsn).strip()}") from None
    except psycopg.ProgrammingError as error:
        raise ConfigurationError(
            f"The DSN cannot be read: {redact(str(error), dsn).strip()}. "
            "It looks like postgresql://user@host:5432/database"
        ) from None
