"""A worker whose stdout or stderr is closed, full, or read by a program that has gone or never reads goes on as ever.

Each way in which streams are broken is tried on the installed program once: by one process that works, and by one command.
What more there is to it, several processes and other commands, starts as forks do (support/stand_in.py).
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import sysconfig
from collections.abc import Callable
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import pytest
import trio

from pulse_trio import SyncClient
from support.workers import RUN, enqueue, settled, until

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from pulse_trio.testing.faults.processes import Processes, Running
    from support.forking import Forker

Program = Callable[[bool], str]
APP = """
import contextlib
import logging
import os
import sys

import trio

from pulse_trio import Handlers, Job

handlers = Handlers()


@handlers.job
async def says_much(job: Job) -> int:
    for line in range(50):
        logging.getLogger("app").warning("%d %s", line, "x" * 2000)
        await trio.sleep(0)
    return job.attempt


@handlers.job(runs="process")
def says_much_elsewhere() -> str:
    for line in range(50):
        logging.getLogger("app").warning("%d %s", line, "x" * 2000)
    return "said"


@handlers.job
async def standard_files() -> list[str]:
    return [os.readlink(f"/proc/self/fd/{number}") for number in (0, 1, 2)]


@handlers.job
async def prints_to_a_file(seconds: float) -> None:
    # The second of two at a time leaves the first one's file, which is closed, as the program's stdout.
    with open(os.devnull, "w") as file, contextlib.redirect_stdout(file):
        await trio.sleep(seconds)
