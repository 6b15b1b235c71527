# ruff: noqa: PT012 - that a block raises at its end is what is tested
"""Cancellation, Trio's way: complete or cancel, and a connection that is usable or closed, never in between."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, LiteralString

import psycopg
import pytest
import trio
from psycopg import pq

from pulse_trio.postgres import QueryTimeout, TrioConnection
from support.streams import closing

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from pulse_trio.testing.faults.proxy import Proxy

    Until = Callable[[int, str], Awaitable[None]]
    Work = Callable[[], Awaitable[object]]

Connection = TrioConnection[Any]
IDLE = pq.TransactionStatus.IDLE
ASLEEP = "wait_event = 'PgSleep'"
NOT_RUNNING = "state <> 'active'"


async def value(connection: Connection, query: LiteralString, *args: Any) -> Any:
    row = await (await connection.execute(query, args or None)).fetchone()
    return row and row[0]


async def cancel_when(until: Until, connection: Connection, condition: str, work: Work) -> bool:
    """Run `work`, cancel it when its backend is as told, see the backend stop; whether it ended cancelled."""
    cancelled = await cancel_at(until, connection, condition, work)
    await until(connection.info.backend_pid, NOT_RUNNING)
    return cancelled


async def cancel_at(until: Until, connection: Connection, condition: str, work: Work) -> bool:
    pid = connection.info.backend_pid

    async def cancel() -> None:
        await until(pid, condition)
        scope.cancel()

    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            nursery.start_soon(cancel)
            await work()
    return scope.cancelled_caught


async def cancel_when_sent(proxy: Proxy, scope: trio.CancelScope, *, task_status: trio.TaskStatus[None]) -> None:
    """Cancels the scope as soon as anything of the client's has come to the proxy."""
    task_status.started()
    await proxy.to_server.arrival()
    scope.cancel()


@pytest.fixture
async def through_proxy(proxy: Proxy) -> AsyncGenerator[Connection]:
    connection = await TrioConnection.connect(proxy.dsn, autocommit=True)
    connection.cancel_timeout = 0.2
    yield connection
    await connection.close()


async def test_a_cancelled_query_is_gone_from_the_server(connection: Connection, until: Until) -> None:
    assert await cancel_when(until, connection, ASLEEP, lambda: connection.execute("SELECT pg_sleep(60)"))
    assert connection.info.transaction_status == IDLE
    assert await value(connection, "SELECT 1") == 1


async def test_a_libpq_that_only_cancels_blocking_does_it_in_a_thread(
    connection: Connection, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psycopg.capabilities, "has_cancel_safe", lambda: False)
    assert await cancel_when(until, connection, ASLEEP, lambda: connection.execute("SELECT pg_sleep(60)"))
    assert await value(connection, "SELECT 1") == 1


async def test_a_deadline_reaches_the_server(connection: Connection) -> None:
    with trio.fail_after(60), trio.move_on_after(0.05) as scope:
        await connection.execute("SELECT pg_sleep(60)")
    assert scope.cancelled_caught
    assert await value(connection, "SELECT 1") == 1


async def test_nothing_is_sent_in_a_cancelled_scope(connection: Connection) -> None:
    await connection.execute("CREATE TEMP TABLE t (n int)")
    with trio.CancelScope() as scope:
        scope.cancel()
        await connection.execute("INSERT INTO t VALUES (1)")
    assert scope.cancelled_caught
    assert await value(connection, "SELECT count(*) FROM t") == 0


async def test_an_answer_that_arrived_is_returned(connection: Connection, until: Until, other: Connection) -> None:
    """Cancelled while the server commits to its answer: the rows come back, then the cancellation strikes."""
    await connection.execute("CREATE TEMP TABLE t (n int)")
    lost = 0
    for delay in range(60):
        before = await value(connection, "SELECT count(*) FROM t")
        rows = []
        with trio.move_on_after(delay * 0.00005):
            cursor = await connection.execute("INSERT INTO t SELECT generate_series(1, 10) RETURNING n")
            rows = await cursor.fetchall()
        lost += await value(connection, "SELECT count(*) FROM t") - before - len(rows)
    assert lost == 0


