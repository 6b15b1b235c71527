"""Applies and checks the schema: forward only, one transaction per migration, under an advisory lock.

Of eight processes that start at once, one applies each migration; the others wait for the lock and find nothing to do.
A migration keeps what programs of the version before call, and its first line says so: `-- works with programs from: NNNN`, the
oldest schema version whose programs work with it. The database remembers that. A program accepts a newer schema if each
migration that it does not know names this program's version or an older one: during a rollout, workers of the version before
may be started again. Without that word an old program on an unknown schema reports it and stops, rather than guess.
"""

from __future__ import annotations

import hashlib
import re
import shlex
import time
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg

from .errors import ConfigurationError, DatabaseUnavailable, SchemaError, UsageError
from .postgres import PINNED, UNBOUNDED, connect_sync
from .schema_owner import refuse_foreign
from .sql import render, render_bound

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Iterable, Mapping


# Another table access method would have no HOT updates; check_function_bodies finds errors immediately.
_WORKS_FROM = re.compile(r"-- works with programs from: (\d{4})\n")
_MIGRATING = PINNED | UNBOUNDED | {"default_table_access_method": "heap", "check_function_bodies": "on"}


class Migration(NamedTuple):
    """One file of migrations/: `NNNN_name.sql`."""

    version: int
    name: str
    text: str

    @property
    def checksum(self) -> str:
        return _checksum(self.text)

    @property
    def works_from(self) -> int | None:
        """The oldest schema version whose programs work with the schema after this migration; None where it does not say."""
        said = _WORKS_FROM.match(self.text)
        return int(said[1]) if said else None


@cache
def _checksum(text: str) -> str:
    # Remembered: every worker compares all of them when it starts, and they are half a megabyte.
    return hashlib.sha256(text.encode()).hexdigest()


class Applied(NamedTuple):
    """A migration as the database remembers it."""

    version: int
    checksum: str
    works_from: int | None


def migrations_folder() -> Path:
    """The folder of migrations: inside the installed package, or the checkout's for an editable installation."""
    shipped = Path(str(files("pulse_trio"))) / "migrations"
    return shipped if shipped.is_dir() else Path(__file__).parents[2] / "migrations"


def known_migrations() -> list[Migration]:
    """Every migration this version of pulse-trio ships, in order.

    Read when this module is imported: another version may be installed over this one while it runs, and a process may run out
    of file descriptors."""
    return list(_KNOWN)


def _read() -> list[Migration]:
    found: list[Migration] = []
    for path in sorted(migrations_folder().glob("[0-9]*_*.sql")):
        version, _, name = path.stem.partition("_")
        found.append(Migration(int(version), name, path.read_text(encoding="utf-8")))
    return found


_KNOWN = _read()


def migration_sql(schema: str = "pulse") -> str:
    """The whole schema as one script, for databases that another team administers."""
    parts = [_preamble(schema)]
    for migration in known_migrations():
        # No value comes from outside: all are our own files' names and digests.
        values = f"{migration.version}, '{migration.name}', '{migration.checksum}'"
        record = render(f'INSERT INTO :"schema".migration (version, name, checksum) VALUES ({values});', schema)  # noqa: S608
        if migration.works_from is not None:
            record += "\n" + render(
                'UPDATE :"schema".migration '  # noqa: S608
                f"SET works_from = {migration.works_from} WHERE version = {migration.version};",
                schema,
            )
        parts.append(f"BEGIN;\n{render(migration.text, schema)}\n{record}\nCOMMIT;")
    return "\n\n".join(parts) + "\n"


