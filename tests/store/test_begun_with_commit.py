"""The transaction of who waits for a connection begins in the message that commits the one before: it is as any other."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, LiteralString

import psycopg
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from pulse_trio.postgres import TrioConnection
from support.sessions import CHANGES, session, window_with_a_tenant
from support.stores import Window, claim_one, end, open_store

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from pulse_trio.store import WorkerStore
    from pulse_trio.store.transactions import Begun


@pytest.fixture
def window(dsn: str) -> Any:
    with window_with_a_tenant(dsn) as window:
        yield window


@pytest.fixture
async def store(dsn: str) -> AsyncGenerator[WorkerStore]:
    # One connection for all transactions.
    async with open_store(dsn, concurrency=1) as store, store.transactions.open():
        yield store


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What each transaction sent to begin: `BEGIN`, `SET LOCAL` (its own limit, where it has begun with another one), or
    nothing."""
    sent: list[str] = []
    begin = TrioConnection.begin

    async def noted(self: Any, commands: bytes) -> None:
        sent.append(commands.decode().partition("; ")[0].partition(" statement_timeout")[0])
        await begin(self, commands)

    monkeypatch.setattr(TrioConnection, "begin", noted)
    return sent


async def wait_for_it(
    nursery: trio.Nursery, store: WorkerStore, use: Callable[[Begun], Awaitable[object]], seconds: float = math.inf
) -> trio.CancelScope:
    """A task waits for the connection, and uses it then."""
    scope = trio.CancelScope()

    async def wait() -> None:
        with scope:
            async with store.transactions.begin(seconds=seconds) as begun:
                await use(begun)

    nursery.start_soon(wait)
    await wait_all_tasks_blocked()
    return scope


async def value(begun: Begun, query: LiteralString) -> Any:
    row = await (await begun.connection.execute(query)).fetchone()
    assert row is not None
    return row[0]


@pytest.mark.parametrize("change", CHANGES)
async def test_what_a_handler_changes_in_its_session_is_gone_for_who_waits(
    change: LiteralString, store: WorkerStore, window: Window, sent: list[str]
) -> None:
    async with store.transactions.begin() as begun:
        before = await session(begun)
    window.enqueue()
    claim = await claim_one(store)
    found: list[Any] = []

    async def look(begun: Begun) -> None:
        found.append(await session(begun))
        # What was reset before is no part of this transaction.
        await begun.connection.execute("ROLLBACK")
        found.append(await session(begun))

    async with trio.open_nursery() as nursery, store.transactions.begin() as begun:
        used = begun.connection
        await wait_for_it(nursery, store, look)
        await used.execute(change)
        assert await begun.complete(end(claim))
    assert found == [before, before]
    assert sent == ["BEGIN", "BEGIN", ""]
    with pytest.raises(psycopg.OperationalError, match="closed"):
        await used.execute("SELECT 1")


async def test_each_has_its_own_time_limit_and_its_writes_are_its_own(
    store: WorkerStore, window: Window, sent: list[str]
) -> None:
    found: list[Any] = []

    async def look(begun: Begun) -> None:
        found.append(await value(begun, "SHOW statement_timeout"))
        await begun.connection.execute("INSERT INTO public.ledger VALUES (2)")

    async def fail(begun: Begun) -> None:
        found.append(await value(begun, "SHOW statement_timeout"))
        await begun.connection.execute("INSERT INTO public.ledger VALUES (3)")
        raise ZeroDivisionError

    with pytest.raises(ExceptionGroup):  # noqa: PT012
        async with trio.open_nursery() as nursery, store.transactions.begin(seconds=41) as begun:
            await wait_for_it(nursery, store, look, 50)
            await wait_for_it(nursery, store, fail)
            found.append(await value(begun, "SHOW statement_timeout"))
            await begun.connection.execute("INSERT INTO public.ledger VALUES (1)")
    assert found == ["43008ms", "51200ms", "0"]  # rounded up
    assert sent == ["BEGIN", "", ""]
    assert window.run("SELECT job FROM public.ledger ORDER BY 1") == [{"job": 1}, {"job": 2}]
    async with store.transactions.begin(seconds=6) as begun:
        assert await value(begun, "SHOW statement_timeout") == "7168ms"
    assert sent[-1] == "BEGIN"


