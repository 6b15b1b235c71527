"""The queues, with their pauses and limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...store import operations, queues, watching

if TYPE_CHECKING:
    from ...store.queues import PausedKind
    from ...store.watching import Depths
    from ..database import Database


@dataclass(frozen=True)
class Queues:
    """The queues, and the kinds that are paused."""

    depths: Depths
    paused_kinds: list[PausedKind]


@dataclass(frozen=True)
class Queue:
    """What is set for one queue."""

    name: str
    paused: bool
    limit: int | None
    rate: str | None
    key_limit: int | None
    key_rate: str | None


async def read_one(database: Database, name: str) -> Queue:
    """What is set for one queue. Raises `InvalidName`."""
    found = await database.read(watching.settings_of(name))
    return Queue(name, found.paused, found.limit, found.rate, found.key_limit, found.key_rate)


async def read(database: Database) -> Queues:
    """Reads them."""
    async with database.reading() as connection:
        return Queues(
            await operations.run(connection, database.schema, watching.depths()),
            await operations.run(connection, database.schema, queues.paused_kinds()),
        )
