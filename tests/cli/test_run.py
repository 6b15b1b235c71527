"""`run` and its signals, as real processes. The database is real; order comes from what the processes print.

Signals, supervisors and process numbers are of the installed program's; what a worker says and does otherwise, of forks.
"""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING

import pytest
import trio

from pulse_trio import SyncClient
from pulse_trio.client import request_by_name

if TYPE_CHECKING:
    from pathlib import Path

    from pulse_trio.testing.faults.processes import Processes, Running

    from .conftest import Command

pytestmark = pytest.mark.usefixtures("app")


async def start(processes: Processes, dsn: str, *arguments: str) -> Running:
    return await processes.pulse_trio("run", "app:handlers", *arguments, env={"PULSE_TRIO_DSN": dsn})


async def fork(processes: Processes, dsn: str, *arguments: str) -> Running:
    return await processes.command("run", "app:handlers", *arguments, env={"PULSE_TRIO_DSN": dsn})


def enqueue_ten(dsn: str) -> None:
    SyncClient(dsn).enqueue_many([request_by_name("greet", {"name": f"n{number}"}) for number in range(10)])


async def state_of(command: Command, job_id: str) -> str:
    return json.loads((await command("jobs", "show", job_id, "--json")).stdout)["state"]


async def test_a_burst_runs_what_is_due_and_exits_0(processes: Processes, command: Command, dsn: str) -> None:
    ids = [(await command("enqueue", "greet", f'{{"name": "n{n}"}}')).stdout.strip() for n in range(3)]
    worker = await fork(processes, dsn, "--burst", "--verbose")
    assert await worker.ended() == 0, worker.report()
    assert worker.stderr.count("completed after") == 3
    assert "jobs: 3 completed" in worker.stderr
    for number, job_id in enumerate(ids):
        shown = json.loads((await command("jobs", "show", job_id, "--json")).stdout)
        assert shown["result"] == f"n{number}"
        assert [a["outcome"] for a in shown["attempts"]] == ["completed"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_first_signal_drains_and_exits_0(processes: Processes, dsn: str, number: signal.Signals) -> None:
    worker = await start(processes, dsn)
    await worker.line("started: all queues")
    worker.send(number)
    await worker.line(f"{number.name}: draining within 25 s; repeat to stop at once")
    assert await worker.ended() == 0, worker.report()
    assert "Traceback" not in worker.stderr


async def test_jobs_that_outlast_the_grace_are_released_and_it_exits_3(
    processes: Processes, command: Command, dsn: str
) -> None:
    job_id = (await command("enqueue", "wait")).stdout.strip()
    worker = await fork(processes, dsn, "--grace", "0.1")
    await worker.line("waiting")
    worker.send(signal.SIGTERM)
    assert await worker.ended() == 3, worker.report()
    assert "1 job(s) released unfinished" in worker.stderr
    assert await state_of(command, job_id) == "available"


async def test_the_second_signal_stops_now_and_exits_3(processes: Processes, command: Command, dsn: str) -> None:
    job_id = (await command("enqueue", "wait")).stdout.strip()
    worker = await start(processes, dsn, "--grace", "600")
    await worker.line("waiting")
    worker.send(signal.SIGTERM)
    await worker.line("draining")
    worker.send(signal.SIGTERM)
    await worker.line("SIGTERM again: stopping at once")
    assert await worker.ended() == 3, worker.report()
    assert await state_of(command, job_id) == "available"


@pytest.mark.parametrize("app_then", ["the same", "another that fails", "another that hangs", "gone"])
@pytest.mark.parametrize("many", [1, 2])
async def test_a_thread_that_does_not_end_is_left_and_its_job_is_released_when_it_is_gone(
    many: int, app_then: str, processes: Processes, command: Command, dsn: str, tmp_path: Path
) -> None:
    """It was rescued as that of a worker that had crashed: with one attempt it was dead, of a deploy. So it was where the
    deploy had put other files in the place of its own: the process that reports it read them."""
    job_id = (await command("enqueue", "block", "--max-attempts", "1")).stdout.strip()
    worker = await start(processes, dsn, "--grace", "0", "--cleanup", "0", "--processes", str(many))
    await worker.line("blocking")
    other = {"another that fails": "1 / 0\n", "another that hangs": "import threading\nthreading.Event().wait()\n"}
    if app_then == "gone":
        (tmp_path / "app.py").unlink()
    elif app_then != "the same":
        (tmp_path / "app.py").write_text(other[app_then])
        (tmp_path / "pulse-trio.toml").write_text("lease = 'no'\n")
    worker.send(signal.SIGTERM)
    await worker.line("this process ends without waiting for what does not end")
    assert await worker.ended() == 3, worker.report()
    (tmp_path / "pulse-trio.toml").unlink(missing_ok=True)
    shown = json.loads((await command("jobs", "show", job_id, "--json")).stdout)
    assert (shown["state"], shown["attempt"], shown["max_attempts"]) == ("available", 1, 2)
    assert [attempt["outcome"] for attempt in shown["attempts"]] == ["released"]


async def test_a_thread_that_is_left_is_released_in_the_folders_own_database_too(processes: Processes) -> None:
    """That ends with the process that uses it, and so was gone when the one in its place reported the job."""
    job_id = (await processes.run("enqueue", "block", "--max-attempts", "1")).strip()
    worker = await processes.pulse_trio("run", "app:handlers", "--grace", "0", "--cleanup", "0")
    await worker.line("blocking")
    worker.send(signal.SIGTERM)
    assert await worker.ended() == 3, worker.report()
    shown = json.loads(await processes.run("jobs", "show", job_id, "--json"))
    assert (shown["state"], shown["attempt"], shown["max_attempts"]) == ("available", 1, 2)


async def test_sigusr1_ends_claiming_and_nothing_else(processes: Processes, command: Command, dsn: str) -> None:
    await command("enqueue", "wait")
    worker = await start(processes, dsn, "--grace", "0")
    await worker.line("waiting")
    worker.send(signal.SIGUSR1)
    await worker.line("SIGUSR1: no more claims")
    left = (await command("enqueue", "greet", '{"name": "late"}')).stdout.strip()
    # Another worker takes what this one leaves.
    assert await (await fork(processes, dsn, "--burst")).ended() == 0
    assert await state_of(command, left) == "completed"
    assert worker.process.returncode is None
    worker.send(signal.SIGTERM)
    assert await worker.ended() == 3, worker.report()


async def test_a_signal_while_it_waits_for_the_database_exits_0(processes: Processes) -> None:
    worker = await fork(processes, "host=127.0.0.1 port=1")
    await worker.line("waiting for the database")
    worker.send(signal.SIGTERM)
    assert await worker.ended() == 0, worker.report()
    assert "stopped before any job was claimed" in worker.stderr


async def test_the_pid_of_run_is_the_worker_s(processes: Processes, command: Command, dsn: str) -> None:
    worker = await start(processes, dsn)
    await worker.line("started")
    (listed,) = json.loads((await command("workers", "--json")).stdout)
    assert listed["pid"] == worker.pid


async def test_json_logs_are_one_object_a_line(processes: Processes, command: Command, dsn: str) -> None:
    await command("enqueue", "broken", "--max-attempts", "1")
    worker = await fork(processes, dsn, "--burst", "--json")
    assert await worker.ended() == 0, worker.report()
    entries = [json.loads(line) for line in worker.stderr.splitlines()]
    events = [entry["event"] for entry in entries if "event" in entry]
    assert events == ["WorkerStarted", "AttemptFailed", "JobDied", "WorkerStopped"]
    assert [entry["level"] for entry in entries if "event" in entry] == ["info", "warning", "error", "info"]
    # An exception is for instruments, not for a line of text.
    assert all("exception" not in entry for entry in entries)
    assert all(entry["pid"] == worker.pid for entry in entries)


async def test_settings_come_from_the_option_the_variable_and_the_file_in_that_order(
    processes: Processes, dsn: str
) -> None:
    (processes.folder / "pulse-trio.toml").write_text('queues = ["filed"]\nconcurrency = 7\nconnect-timeout = 3\n')
    worker = await processes.pulse_trio(
        "run", "app", "--burst", "--queues", "given", env={"PULSE_TRIO_DSN": dsn, "PULSE_TRIO_QUEUES": "environ"}
    )
    await worker.line("started: queue given, up to 7 jobs at once")
    assert await worker.ended() == 0
    worker = await processes.command(
        "run", "app", "--burst", env={"PULSE_TRIO_DSN": dsn, "PULSE_TRIO_QUEUES": "environ"}
    )
    await worker.line("started: queue environ, up to 7 jobs at once")
    assert await worker.ended() == 0


async def test_a_password_is_not_shown_at_the_start(processes: Processes, dsn: str) -> None:
    worker = await fork(processes, f"{dsn} password=secret", "--burst")
    await worker.line(r"database .*password=\*\*\*.*\(from PULSE_TRIO_DSN\)")
    assert await worker.ended() == 0
    assert "secret" not in worker.stderr


async def test_several_processes_share_the_work_and_stop_together(
    processes: Processes, command: Command, dsn: str
) -> None:
    await trio.to_thread.run_sync(enqueue_ten, dsn)
    supervisor = await fork(processes, dsn, "--processes", "2", "--burst")
    assert await supervisor.ended() == 0, supervisor.report()
    assert supervisor.stderr.count("(exit code 0)") == 2
    listed = json.loads((await command("jobs", "list", "--state", "completed", "--json")).stdout)
    assert len(listed) == 10


async def test_the_second_signal_reaches_every_process(processes: Processes, command: Command, dsn: str) -> None:
    job_id = (await command("enqueue", "wait")).stdout.strip()
    supervisor = await start(processes, dsn, "--processes", "2", "--grace", "600")
    await supervisor.line("waiting")
    supervisor.send(signal.SIGTERM)
    await supervisor.line("draining")
    supervisor.send(signal.SIGTERM)
    assert await supervisor.ended() == 3, supervisor.report()
    assert await state_of(command, job_id) == "available"


async def test_a_module_that_cannot_be_imported_ends_every_process_with_2(processes: Processes, dsn: str) -> None:
    running = await processes.command("run", "nope", "--processes", "3", env={"PULSE_TRIO_DSN": dsn})
    assert await running.ended() == 2, running.report()
    assert running.stderr.count("There is no module 'nope'") == 1


async def test_workers_whose_supervisor_is_killed_drain_by_themselves(
    processes: Processes, command: Command, dsn: str
) -> None:
    job_id = (await command("enqueue", "wait")).stdout.strip()
    supervisor = await start(processes, dsn, "--processes", "2", "--grace", "0")
    await supervisor.line("waiting")
    supervisor.kill()
    await supervisor.line("the supervisor has gone")
    # The streams are the workers' too: they end with the last of them.
    assert await supervisor.ended() == -signal.SIGKILL
    assert await state_of(command, job_id) == "available"


async def test_a_killed_worker_s_jobs_are_handed_back_at_once(processes: Processes, command: Command, dsn: str) -> None:
    job_id = (await command("enqueue", "wait")).stdout.strip()
    # The lease is far longer than the test waits.
    supervisor = await start(processes, dsn, "--processes", "2", "--lease", "600", "--grace", "0")
    await supervisor.line("waiting")
    os.kill(await pid_of_holder(command, job_id), signal.SIGKILL)
    await supervisor.line(r"rescued 1 job\(s\) whose worker had vanished")
    await supervisor.line("waiting")
    # It is known to be dead: nobody is to look for it.
    listed = json.loads((await command("workers", "--all", "--json")).stdout)
    states = [worker["state"] for worker in listed]
    assert "gone" in states
    assert "stale" not in states
    supervisor.send(signal.SIGTERM)
    assert await supervisor.ended() == 3, supervisor.report()


async def pid_of_holder(command: Command, job_id: str) -> int:
    session = json.loads((await command("jobs", "show", job_id, "--json")).stdout)["worker"]
    workers = json.loads((await command("workers", "--json")).stdout)
    return next(worker["pid"] for worker in workers if worker["id"] == session)
