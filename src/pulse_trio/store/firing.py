"""Schedules as workers use them: each declares its own when it starts, and any worker fires. schedules.py has the rules."""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from ..errors import DatabaseUnavailable
from ..sql import statement
from . import schedules
from .held_up import HeldUp
from .leases import interval
from .links import UPKEEP_PATIENCE, missing_privileges
from .operations import run

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from ..handlers import Schedule
    from ..postgres import TrioConnection
    from .callbacks import Callbacks
    from .links import WorkerLink
    from .sessions import Sessions


class Firing:
    """The schedules of one schema, for one worker."""

    def __init__(self, link: WorkerLink, schema: str, sessions: Sessions, callbacks: Callbacks) -> None:
        self._link = link
        self._schema = schema
        self._sessions = sessions
        self._held: HeldUp[str] = HeldUp(callbacks)

    async def declare_schedules(self, declared: Sequence[Schedule]) -> None:
        """Writes the schedules that this worker's code declares; unchanged ones stay as they are."""
        async with self._using() as connection, connection.transaction():
            await run(connection, self._schema, schedules.declare(declared, self._sessions.current))

    async def next_schedule(self) -> float | None:
        """Seconds until the first occurrence of any schedule (below 0: it has come), or until one is tried again that somebody
        else's transaction holds up; None if there is none."""
        async with self._using() as connection:
            cursor = await connection.execute(
                statement("schedule_next", self._schema), {"aside": self._held.names()}, prepare=True
            )
            ((seconds,),) = await cursor.fetchall()
            again = self._held.soon()
            return seconds if again is None else again if seconds is None else min(seconds, again)

    async def fire_schedules(self) -> tuple[list[schedules.Fired], list[schedules.Broken]]:
        """Fires the due occurrences that no other worker is firing, each with its job in one transaction."""
        async with self._using(patience=UPKEEP_PATIENCE) as connection:
            with suppress(schedules.OneIsBroken):
                async with connection.transaction():
                    return await schedules.fire(connection, self._schema, self._held, apart=False)
            async with connection.transaction():
                return await schedules.fire(connection, self._schema, self._held, apart=True)

    async def prune_fires(self, retention: float) -> None:
        """Deletes the record of occurrences fired more than `retention` seconds ago (10,000 at a time)."""
        async with self._using(patience=UPKEEP_PATIENCE) as connection:
            await connection.execute(statement("schedule_prune", self._schema), {"retention": interval(retention)})

    @asynccontextmanager
    async def _using(self, *, patience: float | None = None) -> AsyncGenerator[TrioConnection[Any]]:
        try:
            with missing_privileges("fire schedules"):
                async with self._link.using(patience=patience) as connection:
                    yield connection
        except OSError as error:
            # No file descriptor or no memory to read a time zone's file: the next try may succeed.
            raise DatabaseUnavailable(f"this worker cannot fire schedules now: {error}") from error
