"""A server, a database, a role or a DSN may set whatever it likes for its sessions: jobs run, and are read, as ever."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import psycopg
import pytest
import trio
from psycopg.conninfo import make_conninfo
from psycopg.rows import DictRow, dict_row, tuple_row
from psycopg.sql import SQL, Identifier

from pulse_trio import Handlers, Job, SyncClient, UsageError, Worker, open_client
from pulse_trio.migrate import migrate_sync
from pulse_trio.postgres import (
    PINNED,
    UNBOUNDED,
    TrioConnection,
    connect_on_asyncio,
    connect_or_unavailable,
    connect_sync,
)
from support.configured import HOSTILE, LENT, set_on_database
from support.stores import Window, open_store
from support.workers import rows

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import LiteralString

    from pulse_trio.testing.faults.processes import Processes
    from support.databases import Databases

PLANNER = [
    *(name for name in HOSTILE if name.startswith("enable_")),
    "plan_cache_mode", "geqo_threshold", "from_collapse_limit", "join_collapse_limit", "jit_above_cost",
    "debug_parallel_query", "work_mem", "constraint_exclusion", "default_toast_compression", "xmloption",
    "check_function_bodies", "escape_string_warning", "application_name", "client_min_messages",
]  # fmt: skip
"""What makes things slow, or nothing at all: these are tried together."""

handlers = Handlers()


@handlers.job
async def echo(text: str = "€", n: float = 1.1) -> dict[str, Any]:
    return {"text": text, "n": n}


@handlers.job(max_attempts=2, backoff_base=0.01)
async def fails_once(job: Job) -> int:
    if job.attempt == 1:
        raise ValueError("€ \\ '")
    return job.attempt


@handlers.job(max_attempts=1)
async def fails() -> None:
    raise ValueError("€")


@handlers.job(queue="narrow")
async def limited(n: int) -> int:
    return n


handlers.queue("narrow", limit=2, rate="1000/s", key_limit=1)


@handlers.job
async def pays(job: Job) -> None:
    async with job.transaction() as tx:
        await tx.execute("INSERT INTO public.ledger VALUES (%s, now())", [job.id])


@handlers.job
async def called(batch: int | None = None) -> str:
    return "called"


@handlers.cron(every=1, name="often")
async def often() -> None: ...


def evil(window: Window) -> None:
    """What a search path that puts PostgreSQL's own names last would find first."""
    window.run("CREATE SCHEMA evil")
    for types in ("bigint", "int", "text", "boolean", "smallint"):
        window.run(f"CREATE FUNCTION evil.never({types}, {types}) RETURNS bool LANGUAGE sql AS 'SELECT false'")
        window.run(f"CREATE OPERATOR evil.= (FUNCTION = evil.never, LEFTARG = {types}, RIGHTARG = {types})")
    for name in ("now", "clock_timestamp", "statement_timestamp"):
        window.run(
            f"CREATE FUNCTION evil.{name}() RETURNS timestamptz LANGUAGE sql AS $$SELECT '2001-01-01'::timestamptz$$"
        )


