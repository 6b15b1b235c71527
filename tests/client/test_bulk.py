"""Bulk: any iterable, all or none or whole chunks, in order, with progress; on Trio, on asyncio and blocking."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pulse_trio import (
    ConfigurationError,
    DatabaseUnavailable,
    Handlers,
    InvalidArguments,
    JobRequest,
    PartlyEnqueued,
    SyncClient,
    UsageError,
    open_client,
)
from pulse_trio.postgres import TrioConnection

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from support.stores import Window

pytestmark = pytest.mark.anyio  # On Trio and on asyncio.
handlers = Handlers()
COUNT = 12_345


@handlers.job
async def number(n: int) -> None: ...


class SourceBrokeError(Exception):
    pass


def stream(count: int, *, breaks_at: int | None = None) -> Generator[JobRequest]:
    for n in range(count):
        if n == breaks_at:
            raise SourceBrokeError
        yield number.request(n)


async def async_stream(count: int, *, breaks_at: int | None = None) -> AsyncGenerator[JobRequest]:
    for request in stream(count, breaks_at=breaks_at):
        yield request


def stored(window: Window) -> list[tuple[int, int]]:
    rows = window.run("SELECT id, (args ->> 'n')::int AS n FROM job ORDER BY id")
    return [(row["id"], row["n"]) for row in rows]


@pytest.mark.parametrize("source", [stream, async_stream])
@pytest.mark.parametrize("chunk", [None, 5000])
async def test_any_iterable_comes_back_in_order_with_progress(
    source: Any, chunk: int | None, dsn: str, window: Window
) -> None:
    seen: list[int] = []
    async with open_client(dsn) as client:
        refs = await client.enqueue_many(source(COUNT), chunk=chunk, progress=seen.append)
    assert seen == [5000, 10_000, COUNT]
    assert stored(window) == [(ref.id, n) for n, ref in enumerate(refs)]


@pytest.mark.parametrize("source", [stream, async_stream])
async def test_a_source_that_breaks_leaves_nothing(source: Any, dsn: str, window: Window) -> None:
    async with open_client(dsn) as client:
        with pytest.raises(SourceBrokeError):
            await client.enqueue_many(source(COUNT, breaks_at=11_000))
    assert stored(window) == []


@pytest.mark.parametrize("count", [2, COUNT])
async def test_a_progress_that_raises_leaves_nothing(count: int, dsn: str, window: Window) -> None:
    def broken(_: int) -> None:
        raise SourceBrokeError

    async with open_client(dsn) as client:
        with pytest.raises(SourceBrokeError):
            await client.enqueue_many(stream(count), progress=broken)
    with pytest.raises(SourceBrokeError):
        SyncClient(dsn).enqueue_many(stream(count), progress=broken)
    assert stored(window) == []


@pytest.mark.parametrize("source", [stream, async_stream])
async def test_a_source_that_breaks_leaves_whole_chunks_and_says_which(source: Any, dsn: str, window: Window) -> None:
    async with open_client(dsn) as client:
        with pytest.raises(PartlyEnqueued, match="2,000 jobs were enqueued, in whole chunks of 1,000") as caught:
            await client.enqueue_many(source(COUNT, breaks_at=2500), chunk=1000)
        assert isinstance(caught.value.__cause__, SourceBrokeError)
        assert stored(window) == [(ref.id, n) for n, ref in enumerate(caught.value.enqueued)]
        assert len(caught.value.enqueued) == 2000
        with pytest.raises(SourceBrokeError):
            await client.enqueue_many(source(COUNT, breaks_at=999), chunk=1000)
    assert len(stored(window)) == 2000


async def test_a_request_the_database_refuses_leaves_its_chunk_out(dsn: str, window: Window) -> None:
    requests = [*stream(25), JobRequest(kind="number", args="[]"), *stream(25)]
    async with open_client(dsn) as client:
        with pytest.raises(InvalidArguments):
            await client.enqueue_many(requests)
        assert stored(window) == []
        with pytest.raises(PartlyEnqueued) as caught:
            await client.enqueue_many(requests, chunk=20)
    assert len(stored(window)) == len(caught.value.enqueued) == 20


async def test_an_async_generator_is_ended_when_it_is_not_exhausted(dsn: str) -> None:
    ended: list[bool] = []

    async def source() -> AsyncGenerator[Any]:
        try:
            yield number.request(1)
            yield "no request"
        finally:
            ended.append(True)

    async with open_client(dsn) as client:
        with pytest.raises(InvalidArguments, match=r"handler.request\(...\) returns, got 'no request'"):
            await client.enqueue_many(source())
    assert ended == [True]


@pytest.mark.parametrize("requests", [7, number.request(1), "text", [number], [None], None])
async def test_what_is_no_request_is_refused(requests: Any, dsn: str, window: Window) -> None:
    async with open_client(dsn) as client:
        with pytest.raises(InvalidArguments, match="enqueue_many takes"):
            await client.enqueue_many(requests)
    with pytest.raises(InvalidArguments, match="enqueue_many takes"):
        SyncClient(dsn).enqueue_many(requests)
    assert stored(window) == []


@pytest.mark.parametrize("keyed", [False, True])
async def test_jobs_that_come_first_on_a_callers_connection_are_in_its_transaction(
    keyed: bool, dsn: str, window: Window, anyio_backend: str
) -> None:
    """Without autocommit a transaction begins with its first statement, and the caller ends it."""
    numbers = number.options(unique_key="the key") if keyed else number
    connecting = TrioConnection if anyio_backend == "trio" else psycopg.AsyncConnection
    connection: psycopg.AsyncConnection[Any] = await connecting.connect(dsn)
    async with open_client(dsn) as client, connection:
        using = client.using(connection)
        await using.enqueue_many([numbers.request(1)])
        await connection.rollback()
        assert stored(window) == []
        # A refused one leaves the transaction usable, which has begun.
        with pytest.raises(InvalidArguments):
            await using.enqueue_many([JobRequest(kind="number", args="[]")])
        assert await using.jobs() == []
        (kept,) = await using.enqueue_many([numbers.request(2)])
        assert stored(window) == []
        await connection.commit()
        assert stored(window) == [(kept.id, 2)]


@pytest.mark.parametrize("keyed", [False, True])
def test_the_blocking_client_leaves_the_callers_transaction_to_the_caller_too(
    keyed: bool, dsn: str, window: Window
) -> None:
    numbers = number.options(unique_key="the key") if keyed else number
    with psycopg.connect(dsn) as connection:
        using = SyncClient(connection)
        using.enqueue_many([numbers.request(1)])
        connection.rollback()
        assert stored(window) == []
        with pytest.raises(InvalidArguments):
            using.enqueue_many([JobRequest(kind="number", args="[]")])
        assert using.jobs() == []
        (kept,) = using.enqueue_many([numbers.request(2)])
        assert stored(window) == []
    assert stored(window) == [(kept.id, 2)]


async def test_chunks_are_refused_where_they_cannot_be(dsn: str) -> None:
    async with open_client(dsn) as client:
        for chunk in (0, -1, 1.5, True):
            with pytest.raises(ConfigurationError, match="chunk must be"):
                await client.enqueue_many([], chunk=chunk)  # type: ignore[arg-type]
    with psycopg.connect(dsn) as connection, pytest.raises(UsageError, match="commits each chunk"):
        SyncClient(connection).enqueue_many([], chunk=10)


def test_the_blocking_client_does_the_same(dsn: str, window: Window) -> None:
    client, seen = SyncClient(dsn), list[int]()
    with pytest.raises(SourceBrokeError):
        client.enqueue_many(stream(COUNT, breaks_at=11_000))
    assert stored(window) == []
    with pytest.raises(PartlyEnqueued) as caught:
        client.enqueue_many(stream(COUNT, breaks_at=2500), chunk=1000, progress=seen.append)
    assert seen == [1000, 2000]
    assert stored(window) == [(done.id, n) for n, done in enumerate(caught.value.enqueued)]
    assert len(client.enqueue_many(stream(COUNT), chunk=6000)) == COUNT
    with pytest.raises(InvalidArguments, match="an iterable of requests"):
        client.enqueue_many(async_stream(3))  # type: ignore[arg-type]


async def test_a_connection_lost_at_commit_is_one_of_our_errors(dsn: str, window: Window) -> None:
    """The server ends the backend while it commits, as a restart or an administrator does."""
    window.run(
        "CREATE FUNCTION public.end_me() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NULL; END $$"
    )
    window.run(
        "CREATE CONSTRAINT TRIGGER end_me AFTER INSERT ON job DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION public.end_me()"
    )
    async with open_client(dsn) as client:
        with pytest.raises(DatabaseUnavailable, match="terminating connection"):
            await client.enqueue_many(stream(3))
    with pytest.raises(DatabaseUnavailable, match="terminating connection"):
        SyncClient(dsn).enqueue_many(stream(3))
    assert stored(window) == []


async def test_an_error_of_another_database_in_the_iterable_stays_what_it_is(dsn: str, window: Window) -> None:
    def rows() -> Generator[JobRequest]:
        yield number.request(1)
        raise psycopg.OperationalError("another database")

    async with open_client(dsn) as client:
        with pytest.raises(psycopg.OperationalError, match="another database"):
            await client.enqueue_many(rows())
    with pytest.raises(psycopg.OperationalError, match="another database"):
        SyncClient(dsn).enqueue_many(rows())
    assert stored(window) == []
