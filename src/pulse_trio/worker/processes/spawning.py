"""Starts another process of ours, with a line to it and a file for its crash dump."""

from __future__ import annotations

import errno
import socket
import subprocess
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

import trio

from .channel import LINE_VARIABLE
from .crash_dump import LAST_WORDS_VARIABLE, CrashDump

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Launch(NamedTuple):
    """How to start a process with this worker's handlers."""

    command: Sequence[str]
    environment: Mapping[str, str]


class Spawned(NamedTuple):
    """A process that was started, and our ends of its line and its file."""

    process: trio.Process
    line: trio.SocketStream
    words: CrashDump


async def spawn(command: Sequence[str], environment: Mapping[str, str]) -> Spawned:
    """Starts `command`. Raises `OSError` if the system refuses it; then no part of it is left."""
    with ExitStack() as made:
        ours, theirs = socket.socketpair()
        made.enter_context(ours)
        with theirs:
            words = CrashDump()
            made.callback(words.close)
            process = await _open_process(command, environment, theirs.fileno(), words.fileno())
        made.pop_all()
    return Spawned(process, trio.SocketStream(trio.socket.from_stdlib_socket(ours)), words)


async def _open_process(command: Sequence[str], environment: Mapping[str, str], line: int, words: int) -> trio.Process:
    try:
        return await trio.lowlevel.open_process(
            command,
            stdin=subprocess.DEVNULL,
            env={**environment, LINE_VARIABLE: str(line), LAST_WORDS_VARIABLE: str(words)},
            pass_fds=[line, words],
            # Ctrl-C in a terminal is for the process that starts this one, which passes it on; and a handler that kills its
            # process group kills this process, not the one that started it.
            start_new_session=True,
        )
    except RuntimeError as error:
        # Trio starts a process from a thread, and Python raises this when the kernel refuses the thread.
        if "start new thread" not in str(error):
            raise
        raise BlockingIOError(errno.EAGAIN, str(error)) from error
