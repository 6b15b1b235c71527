"""Connections of other libraries: SQLAlchemy's, Django's and asyncpg's, so that a job can be enqueued in their transaction.

None of them is imported here: a connection is recognised by the library its class comes from, and only its documented
interface is used. Each adapter runs a statement and returns its rows through the library itself, not through the driver
beneath: so SQLAlchemy and Django begin their transactions as usual, and know about the statement.

Statements have psycopg's placeholders, `%(name)s`, or numbered ones, `$1`, all of which are text (asyncpg requires a
parameter's exact type; the statements cast).
"""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

import trio
from psycopg.pq import TransactionStatus

from pulse_trio.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator, Sequence
    from contextlib import AbstractAsyncContextManager, AbstractContextManager

_ACCEPTED = (
    "a psycopg connection, an asyncpg connection, SQLAlchemy's Connection, Session, AsyncConnection or AsyncSession, "
    "or django.db.connection"
)


class AsyncForeign(Protocol):
    """A connection of another library, asynchronous."""

    async def numbered(self) -> bool:
        """Whether its statements have numbered placeholders."""
        ...

    async def rows(self, statement: str, parameters: Any) -> Sequence[Sequence[Any]]: ...

    def transaction(self) -> AbstractAsyncContextManager[object]:
        """A savepoint in the caller's transaction, or a transaction where there is none."""
        ...


class Foreign(Protocol):
    """The same, blocking."""

    def rows(self, statement: str, parameters: Any) -> Sequence[Sequence[Any]]: ...

    def transaction(self) -> AbstractContextManager[object]: ...


def adapt_async(connection: Any) -> AsyncForeign:
    """An adapter for an asynchronous connection. Raises `ConfigurationError` for an unusable one."""
    library = _library(connection)
    if library in ("asyncpg", "sqlalchemy") and trio.lowlevel.in_trio_run():
        raise ConfigurationError(
            f"{type(connection).__name__} of {library} needs asyncio, and this is Trio: use psycopg."
        )
    match library, _kinds(connection):
        # Its pool has one too, and lends another connection for each statement.
        case "asyncpg", _ if hasattr(connection, "fetch") and hasattr(connection, "transaction"):
            return _Asyncpg(connection)
        case "sqlalchemy", kinds if kinds & {"AsyncConnection", "AsyncSession", "async_scoped_session"}:
            return _SqlalchemyAsync(connection, is_session="AsyncConnection" not in kinds)
        case ("sqlalchemy", kinds) if kinds & {"Connection", "Session", "scoped_session"}:
            raise _wrong_client(connection, "SyncClient")
        case "django" | "psycopg", _:
            raise _wrong_client(connection, "SyncClient")
        case _:
            raise ConfigurationError(f"{connection!r} is no connection that jobs can be enqueued on: give {_ACCEPTED}.")


def adapt(connection: Any) -> Foreign:
    """An adapter for a blocking connection. Raises `ConfigurationError` for an unusable one."""
    match _library(connection), _kinds(connection):
        case "sqlalchemy", kinds if kinds & {"Connection", "Session", "scoped_session"}:
            return _Sqlalchemy(connection, is_session="Connection" not in kinds)
        case "django", _ if hasattr(connection, "cursor"):
            if connection.vendor != "postgresql":
                raise ConfigurationError(f"Django's connection is to {connection.vendor}, and jobs live in PostgreSQL.")
            return _Django(connection)
        case "sqlalchemy", kinds if kinds & {"AsyncConnection", "AsyncSession", "async_scoped_session"}:
            raise _wrong_client(connection, "Client (open_client)")
        case "asyncpg" | "psycopg" | "pulse_trio", _:
            raise _wrong_client(connection, "Client (open_client)")
        case _:
            raise ConfigurationError(f"{connection!r} is no connection that jobs can be enqueued on: give {_ACCEPTED}.")


def _library(connection: Any) -> str:
    known = ("asyncpg", "sqlalchemy", "django", "pulse_trio", "psycopg")
    roots = {cls.__module__.partition(".")[0] for cls in type(connection).__mro__}
    return next((name for name in known if name in roots), "")


def _kinds(connection: Any) -> set[str]:
    return {cls.__name__ for cls in type(connection).__mro__}


def _wrong_client(connection: Any, right: str) -> ConfigurationError:
    return ConfigurationError(f"{type(connection).__name__} is for the other client: use {right}.")


class _Asyncpg:
    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def numbered(self) -> bool:
        return True

    async def rows(self, statement: str, parameters: Any) -> Sequence[Sequence[Any]]:
        return await self._connection.fetch(statement, *parameters)

    def transaction(self) -> AbstractAsyncContextManager[object]:
        return self._connection.transaction()


