"""The processes that pulse-trio starts for itself, as forks: those of a supervisor, of a job in quarantine, of `--reload`, and
of handlers with `runs="process"`. Each is a `python -m` or a `python -c`, and most of what it does at first is to import.

This takes the place of `trio.lowlevel.open_process`, in forks (forking.py) and where a test says so. What it does not know, or
what is to have other variables of Python's own start, is started as ever, as are all processes of the installed program. A fork
has all that `open_process` was told of, and its number, signals, end and exit code are its own. Only its parent is another.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import trio

from support.stand_in import OF_START, open_streams, request, send_descriptors

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

FORMS = ("-m", "-c")
IN_EARNEST = {"TESTS_START_CHILDREN": "1"}
"""A variable with which a fork starts its processes as ever: for those who look for the children of a process."""


class ForkedChild:
    """Looks like a `trio.Process` without streams of its own."""

    stdin = stdout = stderr = None

    def __init__(self, line: socket.socket, pid: int) -> None:
        self.pid = pid
        self._line = line
        self._code: int | None = None
        self._one_waits = trio.Lock()

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        """The exit code (-N: killed by signal N); None while it runs."""
        if self._code is None:
            with suppress(BlockingIOError):
                told = self._line.recv(4, socket.MSG_DONTWAIT)
                # Whatever forks was killed, with all that it had begun.
                self._code = int.from_bytes(told, "big", signed=True) if len(told) == 4 else -signal.SIGKILL
                self._line.close()
        return self._code

    async def wait(self) -> int:
        async with self._one_waits:
            while (code := self.poll()) is None:
                await trio.lowlevel.wait_readable(self._line)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Order(NamedTuple):
    """What a process shall be."""

    command: Sequence[str]
    environment: Mapping[str, str]
    folder: str
    descriptors: Mapping[int, int]
    """Its own, and what each is here."""
    bound: bool = False
    """Whether it ends with this process."""


async def begin(address: str, order: Order) -> ForkedChild:
    """Has a process forked."""
    with trio.CancelScope(shield=True):
        return ForkedChild(*await trio.to_thread.run_sync(_begin, address, order))
    raise AssertionError("this scope is not cancelled")


def _begin(address: str, order: Order) -> tuple[socket.socket, int]:
    """The line to what stands behind a new fork, and the fork's number."""
    command, environment, folder, descriptors, bound = order
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(address)
        asked = request(command, environment, folder, list(descriptors), bound=bound)
        send_descriptors(line, len(asked), list(descriptors.values()))
        line.sendall(asked)
        told = line.recv(4)
        if len(told) < 4:
            raise BlockingIOError("no process could be forked")
        return line.dup(), int.from_bytes(told, "big", signed=True)


def opens_forks(
    address: str, started_with: Mapping[str, str], more: Mapping[str, str] = MappingProxyType({})
) -> Callable[..., Awaitable[Any]]:
    """In place of `trio.lowlevel.open_process`.

    Args:
        address: the socket of what forks.
        started_with: the variables of Python's own start that it has.
        more: variables for the forks alone.
    """
    in_earnest = trio.lowlevel.open_process

    async def open_process(command: Any, **how: Any) -> Any:
        environment = {**(os.environ if how.get("env") is None else how["env"]), **more}
        if environment.keys() >= IN_EARNEST.keys():
            return await in_earnest(command, **how)
        known = {"stdin", "env", "pass_fds", "start_new_session"} >= set(how) and how.get("start_new_session")
        of_start = {name: value for name, value in environment.items() if name.startswith(OF_START)}
        if not known or list(command[:1]) != [sys.executable] or command[1] not in FORMS or of_start != started_with:
            return await in_earnest(command, **how)
        descriptors = {number: number for number in [*open_streams(), *how.get("pass_fds", ())]}
        with open(os.devnull) as nothing:  # noqa: ASYNC230 -- which does not block
            if how.get("stdin") is not None:
                descriptors[0] = nothing.fileno()
            return await begin(address, Order(command[1:], environment, os.getcwd(), descriptors))

    return open_process
