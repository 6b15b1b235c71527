"""`run --processes N`: worker processes killed, blocked and orphaned."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from support.sink import Sink, open_sink
from support.workers import enqueue, rows, settled, until, worker

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from support.processes import Processes

AT_ONCE = 2.0  # seconds a loaded machine may take for what needs no lease to run out (6 s in these tests)


@pytest.fixture
async def sink(tmp_path: Path) -> AsyncGenerator[Sink]:
    async with open_sink(tmp_path) as sink:
        yield sink


async def test_a_killed_childs_jobs_are_handed_back_at_once_and_it_is_replaced(
    dsn: str, processes: Processes, sink: Sink
) -> None:
    ids = enqueue(dsn, count=20)
    supervisor = await worker(processes, dsn, "--processes=2", "--concurrency=30")
    starts = await sink.until("start", attempt=1, count=20)
    victim = starts[0].pid
    held = [start.job for start in starts if start.pid == victim]
    os.kill(victim, signal.SIGKILL)
    ((killed_at,),) = rows(dsn, "SELECT clock_timestamp()")
    await supervisor.line(rf"{victim} .*signal|{victim} ended")
    await sink.until("start", attempt=2, count=len(held))
    rescued = rows(dsn, "SELECT job_id, ended_at FROM pulse.attempts WHERE outcome = 'rescued'")
    assert sorted(job for job, _ in rescued) == sorted(held)
    assert max((ended - killed_at).total_seconds() for _, ended in rescued) < AT_ONCE
    await supervisor.line("worker process .* started")
    sink.let_go()
    for job_id in ids:
        assert (await settled(dsn, job_id))[:2] == ("completed", 2 if job_id in held else 1)
    supervisor.send(signal.SIGTERM)
    assert await supervisor.ended() == 0


async def test_a_child_whose_loop_is_blocked_is_replaced(
    dsn: str, processes: Processes, sink: Sink, tmp_path: Path
) -> None:
    (job_id,) = enqueue(dsn, "blocking", folder=str(tmp_path))
    supervisor = await worker(processes, dsn, "--processes=2")
    (start,) = await sink.until("start", attempt=1)
    await supervisor.line(f"{start.pid} .*no life")
    (tmp_path / "go-2").touch()
    assert await settled(dsn, job_id) == ("completed", 2, "attempt 2")
    supervisor.send(signal.SIGTERM)
    assert await supervisor.ended() == 0


async def test_the_children_of_a_killed_supervisor_stop_and_give_their_jobs_back(
    dsn: str, processes: Processes, sink: Sink
) -> None:
    (job_id,) = enqueue(dsn)
    supervisor = await worker(processes, dsn, "--processes=2")
    (start,) = await sink.until("start", attempt=1)
    supervisor.kill()
    (cancelled,) = await sink.until("cancelled", attempt=1)
    assert (cancelled.pid, cancelled.reason) == (start.pid, "shutdown")
    await until(dsn, "SELECT 1 FROM pulse.workers HAVING count(*) FILTER (WHERE state <> 'gone') = 0")
    assert rows(dsn, "SELECT state, attempt, max_attempts FROM pulse.jobs") == [("available", 1, 6)]
    assert job_id == start.job
