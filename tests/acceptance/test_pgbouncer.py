"""Through the real PgBouncer in transaction mode: clients, workers, and the commands; LISTEN through a direct DSN."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from pulse_trio import DatabaseUnavailable, Fixed, Handlers, Job, SyncClient, open_client
from pulse_trio.client import request_by_name
from pulse_trio.observe import DatabaseFound, DatabaseLost, FenceLost, JobsRescued, JobStarted, LeaseUnproven
from support.configured import HOSTILE, set_on_database
from support.embedded_workers import working
from support.pgbouncer import PROGRAM, open_mortal_pgbouncer, open_pgbouncer
from support.stores import Window, claim, open_store
from support.workers import rows, settled, until

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from pulse_trio.testing.faults.processes import Processes

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="needs the program pgbouncer, which is not installed here")

THIS_DATABASE = "database = (SELECT oid FROM pg_database WHERE datname = current_database())"
FAST = {"lease": 6.0, "heartbeat": 2.0, "watchdog": 0.5, "grace": 5.0, "concurrency": 20}


@pytest.fixture
async def pooled(dsn: str) -> AsyncGenerator[str]:
    async with open_pgbouncer(dsn) as pooled:
        yield pooled


@pytest.fixture
def handlers() -> Handlers:
    handlers = Handlers()

    @handlers.job
    async def echo(n: int) -> int:
        return n

    @handlers.job
    async def pay(job: Job, n: int) -> int:
        async with job.transaction() as connection:
            await connection.execute("INSERT INTO public.ledger VALUES (%s)", [n])
        return n

    @handlers.job(max_attempts=3, backoff_base=0.01)
    async def fails_once(job: Job) -> int:
        if job.attempt == 1:
            raise ValueError
        return job.attempt

    @handlers.job
    async def long(seconds: float) -> str:
        await trio.sleep(seconds)
        return "long"

    return handlers


async def test_clients_and_workers_work_through_it_by_polling(dsn: str, pooled: str, handlers: Handlers) -> None:
    with Window(dsn) as window:
        window.run("CREATE TABLE public.ledger (n int)")
    async with working(handlers, pooled, poll=0.2, **FAST) as heard:
        long = await trio.to_thread.run_sync(
            SyncClient(pooled).enqueue, "long", {"seconds": 8.0}
        )  # longer than the lease
        async with open_client(pooled) as client:
            refs = []
            for n in range(30):  # often enough for anybody to want to prepare it
                refs += [await client.enqueue("echo", {"n": n}), await client.enqueue("pay", {"n": n})]
            refs += await client.enqueue_many([request_by_name("echo", {"n": n}) for n in range(500)])
            refs.append(await client.enqueue("fails_once"))
            for ref in refs:
                await ref.result(timeout=40)
            ends = await client.enqueue("long", {"seconds": 3600.0})
            await heard.until(JobStarted, job_id=ends.id)
            await client.cancel(ends.id)
            await until(dsn, f"SELECT FROM pulse.jobs WHERE id = {ends.id} AND state = 'cancelled'")
        assert await settled(dsn, long.id) == ("completed", 1, "long")
        assert rows(dsn, "SELECT count(*), count(DISTINCT n) FROM public.ledger") == [(30, 30)]
        # What is said: that nobody is heard, and what to do.
        assert {lost.loop for lost in heard.of(DatabaseLost)} == {"listener"}
        assert "--direct-dsn" in heard.of(DatabaseLost)[0].error
        assert heard.of(LeaseUnproven) == heard.of(FenceLost) == heard.of(JobsRescued) == []
        # Nothing was left behind on the connections that everybody shares.
        left = "SELECT DISTINCT current_setting('enable_seqscan'), (SELECT count(*) FROM pg_prepared_statements)"
        for _ in range(20):
            assert await trio.to_thread.run_sync(rows, pooled, left) == [("on", 0)]
        assert rows(dsn, f"SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND {THIS_DATABASE}") == [(0,)]


async def test_with_a_direct_dsn_a_notification_starts_a_job_at_once(dsn: str, pooled: str, handlers: Handlers) -> None:
    async with working(handlers, pooled, direct_dsn=dsn, poll=30.0, **FAST) as heard:
        idle = f"SELECT FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock' AND {THIS_DATABASE}"
        client = SyncClient(pooled)
        for n in range(3):
            await until(dsn, idle)
            job_id = (await trio.to_thread.run_sync(client.enqueue, "echo", {"n": n})).id
            assert await settled(dsn, job_id) == ("completed", 1, n)
            waited = "SELECT extract(epoch FROM started_at - created_at)::float8 FROM pulse.jobs WHERE id = %(id)s"
            ((took,),) = rows(dsn, waited, {"id": job_id})
            assert took < 5.0  # far less than the poll
        assert heard.of(DatabaseLost) == []


async def test_with_a_direct_dsn_transactions_that_hold_the_whole_pool_keep_their_leases(dsn: str) -> None:
    """The heartbeats waited in the pooler behind the transactions: all jobs were cancelled and begun again, for ever."""
    handlers, begun, released = Handlers(), list[int](), trio.Event()

    @handlers.job
    async def book(job: Job) -> None:
        async with job.transaction() as tx:
            await tx.execute("SELECT 1")
            begun.append(job.attempt)
            await released.wait()

    brief = FAST | {"lease": 3.0, "heartbeat": 1.0}
    async with open_mortal_pgbouncer(dsn, connections=2) as pooler:
        client = SyncClient(pooler.dsn)
        jobs = [(await trio.to_thread.run_sync(client.enqueue, "book")).id for _ in range(2)]
        async with working(handlers, pooler.dsn, direct_dsn=dsn, **brief) as heard:
            for job_id in jobs:
                await heard.until(JobStarted, job_id=job_id)
            ((over,),) = rows(dsn, "SELECT clock_timestamp() + interval '5 s'")
            await until(dsn, "SELECT WHERE clock_timestamp() > %(over)s", {"over": over})
            released.set()
            for job_id in jobs:
                assert (await settled(dsn, job_id))[:2] == ("completed", 1)
            assert begun == [1, 1]
            assert heard.of(LeaseUnproven) == heard.of(FenceLost) == heard.of(JobsRescued) == []


def test_a_client_under_asyncio_works_through_it_too(dsn: str, handlers: Handlers) -> None:
    import asyncio

    async def enqueue(pooled: str) -> None:
        async with open_client(pooled) as client:
            for n in range(20):
                await client.enqueue("echo", {"n": n})

    async def main() -> None:
        async with open_pgbouncer(dsn) as pooled:
            await trio.to_thread.run_sync(lambda: asyncio.run(enqueue(pooled)))

    trio.run(main)
    assert rows(dsn, "SELECT count(*) FROM pulse.job") == [(20,)]


async def test_a_worker_that_comes_to_another_server_through_it_has_another_session(dsn: str, pooled: str) -> None:
    with Window(dsn) as window:
        window.enqueue_many(2)
        async with open_store(pooled) as store:
            (first,) = await claim(store, limit=1)
            store.sessions._server = "the primary that was"
            (second,) = await claim(store, limit=1)
            assert first.session != second.session


async def test_the_commands_work_through_it_and_doctor_says_what_it_means(
    dsn: str, pooled: str, processes: Processes
) -> None:
    await processes.run("enqueue", "echo", '{"n": 1}', f"--dsn={pooled}")
    assert "echo" in await processes.run("jobs", "list", f"--dsn={pooled}")
    refused = await processes.command("migrate", f"--dsn={pooled}")
    assert await refused.ended() == 2
    assert "pooler" in refused.stderr
    found = await processes.run("doctor", f"--dsn={pooled}", code=1)  # no worker runs, and a job waits
    assert "pooler" in found
    assert "--direct-dsn" in found
    assert "pooler" not in await processes.run("doctor", f"--dsn={dsn}", code=1)


@pytest.mark.parametrize("name", ["array_nulls", "search_path", "DateStyle", "all"])
async def test_a_worker_has_its_own_settings_through_it_from_its_first_statement_on(
    name: str, dsn: str, pooled: str, handlers: Handlers
) -> None:
    """It did not start, or said that a right was missing: what it asks first ran with the database's settings."""

    @handlers.cron(every=1, name="often")
    async def often() -> None: ...

    with Window(dsn) as window:
        window.run("CREATE TABLE public.ledger (n int)")
        window.run("CREATE SCHEMA evil; CREATE TABLE evil.pg_database (x int); CREATE TABLE evil.pg_class (x int)")
        for of in ("text", "bool", "int4"):
            window.run(f"CREATE DOMAIN evil.{of} AS pg_catalog.date")
    set_on_database(dsn, HOSTILE if name == "all" else {name: HOSTILE[name]})
    # A client's connections are treated like the user's own where they go through a pooler: this one does not.
    async with open_client(dsn) as client, working(handlers, pooled, poll=0.2, **FAST) as heard:
        refs = [await client.enqueue(kind, {"n": n}) for n, kind in enumerate(["echo", "pay", "echo"])]
        async with client.batch() as batch:
            await batch.enqueue("echo", {"n": 9})
        for ref in refs:
            await ref.result(timeout=40)
        with trio.fail_after(40):
            await batch.wait()
            while not await client.jobs(kind="often", state="completed"):  # noqa: ASYNC110 -- the schedule's own time
                await trio.sleep(0.05)
        assert {lost.loop for lost in heard.of(DatabaseLost)} <= {"listener"}


