"""The bench's own schema, filled with jobs before the clock starts."""

from __future__ import annotations

import secrets
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from psycopg.sql import SQL, Identifier

from ...migrate import migrate_sync
from ...postgres import connect_sync
from ..output import notice

if TYPE_CHECKING:
    from collections.abc import Generator

    import psycopg

KIND = "no_op"


class Ground:
    """The schema, and a connection to prepare it with."""

    def __init__(self, dsn: str, schema: str, connection: psycopg.Connection[Any]) -> None:
        self.dsn = dsn
        self.schema = schema
        self.version = connection.info.parameter_status("server_version") or ""
        self._connection = connection

    def clear(self) -> None:
        """No jobs, and no dead rows."""
        for table in ("job", "job_archive", "attempt", "session"):
            self._execute("TRUNCATE {}.{} CASCADE", Identifier(self.schema), Identifier(table))

    def fill(self, jobs: int) -> None:
        """Replaces all jobs with these, due, in one statement, and updates the planner's statistics."""
        self.clear()
        self._execute(
            "INSERT INTO {}.job (kind, args) SELECT {}, json_build_object('number', g) FROM generate_series(1, {}) g",
            Identifier(self.schema),
            KIND,
            jobs,
        )
        self._execute("VACUUM ANALYZE {}.job", Identifier(self.schema))

    def finished(self) -> tuple[int, float]:
        """How many jobs were completed, and the seconds from the first claim to the last completion."""
        cursor = self._execute(
            "SELECT count(*), extract(epoch FROM max(finished_at) - min(started_at))::float8 FROM {}.job_archive",
            Identifier(self.schema),
        )
        count, seconds = cursor.fetchone() or (0, None)
        return count, seconds or 0.0

    def _execute(self, query: str, *parts: Any) -> psycopg.Cursor[Any]:
        # The queries are this module's own literals; SQL() wants that said in a type that a parameter cannot have.
        return self._connection.execute(SQL(query).format(*parts))  # pyright: ignore[reportArgumentType]


@contextmanager
def open_ground(dsn: str) -> Generator[Ground]:
    """A migrated schema with a unique name; always dropped at the end."""
    schema = f"pulse_bench_{secrets.token_hex(4)}"
    notice(f"measuring in the schema {schema}, which is dropped at the end")
    with connect_sync(dsn) as connection:
        try:
            migrate_sync(dsn, schema)
            yield Ground(dsn, schema, connection)
        finally:
            connection.execute(SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(Identifier(schema)))
