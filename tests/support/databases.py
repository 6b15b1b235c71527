"""Databases on the tests' server: one migrated template a run, and a copy of it for each test."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING

import psycopg
from psycopg.conninfo import make_conninfo
from psycopg.sql import SQL, Composable, Identifier, Literal

from pulse_trio.migrate import migrate_sync

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
        with self._copy_of(self._template()) as dsn:
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

    def _template(self) -> str:
        """The run's migrated template, made by the first worker that asks; the others wait for it."""
        name = f"{self._prefix}_template"
        with self._admin.transaction():
            self._admin.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", [name])
            if not self._exists(name):
                self._make_template(name)
        return name

    def _make_template(self, name: str) -> None:
        # Under another name until it is whole, so that a failed migration is not taken for a template.
        draft = f"{name}_draft"
        with psycopg.connect(self.server_dsn, autocommit=True) as other:
            other.execute(SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(Identifier(draft)))
            other.execute(SQL("CREATE DATABASE {} TEMPLATE template0").format(Identifier(draft)))
            migrate_sync(make_conninfo(self.server_dsn, dbname=draft))
            other.execute(SQL("ALTER DATABASE {} RENAME TO {}").format(Identifier(draft), Identifier(name)))

    def _exists(self, name: str) -> bool:
        return self._admin.execute("SELECT FROM pg_database WHERE datname = %s", [name]).fetchone() is not None

    def _drop(self, name: str) -> None:
        self._admin.execute(SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(Identifier(name)))


def drop_databases(server_dsn: str, prefix: str) -> None:
    """Drop what a run left on a server that outlives it: its template, and what killed tests left."""
    with psycopg.connect(server_dsn, autocommit=True) as admin:
        found = admin.execute("SELECT datname FROM pg_database WHERE starts_with(datname, %s)", [f"{prefix}_"])
        for (name,) in found.fetchall():
            admin.execute(SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(Identifier(name)))
