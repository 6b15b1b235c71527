"""What runs beside the handler that crashes: its children, the events that it waits for, and time.

The handler's job stands in a queue of its own. A worker that is not struck serves the other queues: while the handler is
suspended or dead, so that the order is the same in each run; beside it only where it keeps its slot while it waits.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio.to_thread
import trio

from ...errors import ConfigurationError
from ..clock import PulseClock
from ..draining import PulseWorker
from ..kept import connected
from ..suspended import suspended_jobs
from ..virtual_time import TICK, jump_statement, soon_statement, stop_statement

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from ...handlers import Handlers

QUEUE = "crash_points"
"""Of the handler's own job."""
_QUEUES = """
SELECT DISTINCT s.queue FROM pulse.jobs s
WHERE s.queue <> %s AND s.state NOT IN ('completed', 'dead', 'cancelled')
AND (s.state <> 'suspended' OR EXISTS (SELECT FROM pulse.recheck))
UNION ALL SELECT %s WHERE EXISTS (SELECT FROM pulse.recheck) ORDER BY 1
"""
"""Suspended jobs alone need a worker where a tree is to be looked at: the end of their parent cancels them."""
_TREES = "crash_points_trees"
"""Nothing stands in this queue. Who serves it looks at trees, also when the handler's own job is all that is left."""
_PUT_OFF, _PATIENCE = 0.01, 20
"""Seconds until a tree is looked at again whose rows were locked (recheck_jobs puts that off by 5 ms), and how often."""
_LINES = "SELECT count(*) FROM pulse.history WHERE job_id = %s"
_HAS_CLOCK = "SELECT to_regclass('pulse_clock.clock') IS NOT NULL"
_FORGET = """
DELETE FROM pulse.bucket b USING (SELECT queue, key FROM pulse.bucket ORDER BY queue, key FOR UPDATE SKIP LOCKED) t
WHERE (b.queue, b.key) = (t.queue, t.key)
"""
_LOOK, _LOOKS = 0.1, 3
"""So many looks, so many seconds apart, have to see that a handler keeps its slot. Then its children run beside it."""


class Others:
    """All jobs of a database but the handler's own."""

    def __init__(self, dsn: str, handlers: Handlers) -> None:
        self._dsn = dsn
        self._handlers = handlers
        self._has_clock: bool | None = None

    async def until_due(self, job_id: int) -> int:
        """Runs others, and lets time pass from moment to moment, until a suspended job is due or has ended. Returns how many
        lines its history has.

        Raises `ConfigurationError` if it waits for what never comes here.
        """
        looks = 0
        while True:
            served = await self._run()
            waits = (await anyio.to_thread.run_sync(self._suspended)).get(job_id)
            if waits is None:
                return await anyio.to_thread.run_sync(self._lines, job_id)
            if await anyio.to_thread.run_sync(self._jump):
                continue
            # While some queues were served the clock went on, and jobs of others may have become due.
            left = set(await anyio.to_thread.run_sync(self._look))
            if _TREES in left and looks < _PATIENCE:
                looks += 1
                await trio.sleep(_PUT_OFF)
            elif left <= served and not await anyio.to_thread.run_sync(forget_rates, self._dsn):
                raise ConfigurationError(_stuck(waits, has_clock=bool(self._has_clock)))

    @asynccontextmanager
    async def beside(self, keeps_slot: Callable[[], bool]) -> AsyncGenerator[None]:
        """While the block runs others run too, as long as the handler waits and keeps its slot. One that is about to be
        suspended does not: on a loaded machine its children ended before, and no attempt of it was suspended."""

        async def run() -> None:
            seen = 0
            while True:
                await trio.sleep(_LOOK)
                seen = seen + 1 if keeps_slot() else 0
                if seen < _LOOKS:
                    continue
                with trio.CancelScope(shield=True):
                    try:
                        await self._run()
                    except ConfigurationError as error:
                        failed.append(error)  # raised below, where no nursery puts it into a group
                        return

        failed: list[ConfigurationError] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            yield
            nursery.cancel_scope.cancel()
        if failed:
            raise failed[0]

    async def _run(self) -> set[str]:
        """Serves the queues in which there is something to do, and returns them."""
        queues = await anyio.to_thread.run_sync(self._look)
        if not queues:
            return set()
        await anyio.to_thread.run_sync(forget_rates, self._dsn)
        settings: dict[str, Any] = {"queues": queues, "log": False}
        try:
            if self._has_clock:
                await PulseClock(self._dsn, self._handlers).advance(**settings)
            else:
                await self._drain(settings)
        except LookupError as error:
            raise ConfigurationError(
                f"crash_points: {error} Pass the registry of its children, handlers=..., or their results, children=..."
            ) from None
        return set(queues)

    async def _drain(self, settings: dict[str, Any]) -> None:
        """Runs what is due. On PostgreSQL's own clock the worker would wait for the next token of a rate."""

        async def forget() -> None:
            while True:
                await trio.sleep(_LOOK)
                await anyio.to_thread.run_sync(forget_rates, self._dsn)

        failed: Exception | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(forget)
            try:
                await PulseWorker(self._dsn, self._handlers).drain(**settings)
            except Exception as error:  # raised below, where no nursery puts it into a group
                failed = error
            nursery.cancel_scope.cancel()
        if failed is not None:
            raise failed

    def _suspended(self) -> dict[int, str]:
        with connected(self._dsn) as connection:
            return suspended_jobs(connection, "pulse")

    def _look(self) -> list[str]:
        with connected(self._dsn) as connection:
            if self._has_clock is None:
                ((self._has_clock,),) = connection.execute(_HAS_CLOCK).fetchall()
                if self._has_clock:
                    connection.execute(stop_statement("pulse"))
            if self._has_clock:
                # A child that has ended again, after an attempt that failed of its first end, has ended later than that.
                connection.execute(TICK)
                connection.execute(soon_statement("pulse"))
            return [queue for (queue,) in connection.execute(_QUEUES, [QUEUE, _TREES]).fetchall()]

    def _lines(self, job_id: int) -> int:
        with connected(self._dsn) as connection:
            ((lines,),) = connection.execute(_LINES, [job_id]).fetchall()
        return lines

    def _jump(self) -> bool:
        if not self._has_clock:
            return False
        jump = {"until": None, "taken": "0", "soon": None, "look": False}
        with connected(self._dsn) as connection:
            return bool(connection.execute(jump_statement("pulse", schedules=False), jump).fetchall())


def forget_rates(dsn: str) -> bool:
    """Gives back the tokens that were taken of rates, so that none keeps a job waiting. Returns whether there were any."""
    with connected(dsn) as connection:
        return connection.execute(_FORGET).rowcount > 0


def _stuck(waits: str, *, has_clock: bool) -> str:
    if has_clock or "event" in waits:
        return f"crash_points: {waits}, and nothing brings it: pass events={{'name': payload}}, which are sent to each job."
    return (
        f"crash_points: {waits}, and time does not pass in this database: put pulse_clock among the test's arguments, or make "
        "it with pulse_database(clock=True)."
    )
