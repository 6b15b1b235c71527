"""How many bytes go into one statement, learned from how long recent statements took.

A batch that is bounded by count alone has no bound in bytes: 100 results of 1 MB take longer over a slow network than a
statement may. They are given up, and sent again at the same size for ever. An allowance begins small, doubles while statements
that used it are quick, and halves when one was slow or lost, down to 64 KiB: one large job a statement, and still hundreds of
small ones, because a lost statement may have been an outage.
"""

from __future__ import annotations

FIRST = 1024 * 1024
"""Bytes. A job's arguments or its result have no more, so a smaller first allowance gains nothing."""
MOST = 8 * 1024 * 1024
"""The most that one statement may hold: it is in memory several times over, here and in PostgreSQL."""
LARGE = 16 * 1024
"""A result of more bytes does not travel with claims and with the reports of other jobs."""
SMALL = 250
"""The size that a small job counts for, here and in complete_and_claim.sql, which does not read the arguments of smaller
jobs."""
_LEAST = 64 * 1024
_FORGIVEN = 30
"""After this many quick statements a lost one is taken to have been an outage, one doubling at a time."""


class Allowance:
    """`target`: the seconds that a statement should take."""

    def __init__(self, target: float) -> None:
        self.size = FIRST
        self._target = target
        self._quick = 0

    def took(self, size: int, seconds: float) -> None:
        """A statement with `size` bytes took `seconds`."""
        if seconds > self._target:
            if size > LARGE:
                self.size = max(_LEAST, min(self.size, size) // 2)
        elif seconds < self._target / 2:
            # Here characters are counted, there bytes, up to four for one.
            if size >= self.size // 4:
                self.size = min(MOST, self.size * 2)
            elif self.size < FIRST:
                self._forgive()

    def lost(self) -> None:
        """A statement was given up."""
        self._quick = 0
        self.size = max(_LEAST, self.size // 2)

    def _forgive(self) -> None:
        self._quick += 1
        if self._quick == _FORGIVEN:
            self._quick = 0
            self.size *= 2

    @property
    def halved(self) -> bool:
        """Whether the network has turned out to be slow."""
        return self.size < FIRST // 2
