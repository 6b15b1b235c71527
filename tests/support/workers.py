"""Real workers on the sink's handlers, and what the tests ask of the database about their jobs."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import trio

from pulse_trio import SyncClient
from support.connections import is_quiet, lent

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    import psycopg

    from pulse_trio.testing.faults.processes import Processes, Running

LEASE, HEARTBEAT, WATCHDOG, CLEANUP = 6.0, 2.0, 0.5, 0.5
RUN = [
    "run", "app:handlers", f"--lease={LEASE}", f"--heartbeat={HEARTBEAT}", f"--watchdog={WATCHDOG}",
    f"--cleanup={CLEANUP}", "--poll=1",
]  # fmt: skip


async def worker(processes: Processes, dsn: str, *more: str) -> Running:
    """Starts `pulse-trio run` in the sink's folder."""
    return await processes.command(*RUN, f"--dsn={dsn}", *more, env={"SINK": "sink"})


def enqueue(dsn: str, kind: str = "held", count: int = 1, **args: Any) -> list[int]:
    """Ids of so many new jobs."""
    with lent(dsn) as connection:
        client = SyncClient(connection)
        return [client.enqueue(kind, args, max_attempts=5).id for _ in range(count)]


def rows(dsn: str, query: str, parameters: dict[str, Any] | None = None) -> list[tuple[Any, ...]]:
    """What a query gives now."""
    with lent(dsn) as connection:
        return connection.execute(query.encode(), parameters).fetchall()


@contextmanager
def looking(dsn: str) -> Generator[Callable[..., list[tuple[Any, ...]]]]:
    """What queries give one after the other: on one connection, unless a test ends it."""
    with ExitStack() as stack:
        connection: psycopg.Connection[Any] | None = None

        def look(query: str, parameters: dict[str, Any] | None = None) -> list[tuple[Any, ...]]:
            nonlocal connection
            if connection is None or not is_quiet(connection):
                stack.close()
                connection = stack.enter_context(lent(dsn, planned_once=True))
            return connection.execute(query.encode(), parameters).fetchall()

        yield look


async def until(dsn: str, query: str, parameters: dict[str, Any] | None = None) -> list[tuple[Any, ...]]:
    """Waits until a query has rows, by polling: PostgreSQL sends no notification."""
    with trio.fail_after(40), looking(dsn) as look:
        while True:
            if found := look(query, parameters):
                return found
            await trio.sleep(0.05)


async def settled(dsn: str, job_id: int) -> tuple[str, int, Any]:
    """Waits until a job is finished; its state, attempt and result."""
    finished = "SELECT state, attempt, result FROM pulse.jobs WHERE id = %(id)s AND finished_at IS NOT NULL"
    ((state, attempt, result),) = await until(dsn, finished, {"id": job_id})
    return state, attempt, result
