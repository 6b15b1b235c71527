"""`run --reload`, for development: runs the same command in a process of its own, and starts it anew when a .py file changes.

A new process, because a module that is imported again leaves the old one's objects behind. The running one is ended as by
SIGTERM: its jobs end, or their grace passes, before the next begins.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from importlib import import_module
from importlib.util import cache_from_source
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from ..logs import logger
from .faults import AppError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

RELOAD_VARIABLE = "PULSE_TRIO_RELOAD"
_LOOK = 500
"""Milliseconds after which the watcher is known to look."""
_NAMED = 5
"""How many changed files the log names."""
_SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
_TERMINAL_CLOSED = signal.SIGHUP
"""Passed on as SIGTERM: the command is of a session of its own, so the terminal's end does not reach it."""


def check_reload() -> None:
    """Raises `AppError` where the library that watches files is missing."""
    try:
        import_module("watchfiles")
    except ImportError:
        raise AppError("--reload needs the package watchfiles: pip install 'pulse-trio[reload]'") from None


def command_without_reload(arguments: Sequence[str]) -> list[str]:
    """This process's command, to be run in another process without --reload."""
    return [sys.executable, "-m", "pulse_trio.cli", *(each for each in arguments if each != "--reload")]


class Reloader:
    """Keeps `command` running, and starts it anew when a file below `folder` changes."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self._command = list(command)
        self._folder = folder
        self._process: trio.Process | None = None
        self._changed = trio.Event()
        self._told = False
        self._saved: set[str] = set()
        """The files that have changed since the last start."""

    async def run(self) -> int:
        """Runs until it is told to stop, or the command ends well by itself; returns the exit code."""
        # Under nohup it is ignored.
        heeded = signal.getsignal(_TERMINAL_CLOSED) is not signal.SIG_IGN
        with trio.open_signal_receiver(*_SIGNALS, *[_TERMINAL_CLOSED] * heeded) as signals:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._pass_on, signals)
                await nursery.start(self._watch)
                code = await self._keep_running()
                nursery.cancel_scope.cancel()
        return code if code >= 0 else 128 - code

    async def _keep_running(self) -> int:
        while True:
            self._changed = trio.Event()
            code = await self._run_once()
            if self._told or (code == 0 and not self._changed.is_set()):
                return code
            if not self._changed.is_set():
                logger.warning("the worker ended with exit code %d; waiting for a change to start it again", code)
                await self._changed.wait()
                if self._told:
                    return code

    async def _run_once(self) -> int:
        saved, self._saved = self._saved, set[str]()
        await trio.to_thread.run_sync(_drop_bytecode, saved)
        # Of its own session: a Ctrl-C in the terminal is passed on once, not twice.
        environment = {**os.environ, RELOAD_VARIABLE: "0"}
        process = await trio.lowlevel.open_process(self._command, env=environment, start_new_session=True)
        self._process = process
        if self._told:
            # It was being started when the signal came.
            process.send_signal(signal.SIGTERM)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._end_after_change, process)
                code = await process.wait()
                nursery.cancel_scope.cancel()
        finally:
            self._process = None
            if process.returncode is None:
                process.terminate()
        return code

    async def _end_after_change(self, process: trio.Process) -> None:
        await self._changed.wait()
        if not self._told:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)

    async def _pass_on(self, signals: AsyncIterator[int]) -> None:
        async for number in signals:
            self._told = True
            if self._process is not None:
                with suppress(ProcessLookupError):
                    self._process.send_signal(signal.SIGTERM if number == _TERMINAL_CLOSED else number)
            self._changed.set()

    async def _watch(self, *, task_status: trio.TaskStatus[None]) -> None:
        from watchfiles import PythonFilter, awatch

        began = False
        async for changes in awatch(
            self._folder, watch_filter=PythonFilter(), rust_timeout=_LOOK, yield_on_timeout=True, debounce=200
        ):
            if not began:
                began = True
                logger.info("watching the .py files in %s", self._folder)
                task_status.started()
            self._saved.update(path for _, path in changes)
            if changes and not self._changed.is_set():
                logger.info("%s changed: the worker starts anew when its jobs have ended", self._names_of(changes))
                self._changed.set()

    def _names_of(self, changes: Iterable[tuple[object, str]]) -> str:
        names = sorted({os.path.relpath(path, self._folder) for _, path in changes})
        return ", ".join(names[:_NAMED])


def _drop_bytecode(files: Iterable[str]) -> None:
    """Python takes bytecode for that of a file which has the same size and was saved in the same second: a worker that is
    started anew within a second of the last start would have the old code."""
    for file in files:
        # The latter where Python is told to keep no bytecode at all: it has no name for it then.
        with suppress(OSError, NotImplementedError):
            os.unlink(cache_from_source(file))


def run_reloading() -> int:
    """Runs this process's own command again and again; returns the exit code."""
    return trio.run(Reloader(command_without_reload(sys.argv[1:]), Path.cwd()).run)
