"""`run --json` names the job in every line that its handler, or a library below it, logs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from support.workers import RUN, enqueue, settled

if TYPE_CHECKING:
    from pathlib import Path

    from pulse_trio.testing.faults.processes import Processes

KINDS = ["trio", "asyncio", "thread", "process"]

APP = """
import asyncio
import logging
import warnings

import trio

from pulse_trio import Handlers, Job, current_job

handlers = Handlers()
log = logging.getLogger("library")


def speak(how):
    assert current_job().kind == how
    log.warning("from %s", how, extra={"order": {"id": 5}, "bad": Bad(), "level": "theirs"})
    log.info("%d of them", how)  # a mistake
    warnings.warn(f"{how} is old")


class Bad:
    def __str__(self):
        raise SystemExit


async def child(how):
    speak(how)


@handlers.job(name="trio", queue="a")
async def in_trio(job: Job) -> int:
    job.nursery.start_soon(child, "trio")
    await trio.to_thread.run_sync(speak, "trio")
    speak("trio")
    return current_job().id


@handlers.job(name="asyncio", runs="asyncio", queue="a")
async def in_asyncio() -> int:
    await asyncio.create_task(child("asyncio"))
    await asyncio.to_thread(speak, "asyncio")
    speak("asyncio")
    return current_job().id


@handlers.job(name="thread", queue="a")
def in_thread() -> int:
    for _ in range(3):
        speak("thread")
    return current_job().id


@handlers.job(name="process", runs="process", queue="a")
def in_process() -> int:
    for _ in range(3):
        speak("process")
    return current_job().id
"""


async def test_handlers_of_every_kind_log_with_their_job_and_extra_fields(
    dsn: str, processes: Processes, tmp_path: Path
) -> None:
    (tmp_path / "app.py").write_text(APP)
    jobs = {kind: enqueue(dsn, kind, count=2) for kind in KINDS}
    worker = await processes.command(*RUN, f"--dsn={dsn}", "--burst", "--json")
    assert await worker.ended() == 0, worker.report()
    for kind, ids in jobs.items():
        for job in ids:
            assert await settled(dsn, job) == ("completed", 1, job), kind
    entries = [json.loads(line) for line in worker.stderr.splitlines()]
    spoken = [entry for entry in entries if entry["logger"] == "library"]
    for kind, ids in jobs.items():
        theirs = [entry for entry in spoken if entry["message"] == f"from {kind}"]
        assert sorted(entry["job_id"] for entry in theirs) == sorted(ids * 3)
        for entry in theirs:
            told: dict[str, Any] = {
                "kind": kind,
                "queue": "default",
                "attempt": 1,
                "order": {"id": 5},
                "level": "warning",
            }
            assert entry | told | {"extra_level": "theirs"} == entry
            assert "rendered" in entry["bad"]
        mistakes = [entry for entry in spoken if entry["kind"] == kind and entry["level"] == "error"]
        assert sorted(entry["job_id"] for entry in mistakes) == sorted(ids * 3)
        for entry in mistakes:
            assert entry["message"].startswith("a line of the log could not be written: '%d of them', of ")
            assert "TypeError" in entry["traceback"]
    warned = [entry for entry in entries if entry["logger"] == "py.warnings"]
    assert {entry["kind"] for entry in warned if f"{entry['kind']} is old" in entry["message"]} == set(KINDS)
    (started,) = [entry for entry in entries if entry.get("event") == "WorkerStarted"]
    assert started["job_id"] is None


PLAIN = """
import logging

from pulse_trio import Handlers, JobLogFilter

form = logging.StreamHandler()
form.addFilter(JobLogFilter())
form.setFormatter(logging.Formatter("<%(job_id)s %(kind)s %(queue)s %(attempt)s> %(message)s"))
logging.basicConfig(level=logging.INFO, handlers=[form])
handlers = Handlers()


@handlers.job(name="trio")
async def in_trio() -> None:
    logging.info("spoken")


@handlers.job(name="process", runs="process")
def in_process() -> None:
    logging.info("spoken")
"""


@pytest.mark.parametrize("kind", ["trio", "process"])
async def test_a_programs_own_log_names_the_job_with_the_filter(
    kind: str, dsn: str, processes: Processes, tmp_path: Path
) -> None:
    (tmp_path / "app.py").write_text(PLAIN)
    (job,) = enqueue(dsn, kind)
    worker = await processes.command(*RUN, f"--dsn={dsn}", "--burst")
    assert await worker.ended() == 0, worker.report()
    assert f"<{job} {kind} default 1> spoken" in worker.stderr
    assert "<None None None None> " in worker.stderr
