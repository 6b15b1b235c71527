"""The blocks that the attempts before had open, and that this one has not opened again: in which remembered scopes they stand.

A scope's moment says which scope was around it, in the line's name. A block inside of a scope has a moment of its own that says
so, written before its children are.

The main task's calls are numbered, and a block has the number of its call. So another call of that task with the number of such
a block is a sign that the code has changed (changed.py). Pure: no I/O, no Trio.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .keys import KEYED, block_number
from .under_way import UnderWay

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ...lines import Line

OUTERMOST = "0:job"
"""What is around a scope that is in no other. No key of a handler's looks like it."""
_BODY = "{} body"
_REMEMBERED = {"scope": "{}:scope", "event": "{}:event", "sleep": "{}:sleep", "block": "{}:block body"}
"""The moments that a call with a number may have, by its kind."""
DROPPED = "0:dropped"
"""The key of the moments that say that the body of a block has ended in an attempt that had started none of the children which
those before had started in it; the value is its number."""


def body_key(key: str) -> str:
    """The name of the body of the block with this key: its scope has it, and the moment that says what is around the block."""
    return _BODY.format(key)


def is_body(key: str) -> bool:
    """Whether it may be such a name."""
    return key.endswith(_BODY.format(""))


class Passed(NamedTuple):
    """A call that a block has not been opened at, or that stands in the place of a wait: `kind` and `key` are the call's; `had`
    is the key of the call that an earlier attempt made in its place, or empty if that was the block or the wait."""

    kind: str
    key: str
    had: str = ""