async def test_an_answer_on_its_way_is_returned_and_cancellation_strikes_at_the_next_checkpoint(
    proxy: Proxy, through_proxy: Connection
) -> None:
    through_proxy.cancel_timeout = 60
    await through_proxy.execute("CREATE TEMP TABLE t (n int)")
    proxy.to_client.hold()
    with trio.CancelScope() as scope:

        async def heal() -> None:
            await proxy.to_client.arrival()
            scope.cancel()
            proxy.forward()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(heal)
            cursor = await through_proxy.execute("INSERT INTO t VALUES (7) RETURNING n")
            assert await cursor.fetchone() == (7,)
            await trio.lowlevel.checkpoint()
    assert scope.cancelled_caught
    assert await value(through_proxy, "SELECT count(*) FROM t") == 1


async def test_a_silent_server_costs_the_connection_not_the_program(proxy: Proxy, through_proxy: Connection) -> None:
    proxy.swallow()
    with trio.fail_after(60):
        scope = trio.CancelScope()
        async with trio.open_nursery() as nursery:
            with scope:
                await nursery.start(cancel_when_sent, proxy, scope)
                await through_proxy.execute("SELECT 1")
    assert scope.cancelled_caught
    assert through_proxy.closed
    assert through_proxy.broken


async def test_a_query_timeout_notices_a_silent_server(proxy: Proxy, through_proxy: Connection) -> None:
    through_proxy.query_timeout = 60
    assert await value(through_proxy, "SELECT 1") == 1
    proxy.swallow()
    through_proxy.query_timeout = 0.05
    with trio.fail_after(60), pytest.raises(QueryTimeout):
        await through_proxy.execute("SELECT 1")
    assert through_proxy.closed


async def test_a_query_timeout_cancels_a_slow_query_and_spares_notifies(connection: Connection) -> None:
    connection.query_timeout = 0.05
    with pytest.raises(QueryTimeout):
        await connection.execute("SELECT pg_sleep(60)")
    connection.query_timeout = 60
    assert await value(connection, "SELECT 1") == 1
    connection.query_timeout = 0.0
    with trio.move_on_after(0.05) as scope:
        [note async for note in connection.notifies()]
    assert scope.cancelled_caught


async def test_a_cancelled_transaction_block_is_rolled_back(connection: Connection, until: Until) -> None:
    await connection.execute("CREATE TEMP TABLE t (n int)")

    async def work() -> None:
        async with connection.transaction():
            await connection.execute("INSERT INTO t VALUES (1)")
            async with connection.transaction():
                await connection.execute("SELECT pg_sleep(60)")

    assert await cancel_when(until, connection, ASLEEP, work)
    assert connection.info.transaction_status == IDLE
    assert await value(connection, "SELECT count(*) FROM t") == 0


async def test_a_block_that_ended_is_committed_even_in_a_cancelled_scope(connection: Connection) -> None:
    await connection.execute("CREATE TEMP TABLE t (n int)")
    with trio.CancelScope() as scope:
        async with connection.transaction():
            await connection.execute("INSERT INTO t VALUES (1)")
            scope.cancel()
    assert not scope.cancelled_caught
    assert await value(connection, "SELECT count(*) FROM t") == 1


async def test_a_commit_under_way_is_awaited(connection: Connection, until: Until) -> None:
    await connection.execute("CREATE TEMP TABLE t (n int)")
    await connection.execute(
        "CREATE FUNCTION pg_temp.nap() RETURNS trigger LANGUAGE plpgsql AS "
        "$$BEGIN PERFORM pg_sleep(0.1); RETURN NULL; END$$"
    )
    await connection.execute(
        "CREATE CONSTRAINT TRIGGER nap AFTER INSERT ON t DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION pg_temp.nap()"
    )

    async def work() -> None:
        async with connection.transaction():
            await connection.execute("INSERT INTO t VALUES (1)")

    assert not await cancel_when(until, connection, ASLEEP, work)
    assert await value(connection, "SELECT count(*) FROM t") == 1


