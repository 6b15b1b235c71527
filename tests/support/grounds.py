"""One database for the tests of a module, one after the other: each finds it as a migration leaves it, but for its sequences.

A test with a database of its own pays for the copy, for its connections, and for all that their sessions read of the catalogue
and plan anew. That was half of what PostgreSQL did for the short tests of durable handlers. Here the next test takes over the
connections, and what few rows there are, are deleted.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from psycopg.sql import SQL, Identifier

from pulse_trio.testing.kept import keeping
from support.stores import Window

if TYPE_CHECKING:
    from collections.abc import Generator

    from support.databases import Databases

# One by one, which is a tenth of what TRUNCATE costs: that makes each of their files, and those of their indexes, anew.
EMPTIED = """
  SELECT relname FROM pg_class WHERE relnamespace = 'pulse'::regnamespace AND relkind IN ('r', 'p') AND NOT relispartition
  AND relname NOT IN ('migration', 'maintenance', 'claim_turn') ORDER BY relname
"""
NEWEST = """
  SELECT (SELECT max(oid) FROM pg_class) AS relation, (SELECT max(oid) FROM pg_proc) AS function,
    (SELECT max(oid) FROM pg_trigger) AS trigger, (SELECT max(oid) FROM pg_constraint) AS rule,
    (SELECT max(xmin::text::bigint) FROM pg_proc WHERE pronamespace = 'pulse'::regnamespace) AS replaced,
    (SELECT max(xmin::text::bigint) FROM pg_class WHERE relnamespace = 'pulse'::regnamespace) AS altered
"""


class Ground:
    """A window on the database that the next test gets."""

    def __init__(self, databases: Databases) -> None:
        self._databases = databases
        self._open = ExitStack()
        self._window: Window | None = None
        self._empty = SQL("")
        self._newest: list[dict[str, int]] = []

    @contextmanager
    def taken(self) -> Generator[Window]:
        """Empty. After a test that fails, or that creates or replaces something in it, the next gets a new one."""
        window = self._window or self._new()
        try:
            yield window
            window.connection.execute(self._empty)
            if window.run(NEWEST) != self._newest:
                self.close()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._window = None
        self._open.close()

    def _new(self) -> Window:
        dsn = self._open.enter_context(self._databases.migrated())
        self._open.enter_context(keeping(dsn))
        self._window = window = self._open.enter_context(Window(dsn))
        tables = [Identifier("pulse", row["relname"]) for row in window.run(EMPTIED)]
        # Without triggers: nobody deletes these rows, and the audit would have them.
        self._empty = SQL("SET LOCAL session_replication_role = replica; SET LOCAL lock_timeout = '5s'; {}").format(
            SQL("; ").join(SQL("DELETE FROM {}").format(table) for table in tables)
        )
        self._newest = window.run(NEWEST)
        return window
