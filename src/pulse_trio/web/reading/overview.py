"""The overview: what runs, what waits, and what fails."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...store import operations, queues

if TYPE_CHECKING:
    from ...store.queues import QueueRecord
    from ..database import Database


@dataclass(frozen=True)
class Overview:
    """The first page."""

    queues: list[QueueRecord]


async def read(database: Database) -> Overview:
    """Reads everything that the first page shows."""
    async with database.reading() as connection:
        return Overview(await operations.run(connection, database.schema, queues.queues()))
