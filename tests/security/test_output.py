"""What the database holds may be anybody's: nothing of it is a command to the terminal, or passes for a line of ours."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import psycopg
import pytest

from pulse_trio import SyncClient
from support.stores import Window, claim_one, end, open_store

if TYPE_CHECKING:
    from collections.abc import Generator

    from support.databases import Databases
    from support.processes import Processes

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
        ["cron", "list"],
        ["cron", "fires", "hostile"],
        ["doctor"],
    ):
        for more in ([], ["--json"]) if command == ["jobs", "list"] else ([],):
            running = await processes.pulse_trio(*command, *more, env={"PULSE_TRIO_DSN": dsn})
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
