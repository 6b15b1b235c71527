"""A worker on a database in memory: every part of it is the real one, but for the store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from ...worker import Worker
from .store import MemoryStore

if TYPE_CHECKING:
    from ...handlers import Handlers
    from .database import MemoryDatabase


_NOWHERE = "host=/no-database dbname=none"
"""What would connect to it finds no server. An empty string would mean the one that the environment names."""


class MemoryWorker(Worker):
    """A `Worker` on a `MemoryDatabase`, or on a given `store` of one. It takes `Worker`'s keywords, its settings included."""

    def __init__(
        self, handlers: Handlers, database: MemoryDatabase, *, memory: MemoryStore | None = None, **given: Any
    ) -> None:
        self.memory = memory = memory or MemoryStore(database)
        super().__init__(handlers, _NOWHERE, store=cast("Any", memory), **given)
        memory.lease, memory.queues, memory.stale = self.settings.lease, self.settings.queues, self.settings.stale
        memory.leases = {queue: its.lease for queue, its in self._plan.terms.by_queue.items()}
