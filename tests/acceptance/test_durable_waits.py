"""Durable waits under real workers that are stopped and killed: sleeps, events, suspensions, compensations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pulse_trio import SyncClient
from support.workers import RUN, enqueue, rows, settled, until

if TYPE_CHECKING:
    from pathlib import Path

    from pulse_trio.testing.faults.processes import Processes, Running

APP = """
from pathlib import Path

import trio

from pulse_trio import Handlers, Job

handlers = Handlers()


def note(folder: str, word: str) -> None:
    with open(Path(folder, "notes"), "a") as notes:
        notes.write(word + "\\n")


async def charge(folder: str) -> int:
    note(folder, "charged")
    return 7


async def refund(folder: str, amount: int) -> None:
    note(folder, f"refunded {amount}")


@handlers.job(durable=True, suspend_after=0)
async def sleeper(job: Job, folder: str) -> int:
    charged = await job.step(charge, folder)
    await job.sleep(3)
    return charged


@handlers.job(durable=True, suspend_after=0)
async def order(job: Job, folder: str, linger: bool = False) -> str:
    charged = await job.step(charge, folder)
    try:
        return await job.wait_for_event("approved")
    except BaseException:
        if linger and job.attempt == 1:
            note(folder, "unwinding")
            with trio.CancelScope(shield=True):
                await trio.sleep(3600)
        with job.cleanup():
            await job.step(refund, folder, charged)
        raise
"""

SUSPENDED = "SELECT FROM pulse.jobs WHERE id = %(id)s AND state = 'suspended'"


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(APP)
    return tmp_path


async def worker(processes: Processes, dsn: str) -> Running:
    return await processes.command(*RUN, f"--dsn={dsn}", "--cleanup=60")


def notes(app: Path) -> list[str]:
    return (app / "notes").read_text().splitlines()


async def test_a_job_sleeps_for_longer_than_its_worker_lives(processes: Processes, dsn: str, app: Path) -> None:
    first = await worker(processes, dsn)
    (job_id,) = enqueue(dsn, "sleeper", folder=str(app))
    await until(dsn, SUSPENDED, {"id": job_id})
    first.kill()
    await first.ended()
    await worker(processes, dsn)
    state, attempt, result = await settled(dsn, job_id)
    assert (state, attempt, result) == ("completed", 2, 7)
    assert notes(app) == ["charged"]


@pytest.mark.parametrize("sent", ["before", "after"])
async def test_an_event_is_received_whether_it_is_sent_before_or_after_the_suspension(
    sent: str, processes: Processes, dsn: str, app: Path
) -> None:
    (job_id,) = enqueue(dsn, "order", folder=str(app))
    if sent == "before":
        SyncClient(dsn).send_event(job_id, "approved", "by ada")
        await worker(processes, dsn)
    else:
        await worker(processes, dsn)
        await until(dsn, SUSPENDED, {"id": job_id})
        SyncClient(dsn).send_event(job_id, "approved", "by ada")
    state, _, result = await settled(dsn, job_id)
    assert (state, result) == ("completed", "by ada")
    assert notes(app) == ["charged"]


async def test_a_suspended_job_that_is_cancelled_runs_once_more_and_its_compensation_runs(
    processes: Processes, dsn: str, app: Path
) -> None:
    await worker(processes, dsn)
    (job_id,) = enqueue(dsn, "order", folder=str(app))
    await until(dsn, SUSPENDED, {"id": job_id})
    SyncClient(dsn).cancel(job_id, reason="changed my mind")
    state, attempt, _ = await settled(dsn, job_id)
    assert (state, attempt) == ("cancelled", 2)
    assert notes(app) == ["charged", "refunded 7"]


async def test_a_worker_that_is_killed_while_its_handler_unwinds_loses_nothing(
    processes: Processes, dsn: str, app: Path
) -> None:
    first = await worker(processes, dsn)
    (job_id,) = enqueue(dsn, "order", folder=str(app), linger=True)
    while not (app / "notes").exists() or "unwinding" not in notes(app):
        await until(dsn, "SELECT 1")
    first.kill()
    await first.ended()
    await worker(processes, dsn)
    await until(dsn, SUSPENDED, {"id": job_id})
    SyncClient(dsn).send_event(job_id, "approved", "by ada")
    state, _, result = await settled(dsn, job_id)
    assert (state, result) == ("completed", "by ada")
    assert notes(app) == ["charged", "unwinding"]
    assert ("rescued",) in rows(dsn, "SELECT outcome FROM pulse.attempts WHERE job_id = %(id)s", {"id": job_id})
