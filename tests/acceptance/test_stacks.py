"""`pulse-trio stack`, asked of real workers."""

from __future__ import annotations

import json
import re
import signal
from typing import TYPE_CHECKING

import pytest

from pulse_trio import SyncClient, open_client
from support.workers import RUN, enqueue

if TYPE_CHECKING:
    from pathlib import Path

    from pulse_trio.testing.faults.processes import Processes, Running

APP = """
import os
import time

import trio

from pulse_trio import Handlers, Job

handlers = Handlers()


async def download(url):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep_forever)


async def upload(url):
    await trio.sleep_forever()


@handlers.job
async def mirror(job: Job) -> None:
    job.nursery.start_soon(download, "a")
    job.nursery.start_soon(upload, "b")
    print("began", flush=True)
    await trio.sleep_forever()


@handlers.job(runs="process")
def crunch() -> None:
    print("began", os.getpid(), flush=True)
    time.sleep(1000)


@handlers.job
async def block() -> None:
    print("began", flush=True)
    time.sleep(1000)
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(APP)
    return tmp_path


async def running(processes: Processes, dsn: str, kind: str) -> tuple[Running, int]:
    """A worker that runs one job of that kind, and the job."""
    (job_id,) = enqueue(dsn, kind)
    return await processes.command(*RUN, f"--dsn={dsn}"), job_id


async def stack(processes: Processes, dsn: str, job_id: int, *more: str, code: int = 0) -> Running:
    command = await processes.command("stack", str(job_id), f"--dsn={dsn}", *more)
    assert await command.ended() == code, command.report()
    return command


@pytest.mark.usefixtures("app")
async def test_the_tree_names_the_handler_and_its_children_with_file_and_line(dsn: str, processes: Processes) -> None:
    worker, job_id = await running(processes, dsn, "mirror")
    await worker.line("began")
    printed = (await stack(processes, dsn, job_id)).stdout
    assert re.match(rf"job {job_id} \(mirror\), attempt 1, on \S+:{worker.pid} at ", printed)
    for function in ("mirror", "download", "upload"):
        assert re.search(rf'app.py", line \d+, in {function}\n', printed), printed
    # The task that a child has started is below it.
    child, grandchild = (
        re.search(rf"^( *)task {name}", printed, re.MULTILINE) for name in ("app.download", "trio.sleep_forever")
    )
    assert child is not None, printed
    assert grandchild is not None, printed
    assert len(child[1]) < len(grandchild[1])
    document = json.loads((await stack(processes, dsn, job_id, "--json")).stdout)
    assert (document["job_id"], document["pid"], document["kind"]) == (job_id, worker.pid, "mirror")
    assert "in mirror" in document["stack"]
    assert "in mirror" in SyncClient(dsn).stack(job_id).stack
    async with open_client(dsn) as client:
        assert "in mirror" in (await client.stack(job_id)).stack


@pytest.mark.usefixtures("app")
async def test_of_a_handler_in_a_process_the_process_is_named(dsn: str, processes: Processes) -> None:
    worker, job_id = await running(processes, dsn, "crunch")
    pid = (await worker.line(r"began (\d+)"))[1]
    assert f"process {pid}, a child of the worker" in (await stack(processes, dsn, job_id)).stdout


@pytest.mark.usefixtures("app")
@pytest.mark.parametrize("how", ["blocked", "stopped"])
async def test_a_worker_that_cannot_answer_is_named_and_the_exit_code_is_1(
    how: str, dsn: str, processes: Processes
) -> None:
    worker, job_id = await running(processes, dsn, "block" if how == "blocked" else "mirror")
    await worker.line("began")
    if how == "stopped":
        worker.send(signal.SIGSTOP)
    command = await stack(processes, dsn, job_id, code=1)
    assert re.search(rf"^pulse-trio: The worker \S+:{worker.pid} runs job {job_id} and did not answer", command.stderr)
    assert "event loop is blocked" in command.stderr
    assert command.stdout == ""


async def test_a_job_that_is_not_running_is_wrong_usage(dsn: str, processes: Processes) -> None:
    (job_id,) = enqueue(dsn, "mirror")
    assert f"Job {job_id} is available" in (await stack(processes, dsn, job_id, code=2)).stderr
    assert "There is no job 4711" in (await stack(processes, dsn, 4711, code=2)).stderr
