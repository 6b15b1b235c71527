"""Waiting for ends: woken by a notification, with polling behind it, on both loops."""

from __future__ import annotations

import pickle
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import anyio
import anyio.lowlevel
import anyio.to_thread
import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from psycopg.sql import SQL, Identifier

from pulse_trio import (
    Handlers,
    JobCancelled,
    JobFailed,
    JobRef,
    State,
    SyncClient,
    UnknownJob,
    UsageError,
    open_client,
)
from pulse_trio.client import waiting
from pulse_trio.errors import DatabaseUnavailable, InvalidArguments
from pulse_trio.postgres import TrioConnection
from pulse_trio.sql import statement
from pulse_trio.testing.faults.proxy import open_proxy
from support.stores import ENDS_WAITED_FOR, Window, claim, claim_one, end, open_store

if TYPE_CHECKING:
    from collections.abc import Generator

    from pulse_trio import BatchResult, Client

pytestmark = pytest.mark.anyio  # On Trio and on asyncio.
handlers = Handlers()
on_trio = pytest.mark.parametrize("anyio_backend", ["trio"])
"""For tests with a worker's store in them, which lives on Trio."""
never_polls = pytest.fixture(lambda monkeypatch: monkeypatch.setattr(waiting, "_FIRST", 3600.0))
"""What ends is heard of, or not at all."""


@handlers.job
async def add(a: int, b: int = 2) -> int:
    return a + b


async def until_locks(window: Window, count: int) -> None:
    """Waits until so many ends are waited for, "somebody waits" included; PostgreSQL tells nobody, so it is asked."""
    with anyio.fail_after(20):
        while window.value(ENDS_WAITED_FOR) != count:  # noqa: ASYNC110 -- as said
            await anyio.sleep(0.01)


def finish(window: Window, job_id: int, state: int = 4, **columns: str) -> None:
    """Ends a job as a worker's statement does, on a connection of its own."""
    names = "".join(f", {name}" for name in columns)
    values = "".join(", %s" for _ in columns)
    window.run(
        "WITH done AS (DELETE FROM job WHERE id = %s RETURNING *), kept AS (INSERT INTO job_archive (id, finished_at,"
        " started_at, run_at, created_at, locked_by, attempt, failures, max_attempts, priority, state, queue, kind,"
        f" args{names})"
        f" SELECT id, clock_timestamp(), now(), run_at, created_at, 1, 1, 0, 20, 0, %s, queue, kind, args{values} FROM done)"
        " SELECT pulse.tell_end(array_agg(id)) FROM done",
        job_id,
        state,
        *columns.values(),
    )


async def waited(client: Client, window: Window, ref: JobRef[Any], **ended: Any) -> Any:
    """The result of a job that is finished when it is waited for."""
    found: list[Any] = []

    async def wait() -> None:
        try:
            found.append(await ref.result(timeout=20))
        except Exception as error:
            found.append(error)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await until_locks(window, 2)
        finish(window, ref.id, **ended)
    return found[0]


async def test_a_waiter_is_woken_by_a_notification_alone(dsn: str, window: Window, never_polls: None) -> None:
    async with open_client(dsn) as client:
        for value in ("42", "43"):
            ref = await client.enqueue(add, 1)
            assert await waited(client, window, ref, result=value) == int(value)


async def test_polling_finds_what_was_not_told(dsn: str, window: Window) -> None:
    async with open_client(dsn) as client, anyio.create_task_group() as tasks:
        ref = await client.enqueue(add, 1)
        results: list[int] = []

        async def wait() -> None:
            results.append(await ref.result(timeout=20))

        tasks.start_soon(wait)
        await until_locks(window, 2)
        window.run("CREATE OR REPLACE FUNCTION tell_end(finished bigint[]) RETURNS int LANGUAGE sql AS 'SELECT 0'")
        finish(window, ref.id, result="7")
    assert results == [7]


async def test_a_finished_job_is_not_waited_for(dsn: str, window: Window) -> None:
    async with open_client(dsn) as client:
        ref = await client.enqueue(add, 1)
        finish(window, ref.id, result="3")
        assert await ref.result() == 3
        assert (await ref.wait(timeout=0)).result == 3
        assert await ref.status() is State.COMPLETED


