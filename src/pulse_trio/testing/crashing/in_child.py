"""The crash points of a handler with `runs="process"`: its process is killed, by SIGKILL, before a line of it.

The process finds its function in this module, under a name that says what is to happen, and writes down in a file how far it
came.
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
    """What is to happen: the function at `place` has passed `before` points in earlier attempts, and dies at number `dies_at`
    (0: before its first line; None: not). It notes each point in `notes`."""

    place: Importable
    notes: str
    before: int
    dies_at: int | None


class _Struck(msgspec.Struct):
    file: str
    line: int
    function: str


class InChild:
    """One attempt's: `function` for the worker, and `collect` for what its process has noted."""

    def __init__(self, function: Callable[..., Any], strikes: Strikes) -> None:
        self._strikes = strikes
        number, self._notes = tempfile.mkstemp(prefix="pulse-trio-points-")
        os.close(number)
        place = Importable(function.__module__, function.__qualname__)
        orders = _Orders(place, self._notes, strikes.checkpoints, self._dies_at())
        self._name = _PREFIX + msgspec.json.encode(orders).hex()
        self.function = _made[self._name] = _with_points(self._name, orders, function)

    def _dies_at(self) -> int | None:
        point = self._strikes.point
        self._strikes.starts += 1
        if self._strikes.struck or point.strike != "kill" or point.where == "end":
            return None
        if point.where == "at":
            return point.number
        return 0 if point.number == self._strikes.starts else None

    def collect(self) -> None:
        """Reads how far the process came."""
        notes = Path(self._notes)
        passed, _, struck = notes.read_bytes().partition(b"{")
        notes.unlink()
        _made.pop(self._name, None)
        self._strikes.checkpoints += len(passed)
        if struck:
            at = msgspec.json.decode(b"{" + struck, type=_Struck)
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
        with Path(orders.notes).open("ab", buffering=0) as notes:
            passed = orders.before

            def die(place: Place) -> None:
                notes.write(msgspec.json.encode(_Struck(place.file, place.line, place.function)))
                os.kill(os.getpid(), signal.SIGKILL)

            def at_line(frame: FrameType) -> None:
                nonlocal passed
                passed += 1
                if passed == orders.dies_at:
                    die(place_of_frames([(frame, frame.f_lineno)], function))
                notes.write(b".")

            if orders.dies_at == 0:
                die(place_of_handler(function))
            with LinesOf(function, at_line):
                return function(*args, **kwargs)

    at_points.__module__, at_points.__qualname__ = __name__, name
    return at_points
