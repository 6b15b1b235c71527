"""What PostgreSQL, or somebody else on it, does to a worker: locks, no connections left, transactions held open, bad rows."""

from __future__ import annotations

import secrets
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psycopg
import pytest
import trio
from psycopg.conninfo import make_conninfo

from pulse_trio import DatabaseUnavailable, Handlers, Job, SyncClient, Worker
from pulse_trio.grants import grant_sync
from pulse_trio.observe import (
    CancellationDelivered,
    DatabaseFound,
    DatabaseLost,
    FenceLost,
    JobEnded,
    JobsRescued,
    JobStarted,
    LeaseUnproven,
)
from support.embedded_workers import working
from support.stores import Window
from support.workers import rows, settled, until

if TYPE_CHECKING:
    from collections.abc import Generator

LEASE, HEARTBEAT, WATCHDOG = 3.0, 1.0, 0.5
FAST = {"lease": LEASE, "heartbeat": HEARTBEAT, "watchdog": WATCHDOG, "cleanup": 0.2, "poll": 1.0, "grace": 5.0}
SLACK = 2.0  # seconds that a loaded machine may take beyond what the settings say


class Gate:
    """Handlers `held` that wait until the test opens."""

    def __init__(self) -> None:
        self.open = trio.Event()
        self.handlers = Handlers()

        @self.handlers.job(max_attempts=5, backoff_base=0.01)
        async def held(job: Job) -> int:
            await self.open.wait()
            return job.attempt

        @self.handlers.job
        async def quick() -> str:
            return "done"


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def window(dsn: str) -> Generator[Window]:
    with Window(dsn) as window:
        yield window


def leases_end(window: Window) -> float:
    """The latest end of any lease, in the server's seconds."""
    return window.value("SELECT extract(epoch FROM max(lease_until))::float8 FROM job WHERE state = 2")


async def test_handlers_that_hold_every_connection_of_theirs_keep_neither_beats_nor_reports_waiting(
    dsn: str, window: Window
) -> None:
    handlers, open_, inside = Handlers(), trio.Event(), 0

    @handlers.job
    async def holds(job: Job) -> None:
        nonlocal inside
        async with job.transaction() as connection:
            await connection.execute("SELECT 1")
            inside += 1
            await open_.wait()

    @handlers.job
    async def quick() -> str:
        return "done"

    client = SyncClient(dsn)
    # More than the worker has connections for them: the last ones wait for a connection all the time.
    held = [client.enqueue("holds").id for _ in range(13)]
    async with working(handlers, dsn, **FAST) as heard:
        with trio.fail_after(40):
            while inside < 10:  # noqa: ASYNC110 -- handlers that count
                await trio.sleep(0.01)
        # Two leases long every one of them is kept by beats...
        begun = leases_end(window)
        await until(
            dsn,
            f"SELECT FROM pulse.job WHERE state = 2 HAVING min(extract(epoch FROM lease_until)) > {begun + 2 * LEASE}",
        )
        # ...and others are claimed, run and reported.
        quick_id = client.enqueue("quick").id
        assert await settled(dsn, quick_id) == ("completed", 1, "done")
        assert inside == 10
        open_.set()
        for job_id in held:
            assert (await settled(dsn, job_id))[:2] == ("completed", 1)
        assert heard.of(LeaseUnproven) == heard.of(FenceLost) == heard.of(JobsRescued) == []


@contextmanager
def limited_role(dsn: str) -> Generator[str]:
    """A worker's role of its own, whose connections can be limited; yields its name."""
    role = f"pulse_trio_limited_{secrets.token_hex(4)}"
    with psycopg.connect(dsn, autocommit=True) as owner:
        owner.execute(f"CREATE ROLE {role} LOGIN".encode())
        grant_sync(dsn, {"worker": role, "producer": role})
        try:
            yield role
        finally:
            owner.execute(f"DROP OWNED BY {role}".encode())
            owner.execute(f"DROP ROLE {role}".encode())


