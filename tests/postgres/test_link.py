# ruff: noqa: PT012 - that a block raises at its end is what is tested
"""The reserved connection that makes itself again, and what surrounds it: reconnecting, waiting, DSNs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, LiteralString

import psycopg
import pytest
import trio
import trio.testing
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pulse_trio.errors import ConfigurationError, DatabaseUnavailable
from pulse_trio.postgres import Link, TrioConnection, reconnect_delay, wait_for_database
from pulse_trio.postgres.dsn import redact, with_liveliness

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from pulse_trio.testing.faults.proxy import Proxy

UNREACHABLE = "postgresql://someone:s3cret-word@127.0.0.1:1/nowhere"


@pytest.fixture
async def link(dsn: str) -> AsyncGenerator[Link]:
    link = Link(dsn, name="claims")
    yield link
    await link.aclose()


@pytest.fixture
async def far_link(proxy: Proxy) -> AsyncGenerator[Link]:
    link = Link(proxy.dsn, name="claims", statement_timeout=0.1)
    link.cancel_timeout = 0.1
    yield link
    await link.aclose()


async def value(connection: TrioConnection[Any], query: LiteralString) -> Any:
    row = await (await connection.execute(query)).fetchone()
    assert row is not None
    return row[0]


async def test_the_connection_is_kept_configured_and_named(dsn: str) -> None:
    async def configure(connection: TrioConnection[Any]) -> None:
        await connection.execute("SET search_path TO pulse")

    link = Link(dsn, name="beats", configure=configure)
    assert link.generation == 0
    for _ in range(3):
        async with link.use() as connection:
            assert connection.autocommit
            assert await value(connection, "SHOW search_path") == "pulse"
            assert await value(connection, "SHOW application_name") == "pulse-trio beats"
    assert link.generation == 1
    await link.aclose()
    assert connection.closed
    with pytest.raises(trio.ClosedResourceError):
        async with link.use():
            pass


async def test_users_take_turns_first_come_first_served(link: Link) -> None:
    order = []

    async def user(n: int) -> None:
        async with link.use() as connection:
            order.append(n)
            await connection.execute("SELECT 1")

    async with trio.open_nursery() as nursery, link.use():
        for n in range(5):
            nursery.start_soon(user, n)
            await trio.testing.wait_all_tasks_blocked()
        assert order == []
    assert order == [0, 1, 2, 3, 4]


async def test_a_lost_connection_is_unavailable_once_and_then_new(link: Link) -> None:
    async with link.use() as first:
        pass
    with pytest.raises(DatabaseUnavailable, match="claims: connection lost") as caught:
        async with link.use() as connection:
            await connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")
    assert isinstance(caught.value.__cause__, psycopg.OperationalError)
    async with link.use() as second:
        assert await value(second, "SELECT 1") == 1
    assert first is not second
    assert link.generation == 2


async def test_other_errors_pass_and_keep_the_connection(link: Link) -> None:
    with pytest.raises(psycopg.errors.DivisionByZero):
        async with link.use() as connection:
            await connection.execute("BEGIN")
            await connection.execute("SELECT 1 / 0")
    assert connection.info.transaction_status == pq.TransactionStatus.IDLE
    with pytest.raises(psycopg.errors.LockNotAvailable):  # an OperationalError, but nothing is broken
        async with link.use() as connection:
            await connection.execute("DO $$BEGIN RAISE lock_not_available; END$$")
    async with link.use():
        assert link.generation == 1


async def test_a_transaction_left_open_is_rolled_back(link: Link) -> None:
    async with link.use() as connection:
        await connection.execute("BEGIN")
    assert connection.info.transaction_status == pq.TransactionStatus.IDLE


async def test_an_overdue_statement_is_cancelled_and_the_connection_kept(link: Link) -> None:
    with pytest.raises(DatabaseUnavailable, match=r"did not answer within 0.05 s"):
        async with link.use(timeout=0.05) as connection:
            await connection.execute("SELECT pg_sleep(60)")
    async with link.use() as connection:
        assert await value(connection, "SELECT 1") == 1
    assert link.generation == 1


async def test_a_silent_peer_is_noticed_and_replaced(proxy: Proxy, far_link: Link) -> None:
    async with far_link.use():
        proxy.swallow()
    with trio.fail_after(10), pytest.raises(DatabaseUnavailable):
        async with far_link.use() as connection:
            await connection.execute("SELECT 1")
    proxy.forward()
    async with far_link.use(timeout=5) as connection:
        assert await value(connection, "SELECT 1") == 1
    assert far_link.generation == 2


async def test_a_reset_connection_is_noticed_at_the_next_use(proxy: Proxy, far_link: Link) -> None:
    async with far_link.use(timeout=5):
        pass
    proxy.cut()
    with pytest.raises(DatabaseUnavailable):
        async with far_link.use() as connection:
            await connection.execute("SELECT 1")
    async with far_link.use(timeout=5):
        assert far_link.generation == 2


async def test_cancellation_leaves_the_connection_usable(link: Link) -> None:
    async with link.use() as connection:
        pass  # to connect may take longer than what follows
    with trio.move_on_after(0.05) as scope:
        async with link.use() as connection:
            await connection.execute("SELECT pg_sleep(60)")
    assert scope.cancelled_caught
    async with link.use() as again:
        assert again is connection
        assert await value(again, "SELECT 1") == 1


async def test_cancellation_inside_a_block_of_statements_loses_no_answer(link: Link) -> None:
    async with link.use() as connection:
        await connection.execute("CREATE TEMP TABLE t (n int)")
    got = 0
    for step in range(50):
        with trio.move_on_after(step * 0.00006):
            async with link.use() as connection:
                cursor = await connection.execute("INSERT INTO t VALUES (1) RETURNING n")
                got += len(await cursor.fetchall())
    async with link.use() as connection:
        assert await value(connection, "SELECT count(*) FROM t") == got


async def test_an_unreachable_server_is_unavailable_and_no_password_shows() -> None:
    link = Link(UNREACHABLE, name="claims")
    with pytest.raises(DatabaseUnavailable, match=r"claims: .*refused") as caught:
        async with link.use():
            pass
    assert "s3cret-word" not in f"{caught.value!r} {caught.value} {link!r}"
    assert link.generation == 0
    await link.aclose()


async def test_a_failing_configure_closes_the_connection(dsn: str) -> None:
    made: list[TrioConnection[Any]] = []

    async def configure(connection: TrioConnection[Any]) -> None:
        made.append(connection)
        await connection.execute("SET no_such_setting TO 1")

    link = Link(dsn, name="claims", configure=configure)
    with pytest.raises(psycopg.errors.UndefinedObject):
        async with link.use():
            pass
    assert made[0].closed
    assert link.generation == 0


async def test_closing_waits_for_the_user_and_is_bounded_when_cancelled(link: Link) -> None:
    closed = trio.Event()

    async def close() -> None:
        await link.aclose()
        closed.set()

    async with trio.open_nursery() as nursery, link.use() as connection:
        nursery.start_soon(close)
        await trio.testing.wait_all_tasks_blocked()
        assert not closed.is_set()
        assert await value(connection, "SELECT 1") == 1
    assert closed.is_set()
    assert connection.closed


async def test_waiting_for_a_database_tells_and_gives_up() -> None:
    heard: list[DatabaseUnavailable] = []
    with pytest.raises(DatabaseUnavailable, match="refused"):
        await wait_for_database(UNREACHABLE, 0.3, heard.append)
    assert heard
    with pytest.raises(DatabaseUnavailable):
        await wait_for_database(UNREACHABLE, 0)


async def test_waiting_for_a_database_ends_when_it_is_there(proxy: Proxy) -> None:
    proxy.refuse()
    await wait_for_database(proxy.dsn, 10, lambda _: proxy.forward())


async def test_waiting_for_a_silent_server_ends_in_time(proxy: Proxy) -> None:
    proxy.to_client.swallow()
    with trio.fail_after(5), pytest.raises(DatabaseUnavailable, match="does not answer"):
        await wait_for_database(proxy.dsn, 0.2)


async def test_a_malformed_dsn_is_the_callers_fault_and_shows_no_password() -> None:
    with pytest.raises(ConfigurationError) as caught:
        await wait_for_database("postgresql://me:s3cret-word@[::1", 0)
    assert "s3cret-word" not in str(caught.value)


def test_backoff_is_full_jitter_below_a_growing_bound() -> None:
    bounds = [reconnect_delay(attempt, base=0.1, cap=5.0, uniform=lambda _, high: high) for attempt in range(8)]
    assert bounds == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0])
    assert reconnect_delay(10_000, uniform=lambda low, _: low) == 0.0
    assert all(0 <= reconnect_delay(3) <= 0.8 for _ in range(100))


def test_liveliness_is_added_unless_the_dsn_decides() -> None:
    added = conninfo_to_dict(with_liveliness("postgresql://me@example.org/db?keepalives_idle=99&connect_timeout=3"))
    assert added["keepalives_idle"] == "99"
    assert added["connect_timeout"] == "3"
    assert added["tcp_user_timeout"] == "15000"
    assert added["host"] == "example.org"


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://me:s3cret-word@host/db",
        "host=h password=s3cret-word user=me",
        "host=h password = 's3cret-word \\' x' user=me",
        "postgresql:///db?password=s3cret-word&user=me",
        make_conninfo("", host="h", password="s3cret-word"),
    ],
)
def test_passwords_are_hidden_wherever_they_are_written(text: str) -> None:
    assert "s3cret" not in redact(text)
    assert "s3cret" not in redact(f"cannot use s3cret-word with {text}", make_conninfo("", password="s3cret-word"))


async def test_an_answer_for_which_there_is_no_memory_is_lost_like_a_connection(link: Link) -> None:
    with pytest.raises(DatabaseUnavailable, match="no memory left"):
        async with link.use() as connection:
            bytearray(1 << 62)
    assert connection.closed
    async with link.use() as again:
        assert await value(again, "SELECT 1") == 1
    assert link.generation == 2
