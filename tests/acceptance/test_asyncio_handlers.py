"""Libraries of asyncio in handlers with runs="asyncio", each unchanged, on a real worker."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

import asyncpg
import httpx
import psycopg
import pytest
import sqlalchemy
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy.ext.asyncio import create_async_engine

from pulse_trio import Handlers, Job, SyncClient, open_client
from pulse_trio.observe import JobEnded, TasksLeftBehind
from support.embedded_workers import working
from support.workers import enqueue

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

SETTINGS: dict[str, Any] = {"concurrency": 10, "poll": 1.0}
ONE = "SELECT 1"


async def in_open_client(dsn: str) -> None:
    async with open_client(dsn) as client:
        ref = await client.enqueue("other")
        assert await ref.result(timeout=30) == "the other's"


async def in_psycopg(dsn: str) -> None:
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        assert await (await connection.execute(ONE)).fetchone() == (1,)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await connection.execute("SELECT pg_sleep(60)")


async def in_asyncpg(dsn: str) -> None:
    how: dict[str, Any] = {**conninfo_to_dict(dsn)}
    how["database"] = how.pop("dbname")
    pool = await asyncpg.create_pool(**how, min_size=1, max_size=3)
    try:
        assert await asyncio.gather(*(pool.fetchval(ONE) for _ in range(10))) == [1] * 10
    finally:
        await pool.close()


async def in_sqlalchemy(dsn: str, driver: str) -> None:
    how = conninfo_to_dict(dsn)
    address = sqlalchemy.URL.create(
        f"postgresql+{driver}",
        **{ours: how.get(theirs) for ours, theirs in (("username", "user"), ("password", "password"))},  # type: ignore[arg-type]
        database=str(how["dbname"]),
        query={"host": str(how["host"]), **({"port": str(how["port"])} if "port" in how else {})},
    )
    engine = create_async_engine(address)
    try:
        async with engine.begin() as connection:
            assert (await connection.execute(sqlalchemy.text(ONE))).scalar() == 1
    finally:
        await engine.dispose()


async def in_sqlalchemy_over_psycopg(dsn: str) -> None:
    await in_sqlalchemy(dsn, "psycopg")


async def in_sqlalchemy_over_asyncpg(dsn: str) -> None:
    await in_sqlalchemy(dsn, "asyncpg")


async def in_httpx(_: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with httpx.AsyncClient(trust_env=False) as client:
            responses = await asyncio.gather(*(client.get(f"http://127.0.0.1:{port}/") for _ in range(5)))
    assert [response.text for response in responses] == ["hello"] * 5


async def in_timeout(_: str) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await asyncio.Event().wait()


async def in_task_group(_: str) -> None:
    async def fail() -> None:
        raise ValueError("one")

    with pytest.raises(ExceptionGroup) as told:  # noqa: PT012 -- the block is what raises
        async with asyncio.TaskGroup() as group:
            waits = group.create_task(asyncio.Event().wait())
            group.create_task(fail())
    assert waits.cancelled()
    assert told.group_contains(ValueError, match="one")


async def in_to_thread(_: str) -> None:
    assert await asyncio.to_thread(sum, [1, 2]) == 3


async def in_a_subprocess(_: str) -> None:
    script = "import sys; print(sys.stdin.read().upper()); sys.exit(7)"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert (await process.communicate(b"said"))[0].strip() == b"SAID"
    assert process.returncode == 7


async def in_async_generators(_: str) -> None:
    closed = asyncio.Event()

    async def count() -> AsyncGenerator[int]:
        try:
            for n in range(10):
                yield n
        finally:
            await asyncio.sleep(0)
            closed.set()

    async for _n in count():
        break
    # What nobody finished is finished by the loop, in a task of its own.
    await closed.wait()


TRIED = [
    in_open_client, in_psycopg, in_asyncpg, in_sqlalchemy_over_psycopg, in_sqlalchemy_over_asyncpg, in_httpx, in_timeout,
    in_task_group, in_to_thread, in_a_subprocess, in_async_generators,
]  # fmt: skip


@pytest.mark.parametrize("tried", TRIED, ids=lambda tried: tried.__name__)
async def test_what_asyncio_programs_use_works_unchanged_in_an_asyncio_handler(
    tried: Callable[[str], Awaitable[None]], dsn: str
) -> None:
    handlers = Handlers()

    @handlers.job(runs="asyncio", max_attempts=1)
    async def own(job: Job) -> None:
        assert job.attempt == 1
        await tried(dsn)

    @handlers.job(runs="asyncio")
    async def other() -> str:
        return "the other's"

    async with working(handlers, dsn, **SETTINGS) as heard:
        (job_id,) = enqueue(dsn, "own")
        ended = await heard.until(JobEnded, job_id=job_id)
    assert ended.outcome == "completed", ended.error
    assert not heard.of(TasksLeftBehind)


@pytest.mark.parametrize("tried", [in_open_client, in_psycopg], ids=lambda tried: tried.__name__)
async def test_a_timeout_in_the_middle_of_a_query_leaves_nothing_of_it_on_the_server(
    tried: Callable[[str], Awaitable[None]], dsn: str
) -> None:
    handlers = Handlers()

    @handlers.job(runs="asyncio")
    async def own() -> None:
        if tried is in_psycopg:
            async with await psycopg.AsyncConnection.connect(dsn, application_name="tried") as connection:
                await connection.execute("SELECT pg_sleep(60)")
        else:
            async with open_client(dsn) as client:
                await (await client.enqueue("nobody's")).result(timeout=60)

    async with working(handlers, dsn, **SETTINGS) as heard:
        job_id = SyncClient(dsn).enqueue("own", timeout=0.5).id
        ended = await heard.until(JobEnded, job_id=job_id)
    assert ended.outcome == "timeout"
    with psycopg.connect(dsn, autocommit=True) as connection:
        left = connection.execute(
            "SELECT query FROM pg_stat_activity WHERE application_name IN ('tried', 'pulse-trio waits') "
            "AND datname = current_database() AND state = 'active'"
        ).fetchall()
    assert left == []
