"""What metrics need to know from the database: whether it answers, and what is in the queues."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .links import WorkerLink


class QueueFigures:
    """On a connection of its own, which is made when metrics are first asked for."""

    def __init__(self, link: WorkerLink, schema: str) -> None:
        self._link = link
        self._schema = schema

    async def answers(self, patience: float) -> None:
        """Returns when the database has answered. Raises `DatabaseUnavailable` if it does not within `patience` seconds."""
        async with self._link.using(patience=patience) as connection:
            await connection.ping()
