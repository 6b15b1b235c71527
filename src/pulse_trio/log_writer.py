"""Writes a log to a file descriptor without waiting for the program that reads it.

A pipe that is not read fills up, a terminal may be stopped (Ctrl-S), and a write then blocks for as long as that lasts. In
the event loop that would cost every lease. So each write is tried without waiting, and only the rest goes to a thread. That
backlog is bounded: lines beyond it are dropped and counted.

Whether a write blocks is a property of the open file, which other processes share (a shell, a supervisor's other children),
so we must not change it. On Linux, opening a pipe or a terminal by its name under /proc creates a separate open file; a
socket takes a flag with each message. Where neither works, the thread writes all lines.
"""

from __future__ import annotations

import os
import select
import socket
import stat
import threading
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

MOST = 1 << 20
"""How many bytes may wait for a reader."""
_FAREWELL = 1.0
"""How many seconds the end of the process waits for a reader."""


class LogWriter:
    """Writes to `descriptor`. `notice` turns the number of dropped lines into a line.

    Lines that the descriptor refuses (no reader any more, a full disk) are lost.
    """

    def __init__(self, descriptor: int, notice: Callable[[int], bytes]) -> None:
        self._descriptor = descriptor
        self._notice = notice
        self._attempt = _without_waiting(descriptor)
        self._news = threading.Condition()
        self._backlog: deque[bytes] = deque()
        self._size = 0
        self._left_out = 0
        self._writer: threading.Thread | None = None

    def write(self, line: bytes) -> None:
        """Writes a line, or keeps it for later. Does not wait."""
        with self._news:
            if not self._backlog and self._attempt is not None:
                line = self._rest_of(self._attempt, line)
            if not line:
                return
            if self._size + len(line) > MOST and self._backlog:
                self._left_out += 1
                return
            self._backlog.append(line)
            self._size += len(line)
            self._news.notify_all()
            if self._writer is None:
                self._start()

    def flush(self) -> None:
        """Waits for a second at most until all is written."""
        with self._news:
            self._news.wait_for(lambda: not self._backlog or self._writer is None, _FAREWELL)

    def _rest_of(self, attempt: Callable[[bytes], int], line: bytes) -> bytes:
        try:
            return line[attempt(line) :]
        except BlockingIOError:
            return line
        except OSError:
            return b""

    def _start(self) -> None:
        writer = threading.Thread(target=self._write_backlog, name="pulse-trio log", daemon=True)
        # No thread available: the next line tries again.
        with suppress(RuntimeError):
            writer.start()
            self._writer = writer

    def _write_backlog(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._backlog)
                line = self._backlog[0]
            with suppress(OSError):
                self._write_all(line)
            with self._news:
                # Only now: until then new lines queue behind it.
                self._backlog.popleft()
                self._size -= len(line)
                if self._left_out and self._size < MOST // 2:
                    notice, self._left_out = self._notice(self._left_out), 0
                    self._backlog.append(notice)
                    self._size += len(notice)
                self._news.notify_all()

    def _write_all(self, line: bytes) -> None:
        ready = select.poll()
        ready.register(self._descriptor, select.POLLOUT)
        while line:
            ready.poll()
            with suppress(BlockingIOError):
                line = line[os.write(self._descriptor, line) :]


def _without_waiting(descriptor: int) -> Callable[[bytes], int] | None:
    """A function that writes as many bytes as possible without waiting, or raises `BlockingIOError`; None if there is
    none."""
    try:
        kind = os.fstat(descriptor).st_mode
        if stat.S_ISSOCK(kind):
            own = socket.socket(fileno=os.dup(descriptor))
            return lambda line: own.send(line, socket.MSG_DONTWAIT)
        if stat.S_ISFIFO(kind) or os.isatty(descriptor):
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            opened = os.open(f"/proc/self/fd/{descriptor}", flags)
            return lambda line: os.write(opened, line)
    except OSError:
        return None
    # A file: writes wait for its disk, as in any program.
    return lambda line: os.write(descriptor, line)
