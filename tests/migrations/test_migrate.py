"""Migrations: forward only, once, whoever runs them at the same time."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import trio
from psycopg.conninfo import make_conninfo

from pulse_trio import (
    DatabaseUnavailable,
    Handlers,
    SchemaError,
    SyncClient,
    UsageError,
    Worker,
    migrate,
    open_client,
)
from pulse_trio.migrate import (
    Applied,
    Migration,
    check_sync,
    check_versions,
    known_migrations,
    migrate_sync,
    migration_sql,
)
from pulse_trio.observe import DatabaseLost, JobStarted
from pulse_trio.store import WorkerStore
from support.embedded_workers import working
from support.stores import LOCK_WAITED_FOR

if TYPE_CHECKING:
    from collections.abc import Generator

ALL = [f"{m.version:04}_{m.name}" for m in known_migrations()]
LATER = Migration(max(m.version for m in known_migrations()) + 1, "later", 'CREATE TABLE :"schema".later (n int);')
BROKEN = LATER._replace(text='CREATE TABLE :"schema".half (n int);\nSELECT 1/0;')


@pytest.fixture
def database(empty_dsn: str) -> Generator[psycopg.Connection[Any]]:
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        yield connection


def know(monkeypatch: pytest.MonkeyPatch, *more: Migration) -> None:
    """This version of pulse-trio ships these migrations too."""
    known = [*known_migrations(), *more]
    monkeypatch.setattr(migrate, "known_migrations", lambda: known)


def snapshot(database: psycopg.Connection[Any]) -> list[Any]:
    """What is in the schema, by the catalogues."""
    return database.execute(
        "SELECT c.relkind, c.relname, c.oid, (SELECT array_agg((a.attname, a.atttypid, a.attnotnull) ORDER BY a.attnum)"
        "   FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0)"
        " FROM pg_class c WHERE c.relnamespace = 'pulse'::regnamespace ORDER BY 1, 2"
    ).fetchall()


def test_every_migration_has_a_number_of_its_own() -> None:
    versions = [m.version for m in known_migrations()]
    assert versions == sorted(set(versions))


def test_an_empty_database_is_brought_to_the_head(empty_dsn: str, database: psycopg.Connection[Any]) -> None:
    assert migrate_sync(empty_dsn) == ALL
    check_sync(empty_dsn)
    recorded = database.execute("SELECT version, name, checksum FROM pulse.migration ORDER BY version").fetchall()
    assert recorded == [(m.version, m.name, m.checksum) for m in known_migrations()]
    assert SyncClient(empty_dsn).enqueue("noop").added


def test_migrating_twice_changes_nothing(empty_dsn: str, database: psycopg.Connection[Any]) -> None:
    migrate_sync(empty_dsn)
    before = snapshot(database)
    SyncClient(empty_dsn).enqueue("noop")
    assert migrate_sync(empty_dsn) == []
    assert snapshot(database) == before
    assert database.execute("SELECT count(*) FROM pulse.job").fetchone() == (1,)


def test_every_step_leads_to_a_schema_that_the_next_one_finds(empty_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    every = known_migrations()
    for steps in range(1, len(every) + 1):
        monkeypatch.setattr(migrate, "known_migrations", lambda steps=steps: every[:steps])
        assert migrate_sync(empty_dsn) == ALL[steps - 1 : steps]
        check_sync(empty_dsn)


def test_the_script_is_what_migrating_does(empty_dsn: str, database: psycopg.Connection[Any]) -> None:
    database.execute(migration_sql().encode())
    check_sync(empty_dsn)
    assert migrate_sync(empty_dsn) == []


def test_threads_at_once_apply_each_migration_once(empty_dsn: str) -> None:
    barrier = threading.Barrier(8)

    def run(_: int) -> list[str]:
        barrier.wait(30)
        return migrate_sync(empty_dsn)

    with ThreadPoolExecutor(8) as pool:
        applied = list(pool.map(run, range(8)))
    assert sorted(applied, key=len) == [[]] * 7 + [ALL]
    check_sync(empty_dsn)


def test_processes_at_once_apply_each_migration_once(empty_dsn: str) -> None:
    program = (
        "import sys; from pulse_trio.migrate import migrate_sync\n"
        "sys.stdin.read(1); print(len(migrate_sync(sys.argv[1])))"
    )
    command = [sys.executable, "-c", program, empty_dsn]
    started = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    for process in started:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=60)[0].strip() for process in started]
    assert sorted(outputs) == ["0"] * 7 + [str(len(ALL))]


def test_a_new_migration_is_applied_on_top(empty_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    migrate_sync(empty_dsn)
    know(monkeypatch, LATER)
    assert migrate_sync(empty_dsn) == [f"{LATER.version:04}_later"]
    check_sync(empty_dsn)


async def test_a_running_worker_and_its_clients_go_on_under_the_next_versions_schema(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers, held = Handlers(), trio.Event()

    @handlers.job
    async def before() -> int:
        await held.wait()
        return 1

    @handlers.job
    async def after() -> int:
        return 2

    async with open_client(dsn) as client, working(handlers, dsn, poll=0.1) as heard:
        running = await client.enqueue(before)
        await heard.until(JobStarted, job_id=running.id)
        with monkeypatch.context() as newer:
            know(newer, LATER)
            assert migrate_sync(dsn) == [f"{LATER.version:04}_later"]
        held.set()
        assert await running.result(timeout=20) == 1
        assert await (await client.enqueue(after)).result(timeout=20) == 2
        assert heard.of(DatabaseLost) == []
    # A worker of the old version that starts only now says what to do, and claims nothing.
    with pytest.raises(SchemaError, match=r"newer than this version .*Upgrade"):
        await Worker(handlers, dsn).run()


def test_a_migration_that_fails_leaves_nothing_half_done(
    empty_dsn: str, database: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    know(monkeypatch, BROKEN)
    with pytest.raises(psycopg.errors.DivisionByZero):
        migrate_sync(empty_dsn)
    assert database.execute("SELECT to_regclass('pulse.half')").fetchone() == (None,)
    # Those before it stay: each is a transaction of its own, and the next run goes on from there.
    assert database.execute("SELECT count(*) FROM pulse.migration").fetchone() == (len(ALL),)
    monkeypatch.undo()
    check_sync(empty_dsn)


# --check


def test_a_missing_schema_is_told_with_the_remedy(empty_dsn: str) -> None:
    with pytest.raises(SchemaError, match=r"has no pulse-trio schema 'pulse'. Create it with: pulse-trio migrate"):
        check_sync(empty_dsn)
    with pytest.raises(SchemaError, match="no pulse-trio schema 'elsewhere'"):
        check_sync(empty_dsn, "elsewhere")


def test_a_schema_of_somebody_elses_is_not_ours(empty_dsn: str, database: psycopg.Connection[Any]) -> None:
    database.execute("CREATE SCHEMA pulse CREATE TABLE theirs (n int)")
    with pytest.raises(SchemaError, match="no pulse-trio schema"):
        check_sync(empty_dsn)


def test_an_older_schema_is_told_with_the_remedy(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    know(monkeypatch, LATER)
    with pytest.raises(
        SchemaError, match=rf"older than this version .*1 migration.* from {LATER.version:04}_later on.*migrate"
    ):
        check_sync(dsn)


def test_a_newer_schema_is_told_and_not_touched(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as newer:
        know(newer, LATER)
        migrate_sync(dsn)
    for refuse in (check_sync, migrate_sync):
        with pytest.raises(SchemaError, match=rf"newer than this version .*has migration {LATER.version:04}.*Upgrade"):
            refuse(dsn)


def test_a_schema_made_from_another_text_is_told_and_not_touched(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as database:
        database.execute("UPDATE pulse.migration SET checksum = 'other' WHERE version = 1")
    for refuse in (check_sync, migrate_sync):
        with pytest.raises(SchemaError, match="0001_jobs was applied from a different text"):
            refuse(dsn)


def test_a_role_that_may_not_migrate_is_told_who_may(dsn: str, empty_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (dsn, empty_dsn):
        with psycopg.connect(place, autocommit=True) as connection:
            connection.execute(
                "DO $$ BEGIN CREATE ROLE pulse_trio_stranger LOGIN; EXCEPTION WHEN duplicate_object THEN END $$"
            )

    def as_stranger(place: str) -> str:
        return make_conninfo(place, options="-crole=pulse_trio_stranger")

    with pytest.raises(UsageError, match=r"denied for database .*GRANT CREATE ON DATABASE \w+ TO pulse_trio_stranger$"):
        migrate_sync(as_stranger(empty_dsn))
    for ask in (migrate_sync, check_sync):
        with pytest.raises(
            UsageError, match=r"The schema pulse belongs to \w+: .*pulse-trio grants --worker pulse_trio_stranger \(or"
        ):
            ask(as_stranger(dsn))
    # Rights to work with jobs are none to change their tables.
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("GRANT USAGE, CREATE ON SCHEMA pulse TO pulse_trio_stranger")
        connection.execute("GRANT SELECT, INSERT ON ALL TABLES IN SCHEMA pulse TO pulse_trio_stranger")
    check_sync(as_stranger(dsn))
    later = Migration(9999, "later", 'ALTER TABLE :"schema".job ADD COLUMN later int')
    know(monkeypatch, later)
    with pytest.raises(UsageError, match=r"must be owner of table job. The schema pulse belongs to"):
        migrate_sync(as_stranger(dsn))


async def test_a_worker_finds_the_same_faults(dsn: str, empty_dsn: str) -> None:
    for target, message in ((empty_dsn, "no pulse-trio schema"), (dsn, None)):
        store = WorkerStore(target)
        try:
            if message is None:
                await store.check_schema()
            else:
                with pytest.raises(SchemaError, match=message):
                    await store.check_schema()
        finally:
            await store.aclose()


NEWEST = LATER.version - 1


def remembered(*more: Applied) -> list[Applied]:
    """What a database remembers that has all migrations of this version, and these; the last one of a version counts."""
    rows = [Applied(m.version, m.checksum, m.works_from) for m in known_migrations()]
    return list({row.version: row for row in [*rows, *more]}.values())


def test_the_decision_needs_no_database() -> None:
    check_versions(remembered())
    unknown, incompatible = Applied(NEWEST + 1, "x", None), Applied(NEWEST + 1, "x", NEWEST + 1)
    for bad in ([], remembered(unknown), remembered(incompatible), remembered(Applied(1, "x", None))):
        with pytest.raises(SchemaError):
            check_versions(bad)


def test_a_newer_schema_is_accepted_if_each_unknown_migration_says_so() -> None:
    check_versions(remembered(Applied(NEWEST + 1, "x", NEWEST), Applied(NEWEST + 2, "x", 1)))
    with pytest.raises(SchemaError, match=rf"has migration {NEWEST + 2:04}, this version knows up to {NEWEST:04}"):
        check_versions(remembered(Applied(NEWEST + 1, "x", NEWEST), Applied(NEWEST + 2, "x", NEWEST + 1)))


def test_every_migration_since_the_word_was_introduced_says_which_programs_work_with_it() -> None:
    for migration in known_migrations():
        if migration.version > 48:
            assert migration.works_from is not None, (
                f"{migration.name}: its first line is to be as in migrate.py's docstring"
            )
            assert 48 <= migration.works_from <= migration.version


@pytest.mark.parametrize("by_script", [False, True], ids=["migrated", "by the script"])
async def test_a_worker_of_the_version_before_starts_on_a_schema_that_works_with_it(
    dsn: str, empty_dsn: str, monkeypatch: pytest.MonkeyPatch, by_script: bool
) -> None:
    handlers = Handlers()

    @handlers.job
    async def done() -> int:
        return 1

    friendly = LATER._replace(text=f"-- works with programs from: {NEWEST:04}\n{LATER.text}")
    target = empty_dsn if by_script else dsn
    with monkeypatch.context() as newer:
        know(newer, friendly)
        if by_script:
            with psycopg.connect(target, autocommit=True) as database:
                database.execute(migration_sql().encode())
        else:
            migrate_sync(target)
        check_sync(target)
    check_sync(target)
    assert migrate_sync(target) == []  # as in a container that migrates before it starts
    async with open_client(target) as client, working(handlers, target, poll=0.1):
        assert await (await client.enqueue(done)).result(timeout=20) == 1


def test_a_client_of_a_database_without_the_schema_is_told(empty_dsn: str) -> None:
    with pytest.raises(SchemaError, match="Create it with: pulse-trio migrate"):
        SyncClient(empty_dsn).enqueue("noop")


def test_an_absent_server_is_the_databases_fault() -> None:
    for run in (migrate_sync, check_sync):
        with pytest.raises(DatabaseUnavailable, match="Cannot connect to PostgreSQL"):
            run("host=/nonexistent")


def test_a_waiting_migrator_is_let_in_when_the_first_is_gone(empty_dsn: str, server_dsn: str) -> None:
    with psycopg.connect(empty_dsn, autocommit=True) as holder:
        holder.execute("SELECT pg_advisory_lock(hashtextextended('pulse migrate', 0))")
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(migrate_sync, empty_dsn)
            while holder.execute(LOCK_WAITED_FOR).fetchone() == (0,):
                assert not waiting.done()
            holder.execute("SELECT pg_advisory_unlock_all()")
            assert waiting.result(30) == ALL


def test_large_payloads_are_compressed_with_lz4_where_the_server_has_it(dsn: str) -> None:
    with psycopg.connect(dsn) as connection:
        has_it = connection.execute(
            "SELECT 'lz4' = ANY(enumvals) FROM pg_settings WHERE name = 'default_toast_compression'"
        ).fetchone()
        chosen = connection.execute(
            "SELECT DISTINCT attcompression FROM pg_attribute WHERE attrelid IN "
            "(SELECT relid FROM pg_partition_tree('pulse.job_archive') UNION SELECT 'pulse.job'::regclass) "
            "AND attname IN ('args', 'result')"
        ).fetchall()
    assert chosen == [("l",) if has_it == (True,) else ("",)]