async def test_a_commit_on_a_silent_network_is_given_up(proxy: Proxy, through_proxy: Connection) -> None:
    through_proxy.cleanup_timeout = 0.1
    with trio.fail_after(60):
        scope = trio.CancelScope()
        async with trio.open_nursery() as nursery:
            with scope:
                async with through_proxy.transaction():
                    await through_proxy.execute("SELECT 1")
                    proxy.swallow()
                    await nursery.start(cancel_when_sent, proxy, scope)
    assert scope.cancelled_caught
    assert through_proxy.closed


async def test_rollback_works_where_it_is_needed_in_a_cancelled_scope(dsn: str) -> None:
    async with await TrioConnection.connect(dsn) as connection:
        await connection.execute("SELECT 1")
        with trio.CancelScope() as scope:
            scope.cancel()
            await connection.rollback()
        assert connection.info.transaction_status == IDLE
        await connection.execute("SELECT 1")
        with trio.CancelScope() as scope:
            scope.cancel()
            await connection.commit()
        assert scope.cancelled_caught
        assert connection.info.transaction_status == pq.TransactionStatus.INTRANS


async def test_a_cancelled_begin_leaves_no_transaction(connection: Connection) -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        async with connection.transaction():
            pytest.fail("entered")
    assert scope.cancelled_caught
    async with connection.transaction():
        assert await value(connection, "SELECT 1") == 1


async def test_a_cancelled_pipeline_is_left_clean(connection: Connection, until: Until) -> None:
    async def work() -> None:
        async with connection.pipeline():
            await connection.execute("SELECT pg_sleep(60)")
            await connection.execute("SELECT 1")

    assert await cancel_when(until, connection, ASLEEP, work)
    assert connection.pgconn.pipeline_status == pq.PipelineStatus.OFF
    assert await value(connection, "SELECT 1") == 1


@pytest.mark.parametrize("scope_is_inside", [True, False])
async def test_a_statement_whose_prepare_was_cancelled_in_a_pipeline_is_prepared_anew(
    connection: Connection, until: Until, scope_is_inside: bool
) -> None:
    for _ in range(5):  # the next execution is the one that prepares
        assert await value(connection, "SELECT %s::int", 1) == 1

    async def aborted() -> None:
        await connection.execute("SELECT pg_sleep(60)")
        cursor = await connection.execute("SELECT %s::int", [2])
        await cursor.fetchone()

    async def pipeline_around() -> None:
        async with connection.pipeline():
            await aborted()

    if scope_is_inside:
        async with connection.pipeline() as pipeline:
            assert await cancel_at(until, connection, ASLEEP, aborted)
            await pipeline.sync()
    else:
        assert await cancel_when(until, connection, ASLEEP, pipeline_around)
    for n in range(10):
        assert await value(connection, "SELECT %s::int", n) == n


async def test_a_statement_whose_prepare_was_aborted_by_an_error_is_prepared_anew(connection: Connection) -> None:
    for _ in range(5):
        await value(connection, "SELECT %s::int", 1)
    with pytest.raises(psycopg.errors.DivisionByZero):
        async with connection.pipeline():
            await connection.execute("SELECT 1 / 0")
            await connection.execute("SELECT %s::int", [2])
    assert await value(connection, "SELECT %s::int", 3) == 3


async def test_a_cancelled_executemany_is_left_clean(connection: Connection, until: Until) -> None:
    work = connection.cursor().executemany("SELECT pg_sleep(%s)", [(0,), (60,), (0,)])
    assert await cancel_when(until, connection, ASLEEP, lambda: work)
    assert connection.pgconn.pipeline_status == pq.PipelineStatus.OFF
    assert await value(connection, "SELECT 1") == 1


