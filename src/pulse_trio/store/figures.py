"""What metrics need to know from the database: whether it answers, and what is in the queues."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..sql import statement
from .bounded import bounded
from .links import missing_privileges

if TYPE_CHECKING:
    from .links import WorkerLink

_PATIENCE = 0.5
"""Seconds that the statements for figures may take: then PostgreSQL ends them."""


class QueueFigure(NamedTuple):
    """The live jobs of one queue. `oldest`: for how many seconds the first available job has been due; 0 without one.
    `longest`: for how many seconds the oldest attempt has run, by the database's clock."""

    queue: str
    available: int
    scheduled: int
    running: int
    oldest: float
    paused: bool
    suspended: int = 0
    longest: float | None = None


class Sample(NamedTuple):
    """All queues with live jobs, the number of jobs in quarantine, and for how many seconds each schedule is late. `cut_short`:
    there are more queues, or may be."""

    queues: list[QueueFigure]
    quarantined: int
    late: dict[str, float]
    cut_short: bool = False


class QueueFigures:
    """On a connection of its own, which is made when metrics are first asked for."""

    def __init__(self, link: WorkerLink, schema: str) -> None:
        self._link = link
        self._schema = schema

    async def answers(self, patience: float) -> None:
        """Returns when the database has answered. Raises `DatabaseUnavailable` if it does not within `patience` seconds."""
        async with self._link.using(patience=patience) as connection:
            await connection.ping()

    async def take_turn(self, who: int, seconds: float) -> bool | None:
        """Takes the turn to count the queues, for `seconds`; 0 gives it back. Returns whether it is this process's; None if
        that is not known now. Raises `DatabaseUnavailable`."""
        with missing_privileges("count the queues for metrics"):
            async with self._link.using() as connection:
                cursor = await connection.execute(
                    statement("metrics_turn", self._schema), {"who": who, "seconds": seconds}, prepare=True
                )
                ((mine,),) = await cursor.fetchall()
                return mine

    async def sample(self, most: int, schedules: int) -> Sample:
        """Counts at most `most` jobs of a queue, priority and state, and `schedules` schedules. Raises `DatabaseUnavailable`,
        also if it takes too long."""
        with missing_privileges("count the queues for metrics"):
            async with self._link.using() as connection, bounded(connection, _PATIENCE):
                cursor = await connection.execute(
                    statement("metrics_queues", self._schema), {"most": most}, prepare=True
                )
                *rows, (_, quarantined, _, _, _, cut_short, *_) = await cursor.fetchall()
                cursor = await connection.execute(
                    statement("metrics_schedules", self._schema), {"most": schedules}, prepare=True
                )
                late = {name: max(0.0, seconds) for name, seconds in await cursor.fetchall()}
                return Sample([QueueFigure(*row) for row in rows], quarantined, late, cut_short)
