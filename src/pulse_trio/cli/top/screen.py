"""The terminal: keys as they are pressed, its size, frames on it; and as it was before, however we leave it."""

from __future__ import annotations

import os
import re
import sys
import termios
import tty
from collections import deque
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

import trio

if TYPE_CHECKING:
    from collections.abc import Generator

ENTER: Final = "\x1b[?1049h\x1b[?25l\x1b[2J"
"""The alternate screen, without a cursor."""
LEAVE: Final = "\x1b[?25h\x1b[?1049l"
_NAMES: Final = {
    "[A": "up", "[B": "down", "OA": "up", "OB": "down", "[5~": "page up", "[6~": "page down", "[H": "home", "[F": "end",
    "[1~": "home", "[4~": "end", "OH": "home", "OF": "end", "[C": "right", "[D": "left", "[Z": "back tab",
}  # fmt: skip
_PLAIN: Final = {
    "\r": "enter",
    "\n": "enter",
    "\t": "tab",
    "\x7f": "backspace",
    "\x08": "backspace",
    "\x0c": "redraw",
    "\x15": "clear",
}
_SEQUENCE = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|O[@-~])")
_UNFINISHED = re.compile(r"\x1b(\[[0-9;?]*|O)?")
_ESCAPE_WAITS = 0.05
"""Seconds after which an escape character that nothing follows was the key Escape."""


class Screen:
    """A terminal on two descriptors; use it inside of `taken()`."""

    def __init__(self, keys: int, output: int) -> None:
        self._keys = keys
        self._output = output
        self._before = termios.tcgetattr(keys)
        self._pending = ""
        self._read: deque[str] = deque()

    @contextmanager
    def taken(self) -> Generator[None]:
        """The whole terminal is ours inside of the block, and as it was before afterwards."""
        try:
            self.take()
            yield
        finally:
            self.give_back()

    def take(self) -> None:
        """Keys arrive one by one and are not shown; Ctrl-C is a signal as before."""
        tty.setcbreak(self._keys, termios.TCSADRAIN)
        self._write(ENTER.encode())

    def give_back(self) -> None:
        """The terminal as it was before. May be called twice."""
        # A terminal that has gone needs nothing back.
        with suppress(OSError, termios.error):
            self._write(LEAVE.encode())
        with suppress(OSError, termios.error):
            termios.tcsetattr(self._keys, termios.TCSADRAIN, self._before)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines."""
        with suppress(OSError):
            columns, lines = os.get_terminal_size(self._output)
            if columns > 0 and lines > 0:
                return columns, lines
        return 80, 24

    async def draw(self, lines: list[str]) -> None:
        """Replaces what is shown. In a thread: a terminal may stop reading (Ctrl-S)."""
        text = "\x1b[H" + "\r\n".join(f"{line}\x1b[0m\x1b[K" for line in lines) + "\x1b[J"
        frame = text.encode(sys.stdout.encoding or "ascii", "replace")
        await trio.to_thread.run_sync(self._write, frame, abandon_on_cancel=True)

    async def key(self) -> str:
        """The next key: a character, or a name such as `up`. Raises `EOFError` when the terminal has gone."""
        while not self._read:
            self._split(finished=False)
            if self._read:
                break
            if self._pending:
                with trio.move_on_after(_ESCAPE_WAITS) as waiting:
                    await trio.lowlevel.wait_readable(self._keys)
                if waiting.cancelled_caught:
                    self._split(finished=True)
                    continue
            else:
                await trio.lowlevel.wait_readable(self._keys)
            try:
                data = os.read(self._keys, 1024)
            except OSError as error:
                raise EOFError from error
            if not data:
                raise EOFError
            self._pending += data.decode(errors="replace")
        return self._read.popleft()

    def _split(self, *, finished: bool) -> None:
        """Cuts what was read into keys; an unfinished escape sequence stays, until nothing more comes."""
        while text := self._pending:
            if text[0] != "\x1b":
                self._pending = text[1:]
                self._read.append(_PLAIN.get(text[0], text[0]))
            elif found := _SEQUENCE.match(text):
                self._pending = text[found.end() :]
                # A key that has no meaning here is no key.
                if name := _NAMES.get(found[1]):
                    self._read.append(name)
            elif _UNFINISHED.fullmatch(text) and not finished:
                return
            else:
                self._pending = text[1:]
                self._read.append("escape")

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._output, data) :]
