"""The keys of a handler's durable calls: what each is called in the history, the same in every attempt.

The calls of the handler's main task are numbered. Which of several tasks comes first may differ from attempt to attempt, so
the calls of all others need a key from their code.
"""

from __future__ import annotations

import re
import sys
import warnings
from contextlib import suppress
from inspect import CORO_CLOSED, getcoroutinestate
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import trio

from ...errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence

    from ..jobs.running_job import RunningJob
    from .calls import CallKind
    from .delivering import Delivering
    from .replay import Replay

R = TypeVar("R")

LONGEST = 256
"""Bytes of a key in UTF-8."""
_ENTRY = "{} is entered"
_LEVELS = 32
"""How often at most: clean-ups around each other fail one after the other."""
_DERIVED: Mapping[str, Sequence[str]] = {"block": ("block {}", "{} body", _ENTRY), "scope": ("{} ended", "{} late")}
"""What else the history has under names that are made from the key of a call."""
OURS = re.compile(r"\d+:[a-z]+")
"""The keys that no handler gives."""
REMEMBERED = re.compile(r"[0-9]{1,7}:(?:event|scope|sleep|block body)")
"""The numbered keys that have moments."""
KEYED, HIGHEST = 2**20, 2**30
"""The numbers of blocks with a key stand between them; the others have that of their call."""


class _Made(NamedTuple):
    """A call that is not awaited yet: `what` as its caller knows it, and where it was made."""

    what: str
    call: Coroutine[Any, Any, Any]
    file: str
    line: int
    module: dict[str, Any]

    @property
    def is_left(self) -> bool:
        """One that was closed is not meant to run."""
        return getcoroutinestate(self.call) != CORO_CLOSED


class Keys:
    """The keys that one attempt has used, and the calls that it has made."""

    __slots__ = ("_count", "_delivering", "_main", "_running", "_taken_back", "_unawaited", "_used", "beyond", "replay")

    def __init__(self, running: RunningJob, delivering: Delivering) -> None:
        self._running = running
        self._delivering = delivering
        self._main = running.task
        """The task that runs the handler."""
        self._count = 0
        self._taken_back = 0
        self.beyond = False
        """Whether the main task has begun a call that no attempt before has ended: what they remembered of scopes after it they
        remembered while they unwound."""
        self.replay: Replay | None = None
        """It is told of the calls. None if no attempt before has left a block open, or a wait under way."""
        self._used = set[str]()
        self._unawaited: dict[object, _Made] = {}

    def called(self, what: str, call: Callable[..., Coroutine[Any, Any, R]], *given: Any) -> Coroutine[Any, Any, R]:
        """A durable call is made: `call(*given)` runs when the answer is awaited. `what` is the call as its caller knows it."""
        self._running.run.check(what)
        made = object()

        async def awaited() -> R:
            self._unawaited.pop(made, None)
            self._running.run.check(what)
            try:
                return await call(*given)
            except trio.Cancelled:
                await self._delivering.comes_out()  # noqa: ASYNC102, ASYNC120 -- it shields itself, and the cancellation says more
                raise

        # The nearest of the callers is `Durable.step` or `nursery.flush`. inspect.stack reads files.
        call_made, frame = awaited(), sys._getframe(2)  # pyright: ignore[reportPrivateUsage] -- documented all the same
        while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("pulse_trio."):
            frame = frame.f_back
        call_made.__qualname__ = what
        self._unawaited[made] = _Made(what, call_made, frame.f_code.co_filename, frame.f_lineno, frame.f_globals)
        return call_made

    def check_awaited(self) -> None:
        """Raises `UsageError` if a durable call was made and not awaited: it did nothing, and the handler takes it for done."""
        for made in self._unawaited.values():
            if made.is_left:
                raise UsageError(
                    f"{made.what} was called and not awaited, so it did nothing: write `await {made.what}(...)` "
                    f"({made.file}, line {made.line})."
                )

    def forget_unawaited(self) -> None:
        """The attempt has ended. These calls refer to this object, and would stay until the collector of garbage comes. Python
        would warn of them with a line of this file; this warns with the one that made the call."""
        for made in self._unawaited.values():
            if made.is_left:
                made.call.close()
                # Where warnings are errors, the attempt still ends as it did.
                with suppress(RuntimeWarning):
                    warnings.warn_explicit(
                        f"coroutine '{made.what}' was never awaited", RuntimeWarning, made.file, made.line,
                        module=made.module.get("__name__"), registry=made.module.setdefault("__warningregistry__", {}),
                    )  # fmt: skip
        self._unawaited.clear()

    @property
    def in_main(self) -> bool:
        """Whether the caller is the handler's main task."""
        return trio.lowlevel.current_task() is self._main

    @property
    def count(self) -> int:
        """How many durable calls the main task has made."""
        return self._count

    def go_on_after(self, number: int) -> None:
        """The next call of the main task has a higher number."""
        if self.replay is not None:
            self.replay.unopened.skips(self._count, number)
        self._count = max(self._count, number)

    def take_back(self, key: str | None) -> bool:
        """Frees the number and the key of the main task's last call: the next call has them. `key` is None if it has none yet.
        Returns False, and frees nothing, after many times: a handler that makes the same call in a loop would never end."""
        self._taken_back += 1
        if self._taken_back > _LEVELS:
            return False
        if key is not None:
            self._count -= 1
            self._used.discard(key)
        return True

    def next(self, kind: CallKind, key: str | None, what: str, number: int | None = None) -> str:
        """The key of a call that begins. `what` is the call as its caller knows it, `number` its number if that is not the next
        one. Raises `UsageError`."""
        in_main = self.in_main
        number = self._count + 1 if number is None else number
        if in_main:
            # Calls with a key count too, so that giving one a key renames no other.
            self._count = max(self._count, number)
        if key is None:
            if not in_main:
                raise UsageError(
                    f"{what} in a second task of the handler needs key=: which task comes first may differ from attempt to "
                    "attempt."
                )
            key = f"{number}:{kind}"
        else:
            check_key("key", key)
        names = (key, *(name.format(key) for name in _DERIVED[kind])) if kind in _DERIVED else (key,)
        for name in names:
            if name in self._used:
                raise UsageError(
                    f"{what}: the key {key!r} is used twice in this job (as {name!r}); each durable call needs its own."
                )
        self._used.update(names)
        if self.replay is not None:
            unopened, has_line = self.replay.unopened, self.replay.has_line(key)
            if in_main:
                unopened.begins(number, kind, key, has_line=has_line)
            else:
                unopened.waits.begins_beside(has_line=has_line)
        return key


