"""Connections that go through a pooler (PgBouncer): noticed, and kept from what a pooler in transaction mode breaks.

There a server's process is ours for one transaction only. So nothing may be prepared, and nothing set for the session: it would
be somebody else's, and ours would be gone. A pooler is recognised by the number of the server's process, which is not the one
the connection was made to. In session mode that is so too, and all of this is needless there, and harmless.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psycopg

    from pulse_trio.postgres.connection import TrioConnection

WHO = "SELECT pg_catalog.pg_backend_pid()"


async def heed_pooler(connection: psycopg.AsyncConnection[Any]) -> bool:
    """Whether an async connection goes through a pooler; if so, it prepares nothing from now on. Begins no transaction."""
    result = await connection.wait(connection._exec_command(WHO.encode()))  # pyright: ignore[reportPrivateUsage]
    pooled = result is not None and int(result.get_value(0, 0) or 0) != connection.info.backend_pid
    if pooled:
        connection.prepare_threshold = None
    return pooled


def heed_pooler_sync(connection: psycopg.Connection[Any]) -> bool:
    """The same for a blocking connection in autocommit mode."""
    row = connection.execute(WHO, prepare=False).fetchone()
    pooled = row is not None and row[0] != connection.info.backend_pid
    if pooled:
        connection.prepare_threshold = None
    return pooled


def settings_query(settings: dict[str, str], *, local: bool) -> bytes:
    """A statement that makes these settings, for the session or the transaction. Names and values are the program's own."""
    chosen = [f"set_config('{key}', '{value}', {str(local).lower()})" for key, value in settings.items()]
    # Claims must not be forgotten by a crash of the server: with this off, kill -9 of the server was seen to hand out one (job,
    # worker, attempt) twice. Stronger settings are the owner's to choose.
    chosen.append(
        "CASE WHEN current_setting('synchronous_commit') = 'off' "
        f"THEN set_config('synchronous_commit', 'on', {str(local).lower()}) END"
    )
    return f"SELECT {', '.join(chosen)}".encode()


async def configure_session(connection: TrioConnection[Any], settings: dict[str, str]) -> None:
    """Makes the settings for the session; through a pooler, for each of its transactions."""
    if connection.pooled:
        connection.prologue = settings_query(settings, local=True)
    else:
        await connection.execute(settings_query(settings, local=False))
