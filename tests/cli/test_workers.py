"""`pulse-trio workers`: the states of real workers."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio.testing.faults.processes import WITHIN
from support.stores import Window

if TYPE_CHECKING:
    from pulse_trio.testing.faults.processes import Processes, Running

    from .conftest import Command

LEASE = 1.5


async def start(processes: Processes, dsn: str) -> Running:
    worker = await processes.command(
        "run", "app", "--lease", str(LEASE), "--heartbeat", "0.3", "--grace", "0", env={"PULSE_TRIO_DSN": dsn}
    )
    await worker.line("started: all queues")
    return worker


async def shown(command: Command, pid: int, **expected: Any) -> dict[str, Any]:
    """The worker as the command shows it, once it is as expected."""
    found: dict[str, Any] = {}
    with trio.move_on_after(WITHIN):
        while True:
            listed = json.loads((await command("workers", "--all", "--json")).stdout)
            found = next(w for w in listed if w["pid"] == pid)
            if found | expected == found:
                return found
    raise AssertionError(f"expected {expected}, found {found}")


@pytest.mark.usefixtures("app")
async def test_a_worker_is_running_then_stale_when_stopped_and_running_when_it_goes_on(
    processes: Processes, command: Command, dsn: str
) -> None:
    job_id = (await command("enqueue", "wait")).stdout.strip()
    worker = await start(processes, dsn)
    await worker.line("waiting")
    found = await shown(command, worker.pid, state="running", running=1)
    assert found["beat_age"] < LEASE
    listed = json.loads((await command("jobs", "list", "--worker", f"{found['host']}:{worker.pid}", "--json")).stdout)
    assert [str(job["id"]) for job in listed] == [job_id]

    worker.send(signal.SIGSTOP)
    found = await shown(command, worker.pid, state="stale")
    assert found["beat_age"] > LEASE
    assert "stale" in (await command("workers")).stdout
    worker.send(signal.SIGCONT)
    await shown(command, worker.pid, state="running")


@pytest.mark.usefixtures("app")
async def test_a_quiet_worker_is_draining_and_gone_at_its_end(processes: Processes, command: Command, dsn: str) -> None:
    await command("enqueue", "wait")
    worker = await start(processes, dsn)
    await worker.line("waiting")
    worker.send(signal.SIGUSR1)
    await shown(command, worker.pid, state="draining", running=1)
    worker.send(signal.SIGTERM)
    assert await worker.ended() == 3, worker.report()
    await shown(command, worker.pid, state="gone", running=0)
    assert "no workers; --all shows those that have gone" in (await command("workers")).stderr


async def test_a_worker_that_was_killed_is_stale_for_an_hour_and_then_gone(command: Command, dsn: str) -> None:
    with Window(dsn) as window:
        for session, minutes in ((1, 50), (2, 70)):
            window.run(
                "INSERT INTO session (id, host, pid, version, concurrency, lease, seen_at)"
                f" VALUES ({session}, 'h', {session}, '0', 1, '30 s', now() - interval '{minutes} min')"
            )
    listed = json.loads((await command("workers", "--all", "--json")).stdout)
    assert {w["id"]: w["state"] for w in listed} == {"1": "stale", "2": "gone"}