def migrate_sync(dsn: str, schema: str = "pulse", *, wait: float = 60.0) -> list[str]:
    """Applies the missing migrations; returns their names, `[]` if there was nothing to do.

    Blocks: from Trio call it through `trio.to_thread.run_sync`.
    Raises `DatabaseUnavailable`, also when another session keeps a table locked for `wait` seconds; `ConfigurationError`
    through a pooler; `UsageError` when the schema, or something in it, belongs to an untrusted role; `SchemaError` when the
    schema was made by a newer version or changed by hand.
    """
    with connect_sync(dsn, _MIGRATING) as connection, _rights_explained(connection, schema, migrates=True):
        if connection.prepare_threshold is None:
            raise ConfigurationError(
                "The DSN goes through a pooler (PgBouncer), which cannot hold the lock that a migration needs: give the "
                "database's own address."
            )
        # Session-level, so that it is held across the migrations' transactions; the connection's end releases it at the
        # latest.
        _lock(connection, f"{schema} migrate", wait)
        make_schema, make_table = _missing_preamble(connection, schema)
        if make_schema is not None:
            connection.execute(make_schema.encode())
        # Done before anything in the schema is read or called: a view's or a trigger's function would run as this role.
        refuse_foreign(connection, schema)
        if make_table is not None:
            connection.execute(make_table.encode())
        applied = _applied(connection, schema)
        _refuse_strangers(applied)
        missing = _missing(applied)
        for migration in missing:
            _apply_soon(connection, migration, schema, wait)
        _mend_ids(connection, schema)
    return [f"{m.version:04}_{m.name}" for m in missing]


def _lock(connection: psycopg.Connection[Any], name: str, wait: float) -> None:
    """Waits for the advisory lock, with a limit: any role that may connect can hold it."""
    try:
        with connection.transaction():
            connection.execute("SELECT set_config('lock_timeout', %s, true)", [f"{max(int(wait * 1000), 1)}ms"])
            connection.execute("SELECT pg_advisory_lock(hashtextextended(%s, 0))", [name])
    except psycopg.errors.LockNotAvailable:
        row = connection.execute(
            "SELECT string_agg(format('pid %%s, user %%s, %%s', a.pid, a.usename,"
            " coalesce(nullif(a.application_name, ''), 'a client without a name')), '; ')"
            " FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid,"
            " LATERAL (SELECT hashtextextended(%s, 0) AS key) k"
            " WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1"
            " AND (l.classid::bigint << 32 | l.objid::bigint) = k.key",
            [name],
        ).fetchone()
        raise DatabaseUnavailable(
            f"Another session has held the lock of migrations for more than {wait:g} s: {row[0] if row else 'unknown'}. "
            "If it is migrating, try again when it has finished; if not, end it: SELECT pg_terminate_backend(pid)"
        ) from None


def _mend_ids(connection: psycopg.Connection[Any], schema: str) -> None:
    """Moves the sequence of ids forward if a restore has left it behind the existing jobs."""
    asked = "SELECT has_function_privilege(to_regprocedure(format('%%I.mend_ids()', %s::text)), 'EXECUTE')"
    row = connection.execute(asked, [schema]).fetchone()
    if row is not None and row[0]:
        connection.execute(render('SELECT :"schema".mend_ids()', schema).encode())


def check_sync(dsn: str, schema: str = "pulse", pins: Mapping[str, str] = PINNED) -> None:
    """Raises `SchemaError` unless the schema is what this version of pulse-trio needs, or a newer one that it
    works with. `pins`: settings of the session. Blocks."""
    with connect_sync(dsn, pins) as connection, _rights_explained(connection, schema, migrates=False):
        found = connection.execute(
            "SELECT to_regclass(format('%%I.migration', %s::text)) IS NOT NULL", [schema]
        ).fetchone()
        check_versions(_applied(connection, schema) if found and found[0] else [], schema)


@contextmanager
def _rights_explained(connection: psycopg.Connection[Any], schema: str, *, migrates: bool) -> Generator[None]:
    """Raises `UsageError`, which also says who can grant the missing right; PostgreSQL only names the right."""
    try:
        yield
    except psycopg.errors.InsufficientPrivilege as error:
        said = str(error).partition("\n")[0]
        raise UsageError(
            f"The database role may not do that: {said}. {_remedy(connection, schema, migrates)}"
        ) from error


