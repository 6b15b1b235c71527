# ruff: noqa: PT012 - that a block raises at its end is what is tested
"""The structured pool."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, LiteralString

import psycopg
import pytest
import trio
import trio.testing

from pulse_trio.errors import ConfigurationError, DatabaseUnavailable, UsageError
from pulse_trio.postgres import PoolTimeout, TrioConnection, TrioPool, open_pool

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from pulse_trio.testing.faults.proxy import Proxy


@pytest.fixture
async def pool(dsn: str) -> AsyncGenerator[TrioPool]:
    async with open_pool(dsn, min_size=1, max_size=2) as pool:
        yield pool


async def value(connection: TrioConnection[Any], query: LiteralString) -> Any:
    row = await (await connection.execute(query)).fetchone()
    assert row is not None
    return row[0]


async def size_is(pool: TrioPool, size: int) -> None:
    with trio.fail_after(10):
        while pool.statistics.size != size:
            await trio.lowlevel.checkpoint()


async def test_a_connection_is_lent_again_and_again(pool: TrioPool) -> None:
    pids = set()
    for _ in range(3):
        async with pool.connection() as connection:
            pids.add(await value(connection, "SELECT pg_backend_pid()"))
    assert len(pids) == 1
    assert (pool.statistics.requests, pool.statistics.queued, pool.statistics.size) == (3, 0, 1)


async def test_a_block_commits_and_an_exception_rolls_back(pool: TrioPool) -> None:
    async with pool.connection() as connection:
        await connection.execute("DROP TABLE IF EXISTS kept")
        await connection.execute("CREATE TABLE kept (n int)")
    with pytest.raises(ZeroDivisionError):
        async with pool.connection() as connection:
            await connection.execute("INSERT INTO kept VALUES (1)")
            raise ZeroDivisionError
    async with pool.connection() as connection:
        assert await value(connection, "SELECT count(*) FROM kept") == 0
        await connection.execute("DROP TABLE kept")


async def test_the_pool_grows_to_its_limit_and_the_rest_queue_in_order(pool: TrioPool) -> None:
    served, go_on = [], trio.Event()

    async def user(n: int) -> None:
        async with pool.connection():
            served.append(n)
            await go_on.wait()

    async with trio.open_nursery() as nursery:
        for n in range(6):
            nursery.start_soon(user, n)
            await trio.testing.wait_all_tasks_blocked()
        await size_is(pool, 2)
        while len(served) < 2:
            await trio.lowlevel.checkpoint()
        assert pool.statistics.waiting == 4
        go_on.set()
    assert sorted(served) == [0, 1, 2, 3, 4, 5]
    assert served[:2] == [0, 1]
    assert pool.statistics.idle == 2
    assert pool.statistics.wait_seconds > 0


async def test_the_queue_is_first_come_first_served(dsn: str) -> None:
    served = []

    async def user(n: int) -> None:
        async with pool.connection():
            served.append(n)

    async with open_pool(dsn, max_size=1) as pool, trio.open_nursery() as nursery, pool.connection():
        for n in range(5):
            nursery.start_soon(user, n)
            await trio.testing.wait_all_tasks_blocked()
    assert served == [0, 1, 2, 3, 4]


async def test_waiting_ends_with_a_timeout_that_says_why(pool: TrioPool) -> None:
    async with pool.connection(), pool.connection():
        with pytest.raises(PoolTimeout, match="2 lent of at most 2"):
            async with pool.connection(timeout=0.01):
                pass
    assert pool.statistics.timeouts == 1
    assert pool.statistics.waiting == 0


async def test_a_connection_lost_while_lent_never_comes_back(pool: TrioPool) -> None:
    with pytest.raises(psycopg.OperationalError):
        async with pool.connection() as lost:
            await lost.execute("SELECT pg_terminate_backend(pg_backend_pid())")
    async with pool.connection() as connection:
        assert connection is not lost
        assert await value(connection, "SELECT 1") == 1
    assert pool.statistics.lost == 1


async def test_a_connection_closed_while_lent_is_replaced(pool: TrioPool) -> None:
    async with pool.connection() as closed:
        await closed.close()
    await size_is(pool, 1)
    async with pool.connection() as connection:
        assert connection is not closed
    assert pool.statistics.lost == 0


async def test_a_connection_lost_while_idle_is_not_lent(pool: TrioPool, other: TrioConnection[Any]) -> None:
    async with pool.connection() as idle:
        pid = idle.info.backend_pid
    await other.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])
    async with pool.connection() as connection:
        assert connection is not idle
        assert await value(connection, "SELECT 1") == 1
    assert pool.statistics.lost == 1


async def test_a_silent_idle_connection_is_found_by_the_round_trip(proxy: Proxy, monkeypatch: Any) -> None:
    monkeypatch.setattr("pulse_trio.postgres.pool._CHECK_SECONDS", 0.05)
    async with open_pool(proxy.dsn, check_after=0.0) as pool:
        async with pool.connection() as first:
            first.cancel_timeout = 0.05
        proxy.swallow()
        async with trio.open_nursery() as nursery:

            async def heal() -> None:
                await size_is(pool, 0)
                proxy.forward()

            nursery.start_soon(heal)
            async with pool.connection() as second:
                assert second is not first
                assert await value(second, "SELECT 1") == 1


async def test_an_idle_connection_with_news_is_not_taken_for_dead(pool: TrioPool, other: TrioConnection[Any]) -> None:
    async with pool.connection() as connection:
        await connection.execute("LISTEN news")
    await other.execute("NOTIFY news")
    async with pool.connection() as again:
        assert again is connection
        assert len([note async for note in again.notifies(stop_after=1)]) == 1


async def test_open_state_does_not_leak_to_the_next_user(pool: TrioPool) -> None:
    with trio.move_on_after(0.05):
        async with pool.connection() as first:
            await first.execute("SELECT pg_sleep(60)")
    async with pool.connection() as second:
        assert second is first
        assert second.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        assert await value(second, "SELECT 1") == 1


async def test_old_connections_are_replaced(dsn: str) -> None:
    async with open_pool(dsn, min_size=1, max_lifetime=0.05) as pool:
        async with pool.connection() as first:
            pass
        with trio.fail_after(10):
            while pool.statistics.connections < 2:
                await trio.lowlevel.checkpoint()
        async with pool.connection() as second:
            assert second is not first
        assert first.closed
        assert pool.statistics.retired >= 1


async def test_a_lifetime_that_passes_while_lent_ends_at_the_return(dsn: str) -> None:
    async with open_pool(dsn, min_size=0, max_lifetime=0.0) as pool:
        async with pool.connection() as connection:
            assert await value(connection, "SELECT 1") == 1
        assert connection.closed


async def test_idle_connections_above_the_minimum_are_closed(dsn: str) -> None:
    async with open_pool(dsn, min_size=1, max_size=3, max_idle=0.05) as pool:
        async with pool.connection(), pool.connection(), pool.connection():
            assert pool.statistics.size == 3
        await size_is(pool, 1)
        assert pool.statistics.retired == 2


async def test_the_pool_reconnects_when_the_database_is_back(proxy: Proxy) -> None:
    async with open_pool(proxy.dsn, min_size=2, max_size=2) as pool:
        await size_is(pool, 2)
        proxy.refuse()
        proxy.cut()
        with pytest.raises(PoolTimeout, match="the last attempt to connect failed"):
            async with pool.connection(timeout=0.2):
                pass
        assert pool.statistics.connect_failures >= 1
        proxy.forward()
        async with pool.connection(timeout=20) as connection:
            assert await value(connection, "SELECT 1") == 1


async def test_a_caller_that_gives_up_wastes_no_connection(dsn: str) -> None:
    async with open_pool(dsn, min_size=0, max_size=1) as pool:
        with trio.CancelScope() as scope:

            async def give_up() -> None:
                await trio.testing.wait_all_tasks_blocked()
                scope.cancel()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(give_up)
                async with pool.connection():
                    await trio.sleep_forever()
        async with pool.connection():
            assert pool.statistics.connections == 1


async def test_no_slot_is_lost_under_cancellation(dsn: str) -> None:
    dice = random.Random(7)

    async def user() -> None:
        for _ in range(20):
            with trio.move_on_after(dice.expovariate(300)):
                async with pool.connection() as connection:
                    await connection.execute("SELECT pg_sleep(0.001)")

    async with open_pool(dsn, min_size=1, max_size=4) as pool:
        async with trio.open_nursery() as nursery:
            for _ in range(30):
                nursery.start_soon(user)
        assert pool.statistics.size == pool.statistics.idle <= 4
        assert pool.statistics.waiting == 0


async def test_no_slot_is_lost_when_the_server_is_silent_under_cancellation(proxy: Proxy) -> None:
    async def brief(connection: TrioConnection[Any]) -> None:
        connection.cancel_timeout = connection.cleanup_timeout = 0.2

    async with open_pool(proxy.dsn, min_size=1, max_size=1, configure=brief) as pool:
        with trio.move_on_after(60) as scope:
            async with pool.connection() as connection:
                await connection.execute("SELECT 1")  # begins a transaction
                proxy.swallow()
                scope.cancel()
                await trio.sleep_forever()
        proxy.forward()
        async with pool.connection(timeout=30) as connection:
            assert await value(connection, "SELECT 1") == 1


async def test_the_end_of_the_block_is_the_end_of_the_pool(dsn: str, other: TrioConnection[Any]) -> None:
    async with open_pool(dsn, min_size=2, application_name="short-lived") as pool:
        await size_is(pool, 2)
    assert pool.statistics.size == 0
    with pytest.raises(trio.ClosedResourceError):
        async with pool.connection():
            pass
    count = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'short-lived'"
    while await value(other, count):
        pass


async def test_exceptions_leave_the_pools_block_unwrapped(dsn: str) -> None:
    with pytest.raises(ZeroDivisionError):
        async with open_pool(dsn):
            raise ZeroDivisionError
    with trio.move_on_after(0.05) as scope:
        async with open_pool(dsn):
            await trio.sleep_forever()
    assert scope.cancelled_caught


async def test_what_cannot_work_is_said_at_once() -> None:
    with pytest.raises(DatabaseUnavailable, match=r"refused"):
        async with open_pool("host=127.0.0.1 port=1 password=s3cret"):
            pass
    with pytest.raises(ConfigurationError):
        async with open_pool("nonsense"):
            pass
    with pytest.raises(UsageError, match="min_size"):
        async with open_pool("", min_size=3, max_size=2):
            pass


async def test_a_pool_shows_no_password(dsn: str) -> None:
    async with open_pool("host=127.0.0.1 port=1 password=s3cret-word", min_size=0) as pool:
        assert "s3cret" not in repr(pool)
        with pytest.raises(PoolTimeout) as caught:
            async with pool.connection(timeout=0.1):
                pass
        assert "s3cret" not in str(caught.value)


async def test_a_connection_whose_last_answer_comes_in_the_turn_of_the_close_is_closed(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was left open: seen in the suite as a ResourceWarning, once in some hundred tests."""
    made: list[TrioConnection[Any]] = []
    async with open_pool(dsn, min_size=1, max_size=2) as pool:
        make_slot = pool.make_slot

        async def close_meanwhile() -> Any:
            slot = await make_slot()
            made.append(slot.connection)
            await pool.close()
            return slot

        monkeypatch.setattr(pool, "make_slot", close_meanwhile)
        async with pool.connection():
            with pytest.raises(trio.ClosedResourceError):
                async with pool.connection():
                    pass
        await trio.testing.wait_all_tasks_blocked()
        assert [connection.closed for connection in made] == [True]
