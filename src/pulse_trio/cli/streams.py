"""Standard streams that were closed (`2>&-`, some service managers)."""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import suppress

STDOUT = 1


class Refusing(io.TextIOBase):
    """A stdout that was closed: what a command prints there is lost, and the command says so."""

    def write(self, text: str, /) -> int:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))


def open_closed_streams() -> None:
    """Opens standard streams that were closed on the null device.

    Their numbers would be given to the next files that are opened: what writes to stderr by its number (C libraries, child
    processes) would write into the connection to the database. Python has None for such a stream.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The system gives the lowest free number: this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdout is None:
        sys.stdout = Refusing()
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 -- as long as the process


def accept_lost_output() -> None:
    """What is printed on a stdout that was closed is lost without a word: a worker has other work than to print."""
    if isinstance(sys.stdout, Refusing):
        with suppress(OSError):
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 -- as long as the process
