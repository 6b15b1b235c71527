"""Databases on the tests' server: one migrated template a run, and a copy of it for each test."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING

import psycopg
from psycopg.conninfo import make_conninfo
from psycopg.sql import SQL, Identifier, Literal

from pulse_trio.testing.databases import copy_database, template_of
from support.connections import keeping

if TYPE_CHECKING:
    from collections.abc import Generator


CATALOGUE = """
  SELECT relname FROM pg_class WHERE relnamespace = 'pg_catalog'::regnamespace AND relkind = 'r' AND NOT relisshared
"""


def make_template(server_dsn: str, prefix: str) -> None:
    """Makes the run's migrated template, and its catalogue as small as it can be.

    The migrations leave dead rows there. Without them, and without PostgreSQL's maps of where there is room, a copy has a sixth
    less to copy and to remove. The tables of the schema stay as a user's are after a migration: their plans depend on it.
    """
    with psycopg.connect(server_dsn, autocommit=True) as admin:
        template = make_conninfo(server_dsn, dbname=template_of(admin, server_dsn, prefix))
    with psycopg.connect(template, autocommit=True) as owner:
        tables = [Identifier("pg_catalog", name) for (name,) in owner.execute(CATALOGUE)]
        owner.execute(SQL("VACUUM (FULL, FREEZE) {}").format(SQL(", ").join(tables)))
    # The next session writes what each session reads first; the copies have it from here.
    psycopg.connect(template).close()


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
        with self._dropped_after() as (name, dsn):
            copy_database(self._admin, "template0", name)
            yield dsn

    @contextmanager
    def migrated(self) -> Generator[str]:
        """The DSN of a new database with the schema; dropped afterwards, even with open connections. Until then what looks at
        it, or fills it, shares its connections (connections.py)."""
        with self.copied(template_of(self._admin, self.server_dsn, self._prefix)) as dsn, keeping(dsn):
            yield dsn

    @contextmanager
    def copied(self, template: str) -> Generator[str]:
        """The DSN of a new copy of a database, which nobody is connected to."""
        with self._dropped_after() as (name, dsn):
            copy_database(self._admin, template, name)
            yield dsn

    @contextmanager
    def encoded(self, encoding: str) -> Generator[str]:
        """The same in another encoding than the server's own."""
        how = SQL("ENCODING {} LOCALE 'C'").format(Literal(encoding))
        if self._admin.info.server_version >= 150000:
            how += SQL(" LOCALE_PROVIDER libc")
        with self._dropped_after() as (name, dsn):
            self._admin.execute(SQL("CREATE DATABASE {} TEMPLATE template0 {}").format(Identifier(name), how))
            yield dsn

    @contextmanager
    def _dropped_after(self) -> Generator[tuple[str, str]]:
        name = next(self._names)
        try:
            yield name, make_conninfo(self.server_dsn, dbname=name)
        finally:
            self._admin.execute(SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(Identifier(name)))