async def test_a_stream_cancelled_while_it_waits_frees_the_connection(connection: Connection, until: Until) -> None:
    async def work() -> None:
        async with closing(connection.cursor().stream("SELECT pg_sleep(n * 60) FROM generate_series(0, 1) n")) as rows:
            async for _ in rows:
                pass

    assert await cancel_when(until, connection, ASLEEP, work)
    assert await value(connection, "SELECT 1") == 1


async def test_a_stream_cancelled_between_rows_frees_the_connection(connection: Connection) -> None:
    with trio.CancelScope() as scope:
        async with closing(connection.cursor().stream("SELECT generate_series(1, 10000000)")) as rows:
            async for _ in rows:
                scope.cancel()
    assert scope.cancelled_caught
    assert connection.info.transaction_status == IDLE
    assert await value(connection, "SELECT 1") == 1


async def test_a_stream_left_in_a_cancelled_scope_frees_the_connection(connection: Connection) -> None:
    with trio.CancelScope() as scope:
        async with closing(connection.cursor().stream("SELECT generate_series(1, 10000000)")) as rows:
            async for _ in rows:
                scope.cancel()
                break
    assert connection.info.transaction_status == IDLE
    assert await value(connection, "SELECT 1") == 1


async def test_a_copy_out_cancelled_between_blocks_frees_the_connection(connection: Connection) -> None:
    with trio.CancelScope() as scope:
        async with connection.cursor().copy("COPY (SELECT generate_series(1, 10000000)) TO STDOUT") as copy:
            async for _ in copy:
                scope.cancel()
    assert scope.cancelled_caught
    assert await value(connection, "SELECT 1") == 1


@pytest.mark.parametrize("payload", [b"1\n", b"1\n" * 5_000_000])
async def test_a_cancelled_copy_in_copies_nothing(connection: Connection, payload: bytes) -> None:
    await connection.execute("CREATE TEMP TABLE t (n int)")
    with trio.CancelScope() as scope:
        async with connection.cursor().copy("COPY t FROM STDIN") as copy:
            await copy.write(payload)
            scope.cancel()
            await copy.write(payload)
    assert scope.cancelled_caught
    assert connection.info.transaction_status == IDLE
    assert await value(connection, "SELECT count(*) FROM t") == 0


async def test_a_copy_in_that_the_server_does_not_read_can_be_cancelled(
    connection: Connection, other: Connection, until: Until
) -> None:
    """The send buffer is full because a lock keeps the server from reading: cancelling must still work."""
    await other.execute("DROP TABLE IF EXISTS locked; CREATE TABLE locked (n int)")
    await connection.execute(
        "CREATE FUNCTION pg_temp.nap() RETURNS trigger LANGUAGE plpgsql AS "
        "$$BEGIN PERFORM pg_sleep(60); RETURN NEW; END$$"
    )
    await connection.execute("CREATE TEMP TABLE t (n int)")
    await connection.execute("CREATE TRIGGER nap BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION pg_temp.nap()")

    async def work() -> None:
        async with connection.cursor().copy("COPY t FROM STDIN") as copy:
            while True:
                await copy.write(b"1\n" * 60_000)

    assert await cancel_when(until, connection, ASLEEP, work)
    assert await value(connection, "SELECT 1") == 1


async def test_cancelled_notifies_lose_no_notification(connection: Connection, other: Connection) -> None:
    await connection.execute("LISTEN news")
    with trio.move_on_after(0.01):
        [note async for note in connection.notifies()]
    await other.execute("NOTIFY news, 'late'")
    assert [note.payload async for note in connection.notifies(stop_after=1)] == ["late"]


async def test_a_server_side_cursor_is_closed_in_a_cancelled_scope(dsn: str) -> None:
    async with await TrioConnection.connect(dsn) as connection:
        with trio.CancelScope() as scope:
            async with connection.cursor("portal") as cursor:
                await cursor.execute("SELECT 1")
                scope.cancel()
        assert cursor.closed
        assert await value(connection, "SELECT count(*) FROM pg_cursors") == 0