async def everything(dsn: str, *, looks: bool = True) -> None:
    """All that a worker and the clients do, each in its usual way."""
    with Window(dsn) as window:
        window.run("SET client_encoding = 'UTF8'; SET DateStyle = 'ISO'; SET search_path = pulse, pg_catalog, public")
        window.run("CREATE TABLE IF NOT EXISTS public.ledger (job bigint, at timestamptz)")
    async with open_client(dsn, handlers=handlers) as client:
        made = [
            await client.enqueue(echo),
            await client.enqueue(fails_once),
            await client.enqueue(pays),
            await client.enqueue(echo.options(unique_key="€", delay=0.01, deadline=600), "a\\b'c\"d"),
            *await client.enqueue_many(echo.request(f"{{NULL}} € \\ {n}") for n in range(20)),
            *await client.enqueue_many(echo.options(unique_key=f"k{n}").request() for n in range(3)),
            *await client.enqueue_many(limited.options(key=f"k{n % 2}").request(n) for n in range(4)),
        ]
        dead = await client.enqueue(fails)
        async with client.batch(on_complete=called.request()) as batch:
            await batch.enqueue(echo)
            await batch.enqueue(fails_once)
        worker = Worker(handlers, dsn, poll=0.05, watchdog=0.2, lease=6.0, heartbeat=2.0)
        async with trio.open_nursery() as nursery:
            await nursery.start(worker.run)
            with trio.fail_after(60):
                for ref in made:
                    await ref.result()
                assert (await dead.wait()).error
                await batch.wait()
                while not await client.jobs(kind="often", state="completed"):  # noqa: ASYNC110 -- the schedule's own time
                    await trio.sleep(0.05)
            worker.stop()
        assert await made[4].result() == {"text": "{NULL} € \\ 0", "n": 1.1}
        assert "€" in ((await client.job(dead.id)).error or "")
        done = await client.jobs(state="completed", limit=500)
        assert {d.created_at.utcoffset() for d in done} != set()
        assert all(d.created_at <= d.finished_at for d in done if d.finished_at)
        assert (await client.attempts(made[1].id))[0].started_at is not None
        assert await client.queues()
        assert {f.name for f in await client.schedules()} == {"often"}
        assert await client.fires("often")
        assert (await client.workers(gone=True))[0].beat_age < 600
        again = await client.retry(dead.id)
        assert again == "available"
        assert (await client.cancel(dead.id)).state == "cancelled"
    sync = SyncClient(dsn)
    one = sync.enqueue("echo", {"text": "€"})
    sync.enqueue_many([echo.request("€") for _ in range(20)])
    assert sync.job(one.id).args == {"text": "€"}
    assert len(sync.jobs(state="available", kind="echo", limit=100)) == 21
    if looks:
        await trio.to_thread.run_sync(asyncio.run, on_asyncio(dsn))


async def on_asyncio(dsn: str) -> None:
    async with open_client(dsn) as client:
        ref = await client.enqueue("echo", {"text": "€"})
        await client.enqueue_many([echo.request("€") for _ in range(20)])
        assert (await client.job(ref.id)).args == {"text": "€"}
        assert (await client.jobs(limit=1))[0].run_at


@pytest.mark.parametrize("names", [*([name] for name in HOSTILE if name not in PLANNER), PLANNER], ids=",".join)
async def test_one_setting_that_somebody_made_bends_nothing(names: list[str], dsn: str) -> None:
    with Window(dsn) as window:
        evil(window)
    set_on_database(dsn, {name: HOSTILE[name] for name in names})
    await everything(dsn, looks=names[0] in ("DateStyle", "client_encoding", "array_nulls"))


async def test_all_of_them_at_once_bend_nothing_nor_a_command(dsn: str, processes: Processes) -> None:
    with Window(dsn) as window:
        evil(window)
    set_on_database(dsn, HOSTILE)
    await everything(dsn)
    listed = await processes.run("jobs", "list", "--json", f"--dsn={dsn}")
    assert '"kind"' in listed
    assert "version" in await processes.run("doctor", f"--dsn={dsn}", code=1)  # jobs wait
    assert "narrow" in await processes.run("queues", "list", f"--dsn={dsn}")


def test_a_database_is_migrated_and_maintained_as_ever(databases: Databases) -> None:
    with databases.empty() as plain, databases.empty() as bent:
        with psycopg.connect(bent, autocommit=True) as connection:
            connection.execute("CREATE SCHEMA evil")
        set_on_database(bent, HOSTILE | {"statement_timeout": "20ms", "lock_timeout": "1ms"})
        made: list[Any] = []
        for dsn in (plain, bent):
            migrate_sync(dsn)
            with connect_sync(dsn, PINNED | UNBOUNDED) as connection:
                connection.execute("SELECT pulse.upkeep('7 days')")
                made.append(connection.execute(SCHEMA).fetchall())
        # From a session that nobody has pinned, as cron's psql.
        with psycopg.connect(bent, autocommit=True, options="-c statement_timeout=0 -c TimeZone=Asia/Kolkata") as raw:
            raw.execute("DROP TABLE pulse.job_archive_default").close()
            raw.execute("CREATE TABLE pulse.job_archive_default PARTITION OF pulse.job_archive DEFAULT")
            for (name,) in raw.execute(DAYS).fetchall():
                raw.execute(SQL("DROP TABLE pulse.{}").format(Identifier(name)))
            raw.execute("UPDATE pulse.maintenance SET maintained_at = '-infinity'")
            raw.execute("SELECT pulse.upkeep('7 days')")
        with connect_sync(bent, PINNED | UNBOUNDED) as connection:
            assert connection.execute(SCHEMA).fetchall() == made[0]
        assert made[0] == made[1]


