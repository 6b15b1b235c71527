"""The crash points of a handler with `runs="process"`: its process is killed, by SIGKILL, before a line of it.

The process finds its function in this module, under a name that says what is to happen, and writes down in a file how far it
came. A worker may run the job more than once: it is retried after its process was killed, and its delay may be next to nothing.
So what an attempt does depends on what those before it, of the same worker, have written there.
"""

from __future__ import annotations

import os
import signal
import tempfile
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ...handlers import Handler
from ...worker.jobs.kinds.child import find
from ...worker.jobs.kinds.wire import Importable
from .lines import LinesOf
from .points import Place, place_of_frames, place_of_handler

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from .strikes import Strikes

_PREFIX = "at_"
_made: dict[str, Callable[..., Any]] = {}


class _Orders(msgspec.Struct, frozen=True):
    """What is to happen: the function at `place` has been started `starts` times under earlier workers and has passed
    `checkpoints` points there. Its first attempt in which that is due dies at point number `dies_at`, or before the first line
    of start number `dies_at_start`. It notes each start and each point in `notes`."""

    place: Importable
    notes: str
    starts: int
    checkpoints: int
    dies_at: int | None
    dies_at_start: int | None


class _Struck(msgspec.Struct):
    file: str
    line: int
    function: str


class _Noted(msgspec.Struct):
    """What the attempts under one worker have noted."""

    starts: int = 0
    checkpoints: int = 0
    struck: _Struck | None = None


_STARTED, _PASSED = b"started", b"passed"


def _read(notes: Path) -> _Noted:
    """A note is a line. One that a killed process has begun was not noted."""
    noted = _Noted()
    for line in notes.read_bytes().split(b"\n")[:-1]:
        if line == _STARTED:
            noted.starts += 1
        elif line == _PASSED:
            noted.checkpoints += 1
        else:
            noted.struck = msgspec.json.decode(line, type=_Struck)
    return noted


class InChild:
    """One worker's: `function` for it, and `collect` for what the attempts under it have noted."""

    def __init__(self, function: Callable[..., Any], strikes: Strikes) -> None:
        self._strikes = strikes
        number, self._notes = tempfile.mkstemp(prefix="pulse-trio-points-")
        os.close(number)
        place = Importable(function.__module__, function.__qualname__)
        point = strikes.point
        kills = point.strike == "kill" and not strikes.struck
        orders = _Orders(
            place,
            self._notes,
            strikes.starts,
            strikes.checkpoints,
            point.number if kills and point.where == "at" else None,
            point.number if kills and point.where == "start" else None,
        )
        self._name = _PREFIX + msgspec.json.encode(orders).hex()
        self.function = _made[self._name] = _with_points(self._name, orders, function)

    def collect(self) -> None:
        """Reads how far the processes came."""
        notes = Path(self._notes)
        noted = _read(notes)
        notes.unlink()
        _made.pop(self._name, None)
        self._strikes.starts += noted.starts
        self._strikes.checkpoints += noted.checkpoints
        if (at := noted.struck) is not None:
            self._strikes.struck, self._strikes.place = True, Place(at.file, at.line, at.function)


def __getattr__(name: str) -> Any:
    """The function that a name stands for, in the handler's process."""
    if name in _made:
        return _made[name]
    if not name.startswith(_PREFIX):
        raise AttributeError(name)
    orders = msgspec.json.decode(bytes.fromhex(name.removeprefix(_PREFIX)), type=_Orders)
    found = find(orders.place)
    return _with_points(name, orders, found.function if isinstance(found, Handler) else found)


def _with_points(name: str, orders: _Orders, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def at_points(*args: Any, **kwargs: Any) -> Any:
        noted = _read(Path(orders.notes))
        with Path(orders.notes).open("ab", buffering=0) as notes:
            passed = orders.checkpoints + noted.checkpoints

            def note(line: bytes) -> None:
                notes.write(line + b"\n")

            def die(place: Place) -> None:
                note(msgspec.json.encode(_Struck(place.file, place.line, place.function)))
                os.kill(os.getpid(), signal.SIGKILL)

            def at_line(frame: FrameType) -> None:
                nonlocal passed
                passed += 1
                if passed == orders.dies_at and noted.struck is None:
                    die(place_of_frames([(frame, frame.f_lineno)], function))
                note(_PASSED)

            note(_STARTED)
            if orders.starts + noted.starts + 1 == orders.dies_at_start and noted.struck is None:
                die(place_of_handler(function))
            with LinesOf(function, at_line):
                return function(*args, **kwargs)

    at_points.__module__, at_points.__qualname__ = __name__, name
    return at_points
