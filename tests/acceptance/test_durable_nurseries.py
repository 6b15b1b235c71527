"""Durable nurseries across processes: killed workers of parents and of children lose nothing, and start nothing twice."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from pulse_trio import SyncClient
from support.workers import RUN, rows, settled, until

if TYPE_CHECKING:
    from pathlib import Path

    from pulse_trio.testing.faults.processes import Processes, Running

APP = """
import os

import trio

from pulse_trio import ChildFailed, Discard, Handlers, Job

handlers = Handlers()


def note(line):
    with open("notes", "a") as file:
        file.write(f"{line}\\n")


@handlers.job(queue="children", max_attempts=5)
async def held(job: Job, name: str) -> str:
    note(f"{name} begins")
    try:
        while not os.path.exists(f"go-{name}"):
            await trio.sleep(0.02)
    except trio.Cancelled:
        note(f"{name} cancelled: {job.cancel_reason}")
        raise
    return name


@handlers.job(queue="children")
async def fails() -> None:
    raise Discard("broken")


@handlers.job(durable=True, suspend_after=3600, max_attempts=5)
async def parent(job: Job) -> list[str]:
    note(f"parent {job.attempt}")
    async with job.durable_nursery() as nursery:
        children = [nursery.start_soon(held, name) for name in "ab"]
    return [child.result for child in children]


@handlers.job(durable=True, suspend_after=3600)
async def unlucky(job: Job) -> None:
    async with job.durable_nursery() as nursery:
        nursery.start_soon(held, "a")
        await nursery.flush()
        while not os.path.exists("fail"):
            await trio.sleep(0.02)
        nursery.start_soon(fails)
"""
RUNNING = "SELECT 1 FROM pulse.jobs WHERE kind = 'held' AND state = 'running' HAVING count(*) >= %(n)s"
CHILDREN = "SELECT state, attempt FROM pulse.jobs WHERE parent_id = %(id)s ORDER BY id"


async def start(processes: Processes, dsn: str, queue: str) -> Running:
    (processes.folder / "app.py").write_text(APP)
    return await processes.command(*RUN, f"--dsn={dsn}", f"--queues={queue}")


def notes(folder: Path) -> list[str]:
    return sorted((folder / "notes").read_text().splitlines())


async def test_the_next_attempt_of_a_killed_parent_adopts_its_running_children(dsn: str, processes: Processes) -> None:
    parents = await start(processes, dsn, "default")
    await start(processes, dsn, "children")
    job_id = SyncClient(dsn).enqueue("parent", {}).id
    await until(dsn, RUNNING, {"n": 2})
    parents.send(signal.SIGKILL)
    await start(processes, dsn, "default")
    await until(dsn, "SELECT 1 FROM pulse.jobs WHERE id = %(id)s AND state = 'running' AND attempt = 2", {"id": job_id})
    for name in "ab":
        (processes.folder / f"go-{name}").touch()
    assert await settled(dsn, job_id) == ("completed", 2, ["a", "b"])
    assert rows(dsn, CHILDREN, {"id": job_id}) == [("completed", 1)] * 2
    assert notes(processes.folder) == ["a begins", "b begins", "parent 1", "parent 2"]


async def test_a_parent_waits_for_the_next_attempt_of_a_child_whose_worker_was_killed(
    dsn: str, processes: Processes
) -> None:
    await start(processes, dsn, "default")
    children = await start(processes, dsn, "children")
    job_id = SyncClient(dsn).enqueue("parent", {}).id
    await until(dsn, RUNNING, {"n": 2})
    children.send(signal.SIGKILL)
    for name in "ab":
        (processes.folder / f"go-{name}").touch()
    await start(processes, dsn, "children")
    assert await settled(dsn, job_id) == ("completed", 1, ["a", "b"])
    assert rows(dsn, CHILDREN, {"id": job_id}) == [("completed", 2)] * 2


async def test_a_cancellation_of_the_parent_reaches_children_in_another_process_and_the_parent_ends_last(
    dsn: str, processes: Processes
) -> None:
    await start(processes, dsn, "default")
    await start(processes, dsn, "children")
    client = SyncClient(dsn)
    job_id = client.enqueue("parent", {}).id
    await until(dsn, RUNNING, {"n": 2})
    client.cancel(job_id)
    state, attempt, _ = await settled(dsn, job_id)
    assert (state, attempt) == ("cancelled", 1)
    # In the same snapshot in which it was settled, or later: no child lives.
    assert [state for state, _ in rows(dsn, CHILDREN, {"id": job_id})] == ["cancelled", "cancelled"]
    assert notes(processes.folder) == [
        "a begins", "a cancelled: parent", "b begins", "b cancelled: parent", "parent 1"
    ]  # fmt: skip


async def test_a_childs_failure_cancels_its_sibling_in_another_process_before_the_parent_is_dead(
    dsn: str, processes: Processes
) -> None:
    await start(processes, dsn, "default")
    await start(processes, dsn, "children")
    job_id = SyncClient(dsn).enqueue("unlucky", {}, max_attempts=1).id
    await until(dsn, RUNNING, {"n": 1})
    (processes.folder / "fail").touch()
    assert (await settled(dsn, job_id))[0] == "dead"
    ((error,),) = rows(dsn, "SELECT error FROM pulse.jobs WHERE id = %(id)s", {"id": job_id})
    assert "ChildFailed" in error
    assert [state for state, _ in rows(dsn, CHILDREN, {"id": job_id})] == ["cancelled", "dead"]
    assert notes(processes.folder) == ["a begins", "a cancelled: sibling"]