DAYS = "SELECT c.relname FROM pg_catalog.pg_class c WHERE c.relname ~ '^(job_archive|attempt)_[0-9]{8}$' AND c.relkind = 'r'"
SCHEMA = """
SELECT c.relname::text, c.relkind::text, pg_catalog.pg_get_expr(c.relpartbound, c.oid), a.attname::text,
       pg_catalog.format_type(a.atttypid, a.atttypmod), pg_catalog.pg_get_expr(d.adbin, d.adrelid)
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
LEFT JOIN pg_catalog.pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
WHERE c.relnamespace = 'pulse'::regnamespace ORDER BY 1, a.attname
"""


# The sessions themselves


BENT = {**{n: v for n, v in HOSTILE.items() if n in PINNED}, **dict.fromkeys(UNBOUNDED, "1h")}


async def found(connection: Any, names: Mapping[str, str]) -> dict[str, str | None]:
    cursor = await connection.execute(
        "SELECT name, current_setting(name, true) FROM unnest(%s::text[]) name", [list(names)]
    )
    return {name: value for name, value in await cursor.fetchall() if "." not in name}


def expected(connection: Any, names: Mapping[str, str]) -> dict[str, str | None]:
    known = {name for (name,) in connection.execute("SELECT name FROM pg_settings").fetchall()}
    return {name: value if name in known else None for name, value in names.items() if "." not in name}