class _SqlalchemyAsync:
    def __init__(self, connection: Any, *, is_session: bool) -> None:
        self._given = connection
        self._is_session = is_session

    async def _connection(self) -> Any:
        return await self._given.connection() if self._is_session else self._given

    async def numbered(self) -> bool:
        return _is_numbered((await self._connection()).dialect)

    async def rows(self, statement: str, parameters: Any) -> Sequence[Sequence[Any]]:
        connection = await self._connection()
        return (await connection.exec_driver_sql(statement, parameters)).fetchall()

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[None]:
        connection = await self._connection()
        if not _commits_alone(connection.sync_connection):
            async with self._given.begin_nested():
                yield
            return
        await connection.exec_driver_sql("BEGIN")
        try:
            yield
        except BaseException:
            with suppress(Exception):  # any library's, of a connection that is lost: what was raised before says more
                await connection.exec_driver_sql("ROLLBACK")  # noqa: ASYNC102 -- asyncio tells a task once
            raise
        await connection.exec_driver_sql("COMMIT")


class _Sqlalchemy:
    def __init__(self, connection: Any, *, is_session: bool) -> None:
        self._given = connection
        self._is_session = is_session

    def _connection(self) -> Any:
        connection = self._given.connection() if self._is_session else self._given
        if _is_numbered(connection.dialect):
            raise ConfigurationError("SQLAlchemy over asyncpg is asynchronous: use Client (open_client).")
        return connection

    def rows(self, statement: str, parameters: Any) -> Sequence[Sequence[Any]]:
        return self._connection().exec_driver_sql(statement, parameters).fetchall()

    @contextmanager
    def transaction(self) -> Generator[None]:
        connection = self._connection()
        if not _commits_alone(connection):
            with self._given.begin_nested():
                yield
            return
        connection.exec_driver_sql("BEGIN")
        try:
            yield
        except BaseException:
            with suppress(Exception):  # any library's, of a connection that is lost: what was raised before says more
                connection.exec_driver_sql("ROLLBACK")
            raise
        connection.exec_driver_sql("COMMIT")


class _Django:
    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def rows(self, statement: str, parameters: Any) -> Sequence[Sequence[Any]]:
        with self._connection.cursor() as cursor:
            cursor.execute(statement, parameters)
            return cursor.fetchall()

    def transaction(self) -> AbstractContextManager[object]:
        from importlib import import_module

        return import_module("django.db.transaction").atomic(using=self._connection.alias)


def _commits_alone(connection: Any) -> bool:
    """Whether each statement of SQLAlchemy's connection commits by itself: its isolation level is AUTOCOMMIT, and the caller
    has sent no BEGIN. A savepoint is refused there, and `connection.begin()` begins nothing."""
    pooled = connection.connection
    if not getattr(pooled.dbapi_connection, "autocommit", False):
        return False
    driver = pooled.driver_connection
    begun = getattr(driver, "is_in_transaction", None)
    return not begun() if begun is not None else driver.info.transaction_status == TransactionStatus.IDLE


def _is_numbered(dialect: Any) -> bool:
    if dialect.name != "postgresql":
        raise ConfigurationError(f"SQLAlchemy's connection is to {dialect.name}, and jobs live in PostgreSQL.")
    if dialect.paramstyle not in ("pyformat", "numeric_dollar"):
        raise ConfigurationError(f"SQLAlchemy over {dialect.driver} cannot be used: use psycopg or asyncpg.")
    return dialect.paramstyle == "numeric_dollar"


def cannot_be_used(error: BaseException) -> bool:
    """Whether it says that a connection is closed, was given back, or is another task's now: nothing was sent."""
    names = {cls.__name__ for cls in type(error).__mro__}
    if _library(error) == "sqlalchemy":
        # Its InterfaceError wraps the driver's.
        return "InvalidRequestError" in names
    return "InterfaceError" in names or str(error) == "the connection is closed"


def foreign_failure(error: BaseException) -> tuple[str | None, str] | None:
    """(SQLSTATE if there is one, the server's message) of an error of these libraries; None for any other error."""
    if not any(
        c.__module__.partition(".")[0] in ("asyncpg", "sqlalchemy", "django", "psycopg", "psycopg2")
        for c in type(error).__mro__
    ):
        return None
    if type(error).__name__ in ("PendingRollbackError", "TransactionManagementError"):
        return "25P02", str(error)
    seen: BaseException | None = error
    while seen is not None:
        state = getattr(seen, "sqlstate", None) or getattr(seen, "pgcode", None)
        if isinstance(state, str):
            words = str(seen)
            # SQLAlchemy's asyncpg errors begin with the class of the one beneath.
            return state, words.partition(">: ")[2] or words
        seen = getattr(seen, "orig", None) or seen.__cause__
    return None, str(error)
