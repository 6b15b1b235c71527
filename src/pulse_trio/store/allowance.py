"""How many bytes go into one statement, learned from how long the last ones took.

A batch that is bounded by count alone has no bound in bytes: 100 results of 1 MB take longer over a slow network than a
statement may, are given up, and are sent again at the same size for ever. An allowance begins small, doubles while statements
that used it are quick, and halves when one was slow or lost, down to one job a statement.
"""

from __future__ import annotations

FIRST = 1024 * 1024
"""Bytes. A job's arguments or its result have no more: nothing smaller is gained by beginning lower."""
MOST = 8 * 1024 * 1024
"""What one statement holds in memory several times over, here and in PostgreSQL."""
LARGE = 16 * 1024
"""A result of more bytes does not travel with claims and with the reports of other jobs."""
_LEAST = 1


class Allowance:
    """`target`: the seconds that a statement should take."""

    def __init__(self, target: float) -> None:
        self.size = FIRST
        self._target = target

    def took(self, size: int, seconds: float) -> None:
        """A statement with `size` bytes took `seconds`."""
        if seconds > self._target:
            if size > LARGE:
                self.size = max(_LEAST, min(self.size, size) // 2)
        elif size >= self.size // 2 and seconds < self._target / 2:
            self.size = min(MOST, self.size * 2)

    def lost(self) -> None:
        """A statement was given up."""
        self.size = max(_LEAST, self.size // 2)

    @property
    def halved(self) -> bool:
        """Whether the network has turned out to be slow."""
        return self.size < FIRST // 2
