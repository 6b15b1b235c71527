"""A handler's connection comes back as it was; what was done to it reaches neither the completion nor the next handler."""

# ruff: noqa: PT012 -- a block that is left by an error is what is tried

from __future__ import annotations

from typing import TYPE_CHECKING, Any, LiteralString

import psycopg
import pytest
import trio
import trio.lowlevel
import trio.testing
from psycopg.rows import dict_row
from psycopg.types.numeric import IntLoader

from pulse_trio.postgres import pool_slots
from support.sessions import CHANGES, session, window_with_a_tenant
from support.stores import Window, claim_one, complete_alone, end, open_store

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from pulse_trio.store import WorkerStore

KILLS_ITSELF = b"SELECT pg_terminate_backend(pg_backend_pid())"


@pytest.fixture
def window(dsn: str) -> Any:
    with window_with_a_tenant(dsn) as window:
        yield window


@pytest.fixture
async def store(dsn: str) -> AsyncGenerator[WorkerStore]:
    # One connection for all transactions.
    async with open_store(dsn, concurrency=1) as store, store.transactions.open():
        yield store


@pytest.mark.parametrize("change", CHANGES)
async def test_what_a_handler_changes_in_its_session_is_gone_for_the_next(
    change: LiteralString, store: WorkerStore, window: Window
) -> None:
    async with store.transactions.begin() as begun:
        before = await session(begun)
    window.enqueue()
    claim = await claim_one(store)
    async with store.transactions.begin() as begun:
        await begun.connection.execute(change)
        assert await begun.complete(end(claim))
    async with store.transactions.begin() as begun:
        assert await session(begun) == before


async def test_many_changes_at_once_are_gone_too_and_so_are_notifications(store: WorkerStore, window: Window) -> None:
    async with store.transactions.begin() as begun:
        before = await session(begun)
        await begun.connection.execute("; ".join(["LISTEN news", *CHANGES[:-2]]))
    window.run("NOTIFY news, 'for nobody'")
    async with store.transactions.begin() as begun:
        assert await session(begun) == before
        assert [note async for note in begun.connection.notifies(timeout=0)] == []


def set_rows(c: Any) -> None:
    c.row_factory = dict_row


def set_loader(c: Any) -> None:
    class Nothing(IntLoader):
        def load(self, data: Any) -> Any:
            return None

    for name in ("int8", "int4", "bool"):
        c.adapters.register_loader(name, Nothing)


def set_cursors(c: Any) -> None:
    c.cursor_factory = psycopg.AsyncClientCursor


def set_prepare(c: Any) -> None:
    c.prepare_threshold = 0


def set_limits(c: Any) -> None:
    c.query_timeout = 0.001
    c.cancel_timeout = c.cleanup_timeout = 0.001


def set_handlers(c: Any) -> None:
    c.add_notice_handler(lambda _: 1 / 0)
    c.add_notify_handler(lambda _: 1 / 0)


@pytest.mark.parametrize("change", [set_rows, set_loader, set_cursors, set_prepare, set_limits, set_handlers])
async def test_what_a_handler_changes_in_the_object_reaches_neither_the_completion_nor_the_next(
    change: Callable[[Any], None], store: WorkerStore, window: Window
) -> None:
    window.enqueue()
    claim = await claim_one(store)
    async with store.transactions.begin() as begun:
        pid = begun.connection.info.backend_pid
        change(begun.connection)
        assert await begun.complete(end(claim))
    async with store.transactions.begin() as begun:
        connection = begun.connection
        assert connection.info.backend_pid == pid
        await connection.execute("DO $$ BEGIN RAISE NOTICE 'x'; END $$; LISTEN news; NOTIFY news")
        assert await (await connection.execute("SELECT 1::bigint, true")).fetchall() == [(1, True)]
        assert (connection.prepare_threshold, connection.query_timeout, connection.cursor_factory) == (
            5,
            None,
            psycopg.AsyncCursor,
        )
        assert connection.cleanup_timeout > 1


OF_TYPES = ["text", "int", "int4", "int8", "bool", "bigint", "boolean", "json", "void"]
"""Names that a statement may have for a type, and a handler for something else."""

BENT = [
    "; ".join(f'CREATE TEMP TABLE "{name}" (line int)' for name in OF_TYPES),
    "SET LOCAL search_path = evil, pg_catalog",
    "SET LOCAL array_nulls = off",
    "SET LOCAL ROLE tenant",
    "SET LOCAL SESSION AUTHORIZATION tenant",
    "SET LOCAL datestyle = 'SQL, DMY'",
    "SET LOCAL client_encoding = 'SQL_ASCII'",
    "SET LOCAL session_replication_role = replica",
    "SET LOCAL synchronous_commit = off",
    "SET LOCAL row_security = off",
    "SET LOCAL statement_timeout = '60 ms'",
    "SET LOCAL enable_indexscan = off; SET LOCAL enable_seqscan = off",
]


