"""What the database refused a client, and what a connection cannot carry, as one of our errors: by whose fault it is."""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import psycopg

from ..errors import (
    ConfigurationError,
    DatabaseUnavailable,
    InvalidArguments,
    InvalidTransition,
    SchemaError,
    TookTooLong,
    UsageError,
)
from ..postgres import cannot_be_used
from .blocks import block, block_sync
from .disk_full import disk_full
from .rights import remedy

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from ..errors import PulseTrioError

ASK_WHO = "If a table is locked, pulse-trio doctor says by whom."
"""The end of an error about a statement that took too long."""


class Deadlocked(DatabaseUnavailable):
    """PostgreSQL ended this transaction (or what came after its last savepoint) to end a deadlock."""


def refuse_raw_bytes(connection: psycopg.AsyncConnection[Any] | psycopg.Connection[Any]) -> None:
    """Raises `UsageError` for a caller's connection that returns every text as bytes of an unknown encoding."""
    if connection.pgconn.parameter_status(b"client_encoding") == b"SQL_ASCII":
        raise UsageError("The connection has the client_encoding SQL_ASCII. Run on it: SET client_encoding = 'UTF8'")


def unsendable(
    connection: psycopg.AsyncConnection[Any] | psycopg.Connection[Any], error: UnicodeEncodeError
) -> UsageError | InvalidArguments:
    """The error for a text that a caller's connection cannot carry, or that no connection can."""
    encoding = (connection.pgconn.parameter_status(b"client_encoding") or b"?").decode()
    wrong = error.object[error.start]
    if encoding == "UTF8":
        return InvalidArguments(f"The text has {wrong!r}, half of a character, which cannot be stored.")
    return UsageError(
        f"The connection has the client_encoding {encoding}, which has no {wrong!r}. Run on it: SET client_encoding = 'UTF8'"
    )


def unusable(words: str) -> ConfigurationError:
    """The error of a connection of the caller's on which nothing was sent."""
    return ConfigurationError(f"The connection cannot be used ({words}): give one that is open, and no other task's.")


def translate(error: psycopg.Error, schema: str) -> PulseTrioError:
    """Turns psycopg's error into one of ours, by whose fault it is. The one place where that is decided for clients."""
    text = str(error).strip()
    headline = text.partition("\n")[0]
    match error:
        case psycopg.errors.UndefinedTable() | psycopg.errors.InvalidSchemaName() | psycopg.errors.UndefinedFunction():
            return SchemaError(
                f"The database has no usable pulse-trio schema {schema!r} ({headline}). Create it with: pulse-trio migrate"
            )
        case psycopg.errors.InFailedSqlTransaction():
            return UsageError("The transaction is aborted already by an earlier error; roll it back first.")
        case psycopg.errors.UniqueViolation():
            return InvalidTransition("Another live job on that queue has the same unique key.")
        case (
            psycopg.errors.CheckViolation()
            | psycopg.errors.StatementTooComplex()
            | psycopg.errors.ProgramLimitExceeded()
            | psycopg.DataError()
        ):
            return InvalidArguments(f"The database refused that: {headline}.")
        case psycopg.errors.InsufficientPrivilege():
            return UsageError(f"The database role may not do that: {headline}.{remedy(headline, schema)}")
        case psycopg.errors.DependentObjectsStillExist():
            return UsageError(f"Nothing was dropped: {headline}.")
        case psycopg.errors.DeadlockDetected():
            return Deadlocked(f"The database ended a deadlock ({headline}). The writes were rolled back: try again.")
        case psycopg.errors.QueryCanceled():
            if "user request" in headline:
                return TookTooLong(f"Somebody stopped that in the database, with pg_cancel_backend say ({headline}).")
            who = f" {ASK_WHO}" if "timeout" in headline else ""
            return TookTooLong(f"The database stopped that, because it took too long ({headline}).{who}")
        case _ if cannot_be_used(error):
            return unusable(headline)
        case _ if error.sqlstate is None and isinstance(error, psycopg.OperationalError):
            # libpq's own: the server may have done it before the connection broke, and its answer is lost.
            return DatabaseUnavailable(
                f"The connection was lost, and what was asked for may have been done: {headline}"
            )
        case _:
            return DatabaseUnavailable(f"The database could not do that: {disk_full(error) or headline}")


def _check_begun(connection: psycopg.AsyncConnection[Any] | psycopg.Connection[Any]) -> None:
    # A savepoint would fail, and psycopg log that it cannot roll back to that.
    if connection.info.transaction_status == psycopg.pq.TransactionStatus.INERROR:
        raise psycopg.errors.InFailedSqlTransaction("current transaction is aborted")


@asynccontextmanager
async def transaction(connection: psycopg.AsyncConnection[Any], schema: str) -> AsyncGenerator[None]:
    """A `block`, whose own BEGIN and COMMIT fail with our errors too. An error of the body is left alone: it may be of the
    caller's iterable, which may read another database."""
    inner: BaseException | None = None
    try:
        _check_begun(connection)
        async with block(connection):
            try:
                yield
            except BaseException as error:
                inner = error
                raise
    except psycopg.Error as error:
        if error is inner:
            raise
        raise translate(error, schema) from error


@contextmanager
def transaction_sync(connection: psycopg.Connection[Any], schema: str) -> Generator[None]:
    """The same on a blocking connection."""
    inner: BaseException | None = None
    try:
        _check_begun(connection)
        with block_sync(connection):
            try:
                yield
            except BaseException as error:
                inner = error
                raise
    except psycopg.Error as error:
        if error is inner:
            raise
        raise translate(error, schema) from error
