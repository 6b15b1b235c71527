"""A worker at its limits goes on: no file descriptors, no threads, no memory; it needs no file that was replaced."""

from __future__ import annotations

import shlex
import signal
import sysconfig
from typing import TYPE_CHECKING, Any

import pytest

from pulse_trio import SyncClient
from support.workers import HEARTBEAT, RUN, enqueue, rows, settled, until

if TYPE_CHECKING:
    from pathlib import Path

    from pulse_trio.testing.faults.processes import Processes

APP = """
import os
import sys
import threading

import trio

from pulse_trio import Discard, Handlers, Job, RetryAfter, Snooze

handlers = Handlers()
opened = []


@handlers.job
async def held(job: Job) -> str:
    while not opened:
        await trio.sleep(0.01)
    await trio.sleep(SECONDS)
    return f"attempt {job.attempt}"


@handlers.job
async def takes_every_descriptor() -> str:
    try:
        while True:
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.strerror


@handlers.job(max_attempts=1)
async def opens_a_file() -> None:
    open("/dev/null")


@handlers.job(max_attempts=1)
async def takes_too_much_memory() -> None:
    bytearray(1 << 62)


@handlers.job
async def snoozes(job: Job) -> None:
    if job.attempt == 1:
        raise Snooze(0.1)


@handlers.job
async def retries(job: Job) -> None:
    if job.attempt == 1:
        raise RetryAfter(0.1)


@handlers.job
async def discards() -> None:
    raise Discard("never")


@handlers.job(timeout=0.1, max_attempts=1)
async def times_out() -> None:
    await trio.sleep_forever()


@handlers.job
async def says(job: Job) -> None:
    await job.progress(0.5, "half of it")


@handlers.job
async def commits(job: Job) -> None:
    async with job.transaction() as tx:
        await tx.execute("SELECT 1")


@handlers.job
async def keeps_a_child(job: Job) -> None:
    job.nursery.start_soon(trio.sleep, 0.1)


@handlers.job(max_attempts=1)
async def fails_in_a_group(job: Job) -> None:
    async def fail() -> None:
        raise ValueError("the reason")

    job.nursery.start_soon(fail)


@handlers.job(key="k", limit=1)
async def limited() -> None: ...


@handlers.job(max_attempts=1)
def in_a_thread() -> int:
    return 1


@handlers.job(runs="process", max_attempts=1)
def in_a_process() -> int:
    return 1


@handlers.job
async def watches_imports() -> None:
    ours = os.path.dirname(sys.modules["pulse_trio"].__file__)
    libraries = os.path.dirname(sys.modules["trio"].__file__).removesuffix("/trio")
    standard = os.path.dirname(os.__file__)

    def watch(event, args):
        if event == "import":
            print("LATE import", args[0], file=sys.stderr, flush=True)
        elif event == "open" and str(args[0]).startswith((ours, libraries, standard)):
            # What shows a traceback's lines may read sources: without them the lines are left out.
            if not sys._getframe(1).f_code.co_filename.endswith("tokenize.py"):
                print("LATE open", args[0], file=sys.stderr, flush=True)

    sys.addaudithook(watch)


@handlers.job
async def refuses_threads() -> None:
    def refuse(self):
        raise RuntimeError("can't start new thread")

    threading.Thread.start = refuse
""".replace("SECONDS", f"{HEARTBEAT + 0.5}")

EVERY_WAY_TO_END = {
    "snoozes": "completed", "retries": "completed", "discards": "dead", "times_out": "dead", "says": "completed",
    "keeps_a_child": "completed", "fails_in_a_group": "dead", "limited": "completed", "takes_too_much_memory": "dead",
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "retries": {"max_attempts": 2},
    "times_out": {"max_attempts": 1, "timeout": 0.1},
    "limited": {"key": "k", "limit": 1},
}


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(APP)
    return tmp_path


def begin(dsn: str, *kinds: str) -> dict[str, int]:
    """One job of each kind; their ids."""
    client = SyncClient(dsn)
    return {kind: client.enqueue(kind, **OPTIONS.get(kind, {"max_attempts": 1})).id for kind in kinds}


async def ends(dsn: str, jobs: dict[str, int]) -> dict[str, str]:
    return {kind: (await settled(dsn, job_id))[0] for kind, job_id in jobs.items()}


async def test_a_worker_without_a_free_descriptor_goes_on_and_keeps_its_jobs(
    dsn: str, processes: Processes, app: Path
) -> None:
    command = shlex.join([f"{sysconfig.get_path('scripts')}/pulse-trio", *RUN, f"--dsn={dsn}"])
    worker = await processes.start("bash", "-c", f"ulimit -n 80; exec {command}")
    neighbours = enqueue(dsn, "held", count=5)
    await until(dsn, "SELECT 1 FROM pulse.jobs WHERE kind = 'held' AND state = 'running' HAVING count(*) = 5")
    (greedy,) = enqueue(dsn, "takes_every_descriptor")
    assert (await settled(dsn, greedy))[::2] == ("completed", "Too many open files")
    wanted = EVERY_WAY_TO_END | {
        "opens_a_file": "dead",
        "in_a_process": "dead",
        "in_a_thread": "completed",
    }
    assert await ends(dsn, begin(dsn, *wanted)) == wanted
    # They were longer than a heartbeat: their leases were renewed all the while.
    for job_id in neighbours:
        assert await settled(dsn, job_id) == ("completed", 1, "attempt 1")
    worker.send(signal.SIGTERM)
    assert await worker.ended() == 0, worker.report()


async def test_a_running_worker_reads_no_file_of_its_own_and_imports_nothing(
    dsn: str, processes: Processes, app: Path
) -> None:
    worker = await processes.pulse_trio(*RUN, f"--dsn={dsn}")
    await ends(dsn, begin(dsn, "watches_imports"))
    SyncClient(dsn).enqueue("unknown")
    wanted = EVERY_WAY_TO_END | {"commits": "completed", "in_a_thread": "completed"}
    assert await ends(dsn, begin(dsn, *wanted)) == wanted
    worker.send(signal.SIGTERM)
    assert await worker.ended() == 0
    assert [line for line in worker.stderr.splitlines() if "LATE" in line] == []


async def test_a_worker_that_is_refused_threads_goes_on(dsn: str, processes: Processes, app: Path) -> None:
    worker = await processes.pulse_trio(*RUN, f"--dsn={dsn}")
    await ends(dsn, begin(dsn, "refuses_threads"))
    wanted = EVERY_WAY_TO_END | {"in_a_thread": "dead", "commits": "completed"}
    assert await ends(dsn, begin(dsn, *wanted)) == wanted
    ((error,),) = rows(dsn, "SELECT error FROM pulse.jobs WHERE kind = 'in_a_thread'")
    assert error.startswith("RuntimeError: can't start new thread")
    worker.send(signal.SIGTERM)
    assert await worker.ended() == 0, worker.report()
