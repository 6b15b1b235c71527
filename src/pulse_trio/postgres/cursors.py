"""Cursors that read and write values with psycopg's default adapters, whatever the connection or the program has changed.

A connection may be the user's: it has their row factory, loaders and dumpers, and the program may have changed psycopg's
global ones (a JSON library, dates of another class). pulse-trio's statements and rows depend on none of these. Rows in binary
(`execute(..., binary=True)`) do not depend on DateStyle, IntervalStyle or extra_float_digits either.

A moment that Python cannot hold ("infinity", the year 10000) is read as the nearest one that it can, as the function `moment`
of the schema has it: one row must not make a list unreadable.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import dbapi20, postgres
from psycopg.adapt import AdaptersMap, Loader
from psycopg.pq import Format
from psycopg.rows import tuple_row
from psycopg.types import array
from psycopg.types.datetime import TimestamptzBinaryLoader, TimestamptzLoader

if TYPE_CHECKING:
    from collections.abc import Callable

    from psycopg.abc import AdaptContext, Buffer

_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
FIRST, LAST = datetime(1, 1, 2, tzinfo=UTC), datetime(9999, 12, 30, tzinfo=UTC)


def _defaults() -> AdaptersMap:
    # Not a copy of `psycopg.adapters`: the importing program may have changed that already.
    adapters = AdaptersMap()
    postgres.register_default_types(adapters.types)
    postgres.register_default_adapters(adapters)
    dbapi20.register_dbapi20_adapters(adapters)
    array.register_all_arrays(adapters)
    return adapters


DEFAULTS = _defaults()
"""psycopg's adapters as it ships them. Also a `context` to connect with."""


class _Moment(Loader):
    """Reads a timestamptz in binary: microseconds from the year 2000 on."""

    format = Format.BINARY
    _first, _last = ((moment - _EPOCH).total_seconds() * 1e6 for moment in (FIRST, LAST))

    def __init__(self, oid: int, context: AdaptContext | None = None) -> None:
        super().__init__(oid, context)
        self._possible: Callable[[Buffer], datetime] = TimestamptzBinaryLoader(oid, context).load

    def load(self, data: Buffer) -> datetime:
        since = int.from_bytes(data, signed=True)
        if self._first <= since <= self._last:
            return self._possible(data)
        return FIRST if since < 0 else LAST


class _MomentInText(Loader):
    """Reads a timestamptz in text."""

    def __init__(self, oid: int, context: AdaptContext | None = None) -> None:
        super().__init__(oid, context)
        self._possible: Callable[[Buffer], datetime] = TimestamptzLoader(oid, context).load

    def load(self, data: Buffer) -> datetime:
        try:
            return min(max(self._possible(data), FIRST), LAST)
        except (psycopg.DataError, OverflowError):
            text = bytes(data)
            return FIRST if text.startswith(b"-") or text.endswith(b"BC") else LAST


def _reading() -> AdaptersMap:
    adapters = AdaptersMap(DEFAULTS)
    for loader in (_Moment, _MomentInText):
        adapters.register_loader("timestamptz", loader)
    return adapters


_READING = _reading()
"""What the cursors here read with. Connections do not: a handler's own statements are read as psycopg reads them."""


class OwnAsyncCursor(psycopg.AsyncCursor[tuple[Any, ...]]):
    """Rows are tuples; see above."""

    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        super().__init__(connection, row_factory=tuple_row)

    @property
    def adapters(self) -> AdaptersMap:
        return _READING


class OwnCursor(psycopg.Cursor[tuple[Any, ...]]):
    """The same, blocking."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        super().__init__(connection, row_factory=tuple_row)

    @property
    def adapters(self) -> AdaptersMap:
        return _READING