@pytest.mark.parametrize("through_a_pooler", [False, True])
@pytest.mark.parametrize("change", BENT, ids=lambda change: change[:40])
async def test_what_a_handler_sets_for_its_transaction_does_not_bend_the_completion(
    change: LiteralString, through_a_pooler: bool, store: WorkerStore, window: Window
) -> None:
    window.run("CREATE SCHEMA evil")
    window.run("CREATE FUNCTION evil.never(bigint, bigint) RETURNS bool LANGUAGE sql AS 'SELECT false'")
    window.run("CREATE OPERATOR evil.= (FUNCTION = evil.never, LEFTARG = bigint, RIGHTARG = bigint)")
    window.run("CREATE FUNCTION evil.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS 'SELECT NULL::timestamptz'")
    for name in OF_TYPES:
        window.run(f'CREATE DOMAIN evil."{name}" AS pg_catalog.date')
    job_id = window.enqueue()
    claim = await claim_one(store)
    async with store.transactions.begin() as begun:
        await begun.connection.execute(change)
        if not through_a_pooler:
            assert await begun.complete(end(claim, result=None)) is True
        else:
            assert await complete_alone(begun, end(claim, result=None)) is True
            settings = await (
                await begun.connection.execute(
                    "SELECT current_setting('synchronous_commit') = 'on', "
                    "current_setting('session_replication_role') = 'origin'"
                )
            ).fetchone()
            assert settings == (True, True)
    assert window.job(job_id) | {"state": "completed", "result": None} == window.job(job_id)
    assert window.run("SELECT result::text FROM job_archive") == [{"result": "null"}]


async def test_what_a_handler_deferred_is_checked_in_the_world_it_made(store: WorkerStore, window: Window) -> None:
    window.run("CREATE TABLE elsewhere.audit (job bigint)")
    window.run(
        "CREATE FUNCTION public.note() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN INSERT INTO audit VALUES (NEW.job); RETURN NULL; END $$"
    )
    window.run(
        "CREATE CONSTRAINT TRIGGER noted AFTER INSERT ON public.ledger DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION public.note()"
    )
    window.enqueue()
    claim = await claim_one(store)
    async with store.transactions.begin() as begun:
        await begun.connection.execute("SET LOCAL search_path = elsewhere, public")
        await begun.connection.execute("INSERT INTO ledger VALUES (%s)", [claim.id])
        assert await begun.complete(end(claim))
    assert window.run("SELECT job FROM elsewhere.audit") == [{"job": claim.id}]


async def test_what_a_handler_keeps_is_closed_when_the_block_has_ended(store: WorkerStore, window: Window) -> None:
    async with store.transactions.begin() as begun:
        kept = begun.connection
        cursor = await kept.execute("SELECT generate_series(1, 3)")
        named = kept.cursor("named")
        await named.execute("SELECT 1")
    async with store.transactions.begin() as begun:
        assert kept.closed
        assert len(await cursor.fetchall()) == 3  # it had come
        for use in (
            lambda: kept.execute("INSERT INTO public.ledger VALUES (1)"),
            lambda: cursor.execute("INSERT INTO public.ledger VALUES (1)"),
            lambda: kept.cursor().execute("INSERT INTO public.ledger VALUES (1)"),
            lambda: named.fetchall(),
            kept.commit,
            kept.rollback,
        ):
            with pytest.raises(psycopg.OperationalError, match="closed"):
                await use()
        await named.close()
        await kept.close()
        assert await (await begun.connection.execute("SELECT 1")).fetchone() == (1,)
    assert window.run("SELECT FROM public.ledger") == []


async def test_a_task_that_the_handler_left_writes_into_nobody_elses_transaction(
    store: WorkerStore, window: Window
) -> None:
    failed: list[Exception] = []
    window.enqueue()
    claim = await claim_one(store)

    async def write_on(connection: Any) -> None:
        try:
            while True:
                await connection.execute("INSERT INTO public.ledger VALUES (1)")
        except psycopg.Error as error:
            failed.append(error)

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            async with store.transactions.begin() as begun:
                # That the task goes on when the block has ended is what is tried.
                nursery.start_soon(write_on, begun.connection)  # noqa: ASYNC111
                await trio.testing.wait_all_tasks_blocked()
                assert await begun.complete(end(claim))
            before = window.value("SELECT count(*) FROM public.ledger")
            for _ in range(3):
                async with store.transactions.begin() as begun:
                    await begun.connection.execute("SELECT 1")
                    await trio.lowlevel.checkpoint()
    assert len(failed) == 1
    assert window.value("SELECT count(*) FROM public.ledger") == before


