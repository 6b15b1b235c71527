"""Finds out where a worker process was that can no longer report it: when it crashed, or when it was asked from outside.

A C function that keeps the interpreter's lock stops every thread of Python in its process, the lag monitor's too. Python's
`faulthandler` needs no lock: its signal handler is C, and writes the frames of every thread to a file. So the supervisor gives
each process a file (without a name). The process writes the places of its handlers there when it starts; `faulthandler` adds
the frames when the process dies of a signal such as SIGSEGV, or of `END`, and the supervisor reads from the frames which
handler ran.

`END` ends the process in the same moment: when a signal only asked for the frames, a handler in `sleep` was seen to return from
that (a signal interrupts it) and to complete its job before the kill.

Known flaws: a process that is stopped (SIGSTOP) receives no signal; a recursion deeper than 100 frames hides the handler; if a
module uses `faulthandler` or SIGALRM itself, it is left alone, and the process then dies without a dump.
"""

from __future__ import annotations

import faulthandler
import inspect
import json
import os
import re
import signal
import tempfile
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, cast

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ...handlers import Handler

LAST_WORDS_VARIABLE = "PULSE_TRIO_LAST_WORDS"
"""Holds the number of the inherited descriptor, in the environment of a supervised worker."""
END = signal.SIGALRM
"""Ends a worker whose loop does not turn; also the signal of the kernel's alarm clock (`channel.py`). It leaves no core
file."""
_LIMIT = 1 << 20
"""Bytes that are read."""
_OURS = re.compile(r"[/\\](?:pulse_trio[/\\](?:worker|handlers)|trio|outcome)[/\\]")
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.*)')


class Words(NamedTuple):
    """The stack that was written, outermost frame first, and the kinds whose handlers are on it (on the stacks of several
    threads, if the loop itself only waits)."""

    stack: str = ""
    kinds: tuple[str, ...] = ()


def nameless_file() -> BinaryIO:
    """Makes a file that another process, which gets its number, can read."""
    # In memory where possible: a full disk must not keep a worker from starting.
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("pulse-trio"), "w+b")
    return cast("BinaryIO", tempfile.TemporaryFile())


class CrashDump:
    """The supervisor's end: one file for one process."""

    def __init__(self) -> None:
        self._file = nameless_file()

    def fileno(self) -> int:
        return self._file.fileno()

    def read(self) -> Words:
        """Returns what was written; unreadable content counts as nothing."""
        head, _, dump = os.pread(self.fileno(), _LIMIT, 0).decode(errors="replace").partition("\n")
        try:
            places = {(file, name): kind for kind, (file, name) in json.loads(head).items()}
        except (ValueError, AttributeError, TypeError):
            return Words()
        return read_dump(dump, places)

    def close(self) -> None:
        self._file.close()


class _Frame(NamedTuple):
    file: str
    line: str
    name: str


def read_dump(dump: str, places: Mapping[tuple[str, str], str]) -> Words:
    """Parses the frames of all threads that `faulthandler` wrote; `places` has the kind of each (file, function)."""
    threads: list[tuple[bool, list[_Frame]]] = []
    for line in dump.splitlines():
        if line.startswith(("Current thread ", "Thread ")):
            threads.append((line.startswith("Current"), []))
        elif threads and (match := _FRAME.match(line)) is not None:
            threads[-1][1].append(_Frame(*match.groups()))
    # Signals come to the main thread, where the loop is. If no handler is on its stack, it may be waiting for a lock that
    # another thread holds.
    current = [frames for is_current, frames in threads if is_current]
    for group in (current, [frames for is_current, frames in threads if not is_current]):
        if blamed := [(kind, frames) for frames in group if (kind := _kind_of(frames, places)) is not None]:
            kinds = tuple(dict.fromkeys(kind for kind, _ in blamed))
            return Words("\n\n".join(_text(frames) for _, frames in blamed), kinds)
    return Words(_text(current[0]) if current else "")


def _kind_of(frames: Sequence[_Frame], places: Mapping[tuple[str, str], str]) -> str | None:
    """The kind of the innermost handler: `faulthandler` writes the innermost frame first."""
    return next((kind for frame in frames if (kind := places.get((frame.file, frame.name))) is not None), None)


def _text(frames: Sequence[_Frame]) -> str:
    own = [frame for frame in frames if not _OURS.search(frame.file)] or frames
    return "\n".join(f'  File "{frame.file}", line {frame.line}, in {frame.name}' for frame in reversed(own))


def inherit_crash_dump(handlers: Iterable[Handler[..., object]]) -> None:
    """In the worker, before its first session: writes where its handlers are, and has the frames written when a signal kills
    it."""
    number = os.environ.pop(LAST_WORDS_VARIABLE, None)
    if number is None:
        return
    file = int(number)
    os.set_inheritable(file, False)
    os.write(file, json.dumps({h.kind: place for h in handlers if (place := _place(h)) is not None}).encode() + b"\n")
    if signal.getsignal(END) is signal.SIG_DFL:
        faulthandler.register(END, file, all_threads=True, chain=True)
    if not faulthandler.is_enabled():
        faulthandler.enable(file)


def _place(handler: Handler[..., object]) -> tuple[str, str] | None:
    code = getattr(inspect.unwrap(handler.function), "__code__", None)
    return None if code is None else (code.co_filename, code.co_name)
