"""Where a sweep goes on: it is bounded, so with very many queues and priorities one lap takes several.

What a lap finds is complete when one sweep made it (`whole`): that is so up to `STEPS` (queue, priority) pairs. Beyond that
each sweep tells the due ones among those it walked, and the worker keeps besides what gave it jobs lately (`ClaimCursors`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .arrays import texts

if TYPE_CHECKING:
    from collections.abc import Sequence

STEPS = 256
"""(queue, priority) pairs that a sweep walks; about 3 ms on a busy machine."""
_KEYED = 64
"""Queues with keys that it walks, as slots.sql says."""
_LOWEST = -(2**31) - 1
"""Below every priority."""


class Found(NamedTuple):
    """A slot that has live jobs; `next_due_in` seconds until the first that is not due yet, None if there is none."""

    queue: str
    priority: int
    next_due_in: float | None


class Lap:
    """The place where the next sweep begins. `queues` are the worker's, None for every queue."""

    def __init__(self) -> None:
        self._queues: list[str] | None = None
        self._restart()
        self._after_keyed = ""
        self.whole = True
        """Whether the last sweep walked everything there is."""
        self.ended = True
        """Whether it came to the end; the next then begins at the beginning."""

    def _restart(self) -> None:
        self._after: tuple[str, int, int] = ("", 1, _LOWEST)

    def parameters(self, queues: Sequence[str] | None, told: Sequence[str]) -> dict[str, Any]:
        """For slots.sql."""
        listed = sorted(set(queues)) if queues is not None else None
        if listed != self._queues:
            self._queues = listed
            self._restart()
        queue, nth, priority = self._after
        self._began = self._after == ("", 1, _LOWEST)
        return {
            "queues": listed,
            "after_queue": queue,
            "after_nth": nth,
            "after_priority": priority,
            "after_keyed": self._after_keyed,
            "told": texts([queue for queue in told if listed is None or queue in listed]),
            "most": STEPS,
        }

    def swept(self, at: Sequence[Any]) -> None:
        """Takes where the sweep ended."""
        steps, queue, nth, priority, keyed, last_keyed = at
        self.ended = steps < STEPS
        self.whole = self._began and self.ended and keyed < _KEYED and not self._after_keyed
        if self.ended:
            self._restart()
        else:
            self._after = (queue, nth, priority)
        self._after_keyed = last_keyed if keyed >= _KEYED else ""
