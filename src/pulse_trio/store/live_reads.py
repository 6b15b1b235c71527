"""When the watchdog reads the whole live table, which it must where no index has the leases: below PostgreSQL 16.

There an index on the leases would end HOT updates, and with them the cheap claim and the cheap heartbeat. At 1.2 million live
jobs the reading takes 0.3 s, and every worker's watchdog did it. So a large table is read only while a lease may run out that
nobody renews, as the sessions say (left_leases.sql); and besides, because a row may be held by nobody whom a session shows, as
often as costs a two-hundredth of the time.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import trio

from ..sql import statement
from .links import UPKEEP_PATIENCE

if TYPE_CHECKING:
    from .links import WorkerLink

_INDEXED = 160_000
"""From this version of PostgreSQL on an index finds expired leases."""
_SMALL = 64 * 1024 * 1024
"""Bytes. A table up to this size is read by every tick, within some 10 ms."""
_REST = 200
"""Times what the last reading took, until the table is read although nothing asks for it."""
_LONGEST_REST = 600.0


class LiveReads:
    """The readings by one watchdog."""

    def __init__(self, link: WorkerLink, schema: str) -> None:
        self._link = link
        self._schema = schema
        self._rested = -math.inf

    async def wanted(self) -> bool:
        """Whether to look for expired leases now."""
        async with self._link.using(patience=UPKEEP_PATIENCE) as connection:
            if connection.info.server_version >= _INDEXED or trio.current_time() >= self._rested:
                return True
            cursor = await connection.execute(statement("left_leases", self._schema), {"small": _SMALL}, prepare=True)
            row = await cursor.fetchone()
            return row is not None and bool(row[0])

    def took(self, began: float) -> None:
        """Records that the table was read, from `began` on Trio's clock until now."""
        now = trio.current_time()
        self._rested = now + min(_LONGEST_REST, _REST * (now - began))
