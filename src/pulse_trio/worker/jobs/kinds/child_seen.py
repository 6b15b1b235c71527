"""One child process of `runs="process"`, seen from its worker: its line, its end, and the end of all that it has started."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

import trio

from ....logs import forwarding_level
from .child import LEAVE, LOG_VARIABLE
from .line import Line

if TYPE_CHECKING:
    from . import wire
    from .line import Order

_PATH_VARIABLE = "PULSE_TRIO_CHILD_PATH"
_START = (
    f"import json, os, sys; sys.path[:] = json.loads(os.environ.pop('{_PATH_VARIABLE}')); "
    "from pulse_trio.worker.jobs.kinds.child import main; main(*map(int, sys.argv[1:]))"
)
_LAST_MOMENT = 2.0
"""Seconds that an idle process may take for its end."""
_DEATH_RATTLE = 1.0
"""Seconds between the end of a process's line and its own."""


class ChildProcess:
    """One child, seen from the worker. `usable` while it may be given orders; `held` while one job has it for itself; `loaded`:
    the handlers that it has imported."""

    def __init__(self, process: trio.Process, line: Line) -> None:
        self._process = process
        self.line = line
        self._ended = trio.Event()
        self._gone = False
        self.usable = True
        self.held = True
        self.loaded: set[wire.Importable] = set()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def over(self) -> bool:
        """Whether it has ended, and all that it has started."""
        return self._ended.is_set()

    @property
    def met_the_workers_signal(self) -> bool:
        """Whether it was ended by one of the signals that mean the worker, which it takes no notice of once it is up."""
        return self._process.returncode in (-signal.SIGTERM, -signal.SIGINT, -signal.SIGUSR1)

    async def reap(self) -> None:
        """Waits until the process ends; ends it when cancelled."""
        try:
            await self._process.wait()
        finally:
            await self._let_it_end()  # noqa: ASYNC102 -- shielded inside, with a deadline
            self.kill()
            # Processes that the child started may keep its end of the line open: its death does not always close the line.
            self.line.hang_up()
            with trio.CancelScope(shield=True):
                await self._process.wait()
            self._ended.set()

    async def _let_it_end(self) -> None:
        """An idle process ends by itself when its line does. It gets a moment for what its code does at the interpreter's end,
        such as sending the spans that it has recorded."""
        if self.line.orders or not self.alive:
            return
        try:
            self.line.end()
        except OSError:
            return
        with trio.CancelScope(shield=True, deadline=trio.current_time() + _LAST_MOMENT):
            await self._process.wait()

    async def leave(self, order: Order, why: wire.Cancel, within: float) -> object:
        """Ends the handler of `order`, and the process: signals it, and kills it after `within` seconds. Returns the answer, if
        it still had one."""
        self.usable = False
        answer: object = None
        with trio.move_on_after(within):
            self.line.say(why)
            self._process.send_signal(LEAVE)
            answer = await order.answered()
        await self._end()
        return answer

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
        self.line.close()

    async def how_it_ended(self) -> str:
        """Waits for its end, which may be a moment after that of its line, or kills it."""
        with trio.CancelScope(shield=True):
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


def _log_variable() -> dict[str, str]:
    level = forwarding_level()
    return {} if level is None else {LOG_VARIABLE: str(level)}


async def start_child(lifeline: int) -> ChildProcess:
    """Starts a child with the modules' search path of this process."""
    # Closed whatever happens: a system that refuses one process (no memory, no file descriptors) refuses many.
    with ExitStack() as unless_started, ExitStack() as always:
        ours, theirs = _pair(unless_started, always)
        tickets, taken = _pair(unless_started, unless_started)
        process = await trio.lowlevel.open_process(
            [sys.executable, "-c", _START, str(theirs.fileno()), str(taken.fileno()), str(lifeline)],
            stdin=subprocess.DEVNULL,
            env={**os.environ, _PATH_VARIABLE: json.dumps(sys.path), **_log_variable()},
            pass_fds=[theirs.fileno(), taken.fileno(), lifeline],
            # Ctrl-C in a terminal is for the worker; and the processes that the child starts can be killed with it.
            start_new_session=True,
        )
        unless_started.pop_all()
    return ChildProcess(process, Line(process.pid, ours, tickets, taken))


def _pair(ours: ExitStack, theirs: ExitStack) -> tuple[socket.socket, socket.socket]:
    """Two connected sockets, each closed by its stack."""
    one, other = socket.socketpair()
    return ours.enter_context(one), theirs.enter_context(other)