async def test_a_worker_that_gets_no_connection_backs_off_and_its_running_leases_go_on(
    dsn: str, window: Window, gate: Gate
) -> None:
    with limited_role(dsn) as role:
        client = SyncClient(dsn)
        running = client.enqueue("held").id
        async with working(gate.handlers, make_conninfo(dsn, user=role), **FAST) as heard:
            await heard.until(JobStarted, job_id=running)
            # From now on new connections are refused with the very error of a full server (SQLSTATE 53300).
            window.run(f"ALTER ROLE {role} CONNECTION LIMIT 1")
            window.run(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND application_name = 'pulse-trio claims'"
            )
            waiting = client.enqueue("quick").id
            await heard.until(DatabaseLost, loop="claimer")
            begun = leases_end(window)
            await until(
                dsn, f"SELECT FROM pulse.job WHERE id = {running} AND extract(epoch FROM lease_until) > {begun + LEASE}"
            )
            assert window.job(waiting)["attempt"] == 0
            connected = window.run("SELECT application_name FROM pg_stat_activity WHERE datname = current_database()")
            assert "pulse-trio claims" not in {row["application_name"] for row in connected}
            assert heard.of(DatabaseFound) == []
            window.run(f"ALTER ROLE {role} CONNECTION LIMIT -1")
            await heard.until(DatabaseFound, loop="claimer")
            assert await settled(dsn, waiting) == ("completed", 1, "done")
            gate.open.set()
            assert await settled(dsn, running) == ("completed", 1, 1)
        assert heard.of(LeaseUnproven) == heard.of(FenceLost) == heard.of(JobsRescued) == []


@pytest.mark.parametrize("limit", [1, 2, 3])
async def test_a_worker_that_gets_too_few_connections_to_start_leaves_no_session(
    dsn: str, window: Window, gate: Gate, limit: int
) -> None:
    """Its session was there, and nobody ended it: the doctor and each later worker warned of a stale worker."""
    with limited_role(dsn) as role:
        window.run(f"ALTER ROLE {role} CONNECTION LIMIT {limit}")
        with pytest.raises(DatabaseUnavailable, match="too many connections"):
            await Worker(gate.handlers, make_conninfo(dsn, user=role), connect_timeout=0.5, log=False).run()
        left = window.run("SELECT ended_at IS NOT NULL AS ended, draining FROM session")
        assert [row["ended"] for row in left] == [True]


async def test_a_table_locked_for_two_leases_ends_its_handlers_before_anyone_else_and_is_recovered_from(
    dsn: str, window: Window, gate: Gate
) -> None:
    job_id = SyncClient(dsn).enqueue("held").id
    async with working(gate.handlers, dsn, **FAST) as heard:
        await heard.until(JobStarted, job_id=job_id)
        ends = leases_end(window)
        with psycopg.connect(dsn) as other:
            # In a thread: a transaction of the worker's may hold the table, and ends only while Trio's loop turns.
            await trio.to_thread.run_sync(lambda: other.execute("LOCK TABLE pulse.job IN ACCESS EXCLUSIVE MODE"))
            await heard.until(LeaseUnproven, job_id=job_id)
            ((now, nearly),) = other.execute(
                "SELECT extract(epoch FROM clock_timestamp())::float8, extract(epoch FROM max(lease_until))::float8 "
                "FROM pulse.job"
            ).fetchall()
            # Before the lease's end, whichever beat was the last to get through.
            assert ends <= nearly
            assert now < nearly
            await trio.sleep(max(0.0, 2 * LEASE - (LEASE - (nearly - now))))
            other.rollback()
            ((released,),) = rows(dsn, "SELECT extract(epoch FROM clock_timestamp())::float8")
        gate.open.set()
        assert await settled(dsn, job_id) == ("completed", 2, 2)
        ((started,),) = rows(dsn, "SELECT extract(epoch FROM started_at)::float8 FROM pulse.jobs")
        # The backoff between tries of the database is at most 5 s.
        assert started - released < LEASE + WATCHDOG + 5 + SLACK