@pytest.mark.parametrize("setting", ["idle_in_transaction_session_timeout", "transaction_timeout"])
async def test_a_transaction_that_stands_for_longer_than_its_role_may_names_the_setting_through_it_too(
    setting: str, dsn: str, pooled: str
) -> None:
    """It was PostgreSQL's own error: there the completion goes ahead of COMMIT."""
    handlers = Handlers()

    @handlers.job(max_attempts=1)
    async def pays(job: Job) -> None:
        async with job.transaction() as tx:
            await tx.execute("SELECT 1")
            await trio.lowlevel.wait_readable(tx.connection.fileno())

    with Window(dsn) as window:
        if setting == "transaction_timeout" and window.connection.info.server_version < 170_000:
            pytest.skip("PostgreSQL 17 has brought it")
        window.run(f'ALTER DATABASE "{window.connection.info.dbname}" SET {setting} = 300')
    job_id = (await trio.to_thread.run_sync(SyncClient(pooled).enqueue, pays)).id
    async with working(handlers, pooled, poll=0.2, **FAST):
        assert (await settled(dsn, job_id))[0] == "dead"
    ((said,),) = rows(dsn, "SELECT error FROM pulse.jobs WHERE id = %(id)s", {"id": job_id})
    assert said.splitlines()[0] == (
        f"DatabaseUnavailable: the transaction of job {job_id} was rolled back: the server ended it, and its connection, "
        f"before COMMIT, by the setting {setting}: it stood for too long"
    )


