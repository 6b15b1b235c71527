"""The workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...store import operations

if TYPE_CHECKING:
    from ...store.operations import WorkerRecord
    from ..database import Database

MOST = 500


@dataclass(frozen=True)
class Workers:
    """Workers, newest first. `gone`: those that have ended are among them. `more`: there are more than these."""

    workers: list[WorkerRecord]
    gone: bool
    more: bool

    @property
    def slots(self) -> int:
        """How many jobs all live workers together can run at a time."""
        return sum(w.concurrency for w in self.workers if w.is_live)

    @property
    def running(self) -> int:
        """How many jobs all live workers together run now."""
        return sum(w.running for w in self.workers if w.is_live)


async def read(database: Database, *, gone: bool) -> Workers:
    """Reads them."""
    found = await database.read(operations.workers(gone=gone))
    return Workers(found[:MOST], gone, len(found) > MOST)
