"""What every worker does for the whole schema: it rescues lost jobs, finishes batches, reports silent workers and prunes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg
import trio

from ..errors import DatabaseUnavailable
from ..observe import WorkerStale
from ..sql import statement
from .arrays import numbers
from .finishing import finish_batches
from .held_up import HeldUp
from .leases import interval
from .links import UPKEEP_PATIENCE, missing_privileges
from .live_reads import LiveReads
from .outcomes import EXPIRED
from .rows import each_alone

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..postgres import TrioConnection
    from .callbacks import Callbacks
    from .links import WorkerLink
    from .outcomes import Moved, OutcomeWriter
    from .sessions import Sessions


_OVERDUE = 100
_LOOKED_AT = 5000
_LOOK_EVERY = 60.0


class Rescue(NamedTuple):
    """The number of jobs put back on their queues, and of jobs whose budget the lost attempt had used up."""

    rescued: int
    dead: int


class HandedBack(NamedTuple):
    """A rescue of the jobs of dead sessions; `jobs` has the id and the kind of each."""

    rescued: int
    dead: int
    jobs: tuple[tuple[int, str], ...] = ()


class _Lost(NamedTuple):
    """An attempt to rescue, from expired.sql or from held_by.sql; only the latter gives the kind."""

    job_id: int
    attempt: int
    session: int
    kind: str = ""


class Upkeep:
    """The watchdog's operations, on a connection of its own."""

    def __init__(
        self, link: WorkerLink, schema: str, sessions: Sessions, writer: OutcomeWriter, callbacks: Callbacks
    ) -> None:
        self._link = link
        self._schema = schema
        self._sessions = sessions
        self._live_reads = LiveReads(link, schema)
        self._look_at = 0.0
        self._looked_to = 0
        self._writer = writer
        self._callbacks = callbacks
        self._held: HeldUp[int] = HeldUp(callbacks)

    # Rescues

    async def rescue(self, limit: int = 1000) -> Rescue:
        """Sends expired leases through the retry-or-dead-letter path, due at once."""
        if not await self._live_reads.wanted():
            return Rescue(0, 0)
        began = trio.current_time()
        rescue, _ = await self._rescue("expired", {"limit": limit}, EXPIRED)
        if rescue.rescued + rescue.dead < limit:
            self._live_reads.took(began)
        return rescue

    async def rescue_sessions(self, sessions: Sequence[int], limit: int = 1000) -> HandedBack:
        """Does the same for all jobs of dead sessions, before their leases run out."""
        parameters = {"sessions": list(sessions), "limit": limit}
        (rescued, dead), moved = await self._rescue("held_by", parameters, "the worker process died")
        if not moved:
            # No job is left to hand back. Without this the dead session would be shown as stale until it counts as gone.
            async with self._link.using(patience=UPKEEP_PATIENCE) as connection:
                await connection.execute(statement("end_sessions", self._schema), {"sessions": list(sessions)})
        return HandedBack(rescued, dead, tuple((lost.job_id, lost.kind) for lost in moved))

    async def give_back(self, session: int, why: str) -> None:
        """Releases the jobs that a session has claimed and nobody has begun. Raises `DatabaseUnavailable`."""
        async with self._link.using(patience=UPKEEP_PATIENCE) as connection, connection.transaction():
            cursor = await connection.execute(
                statement("held_by", self._schema), {"sessions": [session], "limit": 1000}, prepare=True
            )
            if found := [_Lost(*row) for row in await cursor.fetchall()]:
                await self._end(connection, found, "released", why)

    async def _rescue(self, source: str, parameters: Mapping[str, Any], error: str) -> tuple[Rescue, list[_Lost]]:
        async with self._link.using(patience=UPKEEP_PATIENCE) as connection, connection.transaction():
            cursor = await connection.execute(statement(source, self._schema), parameters, prepare=True)
            found = [_Lost(*row) for row in await cursor.fetchall()]
            if not found:
                return Rescue(0, 0), []
            parts = await each_alone(
                found,
                lambda some: self._put_back(connection, some, error),
                lambda lost, refused: self._bury(connection, lost, error, refused),
            )
        ends = {job_id: end for part in parts for job_id, end in part.items()}
        ended = list(ends.values())
        moved = [lost for lost in found if lost.job_id in ends]
        return Rescue(rescued=ended.count("retryable"), dead=ended.count("dead")), moved

    async def _put_back(self, connection: TrioConnection[Any], found: Sequence[_Lost], error: str) -> dict[int, str]:
        """What became of each job, by its id. In a savepoint: a row that makes it fail must not undo other rescues."""
        ids = numbers([lost.job_id for lost in found])
        async with connection.transaction():
            await connection.execute(
                statement("refund", self._schema),
                {"ids": ids, "sessions": numbers({lost.session for lost in found})},
                prepare=True,
            )
            moved = await self._end(connection, found, "rescued", error)
        for job in moved:
            if job.suspect is not None:
                self._callbacks.suspect(job.job_id, job.suspect, job.crashes)
        return {job.job_id: job.state for job in moved if job.state is not None}

    async def _end(self, connection: TrioConnection[Any], found: Sequence[_Lost], kind: str, error: str) -> list[Moved]:
        return await self._writer.end_attempts(
            connection,
            {
                "ids": numbers([lost.job_id for lost in found]),
                "attempts": numbers([lost.attempt for lost in found]),
                "sessions": numbers([lost.session for lost in found]),
            },
            kinds=[kind] * len(found),
            delays=[0] * len(found),
            errors=[error] * len(found),
        )

    async def _bury(
        self, connection: TrioConnection[Any], lost: _Lost, error: str, refused: psycopg.Error
    ) -> dict[int, str]:
        fence = (lost.job_id, lost.attempt, lost.session)
        buried = await self._writer.bury_rescued(connection, fence, lost.kind, error, refused)
        return {lost.job_id: "dead"} if buried else {}

    # Batches

    async def finish_batches(self) -> list[int] | None:
        """Finishes batches all of whose jobs have ended, and enqueues their callback jobs. Returns their ids; None when no
        batch is closed and unfinished."""
        async with self._link.using(patience=UPKEEP_PATIENCE) as connection:
            return await finish_batches(connection, self._schema, self._held)

    async def prune_results(self, retention: float) -> None:
        """Deletes batches that finished more than `retention` seconds ago, and the progress of jobs that finished as long
        ago."""
        async with self._link.using(patience=UPKEEP_PATIENCE) as connection:
            for name in ("prune_batches", "prune_progress"):
                await connection.execute(statement(name, self._schema), {"retention": interval(retention)})

    # The rest of the watchdog's rounds

    async def stale_workers(self) -> list[WorkerStale]:
        """Workers that have become stale, other than this one, each reported by one watchdog until it shows a sign of life."""
        async with self._link.using(patience=UPKEEP_PATIENCE) as connection:
            cursor = await connection.execute(
                statement("stale_sessions", self._schema), {"own": numbers(self._sessions.ids)}, prepare=True
            )
            return [WorkerStale(*row) for row in await cursor.fetchall()]

    async def close_cancellations(self) -> None:
        """Closes the ledger rows of jobs that ended while their cancellation was under way."""
        async with self._link.using(patience=UPKEEP_PATIENCE) as connection:
            await connection.execute(statement("cancel_close", self._schema), {}, prepare=True)

    async def tend_trees(self) -> bool:
        """Ends jobs of trees whose deadline has passed while no worker holds them; about once a minute, asks for a look at
        waiting parents that nothing watches. Returns whether there is more to do."""
        # A role whose grants are older than these functions may not call them, and its worker goes on. See: pulse-trio grants
        with missing_privileges("keep the deadlines of trees"):
            async with self._link.using(patience=UPKEEP_PATIENCE) as connection:
                cursor = await connection.execute(
                    statement("end_overdue", self._schema), {"limit": _OVERDUE}, prepare=True
                )
                row = await cursor.fetchone()
                if trio.current_time() >= self._look_at:
                    looked = await connection.execute(
                        statement("look_slowly", self._schema), {"after": self._looked_to, "limit": _LOOKED_AT}
                    )
                    found = await looked.fetchone()
                    self._looked_to = 0 if found is None or found[0] is None else int(found[0])
                    self._look_at = trio.current_time() + _LOOK_EVERY
                return row is not None and bool(row[0] == _OVERDUE)
        return False

    async def maintain(self, retention: float) -> bool:
        """Makes the archive's partitions for the coming days and drops those older than `retention` seconds, unless another
        worker has just done so; deletes a bounded number of rows of queues with a shorter retention. Returns whether there is
        more to do."""
        async with self._link.using(patience=UPKEEP_PATIENCE) as connection:
            try:
                cursor = await connection.execute(
                    statement("maintain", self._schema), {"retention": interval(retention)}
                )
                row = await cursor.fetchone()
                return row is not None and bool(row[0])
            except psycopg.errors.InsufficientPrivilege as error:
                # This worker's jobs need no maintenance: the watchdog reports it and tries again.
                raise DatabaseUnavailable(
                    f"this role may not maintain the schema ({error}); as its owner: "
                    f"GRANT EXECUTE ON FUNCTION {self._schema}.upkeep(interval) TO ..."
                ) from error
