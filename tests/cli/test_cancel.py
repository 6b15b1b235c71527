"""`pulse-trio jobs cancel`, as a real process on a real database."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from pulse_trio import DatabaseUnavailable
from pulse_trio.cli import database
from pulse_trio.postgres import TrioConnection

if TYPE_CHECKING:
    from pulse_trio.testing.faults.processes import Processes

    from .conftest import Command

CUT_OFF = """
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE application_name = 'canceller' AND EXISTS (SELECT FROM pulse.cancellation)
"""
"""Ends the command's connection once its request is in the ledger."""

WAITS = "the cancellation is requested; waiting for the database"


async def test_waiting_jobs_are_cancelled_at_once(command: Command) -> None:
    first, second = [(await command("enqueue", "greet", "--delay", "60")).stdout.strip() for _ in range(2)]
    assert (await command("jobs", "cancel", first, "--reason", "not needed")).stdout == f"{first} cancelled\n"
    shown = json.loads((await command("jobs", "show", first, "--json")).stdout)
    assert (shown["state"], shown["cancel_reason"]) == ("cancelled", "not needed")
    again = await command("jobs", "cancel", first, second, "4711", "--json", code=2)
    assert [(r["job_id"], r["state"]) for r in json.loads(again.stdout)] == [
        (int(first), "cancelled"),
        (int(second), "cancelled"),
    ]
    assert "There is no job 4711" in again.stderr
    assert f"job {first} is cancelled already; nothing was changed" in again.stderr
    assert f"job {second}" not in again.stderr


@pytest.mark.usefixtures("app")
async def test_wait_returns_when_the_handler_has_ended(processes: Processes, command: Command, dsn: str) -> None:
    job_id = (await command("enqueue", "wait")).stdout.strip()
    worker = await processes.command("run", "app", env={"PULSE_TRIO_DSN": dsn})
    await worker.line("waiting")
    done = await command("jobs", "cancel", job_id, "--wait", "--reason", "enough \x1b[31m")
    assert done.stdout == f"{job_id} cancelled\n"
    await worker.line(rf"job {job_id} \(wait\) is being cancelled: enough \\x1b")
    assert json.loads((await command("jobs", "show", job_id, "--json")).stdout)["state"] == "cancelled"


async def test_a_reason_that_is_too_long_is_the_callers_fault(command: Command) -> None:
    job_id = (await command("enqueue", "greet")).stdout.strip()
    refused = await command("jobs", "cancel", job_id, "--reason", "x" * 1001, code=2)
    assert "the limit is 1000" in refused.stderr


@pytest.mark.usefixtures("app")
async def test_wait_outlasts_a_restart_of_the_database(processes: Processes, command: Command, dsn: str) -> None:
    """It died of the lost connection, though the cancellation was in the ledger."""
    job_id = (await command("enqueue", "wait")).stdout.strip()
    worker = await processes.command("run", "app", env={"PULSE_TRIO_DSN": dsn})
    await worker.line("waiting")
    worker.stop()
    waiting = await processes.command(
        "jobs", "cancel", job_id, "--wait", env={"PULSE_TRIO_DSN": dsn, "PGAPPNAME": "canceller"}
    )
    async with await TrioConnection.connect(dsn, autocommit=True) as connection:
        while WAITS not in waiting.stderr:
            await connection.execute(CUT_OFF)
    worker.go_on()
    assert await waiting.ended() == 0, waiting.report()
    assert waiting.stdout == f"{job_id} cancelled\n"


def test_an_outage_is_said_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It was said again when the server refused the first new connection; a later outage is another."""
    gone = DatabaseUnavailable("gone")
    opened: list[object] = [gone, gone, "second client", gone, "third client"]
    waits: dict[object, object] = {"first client": gone, "second client": gone, "third client": "cancelled"}

    def come(what: object) -> Any:
        if isinstance(what, Exception):
            raise what
        return what

    monkeypatch.setattr(database, "open_store", lambda *_: nullcontext(come(opened.pop(0))))
    monkeypatch.setattr(database, "choose_database", lambda _: mock.Mock(dsn=""))
    monkeypatch.setattr("time.sleep", lambda _: None)
    first: Any = "first client"
    assert database.outlast(first, None, None, lambda client: come(waits[client]), "begun") == "cancelled"
    assert opened == []
    assert capsys.readouterr().err.count("begun; waiting for the database: gone") == 2
