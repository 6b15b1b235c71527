"""A copy of a database that is put in its place, under running workers: a backup that was restored."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.sql import SQL, Identifier

if TYPE_CHECKING:
    from collections.abc import Generator

LEASE_OVER = "UPDATE pulse.job SET lease_until = now() - interval '1 s' WHERE id = {} AND locked_by < 0 RETURNING id"
"""Ends the lease of an attempt that a step back has made void, so that a test need not wait for its end."""


class Backup:
    """Of the database that the DSN names."""

    def __init__(self, dsn: str) -> None:
        self.name = str(conninfo_to_dict(dsn)["dbname"])
        self._server = make_conninfo(dsn, dbname="postgres")

    @contextmanager
    def _alone(self) -> Generator[psycopg.Connection]:
        """Nobody is connected to the database in the block, nor can be."""
        with psycopg.connect(self._server, autocommit=True) as admin:
            admin.execute(SQL("ALTER DATABASE {} ALLOW_CONNECTIONS false").format(Identifier(self.name)))
            admin.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = %s", [self.name]
            )
            yield admin
            admin.execute(SQL("ALTER DATABASE {} ALLOW_CONNECTIONS true").format(Identifier(self.name)))

    def take(self) -> None:
        """Copies the database as it is now."""
        with self._alone() as admin:
            admin.execute(
                SQL("CREATE DATABASE {} TEMPLATE {}").format(Identifier(f"{self.name}_copy"), Identifier(self.name))
            )

    def put_back(self) -> None:
        """The copy takes the place of the database, which is dropped, with a session that began before nobody could connect."""
        with self._alone() as admin:
            admin.execute(SQL("DROP DATABASE {} WITH (FORCE)").format(Identifier(self.name)))
            admin.execute(
                SQL("ALTER DATABASE {} RENAME TO {}").format(Identifier(f"{self.name}_copy"), Identifier(self.name))
            )
