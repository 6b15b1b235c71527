"""`run --reload` starts the worker anew when a file changes, after its jobs have ended."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from pulse_trio.cli.reload import Reloader
from support.workers import RUN, enqueue, settled, until

if TYPE_CHECKING:
    from pathlib import Path

    from pulse_trio.testing.faults.processes import Processes

APP = """
import trio

from pulse_trio import Handlers

handlers = Handlers()


@handlers.job
async def held(folder: str) -> str:
    while not await trio.Path(folder, "go").exists():
        await trio.sleep(0.01)
    return "old"
"""


@pytest.mark.parametrize("count", [1, 2])
async def test_a_changed_file_takes_effect_after_the_running_jobs_have_ended(
    count: int, dsn: str, processes: Processes, tmp_path: Path
) -> None:
    (tmp_path / "app.py").write_text(APP)
    (first,) = enqueue(dsn, folder=str(tmp_path))
    # The installed program, and with two processes forks.
    start = processes.pulse_trio if count == 1 else processes.command
    worker = await start(*RUN, f"--dsn={dsn}", "--reload", f"--processes={count}")
    await worker.line("watching the .py files in ")
    await until(dsn, "SELECT 1 FROM pulse.jobs WHERE state = 'running'")
    saved = (tmp_path / "app.py").stat()
    (tmp_path / "app.py").write_text(APP.replace('"old"', '"new"'))
    # Of the same size and in the same second: what Python has compiled seems to be of this one.
    os.utime(tmp_path / "app.py", ns=(saved.st_atime_ns, saved.st_mtime_ns))
    await worker.line("app.py changed: the worker starts anew")
    (tmp_path / "go").touch()
    assert await settled(dsn, first) == ("completed", 1, "old")
    (second,) = enqueue(dsn, folder=str(tmp_path))
    assert await settled(dsn, second) == ("completed", 1, "new")
    worker.send(signal.SIGTERM)
    assert await worker.ended() == 0, worker.report()


async def test_the_worker_ends_with_its_terminal(dsn: str, processes: Processes, tmp_path: Path) -> None:
    """It was left behind: it is of a session of its own, and nothing passed the terminal's SIGHUP on."""
    (tmp_path / "app.py").write_text(APP)
    (job,) = enqueue(dsn, folder=str(tmp_path))
    worker = await processes.command(*RUN, f"--dsn={dsn}", "--reload")
    await until(dsn, "SELECT 1 FROM pulse.jobs WHERE state = 'running'")
    worker.send(signal.SIGHUP)
    await worker.line("SIGTERM: draining")
    (tmp_path / "go").touch()
    assert await worker.ended() == 0, worker.report()
    assert await settled(dsn, job) == ("completed", 1, "old")


async def test_a_worker_that_is_being_started_when_the_signal_comes_ends_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    open_process = trio.lowlevel.open_process

    async def slow(*command: Any, **how: Any) -> trio.Process:
        signal.raise_signal(signal.SIGTERM)
        process = await open_process(*command, **how)
        await trio.testing.wait_all_tasks_blocked()
        return process

    monkeypatch.setattr(trio.lowlevel, "open_process", slow)
    with trio.fail_after(20):
        await Reloader([sys.executable, "-c", "import time; time.sleep(3600)"], tmp_path).run()


async def test_a_broken_file_waits_for_the_next_change(dsn: str, processes: Processes, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    (tmp_path / "app.py").write_text("1 / 0")
    (job,) = enqueue(dsn, folder=str(tmp_path))
    worker = await processes.command(*RUN, f"--dsn={dsn}", "--reload")
    await worker.line("the worker ended with exit code 2; waiting for a change")
    (tmp_path / "app.py").write_text(APP)
    assert await settled(dsn, job) == ("completed", 1, "old")
    worker.send(signal.SIGINT)
    assert await worker.ended() == 0, worker.report()


async def test_without_its_library_it_says_how_to_install_it(dsn: str, processes: Processes, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    code = (
        "import sys; sys.modules['watchfiles'] = None; sys.argv = ['pulse-trio', 'run', 'app:handlers', '--reload']; "
        "from pulse_trio.cli import main; sys.exit(main())"
    )
    done = await processes.start(sys.executable, "-c", code, env={"PULSE_TRIO_DSN": dsn})
    assert await done.ended() == 2, done.report()
    assert "pip install 'pulse-trio[reload]'" in done.stderr


async def test_the_environment_asks_for_it_too(dsn: str, processes: Processes, tmp_path: Path) -> None:
    """It was ignored. The worker that is started does not watch in its turn."""
    (tmp_path / "app.py").write_text(APP)
    worker = await processes.command(*RUN, f"--dsn={dsn}", env={"PULSE_TRIO_RELOAD": "1"})
    await worker.line("watching the .py files in ")
    await worker.line(r"worker \S+ started")
    worker.send(signal.SIGTERM)
    assert await worker.ended() == 0, worker.report()
    assert worker.stderr.count("watching the .py files in ") == 1


async def test_a_variable_that_is_neither_yes_nor_no_is_refused(dsn: str, processes: Processes, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    worker = await processes.command(*RUN, f"--dsn={dsn}", env={"PULSE_TRIO_RELOAD": "maybe"})
    assert await worker.ended() == 2
    assert "'maybe' is not a valid boolean" in worker.stderr