async def test_a_producers_open_transaction_hides_its_job_and_a_late_commit_starts_it_within_two_seconds(
    dsn: str, window: Window, gate: Gate
) -> None:
    client = SyncClient(dsn)
    with psycopg.connect(dsn) as producer:
        late = client.using(producer).enqueue("quick").id
        async with working(gate.handlers, dsn, **FAST) as heard:
            # Meanwhile others, enqueued later, pass by: the worker's cursor is above the row that is not there yet.
            for _ in range(5):
                assert (await settled(dsn, client.enqueue("quick").id))[0] == "completed"
            assert window.run("SELECT FROM jobs WHERE id = %s", late) == []
            assert late not in {e.job_id for e in heard.of(JobStarted)}
            ((committed,),) = rows(dsn, "SELECT extract(epoch FROM clock_timestamp())::float8")
            producer.commit()
            assert await settled(dsn, late) == ("completed", 1, "done")
    ((started,),) = rows(
        dsn, "SELECT extract(epoch FROM started_at)::float8 FROM pulse.jobs WHERE id = %(id)s", {"id": late}
    )
    assert started - committed < 2.0 + SLACK


async def test_what_sql_enqueued_with_the_wrong_arguments_waits_with_the_reason_and_its_batch_is_unharmed(
    dsn: str, window: Window
) -> None:
    handlers = Handlers()

    @handlers.job
    async def typed(n: int, words: list[str]) -> int:
        return n + len(words)

    wrong = {
        '{"n": "seven", "words": []}': "n",
        '{"n": 1}': "words",
        '{"n": 1, "words": ["a", 2]}': "words",
        '{"n": 1, "words": [], "more": 1}': "more",
        '{"n": 1.5, "words": []}': "n",
        '{"n": null, "words": []}': "n",
    }
    good, bad = [], {}
    for args, names in wrong.items():
        good.append(window.value("""SELECT enqueue('typed', '{"n": 1, "words": ["a"]}')"""))
        bad[window.value("SELECT enqueue('typed', %s::jsonb)", args)] = names
    async with working(handlers, dsn, **FAST) as heard:
        for job_id in good:
            assert await settled(dsn, job_id) == ("completed", 1, 2)
        for job_id, names in bad.items():
            # Left to a worker of another version, which may take them.
            await until(dsn, f"SELECT FROM pulse.job WHERE id = {job_id} AND attempt >= 1 AND state <> 2")
            job = window.job(job_id)
            assert (job["state"], job["max_attempts"] - job["attempt"]) == ("scheduled", 20)
            assert "Arguments do not fit typed(" in job["error"]
            assert names in job["error"]
        # One claim brought them all: there was a batch to be harmed.
        assert {e.attempt for e in heard.of(JobEnded)} == {1}


async def test_a_kind_that_only_the_new_worker_knows_costs_no_budget_on_the_old_one(
    dsn: str, window: Window, gate: Gate
) -> None:
    job_id = window.value("SELECT enqueue('new', max_attempts => 1)")
    async with working(gate.handlers, dsn, **FAST):
        await until(dsn, f"SELECT FROM pulse.job WHERE id = {job_id} AND attempt >= 1 AND state <> 2")
        # The old worker's others go on.
        assert (await settled(dsn, SyncClient(dsn).enqueue("quick").id))[0] == "completed"
        job = window.job(job_id)
        assert job["max_attempts"] - job["attempt"] == 1
        newer = Handlers()

        @newer.job(name="new")
        async def new() -> str:
            return "by the new one"

        window.make_due(job_id)
        async with working(newer, dsn, queues=("default",), **FAST):
            with trio.fail_after(60):
                while window.state(job_id) != "completed":
                    window.make_due(job_id)  # the put-back's delay is not what is tried
                    await trio.sleep(0.1)
    assert window.job(job_id)["result"] == "by the new one"


async def test_a_request_to_cancel_is_heard_as_soon_as_the_listener_is_back(
    dsn: str, window: Window, gate: Gate
) -> None:
    """The connection that reads the request was lost too, and nothing has used it since."""
    client = SyncClient(dsn)
    running = client.enqueue("held").id
    # No beat comes by itself before the test gives up.
    async with working(gate.handlers, dsn, lease=300, heartbeat=100) as heard:
        await heard.until(JobStarted, job_id=running)
        window.run(
            "SELECT pg_terminate_backend(pid, 30000) FROM pg_stat_activity WHERE datname = current_database() "
            "AND application_name IN ('pulse-trio listener', 'pulse-trio beats')"
        )
        await heard.until(DatabaseFound, loop="listener")
        client.cancel(running)
        await heard.until(CancellationDelivered, job_id=running)
        await heard.until(JobEnded, job_id=running)
