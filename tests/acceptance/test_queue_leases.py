"""Leases of queues with real processes: how soon the jobs of a killed worker are back, and a blocked one is ended."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from pulse_trio import SyncClient
from support.workers import rows, settled, until

if TYPE_CHECKING:
    from pathlib import Path

    from pulse_trio.testing.faults.processes import Processes

APP = """
import time
from pathlib import Path

import trio

from pulse_trio import Handlers, Job

handlers = Handlers()
handlers.queue("quick", lease=2)
handlers.queue("slow", lease=9)


@handlers.job
async def first_hangs(job: Job) -> int:
    if job.attempt == 1:
        await trio.sleep_forever()
    return job.attempt


@handlers.job
async def first_blocks(job: Job) -> int:
    if job.attempt == 1:
        time.sleep(1000)
    return job.attempt
"""
# The worker's own lease is longer than the test may take.
RUN = ["run", "leases_app:handlers", "--lease=90", "--heartbeat=30", "--cleanup=0.2", "--watchdog=0.3", "--poll=0.2"]


@pytest.fixture(autouse=True)
def app(tmp_path: Path) -> None:
    (tmp_path / "leases_app.py").write_text(APP)


async def test_a_killed_workers_jobs_are_back_after_the_lease_of_their_queue(dsn: str, processes: Processes) -> None:
    client = SyncClient(dsn)
    ids = {queue: client.enqueue("first_hangs", {}, queue=queue).id for queue in ("quick", "slow")}
    worker = await processes.command(*RUN, f"--dsn={dsn}")
    await until(dsn, "SELECT FROM pulse.jobs WHERE state = 'running' HAVING count(*) = 2")
    # Beaten for, too: it runs for longer than the quick queue's lease.
    beaten = (
        "SELECT FROM pulse.jobs WHERE queue = 'quick' AND attempt = 1 AND lease_until > started_at + interval '3 s'"
    )
    await until(dsn, beaten)
    worker.kill()
    held = dict(rows(dsn, "SELECT id, lease_until FROM pulse.jobs"))
    ((killed_at,),) = rows(dsn, "SELECT clock_timestamp()")

    other = await processes.command(*RUN, f"--dsn={dsn}")
    for job_id in ids.values():
        assert await settled(dsn, job_id) == ("completed", 2, 2)
    rescued = dict(rows(dsn, "SELECT job_id, ended_at FROM pulse.attempts WHERE outcome = 'rescued'"))
    for queue, lease in (("quick", 2), ("slow", 9)):
        job_id = ids[queue]
        assert rescued[job_id] >= held[job_id]
        # A tick, and what a loaded machine takes to start a worker.
        assert (rescued[job_id] - max(held[job_id], killed_at)).total_seconds() < 6
        assert (held[job_id] - killed_at).total_seconds() <= lease
    assert rescued[ids["quick"]] < held[ids["slow"]]
    other.send(signal.SIGTERM)
    assert await other.ended() == 0


async def test_a_supervised_worker_that_blocks_on_a_job_with_a_short_lease_is_ended_when_that_is_over(
    dsn: str, processes: Processes
) -> None:
    job_id = SyncClient(dsn).enqueue("first_blocks", {}, queue="quick").id
    supervisor = await processes.command(*RUN, f"--dsn={dsn}", "--processes=2")
    await supervisor.line("gave no sign|no life|for 2 s", within=30)
    assert await settled(dsn, job_id) == ("completed", 2, 2)
    supervisor.send(signal.SIGTERM)
    assert await supervisor.ended() == 0