async def test_a_cancelled_connection_block_is_left_closed(dsn: str) -> None:
    with trio.CancelScope() as scope:
        async with await TrioConnection.connect(dsn) as connection:
            await connection.execute("SELECT 1")
            scope.cancel()
            await trio.lowlevel.checkpoint()
    assert scope.cancelled_caught
    assert connection.closed
    assert not connection.broken


async def test_a_cancelled_connect_leaves_no_socket(proxy: Proxy) -> None:
    proxy.to_client.hold()
    with trio.CancelScope() as scope:

        async def cancel() -> None:
            await proxy.to_client.arrival()
            scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancel)
            await TrioConnection.connect(proxy.dsn, sslmode="disable", gssencmode="disable")
    assert scope.cancelled_caught
    proxy.forward()
    await proxy.connected(0)


async def test_a_waiter_for_the_lock_can_be_cancelled_without_hurting_the_holder(
    connection: Connection, until: Until
) -> None:
    async def impatient() -> None:
        with trio.move_on_after(0.01) as scope:
            await connection.execute("SELECT 1")
        assert scope.cancelled_caught
        holder.cancel()

    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as holder:
            nursery.start_soon(impatient)
            await connection.execute("SELECT pg_sleep(60)")
    assert await value(connection, "SELECT 1") == 1


async def test_closing_wakes_the_task_that_waits(connection: Connection, until: Until) -> None:
    async def sleeper() -> None:
        with pytest.raises(psycopg.OperationalError):
            await connection.execute("SELECT pg_sleep(60)")

    pid = connection.info.backend_pid
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sleeper)
        await until(pid, ASLEEP)
        await connection.close()


async def test_cancel_safe_gives_up_in_time(proxy: Proxy, through_proxy: Connection) -> None:
    proxy.hold()
    with pytest.raises(psycopg.errors.CancellationTimeout):
        await through_proxy.cancel_safe(timeout=0.05)


CTRL_C = """
import signal, sys, trio
from pulse_trio.postgres import TrioConnection

async def main():
    async with await TrioConnection.connect(sys.argv[1], autocommit=True) as connection, \\
            await TrioConnection.connect(sys.argv[1], autocommit=True) as other:
        @trio.lowlevel.enable_ki_protection  # so that Trio delivers it to the main task
        async def press():
            query = "SELECT wait_event = 'PgSleep' FROM pg_stat_activity WHERE pid = %s"
            while not (await (await other.execute(query, [connection.info.backend_pid])).fetchone())[0]:
                pass
            signal.raise_signal(signal.SIGINT)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(press)
            try:
                await connection.execute("SELECT pg_sleep(60)")
            except KeyboardInterrupt:
                print("interrupted", (await (await connection.execute("SELECT 1")).fetchone())[0])

trio.run(main)
"""


async def test_ctrl_c_reaches_the_program_and_frees_the_connection(dsn: str) -> None:
    with trio.fail_after(30):
        process = await trio.run_process([sys.executable, "-W", "error", "-c", CTRL_C, dsn], capture_stdout=True)
    assert process.stdout == b"interrupted 1\n"


@pytest.mark.parametrize(("limit", "closed"), [(0.1, True), (60.0, False)])
async def test_a_query_cancelled_while_it_is_still_being_sent_leaves_the_connection_usable_or_closed(
    limit: float, closed: bool, proxy: Proxy, through_proxy: Connection
) -> None:
    through_proxy.cancel_timeout = limit
    proxy.to_server.delay(1.0)
    with trio.move_on_after(0.2) as scope:
        # More than the kernel takes in while the proxy is slow: the rest waits to be written.
        await through_proxy.execute("SELECT length(%s)", ["x" * 50_000_000])
    proxy.forward()
    assert through_proxy.closed == closed
    assert scope.cancel_called
    if not closed:
        assert await value(through_proxy, "SELECT 1") == 1