@pytest.mark.parametrize("way", ["database", "DSN", "environment"])
async def test_the_sessions_of_workers_and_clients_have_their_own_settings(
    way: str, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = " ".join(f"-c {name}={value.replace(' ', chr(92) + ' ')}" for name, value in BENT.items())
    with psycopg.connect(dsn, autocommit=True) as plain:
        pinned, worker = expected(plain, PINNED), expected(plain, PINNED | UNBOUNDED)
        bent = {name: value for name, value in BENT.items() if (pinned | worker).get(name) is not None}
    if way == "database":
        set_on_database(dsn, bent)
    else:
        options = " ".join(f"-c {name}={value.replace(' ', chr(92) + ' ')}" for name, value in bent.items())
        monkeypatch.setenv("PGTZ", "Asia/Kathmandu")
        monkeypatch.setenv("PGDATESTYLE", "SQL, DMY")
        monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
        if way == "DSN":
            dsn = make_conninfo(dsn, options=options, client_encoding="LATIN1")
        else:
            monkeypatch.setenv("PGOPTIONS", options)
    async with await TrioConnection.connect(dsn, autocommit=True) as anybodys:
        assert (await found(anybodys, {"array_nulls": ""}))["array_nulls"] == "off"
    for connection in (
        await connect_or_unavailable(dsn, own=True, autocommit=True),
        await trio.to_thread.run_sync(lambda: None)
        or await connect_or_unavailable(dsn, own=True, row_factory=dict_row),
    ):
        connection.row_factory = tuple_row
        assert await found(connection, PINNED) == pinned
        await connection.close()
    with connect_sync(dsn) as sync:
        rows_ = sync.execute("SELECT name, current_setting(name, true) FROM unnest(%s::text[]) name", [list(PINNED)])
        assert {name: value for name, value in rows_.fetchall() if "." not in name} == pinned

    async def look() -> dict[str, str | None]:
        async with await connect_on_asyncio(dsn) as connection:
            return await found(connection, PINNED)

    assert await trio.to_thread.run_sync(lambda: asyncio.run(look())) == pinned
    async with open_store(dsn) as store:
        links = store.links
        for link in (links.claims, links.settles, links.beats, links.watch, links.listen, links.progress):
            async with link.use() as connection:
                settings = await found(connection, PINNED | UNBOUNDED)
            own = {"lock_timeout", "idle_in_transaction_session_timeout"}
            assert {n: v for n, v in settings.items() if n not in own} == {
                n: v for n, v in worker.items() if n not in own
            }, link


async def test_workers_that_start_together_where_transactions_are_serializable_all_start(dsn: str) -> None:
    set_on_database(dsn, {"default_transaction_isolation": "serializable"})
    for _ in range(3):
        async with trio.open_nursery() as nursery:
            workers = [Worker(handlers, dsn) for _ in range(4)]
            async with trio.open_nursery() as starting:
                for worker in workers:
                    starting.start_soon(nursery.start, worker.run)
            for worker in workers:
                worker.stop()


# A connection that a user lends


@pytest.mark.parametrize("name", [*LENT, "all"])
async def test_what_is_set_on_a_connection_of_the_users_bends_nothing_and_stays(name: str, dsn: str) -> None:
    with Window(dsn) as window:
        evil(window)
    asked = "SELECT json_object_agg(name, setting)::text FROM pg_catalog.pg_settings WHERE name NOT LIKE 'transaction%'"
    async with await TrioConnection[DictRow].connect(dsn, autocommit=True, row_factory=dict_row) as lent:
        await lent.execute("LOAD 'plpgsql'")
        for setting, value in LENT.items():
            if name in ("all", setting) and "." not in setting:
                await lent.execute(
                    SQL("SET {} = {}").format(
                        Identifier(setting),
                        SQL(cast("LiteralString", value if setting == "search_path" else repr(value))),
                    )
                )
        before = await (await lent.execute(asked)).fetchone()
        async with open_client(dsn) as home:
            client = home.using(lent)
            async with lent.transaction():
                one = await client.enqueue("echo", {"text": "€ \\ '"}, delay=5, deadline=600)
                await client.enqueue("echo", {}, unique_key="k")
                await client.enqueue_many([echo.request("€") for _ in range(20)])
            job = await client.job(one.id)
            assert (job.args, job.state) == ({"text": "€ \\ '"}, "scheduled")
            assert 4 < (job.run_at - job.created_at).total_seconds() < 6
            assert len(await client.jobs(limit=100)) == 22
            assert (await client.cancel(one.id, reason="€")).state == "cancelled"
        assert await (await lent.execute(asked)).fetchone() == before
        assert lent.row_factory is dict_row


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
async def test_a_connection_of_the_users_that_cannot_carry_a_text_is_told(encoding: str, dsn: str) -> None:
    async with (
        await TrioConnection.connect(dsn, autocommit=True, client_encoding=encoding) as lent,
        open_client(dsn) as home,
    ):
        for enqueue in (
            lambda: home.using(lent).enqueue("echo", {"text": "€"}),
            lambda: home.using(lent).enqueue_many([echo.request("€") for _ in range(20)]),
        ):
            with pytest.raises(UsageError, match="SET client_encoding = 'UTF8'"):
                await enqueue()


# Where the database says that nothing may be written


async def test_a_database_that_is_set_read_only_is_said_to_be(dsn: str, processes: Processes) -> None:
    set_on_database(dsn, {"default_transaction_read_only": "on"})
    async with open_client(dsn) as client:
        with pytest.raises(Exception, match="read-only") as refused:
            await client.enqueue(echo)
    assert type(refused.value).__name__ == "DatabaseUnavailable"
    doctor = await processes.run("doctor", f"--dsn={dsn}", code=1)
    assert "default_transaction_read_only" in doctor
    assert rows(dsn, "SELECT FROM pulse.job") == []
