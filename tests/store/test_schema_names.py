"""The schema's name is a setting, and whatever name PostgreSQL takes must do."""

from __future__ import annotations

import psycopg
import pytest
import trio
from psycopg.sql import SQL, Identifier

from pulse_trio.migrate import check_sync, migrate_sync, migration_sql
from pulse_trio.sql import render
from pulse_trio.store import health, operations
from support.stores import Window, claim_one, end, open_store

HOSTILE = [
    "Upper",
    "two words",
    'dou"ble',
    "sin'gle",
    "per%cent %s %(id)s",
    "co:lon ::text",
    """:"schema" :'schema'""",
    "back\\slash\\",
    "$$dollars$$ $1",
    "x; DROP SCHEMA public; --",
    "/* comment */",
    "ünïcödé \U0001f600",
    "{braces} {}",
    "n" * 63,
]


@pytest.mark.parametrize("schema", HOSTILE)
async def test_a_hostile_schema_name_serves_a_job_from_enqueue_to_archive(schema: str, empty_dsn: str) -> None:
    migrate_sync(empty_dsn, schema)
    check_sync(empty_dsn, schema)
    assert migrate_sync(empty_dsn, schema) == []

    heard: list[str] = []
    with Window(empty_dsn, schema=schema) as window:
        async with open_store(empty_dsn, schema=schema) as store, trio.open_nursery() as nursery:
            await store.check_schema()
            listening, woken = trio.Event(), trio.Event()

            def on_notify(queue: str) -> None:
                heard.append(queue)
                (woken if queue else listening).set()

            nursery.start_soon(store.listen, on_notify)
            await listening.wait()
            await store.announce_idle()
            # Two crashes are not to make it a suspect.
            first = window.enqueue("one", unique_key="k", crash_limit=9)
            assert window.enqueue("one", unique_key="k") == first
            await woken.wait()
            await store.withdraw_idle()
            assert [f.queue for f in (await store.sweep(None)).found] == ["one"]

            claimed = await claim_one(store, "one")
            assert claimed.id == first
            assert (await store.beat([claimed])).renewed == {claimed}
            await store.touch(1, set(), draining=False)
            assert (await store.settle([end(claimed, "failed", error="x")])).accepted
            window.make_due(first)
            claimed = await claim_one(store, "one")
            window.expire(first)
            assert await store.rescue() == (1, 0)
            claimed = await claim_one(store, "one")
            assert (await store.rescue_sessions([store.session])).rescued == 1
            claimed = await claim_one(store, "one")
            assert (await store.settle([end(claimed)])).accepted
            assert window.state(first) == "completed"
            await store.maintain(86400)
            window.enqueue_many(2, "many")
            assert window.do(operations.retry(first)) == "available"
            assert window.value("SELECT enqueue('by-sql', queue => 'one')") > first
            assert {row["name"] for row in window.run("SELECT * FROM queues")} == {"one", "many"}
            await store.end_sessions()
            nursery.cancel_scope.cancel()
    assert heard[:2] == ["", "one"]


@pytest.mark.parametrize("schema", HOSTILE)
def test_a_hostile_schema_name_is_put_in_once_and_quoted(schema: str) -> None:
    rendered = render("""SELECT 1 FROM :"schema".job WHERE :'schema' <> ''""", schema)
    identifier = '"' + schema.replace('"', '""') + '"'
    assert rendered.startswith(f"SELECT 1 FROM {identifier}.job WHERE ")


def test_two_schemas_in_one_database_are_strangers(empty_dsn: str) -> None:
    for schema in ("one", "Two"):
        migrate_sync(empty_dsn, schema)
    with Window(empty_dsn, schema="one") as one, Window(empty_dsn, schema="Two") as two:
        one.enqueue("q")
        assert [w.value("SELECT count(*) FROM job") for w in (one, two)] == [1, 0]


def test_the_script_for_other_hands_makes_the_same_schema(empty_dsn: str) -> None:
    with Window(empty_dsn, schema="By Hand") as window:
        window.connection.execute(migration_sql("By Hand").encode())
        check_sync(empty_dsn, "By Hand")
        assert window.enqueue("q") == 1


async def test_an_applications_tables_may_have_the_names_of_ours(empty_dsn: str) -> None:
    """In the schema public, say. They have other columns, by which the worker's question for its rights failed as it started:
    `job`, `queue`, `attempt`, `cancellation` and `schedule` did."""
    migrate_sync(empty_dsn)
    with psycopg.connect(empty_dsn, autocommit=True) as application:
        ours = application.execute(
            "SELECT relname, relkind FROM pg_class WHERE relnamespace = 'pulse'::regnamespace AND relkind IN ('r', 'p', 'v')"
        ).fetchall()
        for name, _ in ours:
            application.execute(SQL("CREATE TABLE public.{} (x int)").format(Identifier(name)))
    assert ("job", "r") in ours
    with Window(empty_dsn) as window:
        async with open_store(empty_dsn) as store:
            await store.check_schema()
            first = window.enqueue("one")
            claimed = await claim_one(store, "one")
            assert claimed.id == first
            await store.settle([end(claimed, "completed")])
        known = window.do(health.server())
        assert known.missing == []
        assert window.do(health.health(known)).put_back == []
