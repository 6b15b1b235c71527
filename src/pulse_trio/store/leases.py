"""How long a worker holds what it claims, and how long it therefore waits for a silent server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class Leases:
    """`lease` in seconds; `by_queue` has those of queues with a lease of their own."""

    def __init__(self, lease: float, by_queue: Mapping[str, float]) -> None:
        self.default = f"{lease} s"
        """As SQL reads it."""
        self._by_queue = {queue: f"{own} s" for queue, own in by_queue.items()}
        self.as_json = json.dumps(self._by_queue) if by_queue else None
        """The leases by queue as SQL reads them; None, and no claim looks anything up, where no queue has its own."""
        self.patience = lease / 6
        """Seconds a statement may take. Two tries of a beat fit between its due time and the lease's end."""
        self.beat_patience = min([lease, *by_queue.values()]) / 6
        """The same by the shortest lease."""
        self.silence = lease / 2
        """Seconds for what has all the time that the lease allows."""
        self.longest = lease * 2
        """Seconds for a single large result, which beats keep its lease for meanwhile."""

    def of(self, queue: str) -> str:
        """The lease of a queue, as SQL reads it."""
        return self._by_queue.get(queue, self.default)
