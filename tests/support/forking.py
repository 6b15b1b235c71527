"""Commands and workers of `pulse-trio`, and runs of pytest, as real processes without the start of a Python each: forks of
one that imported what they need.

Starting Python and importing pulse-trio is nine tenths of what a short command costs, and the tests run hundreds of them. A
fork has its own process, session, folder, environment and streams, and runs the whole of `main`; only the imports are shared.
The tests of the start itself and of signals start the installed program (`Processes.pulse_trio`). Shells start commands by
programs that stand in the place of the installed ones and ask for a fork (stand_in.py). A run of pytest shares what its plugins
import, and nothing of pulse-trio's but the plugin itself: that is imported as in a user's own run. The program of a page's
reader (goes_on.py) imports the page's modules in the fork, and so does a script of a page's.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import io
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
import threading
import types
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import trio

# `support` is a package in the tests, and the first folder of the path in the process that forks.
if __name__ == "__main__":
    from stand_in import OF_START
    from stand_ins import become_asked, stand_behind, take
else:
    from support.stand_in import OF_START
    from support.stand_ins import write_programs

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

NUMBER = struct.Struct("i")
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
    """The process that forks, from the first command on. What it forks is a `program` of `PROGRAMS`."""

    def __init__(self, environment: Mapping[str, str], program: str) -> None:
        self._environment = dict(environment)
        self._program = program
        self._open = ExitStack()
        self._control: socket.socket | None = None
        self._folder: Path | None = None

    def takes(self, environment: Mapping[str, str]) -> bool:
        """Whether a command may be forked: not if a variable means something to Python's own start."""
        return all(self._environment.get(name) == value for name, value in variables_of_start(environment).items())

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
                process = subprocess.Popen(
                    [sys.executable, __file__, self._program, str(theirs.fileno()), str(listener.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,  # as the commands' are: Python looks at what they are only once
                    stderr=subprocess.PIPE,
                    pass_fds=[theirs.fileno(), listener.fileno()],
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


# In the other process


def serve() -> tuple[str, list[str]]:
    """Forks for each request. Returns in the forks alone, with the program and its arguments."""
    gc.collect()
    gc.freeze()
    control, listener = (socket.socket(fileno=int(number)) for number in sys.argv[2:])
    while True:
        for asking in select.select([control, listener], [], [])[0]:
            asked = taken(control, listener) if asking is control else accepted(control, listener)
            if asked is not None:
                return asked
        while reaped():
            pass


def taken(control: socket.socket, listener: socket.socket) -> tuple[str, list[str]] | None:
    """A request of the tests' own process. In the fork alone it is given."""
    asked, ends, _, _ = socket.recv_fds(control, LONGEST, 3)
    if not asked:
        os._exit(0)
    if os.fork() == 0:
        control.close()
        listener.close()
        program, arguments, environment, folder = json.loads(asked)
        if watch(*ends):
            become(environment, folder, *ends)
            return program, arguments
    for end in ends:
        os.close(end)
    return None


def accepted(control: socket.socket, listener: socket.socket) -> tuple[str, list[str]] | None:
    """A request of a program that stands in for another. In the fork alone it is given."""
    line, _ = listener.accept()
    with line:
        if os.fork() > 0:
            return None
        control.close()
        listener.close()
        try:
            asked = take(line)
        except (OSError, ValueError):
            os._exit(1)
        if (pid := os.fork()) > 0:
            for end in asked.streams.values():
                os.close(end)
            stand_behind(pid, line)
    become_asked(asked)
    replace_environment(asked.environment)
    return asked.program, asked.arguments


def watch(status: int, out: int, err: int) -> bool:
    """Forks once more, and tells of the fork's number and its end. Returns in the fork alone: True."""
    pid = os.fork()
    if pid == 0:
        return True
    os.close(out)
    os.close(err)
    try:
        os.write(status, NUMBER.pack(pid))
        os.write(status, NUMBER.pack(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
    except BrokenPipeError:
        pass  # The test has ended without it.
    os._exit(0)


def become(environment: dict[str, str], folder: str, status: int, out: int, err: int) -> None:
    """What a new process has of its own."""
    os.setsid()
    os.dup2(out, 1)
    os.dup2(err, 2)
    for end in (status, out, err):
        os.close(end)
    os.chdir(folder)
    replace_environment(environment)


def replace_environment(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # TMPDIR may be the fork's own


def reaped() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG)[0] > 0
    except ChildProcessError:
        return False


def run_commands() -> NoReturn:
    # As the installed program has it.
    scripts = sysconfig.get_path("scripts")
    sys.path[0] = scripts
    import rich.table  # noqa: F401 -- by the commands that make tables

    from pulse_trio.cli import main

    program, arguments = serve()
    if program == "python":
        run_script(*arguments)
    sys.argv = [str(Path(scripts) / "pulse-trio"), *arguments]
    # With which a worker begins anew.
    sys.orig_argv = [sys.executable, *sys.argv]
    try:
        main()
    except SystemExit as end:
        if arguments[:1] != ["run"] and isinstance(end.code, int):
            leave(end.code)
        raise


def run_script(path: str, *arguments: str) -> NoReturn:
    """`python PATH`: its modules are imported in the fork, but for pulse-trio's own."""
    sys.path[0] = str(Path(path).resolve().parent)
    sys.argv = [path, *arguments]
    sys.orig_argv = [sys.executable, *sys.argv]
    main = types.ModuleType("__main__")
    vars(main).update(__file__=str(Path(path).absolute()), __builtins__=builtins)
    sys.modules["__main__"] = main
    exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), vars(main))  # noqa: S102 -- as Python does
    leave(0)
    sys.exit(0)


def run_tests() -> NoReturn:
    """`python -m pytest`, after a run without tests: that imports the plugins as pytest does, with assertions rewritten."""
    import psycopg  # noqa: F401 -- by pulse-trio
    import pytest

    with tempfile.TemporaryDirectory() as empty, contextlib.redirect_stdout(io.StringIO()):
        os.chdir(empty)
        pytest.main(["-q", "-p", "no:cacheprovider", "--rootdir", empty, "-c", os.devnull])
        os.chdir("/")
    assert "pulse_trio" not in sys.modules
    _, arguments = serve()
    sys.path[0] = str(Path.cwd())
    sys.argv = [pytest.__file__.replace("__init__", "__main__"), *arguments]
    sys.orig_argv = [sys.executable, "-m", "pytest", *arguments]
    code = int(pytest.console_main())
    leave(code)
    sys.exit(code)


def run_goes_on() -> NoReturn:
    """`python goes_on.py`, which imports a page's modules only once it runs."""
    import goes_on

    _, arguments = serve()
    # What stands beside that script is no page's.
    sys.path[0] = "."
    sys.argv = [goes_on.__file__, *arguments]
    sys.orig_argv = [sys.executable, *sys.argv]
    goes_on.run(arguments)
    leave(0)
    sys.exit(0)


PROGRAMS = {"pulse-trio": run_commands, "pytest": run_tests, "goes-on": run_goes_on}


def leave(code: int) -> None:
    """Ends as Python does, but takes no module apart: that would copy every page that this process shares with the others."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    # What nobody refers to any more warns of what was left open or was not awaited.
    gc.collect()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return  # Python's own end says so.
    os._exit(code)


if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
