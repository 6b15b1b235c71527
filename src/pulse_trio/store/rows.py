"""Rows that cannot be processed as they stand: the errors of PostgreSQL for them, and how one is kept from harming the others.

A statement over many rows fails as a whole when one of its values cannot be stored or computed. `each_alone` runs it over
halves, down to the single row; a statement that computes nothing from that row then ends its job (sql/bury.sql).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import psycopg

from ..sql import statement
from ..states import storable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from ..postgres import TrioConnection

T = TypeVar("T")
R = TypeVar("R")

ROWS_FAULT = (
    psycopg.DataError,
    psycopg.IntegrityError,
    # Too deeply nested, too large: errors about a value, although PostgreSQL counts them among its own limits.
    psycopg.errors.StatementTooComplex,
    psycopg.errors.ProgramLimitExceeded,
    # For example a trigger of the schema's owner.
    psycopg.errors.RaiseException,
)
"""PostgreSQL's errors about a value, not about the server."""

_LIMIT = 2000


def caused_by_a_row(error: psycopg.Error) -> bool:
    """Whether a row can have caused the error."""
    # XX: PostgreSQL's internal errors, for example damaged data.
    return isinstance(error, ROWS_FAULT) or (error.sqlstate or "").startswith("XX")


def said_of(error: Exception) -> str:
    """The error as it is kept on a job and shown in an event."""
    return storable(f"{type(error).__name__}: {str(error).strip()}")[:_LIMIT]


async def each_alone(
    given: Sequence[T],
    write: Callable[[Sequence[T]], Awaitable[R]],
    alone: Callable[[T, psycopg.Error], Awaitable[R | None]],
) -> list[R]:
    """Returns the results of `write` for all rows; if that fails because of a row, for their halves, and so on.

    `alone(one, error)` gives the result for a single row that failed."""
    try:
        return [await write(given)]
    except ROWS_FAULT as error:
        if len(given) == 1:
            ended = await alone(given[0], error)
            return [] if ended is None else [ended]
    middle = len(given) // 2
    return [
        *await each_alone(given[:middle], write, alone),
        *await each_alone(given[middle:], write, alone),
    ]


async def bury(
    connection: TrioConnection[Any], schema: str, fence: tuple[int, int, int], outcome: str, error: str
) -> tuple[str, str] | None:
    """Makes one running job dead, fenced by (id, attempt, session): with the producer's columns or, if that is refused, without
    them.

    Returns its kind and its queue; None if no such attempt exists (any more), or if even that is refused. Raises
    `LockNotAvailable` if somebody else has its row just now."""
    job_id, attempt, session = fence
    parameters = {"id": job_id, "attempt": attempt, "session": session, "outcome": outcome, "error": error}
    for bare in (False, True):
        try:
            async with connection.transaction():
                cursor = await connection.execute(statement("bury", schema), parameters | {"bare": bare})
                row = await cursor.fetchone()
        except ROWS_FAULT:
            continue
        if row is None:
            return None
        found, kind, queue = row
        if found is None:
            raise psycopg.errors.LockNotAvailable
        return kind, queue
    return None