class Unopened:
    """Of one attempt."""

    __slots__ = (
        "_around",
        "_first",
        "_given_up",
        "_in_scope",
        "_moments",
        "_skipped",
        "_unknown",
        "dropped",
        "suspects",
        "taken_over",
        "waits",
        "within",
    )

    def __init__(self) -> None:
        self.waits = UnderWay()
        """The waits that the attempts before had begun."""
        self.within: dict[str, str] = {}
        """The key of the scope around a scope, or around a block's body, by its key. None of a scope that a version without
        this has opened."""
        self._around: dict[int, list[str]] = {}
        """The keys of the scopes around each block, the innermost first, as far as they are known."""
        self._in_scope: dict[str, set[int]] = {}
        """The reverse."""
        self._unknown = set[int]()
        """Blocks that are in no scope, or in one of which nothing says so."""
        self._given_up = False
        self._first = 0
        self._moments: Mapping[str, float] = {}
        self._skipped = set[int]()
        """Those that the main task may leave out."""
        self.suspects: dict[int | str, Passed] = {}
        """Those that it should have opened, it seems, with the call that it made; and so the waits, by their keys."""
        self.taken_over: dict[int, set[str]] = {}
        """The keys of the children of attempts before that this one has started again, by the numbers of their blocks."""
        self.dropped = set[int]()
        """Blocks in which an attempt has started none of the children that those before had (other_keys.py)."""

    def starts_again(self, number: int, keys: Iterable[str]) -> None:
        """This attempt has started these children again in the block with that number."""
        if keys := set(keys):
            self.taken_over.setdefault(number, set()).update(keys)

    def told(self, moment: Line) -> None:
        """The history has this moment."""
        if moment.name:
            self.within[moment.key] = moment.name
        if moment.key == DROPPED:
            self.dropped.add(int(float(moment.value or 0)))

    def found(self, numbers: Iterable[int], moments: Mapping[str, float], first_block: int) -> None:
        """The numbers of the blocks that have children and no end, as this attempt begins."""
        suffix, bodies = body_key(""), dict[int, str]()
        self._first, self._moments = first_block, moments
        for body in self.within:
            number = block_number(body.removesuffix(suffix), moments) if body.endswith(suffix) else None
            if number is not None:
                bodies[first_block + number] = body
        for number in numbers:
            self._around[number] = around = list(self._outwards(bodies.get(number)))
            for scope in around:
                self._in_scope.setdefault(scope, set()).add(number)
            if OUTERMOST not in around:
                self._unknown.add(number)

    def _outwards(self, at: str | None) -> Iterator[str]:
        # No scope is around itself, unless somebody has written so.
        for _ in self.within:
            if at is None or (at := self.within.get(at)) is None:
                return
            yield at

    @property
    def is_empty(self) -> bool:
        """Whether there are none."""
        return not self._around

    @property
    def has_more(self) -> bool:
        """Whether the attempts before had come to a block or a wait that this one has not come to."""
        return bool(self._around or self.waits or self.waits.events or self.waits.keyed)

    @property
    def awaited(self) -> bool:
        """Whether there are some, and they may still be opened."""
        return bool(self._around) and not self._given_up

    def has(self, key: str) -> bool:
        """Whether the block of the call with this key is one of them."""
        number = block_number(key, self._moments)
        return number is not None and self._first + number in self._around

    def opened(self, number: int) -> None:
        """A block is open."""
        for scope in self._around.pop(number, ()):
            self._in_scope[scope].discard(number)
        self._unknown.discard(number)
        self.suspects.pop(number, None)

    def begins(self, number: int, kind: str, key: str, *, has_line: bool) -> None:
        """The main task begins the call with this number, which may have a line."""
        own = self._first + number
        # The line of a call with a key says nothing of its number.
        is_numbered = key == f"{number}:{kind}"
        fits = is_numbered and (has_line or (kind == "block" and own in self._around))
        for wait in self.waits.passed_by(number, key, fits=fits):
            self.suspects[wait] = Passed(kind, key)
        if own in self._around:
            if key == f"{number}:block":
                self._skipped.add(own)  # it may be cut short before the block is open
            else:
                self.suspects.setdefault(own, Passed(kind, key))
        elif self._around and not has_line:
            self._look_for_another(number, kind, key)

    def _look_for_another(self, number: int, kind: str, key: str) -> None:
        for other, remembered in _REMEMBERED.items():
            moment = remembered.format(number)
            # A worker of 1.0.0rc1 has remembered scopes of handlers that unwound, too; but of none where it stood.
            if moment not in self._moments or (other == "scope" and moment not in self.within):
                continue
            if (other, f"{number}:{other}") != (kind, key):
                for later in self._numbered():
                    if later > self._first + number:
                        self.suspects.setdefault(later, Passed(kind, key, f"{number}:{other}"))

    def skips(self, after: int, upto: int) -> None:
        """The main task was cut short, and goes on with the number after `upto`."""
        self.waits.skips(after, upto)
        for block in self._numbered():
            if after < block - self._first <= upto:
                self._skipped.add(block)

    def numbers(self) -> list[int]:
        """The numbers of all of them, the numbered ones first."""
        return sorted(self._around)

    def left_out(self) -> list[int]:
        """The main task begins no more calls. Returns those of its blocks that it should have opened, it seems."""
        return [block for block in self._numbered() if block not in self._skipped]

    def _numbered(self) -> list[int]:
        return sorted(block for block in self._around if block - self._first <= KEYED)

    def give_up(self) -> None:
        """They are opened no more."""
        self._given_up = True

    def hold_back(self, scope: str) -> bool:
        """Whether one of them stands in that scope, or may: then its children are reached when it is open again."""
        if self._given_up:
            return False
        return bool(self._in_scope.get(scope)) or (bool(self._unknown) and scope not in self.within)

    def may_be_in(self, block: int) -> bool:
        """Whether one of them may stand in the body of that block, which is open: then it has a higher number."""
        return not self._given_up and any(number > block for number in self._around)

    def leave(self, scope: str) -> list[int]:
        """The scope was cut short: returns those that stand in it, which are opened no more."""
        left = sorted(self._in_scope.get(scope, ()))
        for number in left:
            self.opened(number)
        return left
