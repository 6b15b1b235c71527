"""The blocks that the attempts before had open, and that this one has not opened again: in which remembered scopes they stand.

A scope's moment says which scope was around it, in the line's name. A block inside of a scope has a moment of its own that says
so, written before its children are. Pure: no I/O, no Trio.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .keys import block_number

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

OUTERMOST = "0:job"
"""What is around a scope that is in no other. No key of a handler's looks like it."""
_BODY = "{} body"


def body_key(key: str) -> str:
    """The name of the body of the block with this key: its scope has it, and the moment that says what is around the block."""
    return _BODY.format(key)


class Unopened:
    """Of one attempt."""

    __slots__ = ("_bodies", "_given_up", "_numbers", "within")

    def __init__(self) -> None:
        self.within: dict[str, str] = {}
        """The key of the scope around a scope, or around a block's body, by its key. None of a scope that a version without
        this has opened."""
        self._numbers = set[int]()
        self._bodies: dict[int, str] = {}
        self._given_up = False

    def found(self, numbers: Iterable[int], moments: Mapping[str, float], first_block: int) -> None:
        """The numbers of the blocks that have children and no end, as this attempt begins."""
        self._numbers = set(numbers)
        for body in self.within:
            number = block_number(body.removesuffix(_BODY.format("")), moments)
            if number is not None and body.endswith(_BODY.format("")):
                self._bodies[first_block + number] = body

    @property
    def awaited(self) -> bool:
        """Whether there are some, and they may still be opened."""
        return bool(self._numbers) and not self._given_up

    def opened(self, number: int) -> None:
        """A block is open."""
        self._numbers.discard(number)

    def give_up(self) -> None:
        """They are opened no more."""
        self._given_up = True

    def hold_back(self, scope: str) -> bool:
        """Whether one of them stands in that scope, or may: then its children are reached when it is open again."""
        return self.awaited and any(
            scope in (around := list(self._around(number))) or (OUTERMOST not in around and scope not in self.within)
            for number in self._numbers
        )

    def leave(self, scope: str) -> list[int]:
        """The scope was cut short: returns those that stand in it, which are opened no more."""
        left = [number for number in sorted(self._numbers) if scope in self._around(number)]
        self._numbers.difference_update(left)
        return left

    def _around(self, number: int) -> Iterator[str]:
        """The keys of the scopes around a block, the innermost first, as far as they are known."""
        at = self._bodies.get(number)
        while at is not None and (at := self.within.get(at)) is not None:
            yield at
