"""`pulse-trio cron`, as real processes on a real database."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from pulse_trio import SyncClient
from support.stores import Window

if TYPE_CHECKING:
    from collections.abc import Generator

    from pulse_trio.testing.faults.processes import Processes

    from .conftest import Command


@pytest.fixture
def window(dsn: str) -> Generator[Window]:
    with Window(dsn) as window:
        yield window


@pytest.fixture
def client(dsn: str) -> SyncClient:
    return SyncClient(dsn)


async def test_schedules_are_listed_for_people_and_for_programs(command: Command, client: SyncClient) -> None:
    empty = await command("cron", "list")
    assert (empty.stdout, "no schedules" in empty.stderr) == ("", True)
    client.schedule("nightly", "report", {"n": 1}, cron="30 2 * * *", timezone="Europe/Berlin", catch_up="all")
    client.schedule("often", "poll", every=90)
    listed = (await command("cron", "list")).stdout
    nightly, often = listed.splitlines()[1:]
    assert "30 2 * * * Europe/Berlin" in nightly
    assert "at run time" in nightly
    assert "every 1 min 30 s" in often
    first, _ = json.loads((await command("cron", "list", "--json")).stdout)
    assert first | {
        "name": "nightly", "state": "active", "kind": "report", "args": {"n": 1}, "cron": "30 2 * * *", "every": None,
        "timezone": "Europe/Berlin", "catch_up": "all", "declared": False, "declared_by": 0, "problem": None,
    } == first  # fmt: skip
    assert first["next_due"].endswith("+00:00")


async def test_a_schedule_is_paused_resumed_run_and_removed(command: Command, client: SyncClient) -> None:
    client.schedule("nightly", "report", {"n": 1}, cron="30 2 * * *", unique_key="one")
    assert (await command("cron", "pause", "nightly")).stdout == "nightly paused\n"
    assert client.schedules()[0].state == "paused"
    job_id = int((await command("cron", "run", "nightly")).stdout)
    assert client.job(job_id).args == {"n": 1}
    again = await command("cron", "run", "nightly", "--json")
    assert json.loads(again.stdout) == {"name": "nightly", "id": job_id, "added": False}
    assert "nothing was added" in again.stderr
    assert (await command("cron", "resume", "nightly")).stdout.startswith("nightly active, next 20")
    assert client.schedules()[0].state == "active"
    removed = await command("cron", "remove", "nightly", "--json")
    assert json.loads(removed.stdout) == {"name": "nightly", "removed": True, "declared_by": 0}
    assert client.schedules() == []


async def test_fires_are_listed_with_their_jobs(command: Command, client: SyncClient) -> None:
    client.schedule("nightly", "report", cron="30 2 * * *")
    assert "nightly has not been fired" in (await command("cron", "fires", "nightly")).stderr
    ids = [client.run_schedule("nightly").id for _ in range(3)]
    found = json.loads((await command("cron", "fires", "nightly", "--limit", "2", "--json")).stdout)
    assert [fire["job_id"] for fire in found] == [ids[2], ids[1]]
    assert {fire["job_state"] for fire in found} == {"available"}
    listed = (await command("cron", "fires", "nightly")).stdout.splitlines()
    assert len(listed) == 4
    assert str(ids[2]) in listed[1]


@pytest.mark.parametrize("subcommand", ["pause", "resume", "run", "remove", "fires"])
async def test_an_unknown_schedule_is_told_with_names_like_it(
    subcommand: str, command: Command, client: SyncClient
) -> None:
    client.schedule("nightly", "report", cron="30 2 * * *")
    refused = await command("cron", subcommand, "nigthly", code=2)
    assert "pulse-trio: There is no schedule 'nigthly'. Did you mean 'nightly'?" in refused.stderr
    assert refused.stdout == ""


async def test_what_is_broken_says_why(command: Command, client: SyncClient, window: Window) -> None:
    client.schedule("nightly", "report", cron="30 2 * * *")
    window.run("UPDATE schedule SET cron = '61 * * * *', next_due = NULL, problem = 'bad minute'")
    assert "broken" in (await command("cron", "list")).stdout
    refused = await command("cron", "resume", "nightly", code=2)
    assert "bad minute field: '61'" in refused.stderr


APP = """
from pulse_trio import Handlers

handlers = Handlers()

@handlers.cron(every=1, name="beat")
@handlers.job
async def beat() -> None:
    print("beaten", flush=True)
"""


async def test_a_worker_fires_what_its_code_declares_and_is_named_as_declaring_it(
    command: Command, dsn: str, processes: Processes, client: SyncClient
) -> None:
    (processes.folder / "app.py").write_text(APP)
    worker = await processes.command("run", "app", "--verbose", env={"PULSE_TRIO_DSN": dsn})
    await worker.line("beaten")
    await worker.line(r"schedule 'beat' fired job \d+")
    assert "by 1 worker" in (await command("cron", "list")).stdout
    kept = await command("cron", "remove", "beat")
    assert "1 live worker(s) declare 'beat'" in kept.stderr
    worker.kill()


async def test_a_wrong_declaration_is_told_before_anything_starts(command: Command, processes: Processes) -> None:
    (processes.folder / "app.py").write_text(APP.replace("every=1", '"61 * * * *", timezone="UTC"'))
    refused = await command("run", "app", code=2)
    assert "The cron expression '61 * * * *' has a bad minute field: '61'. It takes 0-59" in refused.stderr
    assert 'File "' in refused.stderr