async def test_a_wait_has_an_end_of_its_own(dsn: str) -> None:
    async with open_client(dsn) as client:
        ref = await client.enqueue(add, 1)
        for timeout in (0, 0.05):
            with pytest.raises(TimeoutError, match=rf"Job {ref.id} did not finish within {timeout} s\.") as late:
                await ref.wait(timeout)
            # On a loaded machine 50 ms may be too short for an answer.
            said = (f"What it waits for: pulse-trio jobs show {ref.id}", "The database had not answered by then.")
            assert str(late.value).endswith(said)
        for timeout in (-1, float("nan"), float("inf"), "1", True, timedelta(seconds=1)):
            with pytest.raises(InvalidArguments, match="seconds from 0 on"):
                await ref.wait(cast("float", timeout))
            with pytest.raises(InvalidArguments, match="seconds from 0 on"):
                SyncClient(dsn).wait(ref.id, cast("float", timeout))
        assert (await ref.status()) is State.AVAILABLE


async def test_a_dead_or_cancelled_job_raises_and_brings_its_record(dsn: str, window: Window) -> None:
    async with open_client(dsn) as client:
        failed = await waited(client, window, await client.enqueue(add, 1), state=5, error="ValueError: no")
        assert isinstance(failed, JobFailed)
        assert (failed.job.state, failed.job.error) == (State.DEAD, "ValueError: no")
        assert str(pickle.loads(pickle.dumps(failed))) == str(failed)  # noqa: S301 -- our own
        cancelled = await waited(client, window, await client.enqueue(add, 1), state=6, cancel_reason="by hand")
        assert isinstance(cancelled, JobCancelled)
        assert cancelled.job.cancel_reason == "by hand"


async def test_a_job_that_is_gone_is_said_to_be(dsn: str, window: Window, never_polls: None) -> None:
    async with open_client(dsn) as client:
        ref = await client.enqueue(add, 1)
        said: list[str] = []

        async def wait() -> None:
            with pytest.raises(UnknownJob) as caught:
                await ref.wait()
            said.append(str(caught.value))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await until_locks(window, 2)
            window.run("WITH d AS (DELETE FROM job RETURNING id) SELECT pulse.tell_end(array_agg(id)) FROM d")
        assert said[0].startswith(f"There is no job {ref.id} ")


async def test_a_job_of_the_callers_transaction_is_waited_for_when_that_has_committed(
    dsn: str, window: Window, anyio_backend: str
) -> None:
    cls = TrioConnection if anyio_backend == "trio" else psycopg.AsyncConnection
    async with open_client(dsn) as client, await cls.connect(dsn) as connection:
        async with connection.transaction():
            ref = await client.using(connection).enqueue(add, 1)
            assert await ref.status() is State.AVAILABLE
            with pytest.raises(UnknownJob, match="once the transaction that enqueued it has committed"):
                await ref.wait(timeout=5)
        assert await waited(client, window, ref, result="9") == 9


async def test_a_client_on_a_connection_alone_refuses_to_wait(dsn: str, anyio_backend: str) -> None:
    from pulse_trio import Client

    cls = TrioConnection if anyio_backend == "trio" else psycopg.AsyncConnection
    async with await cls.connect(dsn) as connection:
        with pytest.raises(UsageError, match="cannot wait"):
            await Client(connection).wait(1)


async def test_many_wait_at_once_and_more_than_there_are_locks(
    dsn: str, window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "LOCKS", 5)
    async with open_client(dsn) as client:
        refs = await client.enqueue_many(add.request(i) for i in range(12))
        results: dict[int, int] = {}

        async def wait(ref: JobRef[Any]) -> None:
            results[ref.id] = await ref.result(timeout=20)

        async with anyio.create_task_group() as tasks:
            for ref in refs * 2:
                tasks.start_soon(wait, ref)
            await until_locks(window, 6)
            for ref in refs:
                finish(window, ref.id, result=str(ref.id))
        assert results == {ref.id: ref.id for ref in refs}
        await until_locks(window, 0)


async def test_a_cancelled_wait_leaves_no_lock_and_the_next_is_told(
    dsn: str, window: Window, never_polls: None
) -> None:
    async with open_client(dsn) as client:
        ref = await client.enqueue(add, 1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ref.wait)
            await until_locks(window, 2)
            tasks.cancel_scope.cancel()
        await until_locks(window, 0)
        assert await waited(client, window, ref, result="5") == 5


