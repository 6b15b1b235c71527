"""Detects connections that go through a pooler (PgBouncer), and avoids what a pooler in transaction mode breaks.

In that mode a server process is ours for one transaction only. So statements must not be prepared and session settings not
changed: another client would get them, and we would lose them. A pooler is recognised by the server's process number, which
is not the one the connection was made to. That holds in session mode too, where these measures are unnecessary but harmless.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from psycopg import IsolationLevel

from pulse_trio.errors import SchemaError
from pulse_trio.postgres.contract import several
from pulse_trio.postgres.pins import PINNED, durable_query, pins_query

if TYPE_CHECKING:
    from collections.abc import Mapping

    import psycopg

    from pulse_trio.postgres.connection import TrioConnection

_WHO = b"SELECT pg_catalog.pg_backend_pid()"


def _question(pins: Mapping[str, str], backend_pid: int) -> bytes:
    # The same statement applies the settings, but only if that process is ours.
    return pins_query(pins, only_in=backend_pid) + b"; " + _WHO if pins else _WHO


def check_encoding(connection: psycopg.AsyncConnection[Any] | psycopg.Connection[Any]) -> None:
    """Raises `SchemaError` for a database that cannot hold every text. The server reports its encoding at connect: no query
    is needed."""
    encoding = (connection.pgconn.parameter_status(b"server_encoding") or b"UTF8").decode()
    if encoding != "UTF8":
        name = connection.info.dbname
        raise SchemaError(
            f"The database {name!r} has the encoding {encoding}, which cannot hold every text, and pulse-trio needs UTF8. Make "
            "another, and move into it what you need (pg_dump): CREATE DATABASE ... ENCODING 'UTF8' "
            "LOCALE 'C' TEMPLATE template0"
        )


async def heed_pooler(connection: psycopg.AsyncConnection[Any], pins: Mapping[str, str]) -> bool:
    """Whether an async connection goes through a pooler. If so, it prepares no statements from now on; if not, it gets these
    settings. Begins no transaction. Raises `SchemaError` with `pins` for a database that cannot hold every text."""
    if pins:
        check_encoding(connection)
    own = connection.info.backend_pid
    result = await connection.wait(several(connection.pgconn, _question(pins, own)))
    pooled = int(result.get_value(0, 0) or 0) != own
    if pooled:
        connection.prepare_threshold = None
        if pins:
            await connection.set_isolation_level(IsolationLevel.READ_COMMITTED)
    return pooled


def heed_pooler_sync(connection: psycopg.Connection[Any], pins: Mapping[str, str]) -> bool:
    """The same for a blocking connection."""
    if pins:
        check_encoding(connection)
    own = connection.info.backend_pid
    result = connection.wait(several(connection.pgconn, _question(pins, own)))
    pooled = int(result.get_value(0, 0) or 0) != own
    if pooled:
        connection.prepare_threshold = None
        if pins:
            connection.isolation_level = IsolationLevel.READ_COMMITTED
    return pooled


async def configure_session(connection: TrioConnection[Any], settings: dict[str, str], question: bytes) -> bytes | None:
    """Applies the settings to the session, on top of the pins; through a pooler, both to each of its transactions. Returns the
    answer to a question, which goes in the same message: on a slow network a round trip more takes long."""
    if connection.pooled:
        connection.prologue = pins_query(PINNED | settings, local=True) + b"; " + durable_query(local=True)
        return await connection.value_of(question)
    return await connection.value_of(b"; ".join([pins_query(settings), durable_query(local=False), question]))
