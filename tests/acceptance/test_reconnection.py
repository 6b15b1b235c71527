"""A database that is absent, goes away, is read-only for a while, or comes back as another one."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, LiteralString

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from psycopg.sql import SQL, Identifier

from pulse_trio import SyncClient
from support.sink import Sink, open_sink
from support.workers import enqueue, rows, settled, until, worker

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from pulse_trio.testing.faults.processes import Processes
    from pulse_trio.testing.faults.proxy import Proxy

LONG = ["--lease=60", "--heartbeat=2"]
"""A lease that outlives what is tried."""
OURS = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'pulse-trio %%'"


@pytest.fixture
async def sink(tmp_path: Path) -> AsyncGenerator[Sink]:
    async with open_sink(tmp_path) as sink:
        yield sink


class Owner:
    """Changes a database from outside of it."""

    def __init__(self, server_dsn: str, dsn: str) -> None:
        self._server_dsn = server_dsn
        self.name = str(conninfo_to_dict(dsn)["dbname"])

    def run(self, statement: LiteralString, *names: str) -> None:
        """A statement with the names of databases."""
        with psycopg.connect(self._server_dsn, autocommit=True) as connection:
            connection.execute(SQL(statement).format(*map(Identifier, names)))

    def read_only(self, *, on: bool) -> None:
        """For every connection made from now on."""
        self.run(f"ALTER DATABASE {{}} SET default_transaction_read_only = {'on' if on else 'off'}", self.name)

    def end_connections(self) -> None:
        """Ends every worker's connection to the database."""
        with psycopg.connect(self._server_dsn, autocommit=True) as connection:
            connection.execute(f"{OURS} AND datname = %s", [self.name])


@pytest.fixture
def owner(server_dsn: str, dsn: str) -> Owner:
    return Owner(server_dsn, dsn)


@pytest.mark.parametrize("count", [1, 2])
async def test_a_database_that_comes_late_is_waited_for(
    count: int, dsn: str, processes: Processes, sink: Sink, proxy: Proxy
) -> None:
    (job_id,) = enqueue(dsn)
    proxy.refuse()
    running = await worker(processes, proxy.dsn, f"--processes={count}")
    await running.line("waiting for the database, up to 30 s")
    proxy.forward()
    sink.let_go()
    assert await settled(dsn, job_id) == ("completed", 1, "attempt 1")
    running.send(signal.SIGTERM)
    assert await running.ended() == 0, running.report()


async def test_a_database_that_takes_no_writes_yet_is_waited_for(
    dsn: str, processes: Processes, sink: Sink, owner: Owner
) -> None:
    (job_id,) = enqueue(dsn)
    owner.read_only(on=True)
    running = await worker(processes, dsn)
    await running.line("waiting for the database, .*: the database is read-only")
    owner.read_only(on=False)
    sink.let_go()
    assert await settled(dsn, job_id) == ("completed", 1, "attempt 1")
    running.send(signal.SIGTERM)
    assert await running.ended() == 0, running.report()


@pytest.mark.parametrize("count", [1, 2])
async def test_running_jobs_live_through_an_outage_shorter_than_their_lease(
    count: int, dsn: str, processes: Processes, sink: Sink, proxy: Proxy
) -> None:
    ids = enqueue(dsn, count=4)
    running = await worker(processes, proxy.dsn, f"--processes={count}", *LONG)
    await sink.until("start", count=4)
    proxy.refuse()
    proxy.cut()
    await running.line(r"database lost \(claimer\)")
    # What they end with meanwhile is kept until it can be told.
    sink.let_go(lambda start: start.job in ids[:2])
    await sink.until("end", count=2)
    proxy.forward()
    await running.line(r"database found again \(claimer\)")
    sink.let_go()
    for job_id in ids:
        assert await settled(dsn, job_id) == ("completed", 1, "attempt 1")
    (after,) = enqueue(dsn)
    assert await settled(dsn, after) == ("completed", 1, "attempt 1")
    running.send(signal.SIGTERM)
    assert await running.ended() == 0, running.report()


async def test_running_jobs_live_through_a_time_without_writes(
    dsn: str, processes: Processes, sink: Sink, owner: Owner
) -> None:
    ids = enqueue(dsn, count=2)
    running = await worker(processes, dsn, *LONG)
    await sink.until("start", count=2)
    owner.read_only(on=True)
    owner.end_connections()
    await running.line(r"database lost \(claimer\)")
    sink.let_go(lambda start: start.job == ids[0])
    await sink.until("end")
    owner.read_only(on=False)
    await running.line(r"database found again \(claimer\)")
    sink.let_go()
    for job_id in ids:
        assert await settled(dsn, job_id) == ("completed", 1, "attempt 1")
    (after,) = enqueue(dsn)
    assert await settled(dsn, after) == ("completed", 1, "attempt 1")
    running.send(signal.SIGTERM)
    assert await running.ended() == 0, running.report()


@pytest.mark.parametrize("count", [1, 2])
async def test_a_copy_that_takes_the_databases_place_knows_no_session_and_is_worked_on_all_the_same(
    count: int, dsn: str, processes: Processes, sink: Sink, proxy: Proxy, owner: Owner
) -> None:
    # What a restored backup is: the job stands in it as it was before its claim.
    # On a connection that is closed when it has been written: a database that somebody uses cannot be copied.
    job_id = SyncClient(dsn).enqueue("held", max_attempts=5).id
    copy, gone = f"{owner.name}_copy", f"{owner.name}_gone"
    owner.run("CREATE DATABASE {} TEMPLATE {}", copy, owner.name)
    running = await worker(processes, proxy.dsn, f"--processes={count}", *LONG)
    (first,) = await sink.until("start")
    proxy.refuse()
    proxy.cut()
    owner.end_connections()
    try:
        owner.run("ALTER DATABASE {} RENAME TO {}", owner.name, gone)
        owner.run("ALTER DATABASE {} RENAME TO {}", copy, owner.name)
        proxy.forward()
        # The same attempt once more, as far as its number goes: its session tells the two apart.
        (cancelled,) = await sink.until("cancelled")
        assert cancelled.reason == "fence-lost"
        starts = await sink.until("start", attempt=1, count=2)
        sink.let_go(lambda start: start.at > first.at)
        assert await settled(dsn, job_id) == ("completed", 1, "attempt 1")
        assert [start.job for start in starts] == [job_id] * 2
        assert len(sink.all("end")) == 1
        # The copy knows the new sessions.
        assert await until(dsn, "SELECT 1 FROM pulse.workers WHERE state = 'running'")
        assert rows(dsn, "SELECT outcome FROM pulse.attempts") == [("completed",)]
        running.send(signal.SIGTERM)
        assert await running.ended() == 0, running.report()
    finally:
        owner.end_connections()
        owner.run("DROP DATABASE IF EXISTS {} WITH (FORCE)", gone)
        owner.run("DROP DATABASE IF EXISTS {} WITH (FORCE)", copy)
