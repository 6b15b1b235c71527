"""Handlers that nobody can end, and child processes, under real workers."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest
import trio

from support.processes import is_running
from support.workers import RUN, enqueue, rows, settled, until

if TYPE_CHECKING:
    from pathlib import Path

    from support.processes import Processes

APP = """
import os
from pathlib import Path

import trio

from pulse_trio import Handlers

handlers = Handlers()


@handlers.job
async def swallows(folder: str) -> str:
    Path(folder, "began").touch()
    while True:
        try:
            await trio.sleep(3600)
        except trio.Cancelled:
            pass


@handlers.job
async def who() -> int:
    return os.getpid()


@handlers.job(runs="process")
def busy(folder: str) -> None:
    Path(folder, "pid.new").write_text(str(os.getpid()))
    Path(folder, "pid.new").rename(Path(folder, "pid"))
    # One C function that keeps the interpreter's lock for hours.
    sum(range(10**13))
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(APP)
    return tmp_path


async def there(path: Path) -> None:
    with trio.fail_after(20):
        while not path.exists():  # noqa: ASYNC110, ASYNC240 -- a file tells nobody
            await trio.sleep(0.01)


@pytest.mark.parametrize("count", [1, 2])
async def test_the_process_of_a_handler_that_swallows_its_cancellation_is_replaced(
    count: int, dsn: str, processes: Processes, app: Path
) -> None:
    (stuck,) = enqueue(dsn, "swallows", folder=str(app))
    worker = await processes.pulse_trio(*RUN, f"--dsn={dsn}", f"--processes={count}")
    await there(app / "began")
    rows(dsn, "SELECT pulse.cancel(%(id)s)", {"id": stuck})
    await worker.line(rf"job {stuck} \(swallows\) has not ended .* replacing the process")
    # With one process the very same process begins anew; with two the supervisor starts another at once.
    assert (await settled(dsn, stuck))[0] == "cancelled"
    assert rows(dsn, "SELECT attempt, outcome FROM pulse.attempts WHERE job_id = %(id)s", {"id": stuck}) == [
        (1, "cancelled")
    ]
    (after,) = enqueue(dsn, "who")
    state, attempt, pid = await settled(dsn, after)
    assert (state, attempt) == ("completed", 1)
    if count == 1:
        assert pid == worker.pid
    worker.send(signal.SIGTERM)
    assert await worker.ended() == 0


async def test_a_child_process_dies_with_its_worker_even_in_a_c_function(
    dsn: str, processes: Processes, app: Path
) -> None:
    enqueue(dsn, "busy", folder=str(app))
    worker = await processes.pulse_trio(*RUN, f"--dsn={dsn}")
    await there(app / "pid")
    pid = int((app / "pid").read_text())
    # It takes a core, and the worker's beats go on.
    await until(dsn, "SELECT 1 FROM pulse.jobs WHERE lease_until > started_at + interval '7 s'")
    worker.kill()
    with trio.fail_after(20):
        while is_running(pid):  # noqa: ASYNC110 -- another process's end
            await trio.sleep(0.05)