async def test_a_lost_listening_connection_is_made_again(dsn: str, window: Window) -> None:
    async with open_client(dsn) as client:
        ref = await client.enqueue(add, 1)
        results: list[int] = []

        async def wait() -> None:
            results.append(await ref.result(timeout=20))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await until_locks(window, 2)
            window.run(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
                " WHERE datname = current_database() AND application_name = 'pulse-trio waits'"
            )
            finish(window, ref.id, result="1")
        assert results == [1]
        assert await waited(client, window, await client.enqueue(add, 1), result="2") == 2


@contextmanager
def nobody_may_connect(window: Window) -> Generator[None]:
    """The database refuses new connections, and those of clients are cut off, until the block ends."""
    name = window.value("SELECT current_database()")
    with psycopg.connect(make_conninfo(window.dsn, dbname="postgres"), autocommit=True) as elsewhere:
        elsewhere.execute(SQL("ALTER DATABASE {} ALLOW_CONNECTIONS false").format(Identifier(name)))
        try:
            window.run(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            yield
        finally:
            elsewhere.execute(SQL("ALTER DATABASE {} ALLOW_CONNECTIONS true").format(Identifier(name)))


async def test_a_wait_outlasts_every_lost_connection(dsn: str, window: Window) -> None:
    async with open_client(dsn) as client:
        refs = await client.enqueue_many(add.request(n) for n in range(30))
        results: list[int] = []
        ended: list[str] = []

        async def wait(ref: JobRef[int]) -> None:
            results.append(await ref.result())

        async def see_it_cancelled(ref: JobRef[int]) -> None:
            ended.append((await client.cancel(ref.id, wait=True)).state)

        async with anyio.create_task_group() as tasks:
            for ref in refs[1:]:
                tasks.start_soon(wait, ref)
            window.run(
                "UPDATE job SET state = 2, attempt = 1, locked_by = 1, lease_until = now() + interval '1 hour' WHERE id = %s",
                refs[0].id,
            )
            tasks.start_soon(see_it_cancelled, refs[0])
            # A connection that is lost in the statement that cancels is another error, which is raised.
            while not window.run("SELECT FROM cancellation"):  # noqa: ASYNC110 -- as above, PostgreSQL tells nobody
                await anyio.sleep(0.01)
            for _ in range(4):
                await until_locks(window, 30)
                with nobody_may_connect(window):
                    pass
            for ref in refs[1:]:
                finish(window, ref.id, result="5")
            window.run("UPDATE cancellation SET ended_at = now(), ended_as = 'cancelled'")
        assert (results, ended) == ([5] * 29, ["cancelled"])


async def test_a_look_that_the_database_refuses_is_made_again_within_the_limit(dsn: str, window: Window) -> None:
    async with open_client(dsn) as client:
        ref = await client.enqueue(add, 1)
        look, refused = client._finished, 0

        async def refusing(job_id: int) -> Any:
            nonlocal refused
            if refused < 3:
                refused += 1
                raise DatabaseUnavailable("gone")
            return await look(job_id)

        client._finished = refusing
        with pytest.raises(DatabaseUnavailable, match="gone"):
            await ref.wait(timeout=0)
        assert await waited(client, window, ref, result="5") == 5
        assert refused == 3
        refused = -(10**6)
        with pytest.raises(TimeoutError, match=r"within 0\.1 s\. The database could not be reached: gone"):
            await ref.wait(timeout=0.1)


@pytest.mark.parametrize("anyio_backend", ["trio"])  # of the proxy
@pytest.mark.parametrize("how", ["refused", "silent"])
async def test_a_wait_that_is_over_says_that_the_database_was_away(dsn: str, how: str) -> None:
    """It had been read from before: the wait stood still for a notification, or for a connection, and said that the job had not
    finished."""
    async with open_proxy(dsn) as proxy, open_client(proxy.dsn) as client:
        ref = await client.enqueue(add, 1)
        with pytest.raises(TimeoutError, match=r"did not finish within 0\.2 s\. What it waits for"):
            await ref.wait(timeout=0.2)
        if how == "refused":
            proxy.refuse()
            proxy.cut()
        else:
            proxy.hold()
        for seconds in (3, 1):
            with pytest.raises(TimeoutError, match=r"The database (could not be reached|had not answered by then)"):
                await ref.wait(timeout=seconds)
        proxy.forward()


async def test_a_batch_is_waited_for_through_lost_connections(dsn: str, window: Window) -> None:
    async with open_client(dsn) as client:
        async with client.batch() as batch:
            ref = await batch.enqueue(add, 1)
        found: list[BatchResult] = []

        async def wait() -> None:
            found.append(await batch.wait())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await until_locks(window, 2)
            with nobody_may_connect(window):
                finish(window, ref.id, state=5, error="no")
                window.run(
                    "UPDATE batch SET finished_at = now(), total = 1, completed = 0, dead = 1, cancelled = 0, removed = 0"
                )
        assert [failure.job_id for failure in found[0].failures] == [ref.id]


async def test_a_forged_notification_ends_no_wait(dsn: str, window: Window, never_polls: None) -> None:
    channel = window.value("SELECT 'end_' || md5('pulse')")
    async with open_client(dsn) as client:
        ref = await client.enqueue(add, 1)
        looks: list[int] = []
        look = client._finished

        async def counted(job_id: int) -> Any:
            looks.append(job_id)
            return await look(job_id)

        client._finished = counted
        results: list[int] = []

        async def wait() -> None:
            results.append(await ref.result(timeout=20))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await until_locks(window, 2)
            for payload in (
                "x",
                "",
                "-",
                "--1",
                "1e5",
                "\N{FIRE}",
                "9" * 30,
                "\N{ARABIC-INDIC DIGIT ONE}",
                f" {ref.id}",
            ):
                window.run("SELECT pg_notify(%s, %s)", channel, payload)
            for _ in range(300):
                window.run("SELECT pg_notify(%s, %s)", channel, str(ref.id))
                await anyio.lowlevel.checkpoint()
            assert results == []
            assert len(looks) < 60
            finish(window, ref.id, result="5")
        assert results == [5]


async def test_a_pooled_connection_holds_no_locks_and_polls(
    dsn: str, window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What a pooler looks like: the process that answers is not the one the connection was made to.
    window.run("CREATE FUNCTION public.pg_backend_pid() RETURNS int LANGUAGE sql AS 'SELECT -1'")
    real = statement("waiting_place", "pulse")
    assert b"pg_backend_pid()" in real
    fooled = real.replace(b"pg_backend_pid()", b"public.pg_backend_pid()")
    from pulse_trio.store import operations

    monkeypatch.setattr(
        operations, "statement", lambda name, schema: fooled if name == "waiting_place" else statement(name, schema)
    )
    async with open_client(dsn) as client:
        ref = await client.enqueue(add, 1)
        results: list[int] = []

        async def wait() -> None:
            results.append(await ref.result(timeout=20))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.sleep(0.1)
            assert window.value(ENDS_WAITED_FOR) == 0
            finish(window, ref.id, result="8")
        assert results == [8]


async def test_the_callers_exception_leaves_the_client_as_it_is(dsn: str, window: Window) -> None:
    async def fail() -> None:
        async with open_client(dsn) as client:
            with pytest.raises(TimeoutError):
                await (await client.enqueue(add, 1)).wait(0.01)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()


# The workers' side


@on_trio
@pytest.mark.parametrize("how", ["complete_and_claim", "settle", "unlocked", "dead", "cancelled", "rescued"])
async def test_every_way_to_end_tells_who_waits_and_nobody_else(how: str, dsn: str, window: Window) -> None:
    ours, other, back = (window.enqueue(max_attempts=1, kind=kind) for kind in ("ours", "other", "back"))
    with psycopg.connect(dsn, autocommit=True) as waiter:
        channel = "end_" + window.value("SELECT md5('pulse')")
        waiter.execute(f"LISTEN {channel}".encode())
        async with open_store(dsn) as store:
            claims = await claim(store, "default", 2)
            returned = await claim_one(store)
            assert (returned.id, [c.id for c in claims]) == (back, [ours, other])
            waiter.execute(statement("hold_waits", "pulse"), {"names": f'{{" waits"," wait {ours}"," wait {back}"}}'})
            if how == "complete_and_claim":
                await store.complete_and_claim(0, [], [end(c) for c in claims])
            elif how == "settle":
                await store.settle([end(c) for c in claims])
            elif how == "unlocked":
                async with store.links.settles.using() as connection:
                    await store.reports._writer.complete_unlocked(connection, [end(c) for c in claims])
            elif how == "rescued":
                # Alone, or the attempt would be given back.
                await store.settle([end(claims[1]), end(returned, "snoozed", delay=60.0)])
                window.expire(ours)
                assert await store.rescue() == (0, 1)
            else:
                await store.settle([end(c, "discarded" if how == "dead" else "cancelled") for c in claims])
            await store.settle([end(returned, "snoozed", delay=60.0)])
            assert [n.payload for n in waiter.notifies(timeout=0.5)] == [str(ours)]
            # Whoever stops waiting is told no more.
            waiter.execute(statement("drop_waits", "pulse"), {"names": f'{{" waits"," wait {ours}"," wait {back}"}}'})
            window.make_due(back)
            await store.complete_and_claim(0, [], [end(await claim_one(store))])
            assert list(waiter.notifies(timeout=0.2)) == []
    assert window.state(back) == "completed"


@on_trio
async def test_while_nobody_waits_nothing_is_notified_and_no_id_is_asked_about(dsn: str, window: Window) -> None:
    window.enqueue_many(20)
    with psycopg.connect(dsn, autocommit=True) as listener:
        listener.execute("LISTEN end_" + window.value("SELECT md5('pulse')"))
        async with open_store(dsn) as store:
            await store.complete_and_claim(0, [], [end(c) for c in await claim(store)])
            async with store.links.claims.using() as connection:
                cursor = await connection.execute("SELECT pulse.tell_end('{1,2,3}'), pulse.tell_end(NULL)")
                assert await cursor.fetchone() == (0, 0)
        assert list(listener.notifies(timeout=0.2)) == []


@on_trio
@pytest.mark.parametrize("schema", ["with space", "q'uote", "ü" * 31])
async def test_any_schema_name_makes_a_channel(schema: str, databases: Any) -> None:
    from pulse_trio.migrate import migrate_sync

    with databases.empty() as dsn:
        migrate_sync(dsn, schema)
        async with open_client(dsn, schema=schema) as client, open_store(dsn, schema=schema) as store:
            results: list[int] = []
            ref = await client.enqueue(add, 1)

            async def wait() -> None:
                results.append(await ref.result(timeout=20))

            with Window(dsn, schema=schema) as window:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(wait)
                    await until_locks(window, 2)
                    await store.settle([end(await claim_one(store), result="3")])
    assert results == [3]


# Without an event loop


def test_a_script_waits_by_asking(dsn: str, window: Window) -> None:
    client = SyncClient(dsn)
    done = client.enqueue(add, 1)
    with pytest.raises(TimeoutError, match=r"within 0\.05 s"):
        client.wait(done.id, timeout=0.05)
    finish(window, done.id, result="3")
    assert client.result(done.id, timeout=5) == 3
    dead = client.enqueue(add, 1)
    finish(window, dead.id, state=5, error="no")
    with pytest.raises(JobFailed, match="is dead after 1 attempt"):
        client.result(dead.id)


@contextmanager
def locked(dsn: str, table: str = "pulse.job") -> Generator[None]:
    """Nobody can read that table in the block, for ten seconds at most."""
    with psycopg.connect(dsn) as connection:
        connection.execute("SET LOCAL idle_in_transaction_session_timeout = '10s'")
        connection.execute(SQL("LOCK TABLE {} IN ACCESS EXCLUSIVE MODE").format(Identifier(*table.split("."))))
        yield
        connection.rollback()


WAITS_FOR_A_LOCK = "SELECT count(*) FROM pg_locks WHERE relation = 'pulse.job'::regclass AND NOT granted"


@pytest.mark.parametrize("whose", ["own", "callers"])
@pytest.mark.parametrize("seconds", [0, 0.2])
def test_a_scripts_wait_is_over_in_time_while_its_statement_waits_in_the_server(
    dsn: str, window: Window, whose: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took as long as the lock, and said to look at the job."""
    monkeypatch.setattr("pulse_trio.client.sync._LEAST", 0.2)
    with psycopg.connect(dsn, autocommit=True) as connection:
        client = SyncClient(dsn if whose == "own" else connection)
        done = client.enqueue(add, 1)
        with locked(dsn):
            with pytest.raises(TimeoutError, match=rf"within {seconds} s\. The database had not answered by then\."):
                client.wait(done.id, timeout=seconds)
            # Nothing is left behind in the server.
            assert any(not window.value(WAITS_FOR_A_LOCK) for _ in range(5000))
        with pytest.raises(TimeoutError, match="What it waits for"):
            client.wait(done.id, timeout=seconds)


@pytest.mark.parametrize("anyio_backend", ["trio"])  # of the proxy
@pytest.mark.parametrize("when", ["connecting", "reading"])
async def test_a_scripts_wait_is_over_in_time_when_the_network_swallows_the_answer(
    dsn: str, window: Window, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited until TCP gave up."""
    monkeypatch.setattr("pulse_trio.client.sync._LEAST", 0.2)
    async with open_proxy(dsn) as proxy:
        client = SyncClient(proxy.dsn)
        done = await anyio.to_thread.run_sync(lambda: client.enqueue(add, 1))

        async def hold() -> None:
            while when == "reading" and not window.value(WAITS_FOR_A_LOCK):  # noqa: ASYNC110 -- a lock tells nobody
                await anyio.sleep(0.01)
            proxy.hold()

        with locked(dsn):
            if when == "connecting":
                await hold()
            async with anyio.create_task_group() as tasks:
                if when == "reading":
                    tasks.start_soon(hold)
                said = r"within 2 s\. The database had not answered by then\."
                with anyio.fail_after(9), pytest.raises(TimeoutError, match=said):
                    await anyio.to_thread.run_sync(client.wait, done.id, 2, abandon_on_cancel=True)
        proxy.forward()


@pytest.mark.parametrize("anyio_backend", ["trio"])  # of the proxy
async def test_a_scripts_wait_that_is_over_says_that_the_database_was_away(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_proxy(dsn) as proxy:
        client = SyncClient(proxy.dsn)
        done = await anyio.to_thread.run_sync(lambda: client.enqueue(add, 1))
        monkeypatch.setattr("pulse_trio.client.sync.time.sleep", lambda _: proxy.refuse())
        with pytest.raises(TimeoutError, match=r"within 0\.5 s\. The database could not be reached: Cannot connect"):
            await anyio.to_thread.run_sync(client.wait, done.id, 0.5)


def test_a_script_asks_after_10_ms_and_then_ever_more_seldom_to_every_half_second(
    dsn: str, window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = SyncClient(dsn)
    ref = client.enqueue(add, 1)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 9:
            finish(window, ref.id, result="3")

    monkeypatch.setattr("pulse_trio.client.sync.time.sleep", sleep)
    assert client.result(ref.id) == 3
    assert slept == pytest.approx([0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.5, 0.5])


def test_a_script_waits_through_an_outage_that_begins_after_its_first_look(
    dsn: str, window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = SyncClient(dsn)
    done = client.enqueue(add, 1)
    with nobody_may_connect(window), pytest.raises(DatabaseUnavailable):
        client.wait(done.id)
    outage = ExitStack()
    pauses = iter([lambda: outage.enter_context(nobody_may_connect(window)), outage.close])

    def instead_of_sleeping(seconds: float) -> None:
        if (act := next(pauses, None)) is not None:
            act()
        else:
            finish(window, done.id, result="3")

    monkeypatch.setattr("pulse_trio.client.sync.time.sleep", instead_of_sleeping)
    assert client.result(done.id) == 3


def test_a_script_does_not_wait_inside_its_own_transaction(dsn: str) -> None:
    with psycopg.connect(dsn) as connection:
        done = SyncClient(connection).enqueue(add, 1)
        with pytest.raises(UsageError, match="inside a transaction"):
            SyncClient(connection).wait(done.id)
    with psycopg.connect(dsn, autocommit=True) as connection:
        with connection.transaction(), pytest.raises(UsageError, match="inside a transaction"):
            SyncClient(connection).wait(done.id)
        with pytest.raises(TimeoutError):
            SyncClient(connection).wait(done.id, timeout=0)


@pytest.mark.parametrize("anyio_backend", ["trio"])  # of the proxy
async def test_an_enqueue_whose_answer_is_lost_does_not_say_that_it_was_not_done(dsn: str, window: Window) -> None:
    async with open_proxy(dsn) as proxy, open_client(proxy.dsn) as client:
        await client.enqueue(add, 1)  # the connection is open
        proxy.to_client.hold()

        async def cut_when_it_is_written() -> None:
            while window.value("SELECT count(*) FROM pulse.job") < 2:
                await anyio.lowlevel.checkpoint()
            proxy.cut()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cut_when_it_is_written)
            with pytest.raises(
                DatabaseUnavailable, match="The connection was lost, and what was asked for may have been"
            ):
                await client.enqueue(add, 2)
