"""Databases on the tests' server: one migrated template a run, and a copy of it for each test."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING

import psycopg
from psycopg.conninfo import make_conninfo
from psycopg.sql import SQL, Composable, Identifier, Literal

from pulse_trio.testing.databases import template_of

if TYPE_CHECKING:
    from collections.abc import Generator


PLAIN = SQL("")


class Databases:
    """Makes and drops databases whose names begin with `prefix`, which is the run's own."""

    def __init__(self, server_dsn: str, prefix: str, worker: str) -> None:
        self.server_dsn = server_dsn
        self._prefix = prefix
        self._names = (f"{prefix}_{worker}_{number}" for number in count(1))
        self._admin = psycopg.connect(server_dsn, autocommit=True)

    def close(self) -> None:
        """Close the connection that the databases are made through."""
        self._admin.close()

    @contextmanager
    def empty(self) -> Generator[str]:
        """The DSN of a new database without the schema; dropped afterwards, even with open connections."""
        with self._copy_of("template0") as dsn:
            yield dsn

    @contextmanager
    def migrated(self) -> Generator[str]:
        """The DSN of a new database with the schema; dropped afterwards, even with open connections."""
        with self._copy_of(template_of(self._admin, self.server_dsn, self._prefix)) as dsn:
            yield dsn

    @contextmanager
    def encoded(self, encoding: str) -> Generator[str]:
        """The same in another encoding than the server's own."""
        how = SQL("ENCODING {} LOCALE 'C'").format(Literal(encoding))
        if self._admin.info.server_version >= 150000:
            how += SQL(" LOCALE_PROVIDER libc")
        with self._copy_of("template0", how) as dsn:
            yield dsn

    @contextmanager
    def _copy_of(self, template: str, how: Composable = PLAIN) -> Generator[str]:
        name = next(self._names)
        self._admin.execute(
            SQL("CREATE DATABASE {} TEMPLATE {} {}").format(Identifier(name), Identifier(template), how)
        )
        try:
            yield make_conninfo(self.server_dsn, dbname=name)
        finally:
            self._drop(name)

    def _drop(self, name: str) -> None:
        self._admin.execute(SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(Identifier(name)))
