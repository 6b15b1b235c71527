"""The same client under Trio and under asyncio: each test runs on both loops."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import psycopg
import pytest

from pulse_trio import DatabaseUnavailable, Handlers, State, UsageError, open_client
from pulse_trio.postgres import TrioConnection
from support.stores import Window, claim, end, open_store

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator

    from pulse_trio import Batch, Client, JobRef

CLOSED = "The client is closed: the block of its open_client() has ended."
pytestmark = pytest.mark.anyio  # On Trio and on asyncio.
handlers = Handlers()


@handlers.job
async def add(a: int, b: int = 2) -> int:
    return a + b


async def connect(dsn: str, backend: str) -> psycopg.AsyncConnection[Any]:
    cls = TrioConnection if backend == "trio" else psycopg.AsyncConnection
    return await cls.connect(dsn)


async def test_a_job_is_enqueued_and_looked_at(dsn: str) -> None:
    async with open_client(dsn) as client:
        ref = await client.enqueue(add, 1, b=5)
        assert await ref.status() is State.AVAILABLE
        found = await client.job(ref.id)
    assert (found.kind, found.args) == ("add", {"a": 1, "b": 5})


async def test_many_jobs_come_back_in_order_and_their_ids_are_real(dsn: str, window: Window) -> None:
    async with open_client(dsn) as client:
        refs = await client.enqueue_many(add.request(i) for i in range(6000))
    stored = window.run("SELECT id, (args ->> 'a')::int AS a FROM pulse.jobs ORDER BY id")
    assert [(row["id"], row["a"]) for row in stored] == [(ref.id, i) for i, ref in enumerate(refs)]


async def test_a_producer_that_fails_in_the_middle_leaves_nothing(dsn: str, window: Window) -> None:
    def failing() -> Generator[Any]:
        for i in range(12_000):
            if i == 11_000:
                raise RuntimeError("the source broke")
            yield add.request(i)

    async with open_client(dsn) as client:
        with pytest.raises(RuntimeError, match="the source broke"):
            await client.enqueue_many(failing())
        assert (await client.enqueue(add, 1)).added
    assert window.value("SELECT count(*) FROM pulse.jobs") == 1


async def test_a_job_appears_if_and_only_if_the_callers_transaction_commits(
    dsn: str, window: Window, anyio_backend: str
) -> None:
    connection = await connect(dsn, anyio_backend)
    async with open_client(dsn) as client, connection:
        async with connection.transaction(force_rollback=True):
            await client.using(connection).enqueue(add, 1)
        async with connection.transaction():
            kept = await client.using(connection).enqueue(add, 2)
            assert window.value("SELECT count(*) FROM pulse.jobs") == 0
    assert [row["id"] for row in window.run("SELECT id FROM pulse.jobs")] == [kept.id]


async def test_a_client_is_refused_in_another_run_and_goes_on_in_its_own(dsn: str) -> None:
    """The other run ended as an internal error of Trio's, "please file a bug", and the client's own one waited for ever."""
    async with open_client(dsn) as client:
        ref = await client.enqueue(add, 1)
        batch_id = (await exhausted(client)).id

        async def elsewhere() -> list[str]:
            calls: list[Callable[[], Awaitable[object]]] = [
                lambda: client.enqueue(add, 2),
                lambda: client.enqueue_many([add.request(2)]),
                lambda: client.job(ref.id),
                lambda: client.jobs(),
                lambda: client.wait(ref.id, timeout=1),
                lambda: ref.result(timeout=0),
                lambda: client.cancel(ref.id, wait=True),
                lambda: client.schedule("s", add, {"a": 1}, every=60),
                lambda: exhausted(client),
                lambda: client.open_batch(batch_id),
            ]
            said: list[str] = []
            for call in calls:
                with anyio.fail_after(10), pytest.raises(UsageError) as refused:
                    await call()
                said.append(str(refused.value))
            return said

        for backend in ("trio", "asyncio"):
            said = await anyio.to_thread.run_sync(partial(anyio.run, elsewhere, backend=backend))
            assert all("belongs to another run of Trio or asyncio" in each for each in said), said
        with anyio.fail_after(10):
            await client.enqueue(add, 3)
            await ref.cancel()
            assert (await ref.wait(timeout=5)).state is State.CANCELLED
            assert len(await client.jobs()) == 2


async def exhausted(client: Client) -> Batch:
    """An empty batch, closed."""
    async with client.batch() as batch:
        return batch


async def test_tasks_share_few_connections(dsn: str, window: Window) -> None:
    async with open_client(dsn, max_connections=2) as client, anyio.create_task_group() as tasks:

        async def enqueue(n: int) -> None:
            await client.enqueue(add, n)

        for i in range(30):
            tasks.start_soon(enqueue, i)
    assert window.value("SELECT count(*) FROM pulse.jobs") == 30


async def test_a_connection_lost_while_idle_is_replaced(dsn: str, window: Window) -> None:
    async with open_client(dsn, max_connections=1) as client:
        await client.enqueue(add, 1)
        window.run(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        with anyio.fail_after(20):
            while True:
                try:
                    await client.enqueue(add, 2)
                    break
                except DatabaseUnavailable:
                    continue  # psycopg on asyncio learns of it by trying
    assert window.value("SELECT count(*) FROM pulse.jobs") == 2


async def test_a_database_that_is_not_there_is_said_at_once() -> None:
    with pytest.raises(DatabaseUnavailable):
        async with open_client("host=127.0.0.1 port=1 user=nobody password=secret"):
            pass


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_a_result_is_waited_for(dsn: str, window: Window) -> None:
    async with open_client(dsn) as client, open_store(dsn) as store, anyio.create_task_group() as tasks:
        ref = await client.enqueue(add, 40)
        results: list[int] = []

        async def wait() -> None:
            results.append(await ref.result())

        tasks.start_soon(wait)
        (claimed,) = await claim(store, "default", 1)
        await store.settle([end(claimed, "completed", result="42")])
    assert results == [42]


async def test_a_schedule_is_made_run_and_removed(dsn: str, anyio_backend: str) -> None:
    async with open_client(dsn) as client:
        await client.schedule("hourly", add, {"a": 1}, cron="@hourly", timezone="Europe/Berlin")
        ref = await client.run_schedule("hourly")
        assert [fire.job_id for fire in await client.fires("hourly")] == [ref.id]
        await client.pause_schedule("hourly")
        assert await client.resume_schedule("hourly") == (await client.schedules())[0].next_due
        async with await connect(dsn, anyio_backend) as connection:
            await client.using(connection).remove_schedule("hourly")
            await client.using(connection).schedule("other", add, {"a": 1}, every=60)
            await connection.rollback()
        assert [found.name for found in await client.schedules()] == ["hourly"]


async def test_connections_that_a_restart_has_cut_fail_no_call(dsn: str, window: Window) -> None:
    """On asyncio each of the pool's connections failed one, however long the database was back."""
    async with open_client(dsn, max_connections=4) as client:

        async def enqueue() -> None:
            await client.enqueue(add, 1)

        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(enqueue)
        cut = window.value(
            "SELECT count(*) FROM (SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()) t"
        )
        assert cut > 1
        for _ in range(cut):
            await client.enqueue(add, 2)


@pytest.mark.parametrize("limit", [None, 60])
async def test_a_wait_ends_with_its_clients_block(limit: float | None, dsn: str) -> None:
    """It went on for ever, though the job had ended."""
    errors: list[str] = []
    begun = anyio.Event()

    async def wait(ref: JobRef[int]) -> None:
        begun.set()
        with pytest.raises(UsageError) as raised:
            await ref.wait(limit)
        errors.append(str(raised.value))

    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks, open_client(dsn) as client:
            ref = await client.enqueue(add.options(delay=999), 1)
            tasks.start_soon(wait, ref)
            await begun.wait()
            await ref.status()  # a round trip, in which the wait begins
    assert errors == [CLOSED]


async def test_a_closed_client_does_nothing_more(dsn: str) -> None:
    async with open_client(dsn) as client:
        ref = await client.enqueue(add.options(delay=999), 1)
    for call in (client.enqueue(add, 1), ref.status(), ref.wait(), client.enqueue_many([add.request(1)])):
        with pytest.raises(UsageError, match=re.escape(CLOSED)):
            await call