def _remedy(connection: psycopg.Connection[Any], schema: str, migrates: bool) -> str:
    if connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
        connection.rollback()
    row = connection.execute(
        "SELECT quote_ident(current_user), quote_ident(current_database()), quote_ident(%s::text),"
        " (SELECT quote_ident(pg_get_userbyid(nspowner)) FROM pg_namespace WHERE nspname = %s::text),"
        " EXISTS (SELECT FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname = %s::text"
        "  AND p.proname = 'add_job' AND has_schema_privilege(n.oid, 'USAGE') AND has_function_privilege(p.oid, 'EXECUTE'))",
        [schema, schema, schema],
    ).fetchone()
    role, database, name, owner, enqueues = row or ("", "", schema, None, False)
    if owner is None:
        return f"A superuser or the database's owner can allow it: GRANT CREATE ON DATABASE {database} TO {role}"
    if enqueues and not migrates:
        return (
            f"A producer enqueues from code or SQL; the command line reads more than it may. The schema's owner, {owner}, "
            f"can grant more: pulse-trio grants --waiter {role}, or --operator {role} for commands that change jobs"
        )
    return (
        f"The schema {name} belongs to {owner}: connect as that role. That role can grant {role} the rights to work with "
        f"jobs: pulse-trio grants --worker {role} (or --producer, --waiter, --operator)"
    )


def check_versions(applied: Collection[Applied], schema: str = "pulse") -> None:
    """The decision of `check_sync`, over what the database remembers (`applied_query`)."""
    if not applied:
        raise SchemaError(f"The database has no pulse-trio schema {schema!r}. Create it with: {_command(schema)}")
    _refuse_strangers(applied)
    missing = _missing(applied)
    if missing:
        raise SchemaError(
            f"The schema {schema!r} is older than this version of pulse-trio: {len(missing)} migration(s) missing, "
            f"from {missing[0].version:04}_{missing[0].name} on. Bring it up to date with: {_command(schema)}"
        )


def _command(schema: str) -> str:
    return "pulse-trio migrate" if schema == "pulse" else f"pulse-trio migrate --schema {shlex.quote(schema)}"


def _missing(applied: Collection[Applied]) -> list[Migration]:
    there = {one.version for one in applied}
    return [m for m in known_migrations() if m.version not in there]


def _refuse_strangers(applied: Collection[Applied]) -> None:
    known = {m.version: m for m in known_migrations()}
    newest = max(known)
    strange = [one for one in applied if one.version not in known]
    if any(one.works_from is None or one.works_from > newest for one in strange):
        raise SchemaError(
            f"The schema is newer than this version of pulse-trio: it has migration {max(strange).version:04}, this version "
            f"knows up to {newest:04}. Upgrade pulse-trio here (pip install --upgrade pulse-trio)."
        )
    changed = [
        known[one.version] for one in applied if one not in strange and known[one.version].checksum != one.checksum
    ]
    if changed:
        raise SchemaError(
            f"Migration {changed[0].version:04}_{changed[0].name} was applied from a different text than the one this "
            "version ships. Use the version of pulse-trio that applied it, or restore the schema from a backup."
        )


_SCHEMA = 'CREATE SCHEMA IF NOT EXISTS :"schema"'
_TABLE = (
    'CREATE TABLE IF NOT EXISTS :"schema".migration (\n'
    "  version int PRIMARY KEY, name text NOT NULL, checksum text NOT NULL,\n"
    "  applied_at timestamptz NOT NULL DEFAULT now())"
)


def _preamble(schema: str) -> str:
    return "".join(f"{render(part, schema)};\n" for part in (_SCHEMA, _TABLE)).rstrip()


def _missing_preamble(connection: psycopg.Connection[Any], schema: str) -> list[str | None]:
    """The two preparatory statements, None for an object that exists. "IF NOT EXISTS" needs the right to create, which the
    schema's owner may lack."""
    row = connection.execute(
        "SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = %s::text),"
        " to_regclass(format('%%I.migration', %s::text)) IS NOT NULL",
        [schema, schema],
    ).fetchone()
    there = row or (False, False)
    return [None if found else render(part, schema) for part, found in zip((_SCHEMA, _TABLE), there, strict=True)]


