"""Writes a log to a file descriptor without waiting for the program that reads it.

A pipe that is not read fills up, a terminal may be stopped (Ctrl-S), and a write then waits for as long as that lasts. In the
event loop that would be the end of every lease. So each write is tried without waiting, and only what does not fit is left to
a thread. That backlog is bounded: lines beyond it are left out and counted.

Whether a write waits is a property of the open file, which other processes share (a shell, a supervisor's other children), so
it is not ours to change. Linux gives a pipe or a terminal that is opened by its name under /proc an open file of its own; a
socket takes the wish with each message. Where neither can be had, all lines go by the thread.
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
"""Bytes that wait for a reader."""
_FAREWELL = 1.0
"""Seconds that the process's end waits for a reader."""


class LogWriter:
    """Writes to `descriptor`. `notice` makes a line of the number of lines that were left out.

    What the descriptor refuses (no reader any more, a full disk) is lost.
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
        # No thread to be had: the next line tries again.
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
                # Only now: until then new lines go behind it.
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
    """What writes as many bytes as go without waiting, or raises `BlockingIOError`; None where there is no such thing."""
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
    # A file: its disk is waited for, as by any program.
    return lambda line: os.write(descriptor, line)
