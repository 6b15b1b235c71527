"""Real processes for acceptance tests: started, watched by the lines they print, signalled, killed at the end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import sysconfig
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import trio

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

_FORKED = "pulse-trio"
"""The first word of a command that a forker started."""
WITHIN = 20.0
"""Seconds a step may take on a loaded machine; a step that works takes far less."""


class ProcessLike(Protocol):
    """What is needed of a `trio.Process`."""

    @property
    def stdout(self) -> trio.abc.ReceiveStream | None: ...

    @property
    def stderr(self) -> trio.abc.ReceiveStream | None: ...

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int: ...

    def kill(self) -> None: ...

    def send_signal(self, number: signal.Signals, /) -> None: ...


class Forker(Protocol):
    """Starts commands of pulse-trio in copies of a process that has imported it."""

    def takes(self, environment: Mapping[str, str]) -> bool: ...

    async def start(self, arguments: Sequence[str], environment: Mapping[str, str], folder: Path) -> ProcessLike: ...


class Output:
    """One of a process's two streams, so far."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.searched = 0
        self.ended = False

    @property
    def text(self) -> str:
        return "".join(f"{line}\n" for line in self.lines)

    def search(self, pattern: str) -> re.Match[str] | None:
        """Find the next line with `pattern` after the last one found; the lines before it are passed over for good."""
        for number, line in enumerate(self.lines[self.searched :], self.searched):
            if match := re.search(pattern, line):
                self.searched = number + 1
                return match
        return None


@dataclass(frozen=True)
class Command:
    """How a process was started."""

    words: tuple[str, ...]
    env: Mapping[str, str] | None
    cwd: Path | None


class Running:
    """A process that was started, and what it printed so far."""

    def __init__(self, process: ProcessLike, command: Command) -> None:
        self.process = process
        self.command = command
        self._out = Output()
        self._err = Output()
        self._news = trio.Event()

    @property
    def stdout(self) -> str:
        """What it has written to stdout so far."""
        return self._out.text

    @property
    def stderr(self) -> str:
        """What it has written to stderr so far."""
        return self._err.text

    @property
    def pid(self) -> int:
        """The process's number."""
        return self.process.pid

    async def line(self, pattern: str, *, within: float = WITHIN) -> re.Match[str]:
        """Wait for a line that `pattern` is found in, on either stream, after the last one found on that stream.

        Raises:
            AssertionError: it did not come in `within` seconds, or the process ended without it.
        """
        with trio.move_on_after(within):
            while (match := self._out.search(pattern) or self._err.search(pattern)) is None and not self._silent:
                await self._news.wait()
            if match is not None:
                return match
        raise AssertionError(f"no line like {pattern!r}\n{self.report()}")

    def send(self, number: signal.Signals) -> None:
        """Send a signal to this process alone."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL to this process alone: what it started lives on, as after a crash."""
        self.process.kill()

    def terminate(self) -> None:
        """Send SIGTERM: a worker drains, and leaves."""
        self.send(signal.SIGTERM)

    def stop(self) -> None:
        """Send SIGSTOP: the process does nothing more, and its connections stay open, as on a machine that hangs."""
        self.send(signal.SIGSTOP)

    def go_on(self) -> None:
        """Send SIGCONT: a stopped process goes on where it was."""
        self.send(signal.SIGCONT)

    async def ended(self, *, within: float = WITHIN) -> int:
        """Wait for the process's end and its last line; returns its exit code (-N: killed by signal N).

        Raises:
            AssertionError: it still runs after `within` seconds.
        """
        with trio.move_on_after(within):
            code = await self.process.wait()
            while not self._silent:
                await self._news.wait()
            return code
        raise AssertionError(f"still running\n{self.report()}")

    def report(self) -> str:
        """What the process printed, for a failed assertion's message."""
        state = "running" if self.process.returncode is None else f"exit code {self.process.returncode}"
        return f"{' '.join(self.command.words)} ({state})\n--- stdout\n{self.stdout}--- stderr\n{self.stderr}---"

    async def read(self) -> None:
        """Take in both streams to their ends."""
        async with trio.open_nursery() as nursery:
            for stream, output in ((self.process.stdout, self._out), (self.process.stderr, self._err)):
                if stream is not None:
                    nursery.start_soon(self._read, stream, output)

    @property
    def _silent(self) -> bool:
        return self._out.ended and self._err.ended

    async def _read(self, stream: trio.abc.ReceiveStream, output: Output) -> None:
        rest = b""
        async with stream:
            async for chunk in stream:
                *lines, rest = (rest + bytes(chunk)).split(b"\n")
                output.lines += [line.decode(errors="replace") for line in lines]
                self._tell()
        if rest:
            output.lines.append(rest.decode(errors="replace"))
        output.ended = True
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = trio.Event()


