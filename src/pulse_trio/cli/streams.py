"""Standard streams that were closed (`2>&-`, some service managers)."""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import suppress
from typing import Any

STDOUT = 1


class Refusing(io.TextIOBase):
    """A stdout that was closed: the command's output is lost, and the command says so."""

    def write(self, text: str, /) -> int:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))


def open_closed_streams() -> None:
    """Opens closed standard streams on the null device.

    The next files to be opened would get their descriptors: anything that writes to stderr by its number (C libraries, child
    processes) would write into the connection to the database. Python's object for such a stream is None.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The system gives the lowest free number: this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115 -- as long as the process
    if sys.stdout is None:
        sys.stdout = Refusing()
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 -- as long as the process


def write_whole() -> None:
    """Gives stdout a buffer where Python runs without one (`PYTHONUNBUFFERED`, which many images set). Python ignores there
    that the system has taken a part of the text alone, and the rest is lost without an error: on a full disk, for one."""
    stdout: Any = sys.stdout
    if isinstance(getattr(stdout, "buffer", None), io.FileIO):
        encoding, errors, raw = stdout.encoding, stdout.errors, stdout.detach()
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(raw), encoding=encoding, errors=errors, line_buffering=True)


def accept_lost_output() -> None:
    """Silently drops output to a closed stdout: a worker does not depend on printing."""
    if isinstance(sys.stdout, Refusing):
        with suppress(OSError):
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 -- as long as the process
