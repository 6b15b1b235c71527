"""What a worker process that can no longer speak still says: where it was when it crashed, or when it was asked from outside.

A C function that keeps the interpreter's lock stops every thread of Python in its process, the lag monitor's too. Python's
`faulthandler` needs no lock: its signal handler is C, and writes the frames of every thread to a file. So each supervised
process has a file (without a name) from its supervisor. It writes the places of its handlers there when it starts;
`faulthandler` adds the frames when the process dies of SIGSEGV and the like, or of `END`, and the supervisor reads which
handler was on them.

Whoever gets `END` ends with it, in the same moment: merely asked, a handler in `sleep` was seen to return from that (a signal
interrupts it) and to complete its job before the kill.

Known flaws: a process that is stopped (SIGSTOP) hears no signal; a recursion deeper than 100 frames hides the handler; a
module that uses `faulthandler` or SIGALRM for itself is let alone, and then dies without a word here.
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
"""Ends a worker whose loop does not turn; what the kernel's alarm clock sends (`channel.py`). It leaves no core behind."""
_LIMIT = 1 << 20
"""Bytes that are read."""
_OURS = re.compile(r"[/\\](?:pulse_trio[/\\](?:worker|handlers)|trio|outcome)[/\\]")
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.*)')


class Words(NamedTuple):
    """The stack that was written, outermost frame first, and the kinds whose handlers are on it (on those of several threads,
    if the loop itself only waits)."""

    stack: str = ""
    kinds: tuple[str, ...] = ()


def nameless_file() -> BinaryIO:
    """To be read by another process that is given its number."""
    # In memory where that can be: a full disk must not keep a worker from being started.
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
        """What was written; nothing understandable is nothing."""
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
    """What `faulthandler` wrote of all threads; `places` has the kind of each (file, function)."""
    threads: list[tuple[bool, list[_Frame]]] = []
    for line in dump.splitlines():
        if line.startswith(("Current thread ", "Thread ")):
            threads.append((line.startswith("Current"), []))
        elif threads and (match := _FRAME.match(line)) is not None:
            threads[-1][1].append(_Frame(*match.groups()))
    # Signals come to the main thread, where the loop is. With no handler on its stack it may wait for what another one keeps.
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
    """In the worker, before its first session: says where its handlers are, and has the frames written at a violent end."""
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