@pytest.mark.parametrize("mode", ["transaction", "session"])
async def test_a_pooler_that_is_killed_and_started_again_under_running_jobs_costs_no_job_and_doubles_none(
    mode: str, dsn: str, handlers: Handlers
) -> None:
    released, acknowledged = trio.Event(), dict[int, int]()

    @handlers.job
    async def held(job: Job, n: int) -> int:
        await released.wait()
        async with job.transaction() as tx:
            tx.result = n
            await tx.execute("INSERT INTO public.ledger VALUES (%s)", [n])
        return n

    # Soon again: with the default policy, one that each kill met waits for longer than this test does.
    @handlers.job(retry=Fixed(0.2))
    async def slow_to_pay(job: Job, n: int) -> None:
        async with job.transaction() as tx:
            await tx.execute("INSERT INTO public.ledger VALUES (%s)", [n])
            await tx.execute("SELECT pg_sleep(0.02)")

    with Window(dsn) as window:
        window.run("CREATE TABLE public.ledger (n int)")
    # A claim whose answer the kill cut off is rescued when its lease is over: well within the time that this waits at its end.
    calm = {"lease": 15.0, "heartbeat": 2.0, "watchdog": 0.5, "grace": 5.0, "concurrency": 20, "poll": 0.2}
    async with (
        open_mortal_pgbouncer(dsn, mode) as pooler,
        open_client(pooler.dsn) as client,
        working(handlers, pooler.dsn, **calm) as heard,
    ):
        running = [await client.enqueue("held", {"n": -n}) for n in range(1, 4)]
        for ref in running:
            await heard.until(JobStarted, job_id=ref.id)

        async def produce(count: int) -> None:
            wanted, n = len(acknowledged) + count, max(acknowledged.values(), default=0)
            while len(acknowledged) < wanted:
                n += 1
                try:
                    # A transaction that was cut off may cost an attempt.
                    ref = await client.enqueue("slow_to_pay", {"n": n}, max_attempts=10)
                except DatabaseUnavailable:
                    await trio.sleep(0.05)
                else:
                    acknowledged[ref.id] = n

        for _ in range(3):
            await produce(10)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(produce, 10)
                lost = len(heard.of(DatabaseLost))
                await pooler.kill()
                with trio.fail_after(40):
                    while len(heard.of(DatabaseLost)) == lost:  # noqa: ASYNC110 -- any of them
                        await trio.sleep(0.02)
                await pooler.start()
        await heard.until(DatabaseFound)
        released.set()
        for ref in running:
            assert (await settled(dsn, ref.id))[:2] == ("completed", 1)
        await until(dsn, "SELECT WHERE NOT EXISTS (SELECT FROM pulse.jobs WHERE finished_at IS NULL)")
    assert heard.of(FenceLost) == heard.of(LeaseUnproven) == []
    completed = {row[0] for row in rows(dsn, "SELECT id FROM pulse.jobs WHERE state = 'completed'")}
    assert set(acknowledged) <= completed
    paid = [row[0] for row in rows(dsn, "SELECT n FROM public.ledger")]
    assert len(paid) == len(set(paid)) == len(completed)
    assert {*acknowledged.values(), -1, -2, -3} <= set(paid)