def _apply_soon(connection: psycopg.Connection[Any], migration: Migration, schema: str, wait: float) -> None:
    """Applies a migration, with retries for at most `wait` seconds while other sessions lock its tables.

    Statements of workers and producers that need the same table queue behind a waiting migration: so each attempt gives up
    soon, and lets them through before the next. Raises `DatabaseUnavailable`, which names the blocking sessions."""
    end = time.monotonic() + wait
    while True:
        patience = min(_PATIENCE, max(wait, 0.001))
        try:
            _apply(connection, migration, schema, patience)
            return
        except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected):
            if time.monotonic() < end:
                time.sleep(_LET_THROUGH)
                continue
            holders = _holders(connection, schema, patience)
        raise DatabaseUnavailable(
            f"The migration {migration.version:04}_{migration.name} changes tables that other sessions have kept locked for "
            f"more than {wait:g} s: {holders}. The migration was not applied. Try again when they have finished, or end "
            f"them: "
            "SELECT pg_terminate_backend(pid)"
        )


_PATIENCE = 2.0
"""Seconds for which one attempt of a migration waits for a lock, and blocks statements queued behind it."""
_LET_THROUGH = 0.5
"""Seconds between two attempts, for the statements that queued."""


def _holders(connection: psycopg.Connection[Any], schema: str, longer_than: float) -> str:
    """The sessions that hold a table of the schema, in a transaction old enough to have blocked the migration."""
    row = connection.execute(
        "SELECT string_agg(coalesce(format('pid %%s, user %%s, %%s, %%s', a.pid, a.usename,"
        "  coalesce(nullif(a.application_name, ''), 'a client without a name'),"
        "  coalesce('in a transaction for ' || round(extract(epoch FROM clock_timestamp() - a.xact_start)) || ' s',"
        "   'for how long this role cannot see')),"
        "  'a prepared transaction (see pg_prepared_xacts)'), '; ' ORDER BY a.xact_start)"
        " FROM (SELECT DISTINCT l.pid FROM pg_locks l JOIN pg_class c ON c.oid = l.relation"
        "  JOIN pg_namespace n ON n.oid = c.relnamespace"
        "  WHERE n.nspname = %s::text AND l.granted AND l.pid IS DISTINCT FROM pg_backend_pid()"
        "  AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())) held"
        " LEFT JOIN pg_stat_activity a USING (pid)"
        " WHERE a.xact_start IS NULL OR a.xact_start < clock_timestamp() - make_interval(secs => %s)",
        [schema, longer_than],
    ).fetchone()
    return (row[0] if row else None) or "they have just gone"


def _apply(connection: psycopg.Connection[Any], migration: Migration, schema: str, patience: float) -> None:
    with connection.transaction():
        connection.execute("SELECT set_config('lock_timeout', %s, true)", [f"{max(int(patience * 1000), 1)}ms"])
        connection.execute(render(migration.text, schema).encode())
        connection.execute(
            render_bound('INSERT INTO :"schema".migration (version, name, checksum) VALUES (%s, %s, %s)', schema),
            [migration.version, migration.name, migration.checksum],
        )
        # Apart, because the column came with migration 0048.
        if migration.works_from is not None:
            connection.execute(
                render_bound('UPDATE :"schema".migration SET works_from = %s WHERE version = %s', schema),
                [migration.works_from, migration.version],
            )


def applied_query(schema: str) -> bytes:
    """The statement that gives the columns of `Applied`. A schema from before migration 0048 has no `works_from`."""
    query = """SELECT m.version, m.checksum, (to_jsonb(m) ->> 'works_from')::int FROM :"schema".migration m"""
    return render(query, schema).encode()


def _applied(connection: psycopg.Connection[Any], schema: str) -> list[Applied]:
    rows: Iterable[tuple[int, str, int | None]] = connection.execute(applied_query(schema)).fetchall()
    return [Applied(*row) for row in rows]
