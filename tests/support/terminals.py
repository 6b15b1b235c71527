"""A command on a terminal of its own, as a person sees it: what stands on the screen, keys, sizes, and how it is left."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import sysconfig
import termios
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from pulse_trio.testing.faults.processes import WITHIN, clean_environment

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from support.forked_children import ForkedChild
    from support.forking import Forker

ALONE = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Makes the terminal the controlling one, so that Ctrl-C and a new size become signals, and runs the command."""
IN_A_FORK = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from pulse_trio.cli import main
main()
"""
"""The same for a command of pulse-trio's."""


class Terminal:
    """What the other end of the terminal sees."""

    def __init__(self, master: int, slave: int) -> None:
        self._master = master
        self._slave = slave
        self.before: list[Any] = termios.tcgetattr(slave)
        self.raw = ""
        self.process: trio.Process | ForkedChild

    @property
    def modes(self) -> list[Any]:
        """The terminal's settings now."""
        return termios.tcgetattr(self._slave)

    @property
    def lines(self) -> list[str]:
        """The lines of the last frame that was drawn to its end, without colours and trailing spaces."""
        frames = re.findall("\x1b\\[H(.*?)\x1b\\[J", self.raw, re.DOTALL)
        shown = re.sub("\x1b\\[[0-9;]*[mK]", "", frames[-1]) if frames else ""
        return [line.rstrip() for line in shown.split("\r\n")]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    async def shows(self, pattern: str) -> re.Match[str]:
        """Waits until the screen has the pattern."""
        with trio.move_on_after(WITHIN):
            while True:
                if found := re.search(pattern, self.text, re.MULTILINE):
                    return found
                await self._read()
        raise AssertionError(f"no {pattern!r} on the screen:\n{self.text}\n{self.raw[-2000:]!r}")

    async def ended(self) -> int:
        """Waits for the end of the command, reading what it still says; returns its exit code."""
        with trio.fail_after(WITHIN):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read_on)
                code = await self.process.wait()
                nursery.cancel_scope.cancel()
        while self._waiting():
            self.raw += os.read(self._master, 65536).decode(errors="replace")
        return code

    async def _read_on(self) -> None:
        while True:
            await self._read()

    async def _read(self) -> None:
        await trio.lowlevel.wait_readable(self._master)
        self.raw += os.read(self._master, 65536).decode(errors="replace")

    def _waiting(self) -> bool:
        return struct.unpack("i", fcntl.ioctl(self._master, termios.FIONREAD, b"\0" * 4))[0] > 0


@asynccontextmanager
async def on_terminal(
    *command: str, env: Mapping[str, str], columns: int = 80, lines: int = 24, forker: Forker | None = None
) -> AsyncGenerator[Terminal]:
    """Runs a command on a new terminal; it is killed at the end of the block if it still runs. With a `forker`, what follows
    `PROGRAM` is run in a fork."""
    master, slave = pty.openpty()
    terminal = Terminal(master, slave)
    terminal.resize(columns, lines)
    environment = {**clean_environment(), "TERM": "xterm-256color", **env}
    try:
        if forker is not None and command[0] == PROGRAM:
            forked = ["-c", IN_A_FORK, *command[1:]]
            terminal.process = await forker.begin(forked, environment, Path.cwd(), (slave, slave, slave))
            yield terminal
            return
        terminal.process = await trio.lowlevel.open_process(
            [sys.executable, "-c", ALONE, *command],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
        )
        yield terminal
    finally:
        if terminal.process.returncode is None:
            terminal.process.kill()
            with trio.CancelScope(shield=True):
                await terminal.process.wait()
        os.close(master)
        os.close(slave)


PROGRAM = str(Path(sysconfig.get_path("scripts")) / "pulse-trio")
