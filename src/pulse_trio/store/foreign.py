"""Drives the store's operations over connections of other libraries, in their current transaction.

The counterpart of `operations.run`, which drives psycopg. A statement's own time limit is left out: it would change a setting
of the caller's transaction.
"""

from __future__ import annotations

import re
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg

from ..errors import UsageError
from ..postgres import cannot_be_used, foreign_failure
from ..sql import statement
from .refusals import translate, unusable

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator, Mapping

    from ..errors import PulseTrioError
    from ..postgres import AsyncForeign, Foreign
    from .operations import Operation

T = TypeVar("T")
_PLACE = re.compile(r"%%|%\((\w+)\)s")


@cache
def named(name: str, schema: str) -> str:
    """The statement as text with psycopg's placeholders."""
    return statement(name, schema).decode()


@cache
def numbered(name: str, schema: str) -> tuple[str, tuple[str, ...]]:
    """The statement with numbered placeholders, and the names of its parameters in their order."""
    names: list[str] = []

    def place(found: re.Match[str]) -> str:
        if found[1] is None:
            return "%"
        if found[1] not in names:
            names.append(found[1])
        return f"${names.index(found[1]) + 1}::text"

    return _PLACE.sub(place, named(name, schema)), tuple(names)


def _texts(parameters: Mapping[str, Any], names: tuple[str, ...]) -> tuple[str | None, ...]:
    # A tuple, because SQLAlchemy takes a list for many executions.
    return tuple([None if (value := parameters[name]) is None else str(value) for name in names])


async def run_foreign(connection: AsyncForeign, schema: str, operation: Operation[T]) -> T:
    """Drives an operation over an awaited connection."""
    try:
        query = next(operation)
        by_number = await connection.numbered()
        while True:
            # The name belongs to the caller's transaction.
            if query.actor is not None:
                naming = {"actor": query.actor}
                if by_number:
                    text, names = numbered("act_as", schema)
                    await connection.rows(text, _texts(naming, names))
                else:
                    await connection.rows(named("act_as", schema), naming)
            if by_number:
                text, names = numbered(query.name, schema)
                rows = await connection.rows(text, _texts(query.parameters, names))
            else:
                rows = await connection.rows(named(query.name, schema), query.parameters)
            query = operation.send(rows)
    except StopIteration as stop:
        return stop.value
    except Exception as error:
        if (translated := _translated(error, schema)) is None:
            raise
        raise translated from error


def run_foreign_sync(connection: Foreign, schema: str, operation: Operation[T]) -> T:
    """Drives an operation over a blocking connection."""
    try:
        query = next(operation)
        while True:
            if query.actor is not None:
                connection.rows(named("act_as", schema), {"actor": query.actor})
            query = operation.send(connection.rows(named(query.name, schema), query.parameters))
    except StopIteration as stop:
        return stop.value
    except Exception as error:
        if (translated := _translated(error, schema)) is None:
            raise
        raise translated from error


@asynccontextmanager
async def foreign_block(connection: AsyncForeign, schema: str) -> AsyncGenerator[None]:
    """A savepoint, or a transaction, on an awaited connection. Its own beginning and end fail with our errors too."""
    inner: BaseException | None = None
    try:
        async with connection.transaction():
            try:
                yield
            except BaseException as error:
                inner = error
                raise
    except Exception as error:  # any library's
        if error is inner or (translated := _translated(error, schema)) is None:
            raise
        raise translated from error


@contextmanager
def foreign_block_sync(connection: Foreign, schema: str) -> Generator[None]:
    """The same on a blocking connection."""
    inner: BaseException | None = None
    try:
        with connection.transaction():
            try:
                yield
            except BaseException as error:
                inner = error
                raise
    except Exception as error:  # any library's
        if error is inner or (translated := _translated(error, schema)) is None:
            raise
        raise translated from error


def _translated(error: Exception, schema: str) -> PulseTrioError | None:
    if isinstance(error, NotImplementedError) and "DateStyle" in str(error):
        return UsageError(f"{error}. Say on the connection: SET DateStyle = 'ISO'")
    if isinstance(error, UnicodeEncodeError):
        return UsageError(f"The connection cannot carry that text: {error}. Run on it: SET client_encoding = 'UTF8'")
    failure = foreign_failure(error)
    if failure is None:
        return None
    state, words = failure
    if state is None and cannot_be_used(error):
        return unusable(words)
    try:
        kind = psycopg.errors.lookup(state or "")
    except KeyError:
        kind = psycopg.OperationalError
    return translate(kind(words), schema)
