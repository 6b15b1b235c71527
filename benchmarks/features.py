"""Does this server have what pulse-trio uses of PostgreSQL?

    python benchmarks/features.py [--dsn DSN] [--json]

For a server that is not PostgreSQL itself: a managed one, a distributed one, a proxy in front of one. Each feature is tried in
a schema that is dropped again; the DSN's role must be allowed to create one. Without a DSN: on the embedded PostgreSQL. Exit
status 1 if the server lacks something that pulse-trio cannot do without.

docs/explanation/beyond-one-server.md has the table. What it cannot try: that COMMIT outlives a crash, and how fast it is.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from common import open_server, table

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

SCHEMA = "pulse_trio_features"


@dataclass(frozen=True)
class Feature:
    """Something that a server has or lacks. `attempt` raises `psycopg.Error` or `Lacking` where it is missing."""

    name: str
    used_for: str
    attempt: Callable[[Sides], None]
    needed: bool = True


class Lacking(Exception):
    """The server accepts the statement and does something else."""


@dataclass(frozen=True)
class Sides:
    """Two sessions of one server, in autocommit mode, with `SCHEMA` in front of their search path."""

    one: psycopg.Connection[Any]
    other: psycopg.Connection[Any]

    def run(self, *statements: str) -> Any:
        """Executes them in the first session. Returns the last one's first value, if it has any."""
        return run(self.one, *statements)


def run(connection: psycopg.Connection[Any], *statements: str) -> Any:
    """Executes them. Returns the last one's first value, if it has any."""
    value = None
    for statement in statements:
        cursor = connection.execute(statement.encode())
        if cursor.description is not None:
            row = cursor.fetchone()
            value = None if row is None else row[0]
    return value


def expect(value: object, wanted: object, what: str) -> None:
    """Raises `Lacking` unless both are equal."""
    if value != wanted:
        raise Lacking(f"{what}: {value!r} instead of {wanted!r}")


# The features


def notifications(sides: Sides) -> None:
    """A notification of one session reaches the other."""
    run(sides.other, "LISTEN pulse_trio_feature")
    sides.run("SELECT pg_notify('pulse_trio_feature', 'hello')")
    got = [notify.payload for notify in sides.other.notifies(timeout=5, stop_after=1)]
    run(sides.other, "UNLISTEN pulse_trio_feature")
    expect(got, ["hello"], "the other session received")


def session_locks(sides: Sides) -> None:
    """What one session has locked the other does not get; `pg_locks` shows who has it."""
    sides.run("SELECT pg_advisory_lock_shared(4711)")
    expect(run(sides.other, "SELECT pg_try_advisory_lock(4711)"), False, "the lock that another session holds")
    holders = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 4711 AND granted"
    expect(run(sides.other, holders), 1, "its holders in pg_locks")
    sides.run("SELECT pg_advisory_unlock_shared(4711)")
    expect(run(sides.other, "SELECT pg_try_advisory_lock(4711)"), True, "the lock once it is free")
    run(sides.other, "SELECT pg_advisory_unlock(4711)")


def transaction_locks(sides: Sides) -> None:
    """A lock that ends with its transaction."""
    sides.run("BEGIN", "SELECT pg_advisory_xact_lock(4712)")
    expect(run(sides.other, "SELECT pg_try_advisory_xact_lock(4712)"), False, "the lock during the other's transaction")
    sides.run("COMMIT")
    expect(run(sides.other, "SELECT pg_try_advisory_xact_lock(4712)"), True, "the lock after it")


def skip_locked(sides: Sides) -> None:
    """Rows that another session has locked are skipped, not waited for."""
    sides.run("CREATE TABLE skipped (id int PRIMARY KEY)", "INSERT INTO skipped VALUES (1), (2)")
    sides.run("BEGIN", "SELECT id FROM skipped ORDER BY id LIMIT 1 FOR UPDATE")
    try:
        run(sides.other, "SET statement_timeout = '5s'")
        found = run(sides.other, "SELECT id FROM skipped ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED")
    finally:
        sides.run("ROLLBACK")
        run(sides.other, "RESET statement_timeout")
    expect(found, 2, "the first row that is free")


def one_statement(sides: Sides) -> None:
    """A statement that deletes, archives and updates other rows, all from one snapshot."""
    sides.run("CREATE TABLE live (id int PRIMARY KEY, state int) WITH (fillfactor = 48)", "CREATE TABLE done (id int)")
    sides.run("INSERT INTO live SELECT g, 1 FROM generate_series(1, 4) g")
    taken = sides.run(
        "WITH ended AS (DELETE FROM live WHERE id <= 2 RETURNING id), kept AS (INSERT INTO done SELECT id FROM ended) "
        "UPDATE live SET state = 2 WHERE id = (SELECT id FROM live WHERE id > 2 ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED) "
        "RETURNING (SELECT count(*) FROM ended)"
    )
    expect(taken, 2, "the deleted rows that the same statement sees")


