"""Where a job may be struck, and how that is said: `kill@3` is the third checkpoint of the handler."""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from ...errors import ConfigurationError
from ...worker.diagnosis.stack import await_frames

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import CodeType, FrameType
    from typing import Any

Strike = Literal["none", "kill", "lost", "cancel"]
Where = Literal["start", "at", "end"]

_NAME = re.compile(r"(kill|lost|cancel)@(start|end)?([1-9][0-9]*)?")
_LIBRARIES = tuple(
    os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_DECORATORS = 50
"""The most lines that a function's decorators may take."""
_OURS = ("pulse_trio", "trio", "outcome")


@dataclass(frozen=True, slots=True)
class CrashPoint:
    """What happens to a run, and where: at the `number`-th checkpoint (`at`), before an attempt's first line (`start`), or when
    an attempt has ended and nothing is reported yet (`end`)."""

    strike: Strike
    where: Where = "at"
    number: int = 1

    def __str__(self) -> str:
        if self.strike == "none":
            return "none"
        if self.where == "at":
            return f"{self.strike}@{self.number}"
        return f"{self.strike}@{self.where}{self.number if self.number > 1 else ''}"

    def says(self, place: Place | None) -> str:
        """What was done, as a sentence without its end."""
        if self.strike == "none":
            return "ran undisturbed"
        at = "" if place is None else f", {place}"
        if self.where == "start":
            return f"was killed before the first line of attempt {self.number}{at}"
        if self.where == "end":
            return f"was killed when attempt {self.number} had ended, before its outcome was written{at}"
        what = {"kill": "was killed", "lost": "lost its lease"}.get(self.strike, "was cancelled")
        return f"{what} at checkpoint {self.number}{at}"


NONE = CrashPoint("none")


def point_named(name: str) -> CrashPoint:
    """The point of `only="kill@3"`. Raises `ConfigurationError`."""
    if name == "none":
        return NONE
    match = _NAME.fullmatch(name)
    if match is None or not (match[2] or match[3]) or (match[1] != "kill" and match[2]):
        raise ConfigurationError(
            f"crash_points(only={name!r}): a point is none, kill@N, lost@N, cancel@N, kill@start or kill@end, as in kill@3."
        )
    strike = cast("Strike", match[1])
    where: Where = "at" if match[2] is None else "start" if match[2] == "start" else "end"
    return CrashPoint(strike, where, int(match[3] or 1))


@dataclass(frozen=True, slots=True)
class Place:
    """A line of the user's code. `inner` is where a function that it calls waits, if that is the user's code too."""

    file: str
    line: int
    function: str
    inner: Place | None = None
    about: str = ""
    """What a durable call was about to do there, or had done."""

    @property
    def source(self) -> str:
        """The line itself; empty if its file cannot be read."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        said = f"{_short(self.file)}:{self.line} in {self.function}"
        said += f": {self.source}" if self.source else ""
        said += f" ({self.about})" if self.about else ""
        return said if self.inner is None else f"{said}\n  inside of it: {self.inner}"


def place_of_task(coro: Any, handler: Callable[..., Any]) -> Place:
    """Where a suspended coroutine waits: its outermost and its innermost frame that are the user's."""
    return place_of_frames(await_frames(coro), handler)


def place_of_frames(frames: Iterable[tuple[FrameType, int]], handler: Callable[..., Any]) -> Place:
    """The same of frames, outermost first."""
    own: CodeType | None = getattr(handler, "__code__", None)
    users = [pair for pair in frames if pair[0].f_code is own or is_users(pair[0])]
    if not users:
        return place_of_handler(handler)
    # Above the handler's own frame stands what wraps it.
    first = next((number for number, (frame, _) in enumerate(users) if frame.f_code is own), 0)
    inner = _place(*users[-1]) if len(users) > first + 1 else None
    outer = _place(*users[first])
    return Place(outer.file, outer.line, outer.function, inner)


def place_of_handler(handler: Callable[..., Any]) -> Place:
    """The first line of a handler's function."""
    code: CodeType | None = getattr(handler, "__code__", None)
    name = getattr(handler, "__qualname__", repr(handler))
    return Place(code.co_filename, _line_of_def(code), name) if code is not None else Place("?", 0, name)


def _line_of_def(code: CodeType) -> int:
    """The first line below the decorators."""
    for line in range(code.co_firstlineno, code.co_firstlineno + _DECORATORS):
        if linecache.getline(code.co_filename, line).lstrip().startswith(("def ", "async def ")):
            return line
    return code.co_firstlineno


def _place(frame: FrameType, line: int) -> Place:
    return Place(frame.f_code.co_filename, line, frame.f_code.co_qualname)


def is_users(frame: FrameType) -> bool:
    """Whether the code is the user's: neither a library's nor ours."""
    module = str(frame.f_globals.get("__name__", ""))
    if any(module == name or module.startswith(f"{name}.") for name in _OURS):
        return False
    return not frame.f_code.co_filename.startswith((*_LIBRARIES, "<"))


def _short(file: str) -> str:
    try:
        short = os.path.relpath(file)
    except ValueError:
        return file
    return file if short.startswith("..") else short
