"""How long a worker holds its claims, and how long it therefore waits for a silent server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


_PATIENCE = 30.0
"""Seconds that a silent server is waited for at most, however long the leases are: a worker whose connection was cut without a
word claims nothing meanwhile."""


def interval(seconds: float) -> str:
    """A time as SQL reads it. PostgreSQL 14 refuses more seconds than an int4 holds (68 years), but takes the hours."""
    return f"{seconds} s" if seconds < 2**31 else f"{seconds / 3600:.0f} h"


class Leases:
    """`lease` in seconds; `by_queue` has the leases of queues with their own."""

    def __init__(self, lease: float, by_queue: Mapping[str, float]) -> None:
        self.default = interval(lease)
        """The lease as SQL reads it."""
        self.most = interval(max([lease, *by_queue.values()]))
        """The longest lease of all."""
        self._by_queue = {queue: interval(own) for queue, own in by_queue.items()}
        self.as_json = json.dumps(self._by_queue) if by_queue else None
        """The leases by queue as SQL reads them; None if no queue has its own, so that no claim looks any up."""
        self.patience = min(lease / 6, _PATIENCE)
        """Seconds a statement may take. Two tries of a beat fit between its due time and the lease's end."""
        self.beat_patience = min(min([lease, *by_queue.values()]) / 6, _PATIENCE)
        """The same for the shortest lease."""
        self.silence = lease / 2
        """Seconds for a statement that may take as long as the lease allows."""
        self.longest = lease * 2
        """Seconds for a single large result; beats keep its lease meanwhile."""

    def of(self, queue: str) -> str:
        """The lease of a queue, as SQL reads it."""
        return self._by_queue.get(queue, self.default)
