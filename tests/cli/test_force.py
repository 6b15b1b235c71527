"""`pulse-trio jobs release` and `jobs complete`, and lists by key, as real processes on a real database."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from support.stores import Window

if TYPE_CHECKING:
    from pulse_trio.testing.faults.processes import Processes, Running

    from .conftest import Command


@pytest.fixture
async def wedged(app: None, processes: Processes, command: Command, dsn: str) -> tuple[str, Running]:
    """A job whose handler does not end, and the worker that runs it."""
    job_id = (await command("enqueue", "wait")).stdout.strip()
    worker = await processes.command("run", "app", env={"PULSE_TRIO_DSN": dsn})
    await worker.line("waiting")
    return job_id, worker


async def test_a_wedged_job_is_released_by_force_and_runs_again(wedged: tuple[str, Running], command: Command) -> None:
    job_id, worker = wedged
    refused = await command("jobs", "release", job_id, code=2)
    assert "--force" in refused.stderr
    released = await command("jobs", "release", job_id, "--force")
    assert released.stdout == f"{job_id} available\n"
    # The handler was told long before its next beat, and the next attempt began in the same worker.
    await worker.line(rf"job {job_id} \(wait\) lost its fence at its heartbeat")
    await worker.line("waiting")
    shown = json.loads((await command("jobs", "show", job_id, "--json")).stdout)
    assert (shown["state"], shown["attempt"]) == ("running", 2)
    audited = json.loads((await command("audit", "--json")).stdout)
    assert [entry["act"] for entry in audited if entry["act"] == "release"] == ["release"]


async def test_a_wedged_job_is_completed_by_force_with_a_result(wedged: tuple[str, Running], command: Command) -> None:
    job_id, worker = wedged
    assert "--force" in (await command("jobs", "complete", job_id, code=2)).stderr
    assert "is not valid JSON" in (await command("jobs", "complete", job_id, "--force", "--result", "{", code=2)).stderr
    done = await command("jobs", "complete", job_id, "4711", "--force", "--result", '{"by": "hand"}', "--json", code=2)
    answer = json.loads(done.stdout)
    assert (answer["completed"], list(answer["refused"])) == ([int(job_id)], ["4711"])
    assert "There is no job 4711" in done.stderr
    await worker.line(rf"job {job_id} \(wait\) lost its fence at its heartbeat")
    shown = json.loads((await command("jobs", "show", job_id, "--json")).stdout)
    assert (shown["state"], shown["result"]) == ("completed", {"by": "hand"})


async def test_jobs_and_queues_are_listed_by_key(command: Command, dsn: str) -> None:
    with Window(dsn) as window:
        for key, times in (("acme", 3), ("globex", 1)):
            for _ in range(times):
                window.run("SELECT enqueue('greet', '{}', 'mail', key => %s)", key)
    jobs = json.loads((await command("jobs", "list", "--key", "acme", "--json")).stdout)
    assert len(jobs) == 3
    keys = json.loads((await command("queues", "list", "--by-key", "mail", "--json")).stdout)
    assert [(k["queue"], k["key"], k["waiting"], k["running"]) for k in keys] == [
        ("mail", "acme", 3, 0),
        ("mail", "globex", 1, 0),
    ]
    table = (await command("queues", "list", "--by-key", "--limit", "1")).stdout
    assert "acme" in table
    assert "globex" not in table
