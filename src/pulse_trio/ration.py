"""Limits how often notifications make a task read the database: every role that may connect can send them."""

from __future__ import annotations


class Ration:
    """Each read that finds nothing doubles the pause before the next: from `first` seconds after more than `free` such reads
    in a row, up to `most`."""

    __slots__ = ("_first", "_free", "_most", "_vain")

    def __init__(self, first: float = 0.005, most: float = 0.25, *, free: int = 0) -> None:
        self._first = first
        self._most = most
        self._free = free
        self._vain = 0

    def looked(self, *, found: bool) -> None:
        """Records whether a read found something."""
        self._vain = 0 if found else self._vain + 1

    @property
    def pause(self) -> float:
        """Seconds from the last read to the next."""
        # The exponent is bounded: a flood that lasts for days must not overflow a float.
        over = min(self._vain - self._free, 32)
        return min(self._first * 2 ** (over - 1), self._most) if over > 0 else 0.0
