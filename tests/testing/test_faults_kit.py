"""`pulse_trio.testing.faults`, as a user's own acceptance tests use it."""

from __future__ import annotations

import signal
from pathlib import Path

import psycopg
import pytest
import trio

from pulse_trio import open_client
from pulse_trio.testing.faults import (
    children_of,
    is_running,
    open_processes,
    open_proxy,
    restartable_server,
    send,
)

APP = """
import trio
from pulse_trio import Handlers, Job

handlers = Handlers()


@handlers.job(max_attempts=3)
async def slow(job: Job) -> int:
    print("begun", job.attempt, flush=True)
    if job.attempt == 1:
        await trio.sleep_forever()
    return job.attempt
"""
QUICK = ("--lease", "3", "--heartbeat", "1", "--watchdog", "0.2", "--cleanup", "0.1", "--poll", "0.2")


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(APP)
    return tmp_path


async def test_a_job_whose_worker_is_killed_is_done_by_the_restarted_one(app: Path, dsn: str) -> None:
    async with open_processes(app) as processes, open_client(dsn) as client:
        worker = await processes.worker("app:handlers", dsn, *QUICK)
        ref = await client.enqueue("slow", {}, max_attempts=3)
        await worker.line("begun 1")
        worker.kill()
        assert await worker.ended() == -9
        again = await processes.restart(worker)
        await again.line("started: all queues")
        with trio.fail_after(30):
            assert await ref.result() == 2


async def test_a_stopped_worker_loses_its_job_and_its_late_report_is_refused(app: Path, dsn: str) -> None:
    async with open_processes(app) as processes, open_client(dsn) as client:
        stopped = await processes.worker("app:handlers", dsn, *QUICK)
        ref = await client.enqueue("slow", {}, max_attempts=3)
        await stopped.line("begun 1")
        stopped.stop()
        await processes.worker("app:handlers", dsn, *QUICK)
        with trio.fail_after(30):
            assert await ref.result() == 2
        stopped.go_on()
        stopped.terminate()
        assert await stopped.ended() == 0
        assert (await client.job(ref.id)).attempt == 2


async def test_a_worker_that_does_not_start_says_why(tmp_path: Path, dsn: str) -> None:
    async with open_processes(tmp_path) as processes:
        with pytest.raises(AssertionError, match="there_is_no_such_module"):
            await processes.worker("there_is_no_such_module:handlers", dsn)


async def test_a_worker_goes_on_when_its_network_is_cut_and_refused(app: Path, dsn: str) -> None:
    async with open_processes(app) as processes, open_proxy(dsn) as proxy, open_client(dsn) as client:
        worker = await processes.worker("app:handlers", proxy.dsn, *QUICK)
        ref = await client.enqueue("slow", {}, max_attempts=3)
        await worker.line("begun 1")
        # Nothing gets through until the lease is over: the handler is cancelled, and the job is somebody else's.
        proxy.refuse()
        proxy.cut()
        await proxy.connected(0)
        proxy.forward()
        with trio.fail_after(40):
            await client.cancel(ref.id, wait=True)
        assert (await client.job(ref.id)).state == "cancelled"


async def test_a_killed_child_of_a_supervisor_is_replaced(app: Path, dsn: str) -> None:
    async with open_processes(app) as processes:
        supervisor = await processes.pulse_trio("run", "app:handlers", "--processes=2", env={"PULSE_TRIO_DSN": dsn})
        for _ in range(2):
            await supervisor.line(r"worker \S+ started")
        child = (await trio.to_thread.run_sync(children_of, supervisor.pid))[-1]
        send(child, signal.SIGKILL)
        await supervisor.line(r"worker \S+ started")
        supervisor.terminate()
        await supervisor.ended()
    assert not is_running(child)


def test_a_server_crashes_and_restarts_with_what_was_committed(tmp_path: Path) -> None:
    tmp_path.chmod(0o711)
    for folder in tmp_path.parents:
        if folder.stat().st_uid == tmp_path.stat().st_uid and folder != Path("/tmp"):  # noqa: S108 -- pytest's own folders
            folder.chmod(folder.stat().st_mode | 0o011)
    with restartable_server(tmp_path / "pg") as server:
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            connection.execute("CREATE TABLE kept AS SELECT 1 AS one")
            server.crash()
            with pytest.raises(psycopg.OperationalError):
                connection.execute("SELECT 1")
        with psycopg.connect(server.dsn) as connection:
            assert connection.execute("SELECT one FROM kept").fetchone() == (1,)
        server.restart()
        with psycopg.connect(server.dsn) as connection:
            assert connection.execute("SELECT one FROM kept").fetchone() == (1,)
