"""What the database holds may be anybody's: nothing of it is a command to the terminal, or passes for a line of ours."""

from __future__ import annotations

import json
import re
import signal
from typing import TYPE_CHECKING

import psycopg
import pytest
import trio

from pulse_trio import SyncClient
from support.stores import Window, claim_one, end, open_store

if TYPE_CHECKING:
    from collections.abc import Generator

    from pulse_trio.testing.faults.processes import Processes
    from support.databases import Databases

HOSTILE = "\x1b]0;taken\x07\x9b2J\u202ecba\nstate           completed\r\u2028more"
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


async def test_no_command_prints_what_a_terminal_obeys(dsn: str, processes: Processes) -> None:
    client = SyncClient(dsn)
    dead = client.enqueue("noop", {"text": HOSTILE}, queue="q", max_attempts=1).id
    async with open_store(dsn, queues=["q"]) as store:
        await store.settle([end(await claim_one(store, "q"), "failed", error=HOSTILE)])
    waiting = client.enqueue("noop", {"text": HOSTILE}, queue="q", delay=3600).id
    client.cancel(waiting, reason=HOSTILE)
    client.schedule("hostile", "noop", {"text": HOSTILE}, every=3600)
    with Window(dsn) as window:
        # What a client refuses, but whoever may write the tables does not: a stolen worker's login, say.
        window.run("UPDATE session SET host = %s", HOSTILE)
        window.run("UPDATE cancellation SET requested_by = %s", HOSTILE)
        window.run("UPDATE schedule SET problem = %s", HOSTILE)
        window.run("INSERT INTO job (kind, queue, unique_key, key) VALUES ('noop', 'q', %s, %s)", HOSTILE, HOSTILE)
        live = window.value("SELECT max(id) FROM job")
        window.run(
            "INSERT INTO progress (job_id, attempt, fraction, message, updated_at) VALUES (%s, 0, 0.5, %s, now())",
            live,
            HOSTILE,
        )
    for command in (
        ["jobs", "list"],
        *(["jobs", "show", str(job)] for job in (dead, waiting, live)),
        ["queues", "list"],
        ["workers", "--all"],
        ["top", "--once", "--state", "all"],
        ["cron", "list"],
        ["cron", "fires", "hostile"],
        ["doctor"],
    ):
        for more in ([], ["--json"]) if command == ["jobs", "list"] else ([],):
            running = await processes.command(*command, *more, env={"PULSE_TRIO_DSN": dsn})
            assert await running.ended() in (0, 1), running.report()
            said = running.stdout + running.stderr
            assert "Traceback" not in said
            assert not OBEYED.search(said), (command, OBEYED.findall(said))
            if more:
                json.loads(running.stdout)
            else:
                assert not re.search("^state +completed", said, re.MULTILINE), said
    shown = await processes.run("jobs", "show", str(dead), env={"PULSE_TRIO_DSN": dsn})
    assert r"\x1b]0;taken\x07" in shown


@pytest.fixture(scope="module")
def window(databases: Databases) -> Generator[Window]:
    with databases.migrated() as dsn, Window(dsn) as window:
        yield window


@pytest.mark.parametrize(
    ("statement", "limit"),
    [
        ("INSERT INTO job (kind, args) VALUES ('noop', json_build_object('a', repeat('x', 1048577)))", "arguments"),
        ("INSERT INTO job (kind) VALUES (repeat('x', 257))", "kind_name"),
        ("INSERT INTO job (kind) VALUES (E'a\\x1b')", "kind_name"),
        ("INSERT INTO job (kind, queue) VALUES ('noop', repeat('x', 129))", "queue_name"),
        ("INSERT INTO job (kind, unique_key) VALUES ('noop', repeat('x', 513))", "unique_key"),
    ],
)
def test_the_schema_caps_what_the_client_caps(statement: str, limit: str, window: Window) -> None:
    with pytest.raises(psycopg.errors.CheckViolation, match=limit):
        window.run(statement)


ARGUMENT = "an-argument-of-a-job"
APP = """
import os, time
import trio
from pulse_trio import Discard, Handlers, Job, Snooze

handlers = Handlers()


@handlers.job
async def ends(job: Job, how: str, said: str) -> str | None:
    if how == "fail":
        raise ValueError("an error without arguments")
    if how == "discard":
        raise Discard("not needed")
    if how == "snooze" and job.attempt == 1:
        raise Snooze(0)
    if how == "wait":
        await trio.sleep_forever()
    if how == "block":
        time.sleep(1.5)
    if how == "return":
        return said
    if how == "large":
        return said * 1_000_000
    if how == "commit":
        async with job.transaction(result=said):
            pass
        raise ValueError("after the commit")
    return None


@handlers.job(runs="process")
def dies(said: str) -> None:
    os._exit(7)


@handlers.job
async def typed(number: int) -> None: ...


@handlers.job(key=lambda said: "k", limit=1)
async def keyed(said: str) -> None: ...
"""


async def test_no_log_of_a_worker_has_an_argument_however_its_jobs_end(dsn: str, processes: Processes) -> None:
    (processes.folder / "app.py").write_text(APP)
    client = SyncClient(dsn)
    for how in ("fail", "discard", "snooze", "block", "return", "large", "commit"):
        client.enqueue("ends", {"how": how, "said": ARGUMENT}, max_attempts=1)
    client.enqueue("ends", {"how": "wait", "said": ARGUMENT}, timeout=1, max_attempts=1)
    client.enqueue("ends", {"how": "wait", "said": ARGUMENT}, deadline=3)
    client.enqueue("dies", {"said": ARGUMENT}, max_attempts=1)
    client.enqueue("typed", {"number": ARGUMENT})
    client.enqueue("typed", {"unknown": ARGUMENT})
    client.enqueue("keyed", {"said": ARGUMENT}, key="k")
    client.enqueue("nobody_knows", {"said": ARGUMENT})
    last = client.enqueue("ends", {"how": "wait", "said": ARGUMENT}).id
    worker = await processes.pulse_trio(
        "run", "app:handlers", "--verbose", "--poll=0.2", "--grace=0.1", env={"PULSE_TRIO_DSN": dsn}
    )
    with Window(dsn) as window, trio.fail_after(60):
        # What does not fit this worker, and kinds that it does not know, wait for another version.
        await worker.line(r"\(typed\)")
        unfinished = "SELECT count(*) FROM job WHERE id <> %s AND kind NOT IN ('typed', 'nobody_knows')"
        while window.value(unfinished, last):  # noqa: ASYNC110 -- the worker says so in its log at best
            await trio.sleep(0.1)
        states = {row["state"] for row in window.run("SELECT state FROM jobs")}
    assert states >= {"completed", "dead", "cancelled", "running"}
    worker.send(signal.SIGTERM)
    await worker.ended()
    said = worker.stdout + worker.stderr
    assert "an error without arguments" in said
    assert ARGUMENT not in said