async def test_a_pipeline_that_is_left_open_is_told_and_its_connection_not_lent_again(
    store: WorkerStore, window: Window
) -> None:
    job_id = window.enqueue()
    claim = await claim_one(store)
    with pytest.raises(RuntimeError, match="pipeline"):
        async with store.transactions.begin() as begun:
            pid = begun.connection.info.backend_pid
            pipeline = begun.connection.pipeline()
            await pipeline.__aenter__()
            await begun.connection.execute("INSERT INTO public.ledger VALUES (1)")
            await begun.complete(end(claim))
    with pytest.raises(psycopg.OperationalError, match="closed"):
        await pipeline.__aexit__(None, None, None)
    async with store.transactions.begin() as begun:
        assert begun.connection.info.backend_pid != pid
    assert window.run("SELECT FROM public.ledger") == []
    assert window.state(job_id) == "running"


async def test_a_connection_that_a_handler_closes_is_replaced(store: WorkerStore, window: Window) -> None:
    window.enqueue()
    claim = await claim_one(store)
    with pytest.raises(psycopg.OperationalError, match="closed"):
        async with store.transactions.begin() as begun:
            await begun.connection.close()
            await begun.complete(end(claim))
    async with store.transactions.begin() as begun:
        assert await begun.complete(end(claim))


async def test_a_session_that_cannot_be_reset_is_closed(
    store: WorkerStore, window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    # After a rollback.
    with pytest.raises(ZeroDivisionError):
        async with store.transactions.begin() as begun:
            pid = begun.connection.info.backend_pid
            monkeypatch.setattr(pool_slots, "RESET_SESSION", KILLS_ITSELF)
            raise ZeroDivisionError
    async with store.transactions.begin() as begun:
        assert begun.connection.info.backend_pid != pid


async def test_a_commit_whose_session_is_not_reset_with_it_is_done_and_the_session_is_reset_later(
    store: WorkerStore, window: Window
) -> None:
    job_id = window.enqueue()
    claim = await claim_one(store)
    async with store.transactions.begin() as begun:
        await begun.connection.execute("SET my.variable = '7'")
        begun.connection.epilogue = b"SELECT 1/0"
        assert await begun.complete(end(claim))
    assert begun.committed
    assert window.job(job_id)["state"] == "completed"
    async with store.transactions.begin() as begun:
        assert await (await begun.connection.execute("SHOW my.variable")).fetchone() == ("",)


async def test_a_connection_that_is_lost_after_its_commit_raises_nothing(store: WorkerStore, window: Window) -> None:
    window.enqueue()
    claim = await claim_one(store)
    async with store.transactions.begin() as begun:
        pid = begun.connection.info.backend_pid
        begun.connection.epilogue = KILLS_ITSELF
        assert await begun.complete(end(claim))
    assert begun.committed
    assert await store.transactions.committed(claim)
    async with store.transactions.begin() as begun:
        assert begun.connection.info.backend_pid != pid


async def test_a_statement_that_comes_after_the_commit_is_refused(store: WorkerStore, window: Window) -> None:
    job_id = window.enqueue()
    claim = await claim_one(store)
    refused: list[psycopg.OperationalError] = []

    async def late(connection: Any) -> None:
        # When COMMIT is under way: it waits for its turn on the connection.
        await trio.testing.wait_all_tasks_blocked()
        try:
            await connection.execute("SET search_path = elsewhere")
        except psycopg.OperationalError as error:
            refused.append(error)

    async with trio.open_nursery() as nursery, store.transactions.begin() as begun:
        pid = begun.connection.info.backend_pid
        nursery.start_soon(late, begun.connection)  # noqa: ASYNC111 -- that it outlives the block is what is tried
        assert await begun.complete(end(claim))
    async with store.transactions.begin() as begun:
        assert begun.connection.info.backend_pid == pid
        assert await (await begun.connection.execute("SHOW search_path")).fetchone() != ("elsewhere",)
    assert window.job(job_id)["state"] == "completed"
    assert len(refused) == 1


@pytest.mark.parametrize("seconds", [60.0, float("inf")], ids=["with a timeout", "without"])
@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
async def test_a_handler_chooses_the_isolation_of_its_transaction_whether_its_job_has_a_timeout_or_not(
    seconds: float, level: LiteralString, store: WorkerStore, window: Window
) -> None:
    window.enqueue()
    claim = await claim_one(store)
    async with store.transactions.begin(seconds=seconds) as begun:
        await begun.connection.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
        assert await (await begun.connection.execute("SHOW transaction_isolation")).fetchone() == (level,)
        assert await begun.complete(end(claim))
    async with store.transactions.begin(seconds=seconds) as begun:
        assert await (await begun.connection.execute("SHOW transaction_isolation")).fetchone() == ("read committed",)
