"""What a block has been told of its children, and what it reads of them while its handler asks how they are."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Any, Protocol

import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from contextlib import AbstractContextManager

    from ...store.trees import Cause
    from .calls import Call
    from .children import Child
    from .seen import Seen

WINDOW = 500
"""Children that are asked for together by their ids."""
_MOST_WINDOWS = 5
"""Of children that were started later than those whose end is to be expected, in one look."""
_REST_EVERY = 0.5
"""Seconds at least between two looks at those. A notification has the first ones read alone, and many may come in a second."""


class Body(Protocol):
    @property
    def cause(self) -> Cause | None: ...

    def child_failed(self) -> None: ...

    def holds(self, task: trio.lowlevel.Task) -> bool: ...


class Ear:
    """What a block has been told, and whether the handler reads how its children are."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        self.event = trio.Event()
        self.interest = False
        self.has_failed = False
        """Whether the failure of a child is known."""
        self.body: Body | None = None
        """Is told as soon as it is."""
        self.living = 0
        """Children whose end is not known."""
        self.call: Call | None = None
        """The call that waits for them."""
        self.in_shield = False
        """The job is cancelled, and the block stands in a shield of the handler's, which nothing of that reaches. So children
        that were cancelled with the job count as failures."""
        self._read_upto = 0
        """The id at which the last look at the rest has stopped."""
        self._rest_due = 0.0
        self._is_new = True
        """Whether it was told of something since a failure was last looked for."""
        self._round = 0
        """How many children are left to be read, in turn, until that failure has been found."""

    def decoding(self) -> AbstractContextManager[None]:
        return self.seen.decoding()

    def one_ended(self) -> None:
        self.living -= 1
        if self.call is not None:
            self.call.moved = True
        if not self.living:
            self.told()

    def one_failed(self) -> None:
        self.has_failed = True
        self.tell_body()

    def tell_body(self) -> None:
        """Tells the body of a failure, if one is known."""
        if self.has_failed and self.body is not None:
            self.body.child_failed()

    @property
    def is_cut(self) -> bool:
        """Whether the body is being cut short, and the children are to be cancelled."""
        return self.body is not None and self.body.cause is not None

    def one_lives(self) -> None:
        self.living += 1

    def shows(self, child: str) -> bool:
        return self.seen.shows(child)

    @property
    def over(self) -> bool:
        return self.seen.over

    def asked(self, *, has_ended: bool) -> None:
        # Sets a mark alone, because a handler may read in a thread.
        self.interest = True
        if not has_ended:
            self.seen.waited_for()

    def take_interest(self) -> bool:
        interest, self.interest = self.interest, False
        return interest

    def told(self) -> None:
        self._is_new = True
        self.event.set()

    async def catch_up(
        self, alive: Sequence[Child[Any]], learn: Callable[[Sequence[int]], Awaitable[object]], *, failed: bool = False
    ) -> None:
        """Reads how the children are that are not known to have ended. `failed`: a child has failed, which may be one of these;
        then all of them are read once, in as many looks as that takes.

        Most are claimed in the order in which they were started, so those that were started first are read until most of them
        still live. The others may have ended too, in queues of their own, or before their parent heard that they were written:
        they are read in turn.
        """
        read = 0
        while read < len(alive):
            window = alive[read : read + WINDOW]
            read += len(window)
            await learn([child.id for child in window])
            if sum(child.has_ended for child in window) * 2 < len(window):
                break
        rest = [child.id for child in alive[read:]]
        if failed and self._is_new:
            self._is_new, self._round = False, len(rest)
        if rest:
            if trio.current_time() < self._rest_due:
                self.interest = True
                return
            self._rest_due = trio.current_time() + _REST_EVERY
            rest.sort()
            first = bisect_right(rest, self._read_upto)
            chosen = (rest[first:] + rest[:first])[: WINDOW * _MOST_WINDOWS]
            self._read_upto = chosen[-1]
            for start in range(0, len(chosen), WINDOW):
                await learn(chosen[start : start + WINDOW])
            self._round -= len(chosen)
            self.interest = self.interest or self._round > 0