class Processes:
    """Starts processes in `folder`, each in a session of its own."""

    def __init__(self, folder: Path, nursery: trio.Nursery, forker: Forker | None = None) -> None:
        self.folder = folder
        self._forker = forker
        self._nursery = nursery
        self._running: list[Running] = []

    async def pulse_trio(
        self, *arguments: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> Running:
        """Start the installed `pulse-trio` command; arguments as of `start`."""
        command = str(Path(sysconfig.get_path("scripts")) / "pulse-trio")
        return await self.start(command, *arguments, env=env, cwd=cwd)

    async def worker(
        self,
        app: str,
        dsn: str,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        within: float = WITHIN,
    ) -> Running:
        """Start `pulse-trio run` for the handlers of `app`, as in "app:handlers", and wait until it has registered; other
        arguments as of `start`. The DSN goes by the environment, where no other user of the machine sees it.

        Raises:
            AssertionError: it has not registered in `within` seconds, or has ended; the message has what it printed.
        """
        running = await self.pulse_trio("run", app, *arguments, env={**(env or {}), "PULSE_TRIO_DSN": dsn}, cwd=cwd)
        await running.line(r"worker \S+ started", within=within)
        return running

    async def restart(self, running: Running) -> Running:
        """Start the same command again, once its process has ended; one that still runs is killed first."""
        if running.process.returncode is None:
            running.kill()
        await running.process.wait()
        command = running.command
        start = self.start if command.words[0] != _FORKED else self.command
        words = command.words if command.words[0] != _FORKED else command.words[1:]
        return await start(*words, env=command.env, cwd=command.cwd)

    async def python(self, *arguments: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Running:
        """Start the Python that runs the tests; arguments as of `start`."""
        return await self.start(sys.executable, *arguments, env=env, cwd=cwd)

    async def start(self, *command: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Running:
        """Start `command`, with no input.

        Args:
            command: the program and its arguments.
            env: variables beside the inherited ones. None of pulse-trio's or PostgreSQL's own are inherited.
            cwd: its current folder; default: the test's temporary folder.
        """
        process = await trio.lowlevel.open_process(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**clean_environment(), **(env or {})},
            cwd=cwd or self.folder,
            start_new_session=True,
        )
        return self._watched(process, Command(command, env, cwd))

    async def command(self, *arguments: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Running:
        """Start a command of `pulse-trio`, by the forker if there is one; arguments as of `start`."""
        environment = {**clean_environment(), **(env or {})}
        if self._forker is None or not self._forker.takes(environment):
            return await self.pulse_trio(*arguments, env=env, cwd=cwd)
        with trio.CancelScope(shield=True):
            process = await self._forker.start(arguments, environment, cwd or self.folder)
            return self._watched(process, Command((_FORKED, *arguments), env, cwd))
        raise AssertionError("this scope is not cancelled")

    async def run(self, *arguments: str, code: int = 0, env: Mapping[str, str] | None = None) -> str:
        """Run a `command` to its end, which must be exit code `code`; returns its stdout."""
        running = await self.command(*arguments, env=env)
        ended = await running.ended()
        if ended != code:
            raise AssertionError(f"exit code {ended}, not {code}\n{running.report()}")
        return running.stdout

    def _watched(self, process: ProcessLike, command: Command) -> Running:
        running = Running(process, command)
        self._running.append(running)
        self._nursery.start_soon(running.read)
        return running

    async def kill_all(self) -> None:
        """Kill what runs, with all it started in its session's process group."""
        for running in self._running:
            kill_group(running.pid)
            await running.process.wait()


def children_of(parent: int) -> list[int]:
    """The processes that one has started and that still are, oldest first: the worker processes of a supervisor."""
    command = ["ps", "-A", "-o", "pid=,ppid=,stat="]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603 -- a fixed command
    rows = [line.split() for line in listed.stdout.splitlines()]
    return sorted(int(pid) for pid, of, state in rows if int(of) == parent and not state.startswith("Z"))


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal, unless the process is gone."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def clean_environment() -> dict[str, str]:
    """This process's environment without the variables that name a database or a setting of pulse-trio; unbuffered output."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PULSE_TRIO_", "PG"))}
    kept.pop("DATABASE_URL", None)
    return {**kept, "PYTHONUNBUFFERED": "1"}


def kill_group(leader: int) -> None:
    """Kill every process of the group that `leader` began, if any is left."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        pass


def is_running(pid: int) -> bool:
    """Whether a process lives; one that has ended and waits to be reaped does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # Nobody may be there to reap it.
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"


@asynccontextmanager
async def open_processes(folder: Path, forker: Forker | None = None) -> AsyncGenerator[Processes]:
    """Start processes in `folder` for as long as the block runs; what is left then is killed. A `forker` starts short commands
    of pulse-trio without the start of a Python, for suites that run hundreds of them."""
    async with trio.open_nursery() as nursery:
        processes = Processes(folder, nursery, forker)
        try:
            yield processes
        finally:
            with trio.CancelScope(shield=True):
                await processes.kill_all()
            nursery.cancel_scope.cancel()