"""
BROKEN = ["2>&-", "2>/dev/full", ">/dev/full", ">&-", ">&- 2>&-", ">&- 2>&- <&-", ">/dev/full 2>&1"]


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(APP)
    return tmp_path


@pytest.fixture
def program(forker: Forker) -> Program:
    """The path of `pulse-trio`: of the installed one, or of what stands in for it."""
    return lambda installed: f"{sysconfig.get_path('scripts') if installed else forker.stand_ins()}/pulse-trio"


async def run(processes: Processes, program: str, dsn: str, redirected: str, *more: str) -> Running:
    command = shlex.join([program, *RUN, "--verbose", f"--dsn={dsn}", *more])
    return await processes.start("bash", "-c", f"exec {command} {redirected}")


async def works(dsn: str) -> None:
    """Jobs that say more than a pipe holds are completed at their first attempt."""
    for kind, count, result in (("says_much", 4, 1), ("says_much_elsewhere", 1, "said")):
        for job_id in enqueue(dsn, kind, count):
            assert await settled(dsn, job_id) == ("completed", 1, result)


@pytest.mark.parametrize("processes_", [1, 2])
@pytest.mark.parametrize("redirected", BROKEN)
async def test_a_worker_works_and_ends_well_whatever_its_streams_are(
    redirected: str, processes_: int, program: Program, dsn: str, processes: Processes, app: Path
) -> None:
    worker = await run(processes, program(processes_ == 1), dsn, redirected, f"--processes={processes_}")
    await works(dsn)
    (files,) = enqueue(dsn, "standard_files")
    _, _, opened = await settled(dsn, files)
    # No socket has taken the place of a stream that was closed: what writes there would speak to the database.
    assert [name for name in opened if name.startswith(("socket", "anon"))] == []
    worker.send(signal.SIGTERM)
    assert await worker.ended() == 0, worker.report()


async def test_a_worker_whose_handler_has_closed_stdout_ends_well(
    program: Program, dsn: str, processes: Processes, app: Path
) -> None:
    worker = await run(processes, program(False), dsn, "", "--processes=1")
    jobs = [SyncClient(dsn).enqueue("prints_to_a_file", {"seconds": seconds}).id for seconds in (0.5, 1)]
    for job_id in jobs:
        assert await settled(dsn, job_id) == ("completed", 1, None)
    worker.send(signal.SIGTERM)
    assert await worker.ended() == 0, worker.report()


@contextmanager
def fifo(folder: Path) -> Generator[int]:
    """A pipe with a name, and its reading end."""
    os.mkfifo(folder / "pipe")
    end = os.open(folder / "pipe", os.O_RDWR | os.O_NONBLOCK)
    try:
        yield end
    finally:
        with suppress(OSError):
            os.close(end)


def fill(end: int) -> None:
    with suppress(BlockingIOError):
        while True:
            os.write(end, b"x" * 4096)


@pytest.mark.parametrize("processes_", [1, 2])
@pytest.mark.parametrize("redirected", ["2>pipe", ">pipe 2>&1"])
async def test_a_worker_whose_log_nobody_reads_works_and_ends_well(
    redirected: str, processes_: int, program: Program, dsn: str, processes: Processes, app: Path
) -> None:
    with fifo(app) as end:
        fill(end)
        worker = await run(processes, program(processes_ == 1), dsn, redirected, f"--processes={processes_}")
        await works(dsn)
        worker.send(signal.SIGTERM)
        assert await worker.ended() == 0, worker.report()


async def test_a_log_that_is_read_late_says_how_many_lines_it_lacks(
    program: Program, dsn: str, processes: Processes, app: Path
) -> None:
    with fifo(app) as end:
        worker = await run(processes, program(False), dsn, "2>pipe")
        for job_id in enqueue(dsn, "says_much", 20):  # 2 MB
            assert await settled(dsn, job_id) == ("completed", 1, 1)
        heard = b""
        with trio.fail_after(20):
            while b" lines of the log were dropped here, because stderr was not read in time" not in heard:
                await trio.lowlevel.wait_readable(end)
                heard += os.read(end, 65536)
        (left_out,) = re.findall(rb"WARNING (\d+) lines of the log were dropped", heard)
        lines = [line for line in heard.split(b"\n") if b"WARNING app: " in line]
        assert len(lines) + int(left_out) >= 20 * 50
        # None is cut, and none is within another.
        assert {line[-2000:] for line in lines} == {b"x" * 2000}
        assert {line.count(b"WARNING") for line in lines} == {1}
        os.close(end)
        worker.send(signal.SIGTERM)
        assert await worker.ended() == 0, worker.report()


@pytest.mark.parametrize("what", ["jobs list", "jobs list --json", "queues list", "--help"])
async def test_a_command_whose_stdout_is_closed_says_so(
    what: str, program: Program, processes: Processes, dsn: str
) -> None:
    enqueue(dsn)
    command = f"{program(what == 'jobs list')} {what} >&-"
    running = await processes.start("bash", "-c", command, env={"PULSE_TRIO_DSN": dsn})
    assert await running.ended() == 1
    assert "the output could not be written to stdout: Bad file descriptor" in running.stderr
    assert "Traceback" not in running.stderr


@pytest.mark.parametrize(
    "what", ["enqueue later -", "jobs send-event 1 go -", "jobs delete --state dead", "web --hash-password"]
)
async def test_a_command_whose_stdin_is_closed_reads_nothing_from_it(
    what: str, program: Program, processes: Processes, dsn: str
) -> None:
    """As under some supervisors. That was a bug in pulse-trio, the command said."""
    command = f"{program(what.startswith('enqueue'))} {what} <&-"
    running = await processes.start("bash", "-c", command, env={"PULSE_TRIO_DSN": dsn})
    assert await running.ended() in (0, 2), running.report()
    assert "Traceback" not in running.stderr


@pytest.mark.parametrize("redirected", ["2>&-", "2>/dev/full", "<&- 2>&-"])
async def test_a_command_whose_stderr_is_lost_does_what_it_was_asked_for(
    redirected: str, program: Program, processes: Processes, dsn: str
) -> None:
    enqueue(dsn)
    for what, code in (("jobs list --json", 0), ("jobs show 999999", 2)):
        command = f"{program(code == 0)} {what} {redirected}"
        running = await processes.start("bash", "-c", command, env={"PULSE_TRIO_DSN": dsn})
        assert await running.ended() == code, running.report()
        assert ('"kind"' in running.stdout) == (code == 0)


@pytest.mark.parametrize("processes_", [1, 2])
async def test_a_worker_whose_logs_reader_has_gone_works_and_ends_well(
    processes_: int, program: Program, dsn: str, processes: Processes, app: Path
) -> None:
    with fifo(app) as end:
        worker = await run(processes, program(processes_ == 1), dsn, "2>pipe", f"--processes={processes_}")
        await until(dsn, "SELECT FROM pulse.workers")
        os.close(end)
        await works(dsn)
        worker.send(signal.SIGTERM)
        assert await worker.ended() == 0, worker.report()