@pytest.mark.parametrize("other", [None, 60, math.inf])
async def test_who_gives_up_meanwhile_leaves_nothing_to_the_next(
    store: WorkerStore, window: Window, sent: list[str], monkeypatch: pytest.MonkeyPatch, other: float | None
) -> None:
    """The first one that waits is cancelled when its transaction has begun, and it does not know yet."""
    given_up: list[trio.CancelScope] = []
    finish, found = TrioConnection.finish, list[Any]()

    async def finished(self: Any, *args: Any) -> None:
        await finish(self, *args)
        if given_up:
            given_up.pop().cancel()
            await wait_all_tasks_blocked()

    async def look(begun: Begun) -> None:
        found.append((await value(begun, "SHOW statement_timeout"), begun.connection.info.backend_pid))

    async def never(_: Begun) -> None:
        raise AssertionError("it has given up")

    monkeypatch.setattr(TrioConnection, "finish", finished)
    async with trio.open_nursery() as nursery, store.transactions.begin() as begun:
        pid = begun.connection.info.backend_pid
        given_up.append(await wait_for_it(nursery, store, never, 50))
        if other is not None:
            await wait_for_it(nursery, store, look, other)
    if other is None:
        async with store.transactions.begin(seconds=60) as begun:
            await look(begun)
    assert found == [("0" if other == math.inf else "61440ms", pid)]
    assert sent == ["BEGIN", "BEGIN" if other is None else "SET LOCAL"]


async def test_who_is_cancelled_as_it_gets_the_connection_rolls_back(
    store: WorkerStore, window: Window, sent: list[str]
) -> None:
    async def never(_: Begun) -> None:
        raise AssertionError("it is cancelled")

    async def look(begun: Begun) -> None:
        assert await value(begun, "SELECT count(*) FROM public.ledger") == 1

    async with trio.open_nursery() as nursery:
        async with store.transactions.begin() as begun:
            scope = await wait_for_it(nursery, store, never, 50)
            await wait_for_it(nursery, store, look)
            await begun.connection.execute("INSERT INTO public.ledger VALUES (1)")
        # The task has the connection, and has not had its turn.
        scope.cancel()
    assert sent == ["BEGIN", "", "BEGIN"]


@pytest.mark.parametrize("way", ["fence", "commit", "rollback"])
async def test_where_nothing_is_committed_the_next_one_begins_by_itself(
    way: str, store: WorkerStore, window: Window, sent: list[str]
) -> None:
    window.enqueue()
    claim = await claim_one(store)
    window.run("UPDATE pulse.job SET attempt = attempt + 1")
    window.run("ALTER TABLE public.ledger ADD UNIQUE (job) DEFERRABLE INITIALLY DEFERRED")
    found: list[Any] = []

    async def look(begun: Begun) -> None:
        found.append(await value(begun, "SELECT count(*) FROM public.ledger"))

    async def fail(begun: Begun) -> None:
        await begun.connection.execute("INSERT INTO public.ledger VALUES (1)")
        if way == "commit":
            await begun.connection.execute("INSERT INTO public.ledger VALUES (1)")
        elif way == "rollback" or await begun.complete(end(claim)) is False:
            raise ZeroDivisionError

    async with trio.open_nursery() as nursery:
        with pytest.raises((ZeroDivisionError, psycopg.errors.UniqueViolation)):  # noqa: PT012
            async with store.transactions.begin() as begun:
                await wait_for_it(nursery, store, look)
                await fail(begun)
    assert found == [0]
    assert sent == ["BEGIN", "BEGIN"]
