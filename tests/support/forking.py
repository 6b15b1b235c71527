"""Commands and workers of `pulse-trio`, and runs of pytest, as real processes without the start of a Python each: forks of
one that imported what they need.

Starting Python and importing pulse-trio is nine tenths of what a short command costs, and the tests run hundreds of them. A
fork has its own process, session, folder, environment and streams, and runs the whole of `main`; only the imports are shared.
The tests of the start itself and of signals start the installed program (`Processes.pulse_trio`). Shells start commands by
programs that stand in the place of the installed ones and ask for a fork (stand_in.py). A run of pytest shares what its plugins
import, and nothing of pulse-trio's but the plugin itself: that is imported as in a user's own run. The program of a page's
reader (goes_on.py) imports the page's modules in the fork, and so does a script of a page's. What a fork starts for itself, as
a supervisor does, is a fork too (forked_children.py).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from support.forked_children import ForkedChild, Order, begin, opens_forks
from support.stand_in import OF_START
from support.stand_ins import write_programs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence

NUMBER = struct.Struct("i")
UNBUFFERED = {"PYTHONUNBUFFERED": "1"}
"""As all commands of the tests are (`clean_environment`)."""
LONGEST = 200_000
"""Bytes of a request: arguments and environment."""


def variables_of_start(environment: Mapping[str, str]) -> dict[str, str]:
    """Those that mean something to Python's own start, or to the C library's: a fork has had them already."""
    return {name: value for name, value in environment.items() if name.startswith(OF_START)}


class Forked:
    """A command that was forked off; looks like a `trio.Process`."""

    def __init__(self, pid: int, status: trio.lowlevel.FdStream, out: int, err: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout = trio.lowlevel.FdStream(out)
        self.stderr = trio.lowlevel.FdStream(err)
        self._status = status
        self._one_reads = trio.Lock()

    async def wait(self) -> int:
        """Wait for the end; returns the exit code (-N: killed by signal N)."""
        async with self._one_reads:
            if self.returncode is None:
                self.returncode = await read_number(self._status)
                await self._status.aclose()
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forker:
    """The process that forks (forks.py), from the first command on."""

    def __init__(self, environment: Mapping[str, str], program: str) -> None:
        self._environment = dict(environment)
        self._program = program
        self._open = ExitStack()
        self._control: socket.socket | None = None
        self._folder: Path | None = None

    def takes(self, environment: Mapping[str, str]) -> bool:
        """Whether a command may be forked: not if a variable means something to Python's own start."""
        return all(self._environment.get(name) == value for name, value in variables_of_start(environment).items())

    def opens_children(self) -> Callable[..., Awaitable[Any]]:
        """What takes the place of `trio.lowlevel.open_process` in this process, for workers in it."""
        folder = self.stand_ins()
        return opens_forks(str(folder / "socket"), variables_of_start(self._environment), UNBUFFERED)

    async def begin(
        self, command: Sequence[str], environment: Mapping[str, str], folder: Path, streams: tuple[int, int, int]
    ) -> ForkedChild:
        """Run `-c CODE` or `-m MODULE` as Python, with arguments and streams. It ends with the tests' process."""
        assert self.takes(environment)
        address = str(self.stand_ins() / "socket")
        order = Order(command, environment, str(folder), dict(enumerate(streams)), bound=True)
        return await begin(address, order)

    def stand_ins(self) -> Path:
        """A folder to be put first on PATH, in which `pulse-trio` and `python` have forks run their commands and scripts."""
        self._connection()
        assert self._folder is not None
        return self._folder

    async def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], folder: Path, *, program: str = ""
    ) -> Forked:
        """Start the program with these arguments, with no input. `program`: another of that process's."""
        status, status_end = os.pipe()
        out, out_end = os.pipe()
        err, err_end = os.pipe()
        asked = json.dumps([program or self._program, list(arguments), dict(environment), str(folder)]).encode()
        assert len(asked) < LONGEST
        socket.send_fds(self._connection(), [asked], [status_end, out_end, err_end])
        for end in (status_end, out_end, err_end):
            os.close(end)
        stream = trio.lowlevel.FdStream(status)
        return Forked(await read_number(stream), stream, out, err)

    def close(self) -> None:
        """End the process. What it has forked goes on."""
        self._open.close()

    def _connection(self) -> socket.socket:
        if self._control is None:
            self._folder = Path(self._open.enter_context(tempfile.TemporaryDirectory(prefix="pt-forks-")))
            address = self._folder / "socket"
            write_programs(self._folder, address, variables_of_start(self._environment))
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs, socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(address))
                listener.listen(100)
                numbers = [theirs.fileno(), listener.fileno()]
                process = subprocess.Popen(
                    [sys.executable, "-m", "support.forks", self._program, *map(str, numbers), str(address)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,  # as the commands' are: Python looks at what they are only once
                    stderr=subprocess.PIPE,
                    pass_fds=numbers,
                    cwd=Path(__file__).parents[1],
                    env=self._environment,
                    start_new_session=True,
                )
            self._open.enter_context(process)
            self._open.callback(self._control.close)
        return self._control


def search_path(forker: Forker | None = None) -> str:
    """Where a shell finds the installed programs first, or with `forker` what stands for them."""
    first = "" if forker is None else f"{forker.stand_ins()}:"
    return f"{first}{sysconfig.get_path('scripts')}:{os.environ['PATH']}"


class Scripts:
    """Starts `python SCRIPT` in a fork of a process that has imported pulse-trio and has run nothing of it."""

    def __init__(self, forker: Forker) -> None:
        self._forker = forker

    def takes(self, environment: Mapping[str, str]) -> bool:
        return self._forker.takes(environment)

    async def start(self, arguments: Sequence[str], environment: Mapping[str, str], folder: Path) -> Forked:
        return await self._forker.start(arguments, environment, folder, program="python")


@contextmanager
def open_forker(environment: Mapping[str, str], program: str = "pulse-trio") -> Generator[Forker]:
    """For as long as the block runs; `environment` is what the commands' Python starts with."""
    forker = Forker(environment, program)
    try:
        yield forker
    finally:
        forker.close()


async def completed(process: Forked) -> tuple[int, str, str]:
    """Its exit code and all that it writes; it is killed where this is not waited for to the end."""
    written: dict[str, str] = {}

    async def read(name: str, stream: trio.lowlevel.FdStream) -> None:
        async with stream:
            written[name] = b"".join([bytes(chunk) async for chunk in stream]).decode()

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read, "stdout", process.stdout)
            nursery.start_soon(read, "stderr", process.stderr)
            code = await process.wait()
    except BaseException:
        process.kill()
        raise
    return code, written["stdout"], written["stderr"]


async def read_number(stream: trio.lowlevel.FdStream) -> int:
    """One that the other side wrote at once, so that it comes at once."""
    data = bytes(await stream.receive_some(NUMBER.size))
    assert len(data) == NUMBER.size, "the process that forks the commands has ended"
    (number,) = NUMBER.unpack(data)
    return number
