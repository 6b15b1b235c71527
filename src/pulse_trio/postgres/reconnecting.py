"""Connecting where failure is normal: one attempt with our own error, the backoff, and waiting for a database."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import trio
from psycopg import errors as e

from pulse_trio.errors import ConfigurationError, DatabaseUnavailable
from pulse_trio.postgres.connection import TrioConnection
from pulse_trio.postgres.cursors import DEFAULTS
from pulse_trio.postgres.dsn import redact, with_liveliness
from pulse_trio.postgres.pins import PINNED
from pulse_trio.postgres.pooler import heed_pooler

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    Configure = Callable[[TrioConnection[Any]], Awaitable[None]]


_CONFIGURE_WITHIN = 30.0
"""Seconds for a new connection's first statements. `connect_timeout` does not cover a server that falls silent between the
handshake and these, and callers of a pool would wait forever."""


def reconnect_delay(
    attempt: int, base: float = 0.1, cap: float = 4.0, uniform: Callable[[float, float], float] = random.uniform
) -> float:
    """Seconds to wait before the attempt after this one: exponential with full jitter.

    Full jitter (anything from 0 to the exponential) spreads a fleet that lost its database at the same moment best;
    the idea and the comparison are from AWS's architecture blog, "Exponential Backoff And Jitter".

    Args:
        attempt: how many attempts have failed before, from 0.
        base: the upper bound after the first failure, seconds.
        cap: the highest upper bound, seconds. 4 by default, so that claims resume within 5 s after the server accepts
        connections. uniform: the random source, `uniform(low, high)`.
    """
    # The exponent is bounded so that a worker that was cut off for a week does not overflow a float.
    return uniform(0.0, min(cap, base * 2.0 ** min(attempt, 60)))


async def connect_or_unavailable(
    dsn: str, configure: Configure | None = None, *, own: bool = False, **options: Any
) -> TrioConnection[Any]:
    """One attempt to connect and configure a session, with keepalive parameters.

    Args:
        dsn: the connection string; its password appears in no error.
        configure: called with the new connection; if it raises, the connection is closed.
        own: only for pulse-trio's own statements: the session has the settings of `pins.PINNED`, and reads values with
        psycopg's default adapters. options: further arguments of `TrioConnection.connect`.

    Raises:
        DatabaseUnavailable: no server could be reached, or the connection broke while it was configured.
        SchemaError: `own`, and the database's encoding is not UTF8.
        ConfigurationError: the DSN is not a connection string.
    """
    try:
        lively = with_liveliness(dsn)
        if own:
            options = {"client_encoding": PINNED["client_encoding"], "context": DEFAULTS} | options
    except e.ProgrammingError as ex:
        raise ConfigurationError(f"not a PostgreSQL connection string: {redact(str(ex), dsn)}") from None
    try:
        connection = await TrioConnection[Any].connect(lively, **options)
        await _configure(connection, configure, PINNED if own else {})
    except (e.OperationalError, e.InterfaceError) as ex:
        raise DatabaseUnavailable(redact(str(ex), dsn)) from None
    return connection


async def _configure(connection: TrioConnection[Any], configure: Configure | None, pins: Mapping[str, str]) -> None:
    try:
        with trio.move_on_after(_CONFIGURE_WITHIN) as deadline:
            connection.pooled = await heed_pooler(connection, pins)
            if configure is not None:
                await configure(connection)
    except BaseException:
        await connection.close()  # noqa: ASYNC102 - never waits
        raise
    if deadline.cancelled_caught:
        await connection.close()
        raise DatabaseUnavailable(f"the server did not answer within {_CONFIGURE_WITHIN:g} s of connecting")


async def _look(dsn: str) -> None:
    """Checks once whether the database is reachable and writable."""
    connection = await connect_or_unavailable(dsn, own=True, autocommit=True)
    try:
        row = await (
            await connection.execute("SELECT pg_catalog.current_setting('transaction_read_only')::boolean")
        ).fetchone()
    except e.OperationalError as ex:
        raise DatabaseUnavailable(redact(str(ex), dsn)) from None
    finally:
        await connection.close()  # noqa: ASYNC102 - never waits
    if row is not None and row[0]:
        raise DatabaseUnavailable(
            "the database is read-only: a standby, a primary that is being replaced, or default_transaction_read_only is on "
            "for this role or database"
        )


async def _look_before(deadline: float, dsn: str) -> None:
    with trio.move_on_at(deadline):
        await _look(dsn)
        return
    raise DatabaseUnavailable("the server does not answer")


async def wait_for_database(
    dsn: str,
    timeout: float,  # noqa: ASYNC109 - the last failure is what the caller wants to hear, not TooSlowError
    on_wait: Callable[[DatabaseUnavailable], object] | None = None,
) -> None:
    """Return when the database accepts connections and writes; a standby that was just promoted takes a while.

    Args:
        dsn: the connection string.
        timeout: seconds to go on trying; 0 tries once.
        on_wait: called after each failed attempt that will be followed by another.

    Raises:
        DatabaseUnavailable: it did not in time; has the last error.
        ConfigurationError: the DSN is not a connection string.
    """
    deadline = trio.current_time() + timeout
    attempt = 0
    while True:
        try:
            await (_look_before(deadline, dsn) if timeout else _look(dsn))
        except DatabaseUnavailable as ex:
            pause = reconnect_delay(attempt, cap=1.0)
            if trio.current_time() + pause >= deadline:
                raise
            if on_wait is not None:
                on_wait(ex)
            await trio.sleep(pause)
            attempt += 1
        else:
            return
