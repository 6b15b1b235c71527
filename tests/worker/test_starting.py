"""A worker begins while its database restarts. Time is virtual."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import pytest
import trio

from pulse_trio.errors import DatabaseUnavailable
from pulse_trio.observe import JobEnded

if TYPE_CHECKING:
    from support.stage import Recorder, Stage


@pytest.mark.parametrize(
    ("operation", "cause"),
    [
        ("check_schema", None),
        ("open_session", None),
        ("declare_limits", psycopg.errors.LockNotAvailable("canceling statement due to lock timeout")),
        ("open_session", psycopg.errors.QueryCanceled("canceling statement due to user request")),
    ],
)
async def test_a_connection_that_breaks_at_the_start_is_made_again(
    stage: Stage, events: Recorder, operation: str, cause: Exception | None
) -> None:
    """The server was there when the worker connected, and gone a moment later: the worker ended. Or somebody was about to
    change the limits of a queue, or has stopped the statement that waited for a lock."""
    broken: list[float] = []

    async def breaks() -> None:
        if len(broken) < 3:
            broken.append(trio.current_time())
            raise DatabaseUnavailable("server closed the connection unexpectedly") from cause

    @stage.handlers.job
    async def work() -> int:
        return 1

    job = stage.database.jobs[stage.enqueue("work")]
    stage.store.trouble[operation] = breaks
    async with stage.working():
        await events.first(JobEnded)
    assert len(broken) == 3
    assert job.result == "1"


async def test_a_database_that_stays_away_ends_the_worker_in_time(stage: Stage) -> None:
    async def away() -> None:
        raise DatabaseUnavailable("server closed the connection unexpectedly")

    stage.store.trouble["check_schema"] = away
    began = trio.current_time()
    with pytest.RaisesGroup(DatabaseUnavailable, allow_unwrapped=True, flatten_subgroups=True):
        async with stage.working(connect_timeout=12):
            await trio.sleep_forever()
    assert trio.current_time() - began <= 12


async def test_what_the_database_answers_is_not_asked_again(stage: Stage) -> None:
    asked: list[int] = []

    async def deadlock() -> None:
        asked.append(1)
        raise DatabaseUnavailable("deadlock detected") from psycopg.errors.DeadlockDetected()

    stage.store.trouble["open_session"] = deadlock
    with pytest.RaisesGroup(DatabaseUnavailable, allow_unwrapped=True, flatten_subgroups=True):
        async with stage.working(connect_timeout=12):
            await trio.sleep_forever()
    assert len(asked) == 1
