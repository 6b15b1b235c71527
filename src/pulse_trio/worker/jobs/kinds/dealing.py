"""Which child gets which order: the oldest first, as soon as there is a child for it.

An order whose handler no idle child has loaded yet gets a child for itself alone, whose job then starts it or has it load the
handler. Where children run handlers that end soon, orders are sent to them ahead; they come back when the child stays silent or
another one is free.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .child_seen import ChildProcess
    from .line import Order

_PATIENCE = 0.01
"""Seconds that a child may be silent while orders wait behind the one that it runs."""


class Alone:
    """What an order is told that gets a child for itself: this one, or None: a new one."""

    __slots__ = ("child",)

    def __init__(self, child: ChildProcess | None) -> None:
        self.child = child


class Dealer:
    """Deals orders to at most `slots` children."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._waiting: deque[Order] = deque()
        self._idle: list[ChildProcess] = []
        self._busy: set[ChildProcess] = set()
        """Those with orders."""
        self._alone = 0
        """How many jobs have one, or a place for one, for themselves."""
        self._exhausted = False
        """Whether no child can take the first waiting order, and nothing has changed since that was found."""

    # Orders

    def add(self, order: Order) -> None:
        """A job waits for a child."""
        order.wait()
        self._waiting.append(order)
        if not self._exhausted:
            self._deal()

    def remove(self, order: Order) -> None:
        """The job waits no more."""
        if order in self._waiting:
            self._waiting.remove(order)
            self._changed()

    def put_back(self, orders: Iterable[Order]) -> None:
        """These orders, which were dealt, did not begin: they come first."""
        for order in reversed([*orders]):
            order.child = None
            self._waiting.appendleft(order)

    # Children

    def give(self, child: ChildProcess, order: Order) -> None:
        """The job that had the child for itself has made it ready for its order."""
        self._alone -= 1
        child.held = False
        self._put(child, order)
        self._changed()

    def leave(self, child: ChildProcess | None) -> None:
        """A job that had a child, or a place for one, for itself does not need it after all."""
        self._alone -= 1
        if child is not None:
            child.held = False
            # One that comes to its end has its place until then.
            self._busy.add(child)
        self.heard(child)

    def heard(self, child: ChildProcess | None) -> None:
        """A child has answered, or has come to its end."""
        if child is not None and not child.held and not child.line.orders:
            if child.over:
                self._busy.discard(child)
            elif child.usable and child in self._busy:
                self._busy.discard(child)
                self._idle.append(child)
        self._changed()

    def close(self) -> None:
        """Closes the lines of all idle children."""
        for child in self._idle:
            child.line.close()

    # Dealing

    def _changed(self) -> None:
        now = time.perf_counter()
        for child in self._busy:
            if len(child.line.orders) > 1 and now - child.line.heard_at > _PATIENCE:
                self.put_back(child.line.take_back())
        if (self._idle or self._has_place) and not self._waiting and self._busy:
            most = max(self._busy, key=_orders)
            if _orders(most) > 1:
                self.put_back(most.line.take_back())
        self._deal()

    @property
    def _has_place(self) -> bool:
        """Whether another child may start, once none is idle."""
        return len(self._busy) + self._alone < self._slots

    def _deal(self) -> None:
        while self._waiting:
            order = self._waiting[0]
            if (child := self._idle_child(order)) is not None and order.place in child.loaded:
                self._put(child, order)
            elif child is not None or self._has_place:
                self._alone += 1
                if child is not None:
                    child.held = True
                order.deliver(Alone(child))
            elif (child := self._busy_child(order)) is not None:
                self._put(child, order)
            else:
                break
            self._waiting.popleft()
        self._exhausted = bool(self._waiting)

    def _put(self, child: ChildProcess, order: Order) -> None:
        order.child = child
        self._busy.add(child)
        child.line.put(order)

    def _idle_child(self, order: Order) -> ChildProcess | None:
        """The idle child that was busy last, if possible among those that have loaded the handler."""
        while self._idle:
            child = next((child for child in reversed(self._idle) if order.place in child.loaded), self._idle[-1])
            self._idle.remove(child)
            if child.usable and child.alive:
                return child
        return None

    def _busy_child(self, order: Order) -> ChildProcess | None:
        """The child with the fewest orders that may get this one ahead of its turn."""
        if not order.small:
            return None
        some = [child for child in self._busy if child.line.room and child.usable and order.place in child.loaded]
        return min(some, key=_orders, default=None)


def _orders(child: ChildProcess) -> int:
    return len(child.line.orders)
