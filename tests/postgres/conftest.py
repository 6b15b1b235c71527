"""One empty database for this room; tests keep to temporary tables, or drop what they make."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, LiteralString

import pytest

from pulse_trio.postgres import TrioConnection

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Generator

    from support.databases import Databases

Connection = TrioConnection[Any]


@pytest.fixture(scope="session")
def room_dsn(databases: Databases) -> Generator[str]:
    with databases.empty() as dsn:
        yield dsn


@pytest.fixture
def dsn(room_dsn: str) -> str:
    return room_dsn


@pytest.fixture
async def connection(dsn: str) -> AsyncGenerator[Connection]:
    """The connection under test, in autocommit mode."""
    async with await TrioConnection.connect(dsn, autocommit=True) as connection:
        yield connection


@pytest.fixture
async def other(dsn: str) -> AsyncGenerator[Connection]:
    """A second connection, to look at the first from."""
    async with await TrioConnection.connect(dsn, autocommit=True) as connection:
        yield connection


@pytest.fixture
def until(other: Connection) -> Callable[..., Awaitable[None]]:
    """`await until(pid, "state = 'active'")`: asks pg_stat_activity until the backend is so; no rows count as gone."""

    async def until(pid: int, condition: LiteralString) -> None:
        query = f"SELECT coalesce(bool_or({condition}), false) FROM pg_stat_activity WHERE pid = %s"
        while (row := await (await other.execute(query, [pid])).fetchone()) is not None and not row[0]:
            pass

    return until
