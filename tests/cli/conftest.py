"""A small module of handlers, and commands run to their end as real processes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator

    from pulse_trio.testing.faults.processes import Processes, Running

    Command = Callable[..., Awaitable[Running]]

APP = """
import threading
import time

import trio

from pulse_trio import Handlers, Job

handlers = Handlers()


@handlers.job(queue="mail")
async def greet(job: Job, name: str, loud: bool = False) -> str:
    return name.upper() if loud else name


@handlers.job(max_attempts=1)
async def broken() -> None:
    raise ValueError("no \\x1b[31mluck")


@handlers.job
async def wait() -> None:
    print("waiting", flush=True)
    await trio.sleep_forever()


@handlers.job
def block() -> None:
    print("blocking", flush=True)
    threading.Event().wait()
"""


@pytest.fixture
def app(tmp_path: Path) -> None:
    """The module `app` in the processes' folder. Not by way of `processes`: pytest-trio leaves out a fixture that depends on an
    asynchronous one and that a test only names in `usefixtures`."""
    (tmp_path / "app.py").write_text(APP)


@pytest.fixture
def command(processes: Processes, dsn: str) -> Command:
    """Runs `pulse-trio` on the test's database to its end."""

    async def run(*arguments: str, code: int = 0) -> Running:
        running = await processes.command(*arguments, env={"PULSE_TRIO_DSN": dsn})
        assert await running.ended() == code, running.report()
        return running

    return run


@pytest.fixture
def tmp_path_short() -> Generator[Path]:
    """A folder with a name short enough for a socket in it, which `nobody` can reach where root has to become it."""
    with tempfile.TemporaryDirectory(prefix="pt-") as name:
        folder = Path(name)
        folder.chmod(0o711)
        yield folder
