"""What commands do with a job that is suspended."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from pulse_trio.testing.faults.processes import Processes

    from .conftest import Command

APP = """
from pulse_trio import Handlers, Job

handlers = Handlers()


@handlers.job(durable=True, suspend_after=0)
async def order(job: Job) -> None:
    await job.wait_for_event("approved")
"""


@pytest.fixture
async def job_id(command: Command, processes: Processes, tmp_path: Path, dsn: str) -> str:
    """Of a suspended job."""
    (tmp_path / "app.py").write_text(APP)
    job_id = (await command("enqueue", "order")).stdout.strip()
    worker = await processes.command("run", "app", "--burst", env={"PULSE_TRIO_DSN": dsn})
    assert await worker.ended() == 0
    return job_id


async def test_the_trail_says_who_has_ended_a_job_without_its_clean_up(command: Command, job_id: str) -> None:
    await command("jobs", "cancel", job_id, "--now", "--as", "Ada")
    trail = json.loads((await command("audit", "--act", "cancel", "--json")).stdout)
    assert [(a["actor"], a["job_ids"]) for a in trail] == [("Ada", [int(job_id)])]


async def test_a_rehearsed_retry_says_which_jobs_would_be_refused(command: Command, job_id: str) -> None:
    dry = await command("jobs", "retry", job_id, "--dry-run", code=2)
    assert dry.stdout == "0 jobs would be retried\n"
    assert f"Job {job_id} is suspended: it goes on by itself" in dry.stderr
    told = await command("jobs", "retry", job_id, "999999", "--dry-run", "--json", code=2)
    assert set(json.loads(told.stdout)["refused"]) == {job_id, "999999"}
    await command("jobs", "cancel", job_id, "--now")
    assert (await command("jobs", "retry", job_id, "--dry-run")).stdout == "1 job would be retried\n"
