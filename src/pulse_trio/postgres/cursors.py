"""Cursors that read and write values with psycopg's default adapters, whatever the connection or the program has changed.

A connection may be the user's: it has their row factory, loaders and dumpers, and the program may have changed psycopg's
global ones (a JSON library, dates of another class). pulse-trio's statements and rows depend on none of these. Rows in binary
(`execute(..., binary=True)`) do not depend on DateStyle, IntervalStyle or extra_float_digits either.
"""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import dbapi20, postgres
from psycopg.adapt import AdaptersMap
from psycopg.rows import tuple_row
from psycopg.types import array


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


class OwnAsyncCursor(psycopg.AsyncCursor[tuple[Any, ...]]):
    """Rows are tuples; see above."""

    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        super().__init__(connection, row_factory=tuple_row)

    @property
    def adapters(self) -> AdaptersMap:
        return DEFAULTS


class OwnCursor(psycopg.Cursor[tuple[Any, ...]]):
    """The same, blocking."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        super().__init__(connection, row_factory=tuple_row)

    @property
    def adapters(self) -> AdaptersMap:
        return DEFAULTS