def functions(sides: Sides) -> None:
    """PL/pgSQL with settings of its own, run with its owner's rights."""
    sides.run(
        "CREATE FUNCTION with_settings() RETURNS text LANGUAGE plpgsql SECURITY DEFINER "
        "SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET plan_cache_mode = force_generic_plan "
        "AS $$ BEGIN PERFORM FROM pg_class; RETURN current_setting('enable_seqscan'); END $$"
    )
    expect(sides.run("SELECT with_settings()"), "off", "a setting of the function's")


def triggers(sides: Sides) -> None:
    """Triggers for each row, on a partitioned table."""
    sides.run(
        "CREATE TABLE triggered (day date, n int) PARTITION BY RANGE (day)",
        "CREATE TABLE triggered_1 PARTITION OF triggered DEFAULT",
        "CREATE FUNCTION raise_n() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NEW.n := NEW.n + 1; RETURN NEW; END $$",
        "CREATE TRIGGER up BEFORE INSERT ON triggered FOR EACH ROW EXECUTE FUNCTION raise_n()",
    )
    expect(sides.run("INSERT INTO triggered VALUES ('2026-01-01', 1) RETURNING n"), 2, "what the trigger wrote")


def partitions(sides: Sides) -> None:
    """A day's partition that is made and dropped beside the others."""
    sides.run(
        "CREATE TABLE days (id bigint, at timestamptz) PARTITION BY RANGE (at)",
        "CREATE INDEX days_at ON days USING brin (at)",
        "CREATE TABLE days_1 PARTITION OF days FOR VALUES FROM ('2026-01-01Z') TO ('2026-01-02Z')",
        "INSERT INTO days VALUES (1, '2026-01-01 12:00Z')",
        "DROP TABLE days_1",
    )
    expect(sides.run("SELECT count(*) FROM days"), 0, "the rows that are left")


def partial_indexes(sides: Sides) -> None:
    """Partial unique indexes as arbiters of ON CONFLICT, and collation by bytes."""
    sides.run('CREATE TABLE keyed (id int, key text COLLATE "C")')
    sides.run(
        "CREATE UNIQUE INDEX keyed_once ON keyed (key) WHERE key IS NOT NULL", "INSERT INTO keyed VALUES (1, 'a')"
    )
    sides.run("INSERT INTO keyed VALUES (2, 'a') ON CONFLICT (key) WHERE key IS NOT NULL DO NOTHING")
    expect(sides.run("SELECT count(*) FROM keyed"), 1, "rows with one key")


def gin_indexes(sides: Sides) -> None:
    """Tags are found by an index on an expression."""
    sides.run(
        "CREATE TABLE tagged (options jsonb)",
        "CREATE FUNCTION tags_of(o jsonb) RETURNS jsonb LANGUAGE sql IMMUTABLE RETURN o -> 'tags'",
        "CREATE INDEX tagged_tags ON tagged USING gin (tags_of(options)) WHERE options ? 'tags'",
        """INSERT INTO tagged VALUES ('{"tags": ["eu"]}')""",
    )
    found = """SELECT count(*) FROM tagged WHERE options ? 'tags' AND tags_of(options) @> '["eu"]'"""
    expect(sides.run(found), 1, "rows with the tag")


def domains(sides: Sides) -> None:
    """Names and sizes are checked by domains."""
    sides.run("CREATE DOMAIN short AS text CHECK (octet_length(VALUE) <= 3)", "CREATE TABLE checked (name short)")
    with suppress(psycopg.errors.CheckViolation):
        sides.run("INSERT INTO checked VALUES ('four')")
        raise Lacking("a value that the domain forbids was written")


def row_security(sides: Sides) -> None:
    """Policies keep a worker's login from forging rows."""
    sides.run(
        "CREATE TABLE guarded (id int)",
        "ALTER TABLE guarded ENABLE ROW LEVEL SECURITY",
        "CREATE POLICY own ON guarded USING (id > 0) WITH CHECK (id > 0)",
    )


def settings(sides: Sides) -> None:
    """The time limits and the durability that each transaction asks for."""
    sides.run("BEGIN")
    try:
        for name, value in (
            ("statement_timeout", "5s"),
            ("lock_timeout", "1s"),
            ("idle_in_transaction_session_timeout", "10s"),
            ("synchronous_commit", "on"),
        ):
            sides.run(f"SET LOCAL {name} = '{value}'")
            expect(sides.run(f"SHOW {name}"), value, name)
    finally:
        sides.run("ROLLBACK")


def one_clock(sides: Sides) -> None:
    """Leases use the database's clock: it must be one, and go on within a transaction."""
    sides.run("BEGIN")
    try:
        if not sides.run("SELECT clock_timestamp() > now()"):
            raise Lacking("clock_timestamp() stands still in a transaction")
    finally:
        sides.run("ROLLBACK")


def sessions_seen(sides: Sides) -> None:
    """`doctor` names who holds a lock, and since when."""
    seen = sides.run(f"SELECT count(*) FROM pg_stat_activity WHERE pid = {sides.other.info.backend_pid}")
    expect(seen, 1, "the other session in pg_stat_activity")


