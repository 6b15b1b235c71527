"""Writes the progress that handlers report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..sql import statement
from .arrays import fences, numbers, texts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..jobs import Progress
    from .links import WorkerLink


class ProgressWriter:
    """Uses a connection of its own, made when a handler first reports: a lock on the table of progress delays no other
    statement."""

    def __init__(self, link: WorkerLink, schema: str) -> None:
        self._link = link
        self._schema = schema

    async def write_progress(self, said: Sequence[Progress]) -> None:
        """Writes the latest progress of each attempt that still runs."""
        async with self._link.using() as connection:
            await connection.execute(
                statement("progress", self._schema),
                {
                    **fences([s.claim for s in said]),
                    "fractions": numbers([s.fraction for s in said]),
                    "messages": texts([s.message for s in said]),
                },
                prepare=True,
            )
