"""One child process of `runs="process"`, seen from its worker: its line, its end, and the end of all that it has started."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

import msgspec
import trio

from ....errors import ProcessDied
from ....job_log import SentExtra
from ....logs import forwarding_level
from . import wire
from .child import LEAVE, LOG_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable

_PATH_VARIABLE = "PULSE_TRIO_CHILD_PATH"
_START = (
    f"import json, os, sys; sys.path[:] = json.loads(os.environ.pop('{_PATH_VARIABLE}')); "
    "from pulse_trio.worker.jobs.kinds.child import main; main(int(sys.argv[1]), int(sys.argv[2]))"
)
_LONGEST_LINE = 16 * 1024 * 1024
"""Bytes. A result has 1 MiB at most, and the stored part of an exception less: a longer message is not accepted."""
_LAST_MOMENT = 2.0
"""Seconds that an idle process may take for its end."""
_DEATH_RATTLE = 1.0
"""Seconds between the end of a process's line and its own."""


class ChildProcess:
    """One child, seen from the worker. `usable` while it may be given another handler; `loaded`: those that it has imported."""

    def __init__(self, process: trio.Process, line: trio.SocketStream) -> None:
        self._process = process
        self._line = line
        self._rest = bytearray()
        self._ended = trio.Event()
        self._gone = False
        self.usable = True
        self.loaded: set[wire.Importable] = set()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    async def reap(self) -> None:
        """Waits until the process ends; ends it when cancelled."""
        try:
            await self._process.wait()
        finally:
            await self._let_it_end()  # noqa: ASYNC102 -- shielded inside, with a deadline
            self.kill()
            # Processes that the child started may keep its end of the line open: its death does not always close the line.
            try:
                self._line.socket.shutdown(socket.SHUT_RD)
            except OSError:
                pass
            with trio.CancelScope(shield=True):
                await self._process.wait()
            self._ended.set()

    async def _let_it_end(self) -> None:
        """An idle process ends by itself when its line does. It gets a moment for what its code does at the interpreter's end,
        such as sending the spans that it has recorded."""
        if not self.usable or not self.alive:
            return
        try:
            self._line.socket.shutdown(socket.SHUT_WR)
        except OSError:
            return
        with trio.CancelScope(shield=True, deadline=trio.current_time() + _LAST_MOMENT):
            await self._process.wait()

    async def ready(self) -> None:
        """Waits until the process has started. Raises `ProcessDied`."""
        if await self._next() is None:
            raise ProcessDied(f"The process {self.pid} for the handler {await self._how_it_ended()}.")

    async def call(
        self, order: wire.Call, on_progress: Callable[[float, str | None], None]
    ) -> wire.Returned | wire.Raised:
        """Runs a handler, or loads it. Raises `ProcessDied`. After that, or after a cancellation, call `leave`."""
        self.usable = False
        try:
            await self._line.send_all(wire.encode(order) + b"\n")
            while isinstance(answer := await self._next(), wire.Said):
                on_progress(answer.fraction, answer.message)
        except trio.BrokenResourceError:
            answer = None
        if not isinstance(answer, (wire.Returned, wire.Raised)):
            raise ProcessDied(f"The handler's process {self.pid} {await self._how_it_ended()}.")
        self.usable = True
        return answer

    async def _next(self) -> wire.Answer | None:
        """Returns the next message except log records, which it logs here."""
        while isinstance(answer := await self._read(), wire.Logged):
            _log(answer, self.pid)
        return answer

    async def _read(self) -> wire.Answer | None:
        """Returns the next message; None if the process is gone."""
        looked = 0
        while (end := self._rest.find(b"\n", looked)) < 0:
            looked = len(self._rest)
            if looked > _LONGEST_LINE:
                self.kill()
                return None
            try:
                chunk = await self._line.receive_some()
            except trio.BrokenResourceError:
                return None
            if not chunk:
                return None
            self._rest += chunk
        line = bytes(self._rest[:end])
        del self._rest[: end + 1]
        try:
            return wire.decode_answer(line)
        except msgspec.DecodeError:
            # The handler wrote into the line, which it can find among its descriptors: the process is of no more use.
            return None

    async def leave(self, order: wire.Cancel, within: float) -> wire.Returned | wire.Raised | None:
        """Ends the handler and the process: signals it, and kills it after `within` seconds. Returns the answer, if it still
        had one."""
        self.usable = False
        answer: wire.Answer | None = None
        with trio.move_on_after(within):
            try:
                await self._line.send_all(wire.encode(order) + b"\n")
                self._process.send_signal(LEAVE)
                while isinstance(answer := await self._next(), wire.Said):
                    pass
            except trio.BrokenResourceError:
                pass  # it has died by itself
        await self._end()
        return answer if isinstance(answer, (wire.Returned, wire.Raised)) else None

    def kill(self) -> None:
        """Kills the process and every process in its group, also when it has died itself."""
        self.usable = False
        if self._gone:
            return
        # The group keeps its number while any process of it runs. Once all have ended, the number may be another's.
        self._gone = not self.alive
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # the latter on macOS, where only zombies are left
            pass

    async def end(self) -> None:
        """Lets the idle process end by itself, with what its code does then, and kills every process in its group."""
        await self._let_it_end()
        await self._end()

    async def _end(self) -> None:
        self.kill()
        await self._ended.wait()
        self.close()

    def close(self) -> None:
        """Closes the line."""
        self._line.socket.close()

    async def _how_it_ended(self) -> str:
        with trio.CancelScope(shield=True):
            # The line does not end at the same moment as the process.
            with trio.move_on_after(_DEATH_RATTLE):
                await self._ended.wait()
            await self._end()
        code = self._process.returncode or 0
        return f"was killed by {_name(-code)}" if code < 0 else f"ended with exit code {code}, without an answer"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _log(record: wire.Logged, pid: int) -> None:
    """Logs here a record of a handler in the process `pid`."""
    made = logging.makeLogRecord(
        {
            "name": record.name,
            "levelno": record.level,
            "levelname": logging.getLevelName(record.level),
            "msg": record.message,
            "created": record.created,
            "msecs": record.created % 1 * 1000,
            "process": pid,
            "exc_text": record.traceback,
            "pulse_trio_job": record.job,
            "pulse_trio_extra": SentExtra(record.extra),
        }
    )
    target = logging.getLogger(record.name)
    if target.isEnabledFor(record.level):
        target.handle(made)


def _log_variable() -> dict[str, str]:
    level = forwarding_level()
    return {} if level is None else {LOG_VARIABLE: str(level)}


async def start_child(lifeline: int) -> ChildProcess:
    """Starts a child with the modules' search path of this process."""
    ours, theirs = socket.socketpair()
    # Closed whatever happens: a system that refuses one process (no memory, no file descriptors) refuses many.
    with theirs, ExitStack() as unless_started:
        unless_started.callback(ours.close)
        process = await trio.lowlevel.open_process(
            [sys.executable, "-c", _START, str(theirs.fileno()), str(lifeline)],
            stdin=subprocess.DEVNULL,
            env={**os.environ, _PATH_VARIABLE: json.dumps(sys.path), **_log_variable()},
            pass_fds=[theirs.fileno(), lifeline],
            # Ctrl-C in a terminal is for the worker; and the processes that the child starts can be killed with it.
            start_new_session=True,
        )
        unless_started.pop_all()
    return ChildProcess(process, trio.SocketStream(trio.socket.from_stdlib_socket(ours)))