def copies(sides: Sides) -> None:
    """Bulk enqueue is COPY."""
    sides.run("CREATE TABLE copied (id int, args json)")
    with sides.one.cursor() as cursor, cursor.copy("COPY copied FROM STDIN") as copy:
        copy.write_row((1, "{}"))
    expect(sides.run("SELECT count(*) FROM copied"), 1, "copied rows")


def savepoints(sides: Sides) -> None:
    """A failed statement of `job.transaction()` can be taken back alone."""
    sides.run("CREATE TABLE saved (id int)", "BEGIN", "INSERT INTO saved VALUES (1)", "SAVEPOINT s")
    with suppress(psycopg.errors.DivisionByZero):
        sides.run("SELECT 1 / 0")
    sides.run("ROLLBACK TO s", "COMMIT")
    expect(sides.run("SELECT count(*) FROM saved"), 1, "the rows from before the savepoint")


def identities(sides: Sides) -> None:
    """Ids come from sequences."""
    sides.run("CREATE TABLE numbered (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, n int)")
    expect(sides.run("INSERT INTO numbered (n) VALUES (7) RETURNING id"), 1, "the first id")


def tables(sides: Sides) -> None:
    """Ids and domains."""
    identities(sides)
    domains(sides)


FEATURES = (
    Feature("UTF8, ids from sequences, domains", "the tables", tables),
    Feature("partial and expression indexes, ON CONFLICT, COLLATE", "unique keys, claims in order", partial_indexes),
    Feature("GIN", "jobs by tag", gin_indexes),
    Feature("partitions by range, BRIN", "finished jobs and their retention", partitions),
    Feature("triggers on partitioned tables", "batches, hooks on death, audit", triggers),
    Feature("PL/pgSQL with SET and SECURITY DEFINER", "what is decided in the database, and rights", functions),
    Feature("several writes in one statement", "completions travel with the next claim", one_statement),
    Feature("FOR UPDATE SKIP LOCKED", "claims, rescues", skip_locked),
    Feature("advisory locks of a session, pg_locks", "one watchdog and scheduler; who waits idle", session_locks),
    Feature("advisory locks of a transaction", "turns of limited queues, migrations", transaction_locks),
    Feature("one clock that goes on", "leases, deadlines", one_clock),
    Feature("time limits and synchronous_commit in a transaction", "no lock outlives its worker", settings),
    Feature("savepoints", "client.using(), job.transaction()", savepoints),
    Feature("COPY", "enqueue_many", copies),
    Feature("row-level security", "a worker's own login", row_security, needed=False),
    Feature("LISTEN and NOTIFY", "work and results are heard of at once", notifications),
    Feature("pg_stat_activity of other sessions", "doctor names who holds a lock", sessions_seen, needed=False),
)


def tried(dsn: str, features: Sequence[Feature] = FEATURES) -> list[dict[str, Any]]:
    """Each feature with `there` and, where it is not, why."""
    results = list[dict[str, Any]]()
    with sessions(dsn) as sides:
        for feature in features:
            problem = ""
            try:
                feature.attempt(sides)
            except (psycopg.Error, Lacking) as error:
                problem = str(error).strip().split("\n")[0]
                for side in (sides.one, sides.other):
                    if side.closed:
                        raise
                    side.execute("ROLLBACK")  # of nothing, most often: a notice
            results.append(
                {
                    "feature": feature.name,
                    "used_for": feature.used_for,
                    "needed": feature.needed,
                    "there": not problem,
                    "problem": problem,
                }
            )
    return results


@contextmanager
def sessions(dsn: str) -> Generator[Sides]:
    """Two sessions, and the schema for as long as the block lasts."""
    schema = sql.Identifier(SCHEMA)
    with psycopg.connect(dsn, autocommit=True) as one, psycopg.connect(dsn, autocommit=True) as other:
        one.execute(sql.SQL("CREATE SCHEMA {}").format(schema))
        try:
            for side in (one, other):
                side.execute(sql.SQL("SET search_path = {}").format(schema))
                side.execute("SET client_min_messages = warning")
            yield Sides(one, other)
        finally:
            if not one.closed:
                one.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(schema))


def main() -> int:
    """Prints what is there."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--dsn", help="the server; default: an embedded PostgreSQL")
    made.add_argument("--json", action="store_true", help="one JSON object on standard output")
    options = made.parse_args()
    if options.dsn:
        conninfo_to_dict(options.dsn)
        results = tried(options.dsn)
    else:
        with open_server() as server:
            results = tried(server.admin)
    if options.json:
        print(json.dumps(results, indent=1))
    else:
        rows = [row | {"there": "yes" if row["there"] else f"NO: {row['problem']}"} for row in results]
        print(table(rows, {"feature": "feature", "used_for": "used for", "there": "there"}))
    return int(any(row["needed"] and not row["there"] for row in results))


if __name__ == "__main__":
    sys.exit(main())