def entry_key(key: str) -> str:
    """The name of the place where a task enters the block with this key. The key itself is that of the block's end."""
    return _ENTRY.format(key)


def is_entry(key: str) -> bool:
    """Whether it is such a name. No handler has a key like it beside that block's."""
    return key.endswith(_ENTRY.format(""))


def block_number(key: str, moments: Mapping[str, float]) -> int | None:
    """The number of the block that a call with this key opens, counted from the history's beginning: that of its call, or the
    one that is remembered for its key; None if it is to be given one."""
    number, _, kind = key.partition(":")
    if kind == "block" and number.isascii() and number.isdigit():
        return int(number)
    given = moments.get(f"block {key}")
    return None if given is None else int(given)


def highest_number(moments: Iterable[str], blocks: Iterable[int]) -> int:
    """The highest number of a main task's call of which there is more than a line: a moment, or the children of a block."""
    numbers = [int(key.partition(":")[0]) for key in moments if REMEMBERED.fullmatch(key)]
    return max(numbers + [number for number in blocks if number <= KEYED], default=0)


def highest_of(keys: Iterable[str]) -> int:
    """The highest number in the keys of lines."""
    return max((int(key.partition(":")[0]) for key in keys if OURS.fullmatch(key)), default=0)


def check_key(what: str, key: object) -> str:
    """A key that code gives, checked. Raises `UsageError`."""
    if not isinstance(key, str):
        raise UsageError(f"A {what} is a text, got {key!r}.")
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        raise UsageError(f"A {what} must be text that UTF-8 can carry, got {key!r}.") from None
    if not 0 < size <= LONGEST:
        raise UsageError(f"A {what} has 1 to {LONGEST} bytes of UTF-8, got {size}.")
    if "\0" in key or OURS.fullmatch(key):
        raise UsageError(f"A {what} holds no NUL and does not look like the numbered keys (3:step), got {key!r}.")
    return key
