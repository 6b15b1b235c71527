"""A waiter, which a web application is: it enqueues, waits, has results, and sees no arguments."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg.errors import InsufficientPrivilege

from pulse_trio import Handlers, Job, JobFailed, SyncClient, UsageError, Worker, open_client
from support.stores import Window

if TYPE_CHECKING:
    from pulse_trio.testing.faults.processes import Processes
    from support.logins import Logins


def app() -> Handlers:
    handlers = Handlers()

    @handlers.job
    async def double(n: int) -> int:
        return 2 * n

    @handlers.job(max_attempts=1)
    async def failing() -> None:
        raise ValueError("no such address")

    @handlers.job
    async def after() -> str:
        return "called"

    return handlers


async def test_a_waiter_enqueues_waits_and_has_results_errors_and_batches(logins: Logins) -> None:
    handlers = app()
    async with open_client(logins.as_("waiter"), handlers=handlers) as client:
        one = await client.enqueue("double", {"n": 4})
        failed = await client.enqueue("failing")
        async with client.batch(name="both", on_complete=handlers["after"].request()) as batch:
            await batch.enqueue("double", {"n": 1})
            await batch.enqueue_many(handlers["double"].request(n) for n in range(12))
            await batch.enqueue("failing")
        await Worker(handlers, logins.as_("worker"), burst=True).run()
        assert await one.result(timeout=20) == 8
        assert await one.status() == "completed"
        with pytest.raises(JobFailed, match="no such address"):
            await failed.result(timeout=20)
        result = await batch.wait(timeout=20)
        assert (result.status.completed, result.status.dead) == (13, 1)
        assert result.status.callback_job_id is not None
        assert (await client.wait(result.status.callback_job_id, timeout=20)).result == "called"
        assert (await client.job(one.id)).args == {}
        async with client._connection() as connection, connection.transaction():
            inside = await client.using(connection).enqueue("double", {"n": 5})
            assert (await client.using(connection).job(inside.id)).state == "available"
    sync = SyncClient(logins.as_("waiter"))
    assert (sync.job(one.id).args, sync.job(one.id).result, sync.result(one.id)) == ({}, 8, 8)


DENIED = [
    "SELECT meta FROM jobs", "SELECT options FROM job", "SELECT args FROM jobs",
    "SELECT * FROM jobs", "SELECT args FROM job", "SELECT args FROM job_archive",
    "SELECT result FROM job_archive", "SELECT FROM attempts", "SELECT FROM workers", "SELECT FROM cancellations",
    "SELECT FROM audit", "SELECT FROM schedules", "SELECT FROM queues", "INSERT INTO job (kind) VALUES ('a')",
    "UPDATE job SET args = '{}'", "DELETE FROM job", "DELETE FROM batch", "UPDATE batch SET finished_at = now()",
    "COPY job (kind) FROM STDIN", "SELECT cancel(1)", "SELECT retry_jobs('{1}')", "SELECT delete_jobs('{1}')",
    "SELECT upkeep('1 day')", "SELECT maintain()", "SELECT wake('default')", "INSERT INTO queue (name) VALUES ('q')",
    "INSERT INTO schedule (name, kind, cron) VALUES ('a', 'a', '@daily')", "TRUNCATE job", "CREATE TABLE pulse.mine ()",
    "SELECT answer_stack(1, 1, '')", "INSERT INTO session (id) VALUES (1)",
]  # fmt: skip


@pytest.fixture
def waiter(logins: Logins) -> psycopg.Connection:
    connection = psycopg.connect(logins.as_("waiter"), autocommit=True)
    connection.execute("SET search_path = pulse")
    return connection


def test_a_waiter_sees_tags(waiter: psycopg.Connection) -> None:
    with waiter:
        waiter.execute("SELECT enqueue('double', tags => '{eu}', meta => '{\"order\": 7}')")
        assert waiter.execute("SELECT tags FROM jobs").fetchall() == [(["eu"],)]


def test_a_waiter_may_nothing_else(waiter: psycopg.Connection) -> None:
    with waiter:
        for query in DENIED:
            with pytest.raises(InsufficientPrivilege):
                waiter.execute(query.encode())


def test_what_a_waiter_may_not_do_is_said_with_who_may(logins: Logins) -> None:
    client = SyncClient(logins.as_("waiter"))
    for attempt in (lambda: client.jobs(), lambda: client.cancel(1), lambda: client.queues(), lambda: client.audit()):
        with pytest.raises(UsageError, match=r"permission denied .* pulse-trio grants .*--operator ROLE"):
            attempt()
    with pytest.raises(UsageError, match=r"permission denied .*--waiter ROLE"):
        SyncClient(logins.as_("producer")).job(1)


async def test_an_operator_uses_batches_and_asks_doctor(logins: Logins, processes: Processes) -> None:
    handlers = app()
    async with open_client(logins.as_("operator"), handlers=handlers) as client:
        async with client.batch() as batch:
            await batch.enqueue("double", {"n": 1})
        await Worker(handlers, logins.as_("worker"), burst=True).run()
        assert (await batch.wait(timeout=20)).succeeded
    with Window(logins.dsn) as owner:
        owner.run("SELECT upkeep('7 days')")
    doctor = await processes.command("doctor", "--json", f"--dsn={logins.as_('operator')}")
    await doctor.ended()
    findings = json.loads(doctor.stdout)["findings"]
    # The tests' server runs without autovacuum and without fsync, which are other findings.
    assert {finding["check"] for finding in findings if finding["level"] == "error"} <= {"autovacuum", "durability"}
    (rights,) = [finding for finding in findings if finding["check"] == "rights"]
    assert "cannot see whether the workers' roles have theirs" in rights["what"]


async def test_a_handler_enqueues_with_the_rights_of_its_worker(logins: Logins) -> None:
    """In its fenced transaction, and through a client on the worker's login."""
    handlers = app()
    dsn = logins.as_("worker")

    @handlers.job
    async def parent(job: Job) -> None:
        async with open_client(dsn, handlers=handlers) as client:
            await client.enqueue("double", {"n": 1})
            await client.enqueue_many(handlers["double"].request(n) for n in range(20))
            async with job.transaction() as tx:
                await client.using(tx.connection).enqueue("double", {"n": 3})

    async with open_client(logins.as_("producer"), handlers=handlers) as client:
        await client.enqueue("parent")
    await Worker(handlers, dsn, burst=True).run()
    with Window(logins.dsn) as owner:
        assert owner.value("SELECT count(*) FROM jobs WHERE kind = 'double' AND state = 'completed'") == 22
