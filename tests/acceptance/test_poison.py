"""Jobs that kill their worker process: dead after they were seen to, and nobody else pays for them."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio

from pulse_trio import SyncClient
from support.connections import lent
from support.workers import rows, settled, until

if TYPE_CHECKING:
    from pulse_trio.testing.faults.processes import Processes, Running

RUN = ["run", "app:handlers", "--watchdog=0.5", "--poll=1"]
SOON = 20.0
"""Seconds on a loaded machine; a suspect starts after two or three."""


@pytest.fixture(autouse=True)
def app(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).parents[1] / "support" / "poison_app.py", tmp_path / "app.py")


def suspects(dsn: str, *kinds: str, **args: object) -> list[int]:
    """Jobs that have crashed their worker twice."""
    with lent(dsn) as connection:
        client = SyncClient(connection)
        ids = [client.enqueue(kind, args, delay=3600).id for kind in kinds]
    rows(
        dsn,
        "UPDATE pulse.job SET suspect = true, suspected_at = now(), crashes = 2, run_at = now()"
        " WHERE id = ANY (%(ids)s) RETURNING 1",
        {"ids": ids},
    )
    return ids


def attempts(dsn: str, job_id: int) -> list[tuple[str, str]]:
    return rows(dsn, "SELECT outcome, error FROM pulse.attempts WHERE job_id = %(id)s ORDER BY attempt", {"id": job_id})


async def in_quarantine(worker: Running, job_id: int) -> int:
    """The process that runs the job."""
    found = await worker.line(rf"job {job_id} \(\w+\) attempt \d+ runs in quarantine, in process (\d+)")
    return int(found.group(1))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # it has gone, or goes while the file is read
        return False


async def gone(*pids: int) -> None:
    with trio.fail_after(SOON):
        while any(alive(pid) for pid in pids):  # noqa: ASYNC110 -- not our children
            await trio.sleep(0.02)


async def test_a_job_that_kills_its_process_is_dead_and_its_neighbours_budget_is_untouched(
    dsn: str, processes: Processes
) -> None:
    client = SyncClient(dsn)
    poison, *others = [client.enqueue(kind).id for kind in ["poison", *["neighbour"] * 6]]
    supervisor = await processes.command(*RUN, f"--dsn={dsn}", "--processes=2", "--concurrency=10")
    assert (await settled(dsn, poison))[0] == "dead"
    for job_id in others:
        assert (await settled(dsn, job_id))[0] == "completed"
    ((error,),) = rows(dsn, "SELECT error FROM pulse.jobs WHERE state = 'dead'")
    assert error.startswith("CrashLimit: 3 times it ran alone in a process of its own, and that process died of it")
    assert "killed by signal 9 (SIGKILL)" in error
    # One attempt of the budget was used by each: the one that completed it.
    assert rows(dsn, "SELECT DISTINCT max_attempts - attempt FROM pulse.jobs WHERE state = 'completed'") == [(19,)]
    # They were there: some attempt of a neighbour ended with the death of its worker.
    assert rows(
        dsn, "SELECT count(*) > 0 FROM pulse.attempts WHERE outcome = 'rescued' AND job_id <> %(id)s", {"id": poison}
    ) == [(True,)]
    # The last three crashes took nobody along.
    company = (
        "SELECT count(*) FROM pulse.attempts WHERE outcome = 'rescued' AND worker IN (SELECT worker FROM pulse.attempts"
        " WHERE job_id = %(id)s ORDER BY attempt DESC LIMIT 3)"
    )
    assert rows(dsn, company, {"id": poison}) == [(3,)]
    supervisor.send(signal.SIGTERM)
    assert await supervisor.ended() == 0


@pytest.mark.parametrize("processes_of_it", [1, 2])
async def test_suspects_start_soon_although_every_slot_of_every_worker_has_a_long_job(
    processes_of_it: int, dsn: str, processes: Processes
) -> None:
    client = SyncClient(dsn)
    busy = [client.enqueue("endless").id for _ in range(2 * processes_of_it)]
    # With several processes as an installed program; one process is a fork, and so is what it starts.
    start = processes.pulse_trio if processes_of_it == 2 else processes.command
    worker = await start(*RUN, f"--dsn={dsn}", f"--processes={processes_of_it}", "--concurrency=2", "--grace=0.5")
    await until(
        dsn, "SELECT 1 FROM pulse.jobs WHERE state = 'running' HAVING count(*) = %(n)s", {"n": 2 * processes_of_it}
    )
    poison, innocent = suspects(dsn, "poison", "neighbour")
    with trio.fail_after(SOON):
        state, attempt, _ = await settled(dsn, innocent)
    assert (state, attempt) == ("completed", 1)
    state, attempt, _ = await settled(dsn, poison)
    assert (state, attempt) == ("dead", 3)
    # Nothing of it reached the others.
    assert rows(
        dsn,
        "SELECT DISTINCT state, attempt, max_attempts FROM pulse.jobs WHERE id = ANY (%(ids)s)",
        {"ids": busy},
    ) == [("running", 1, 20)]
    worker.send(signal.SIGTERM)
    assert await worker.ended() == 3


@pytest.mark.parametrize(
    ("how", "seen"),
    [
        ("SIGSEGV", "killed by signal 11 (SIGSEGV)"),
        ("group", "killed by signal 9 (SIGKILL)"),
        ("exit 0", "ended with exit code 0 before the job had ended"),
        ("exit 1", "ended with exit code 1 before the job had ended"),
        ("exit 75", "ended with exit code 75 before the job had ended"),
    ],
)
async def test_whichever_way_its_process_dies_a_job_is_dead_and_the_error_says_what_was_seen(
    how: str, seen: str, dsn: str, processes: Processes
) -> None:
    (poison,) = suspects(dsn, "poison", how=how)
    worker = await processes.command(*RUN, f"--dsn={dsn}")
    state, attempt, _ = await settled(dsn, poison)
    assert (state, attempt) == ("dead", 3)
    ((error,),) = rows(dsn, "SELECT error FROM pulse.jobs WHERE id = %(id)s", {"id": poison})
    assert error.startswith("CrashLimit: 3 times")
    assert seen in error
    if how == "SIGSEGV":
        assert "in die" in error
    worker.send(signal.SIGTERM)
    assert await worker.ended() == 0


async def test_a_job_whose_machine_is_switched_off_three_times_in_quarantine_is_not_dead(
    dsn: str, processes: Processes, tmp_path: Path
) -> None:
    (job_id,) = suspects(dsn, "gated")
    for _ in range(3):
        worker = await processes.command(*RUN, f"--dsn={dsn}", "--lease=2", "--heartbeat=0.6", "--cleanup=0.2")
        process = await in_quarantine(worker, job_id)
        await until(dsn, "SELECT 1 FROM pulse.jobs WHERE id = %(id)s AND state = 'running'", {"id": job_id})
        worker.kill()
        os.kill(process, signal.SIGKILL)
        await gone(worker.pid, process)
    worker = await processes.command(*RUN, f"--dsn={dsn}", "--lease=2", "--heartbeat=0.6", "--cleanup=0.2")
    (tmp_path / "open").touch()
    assert (await settled(dsn, job_id))[::2] == ("completed", "open")
    assert [outcome for outcome, _ in attempts(dsn, job_id)][:3] == ["rescued"] * 3
    worker.send(signal.SIGTERM)
    assert await worker.ended() == 0


async def test_a_handler_of_every_kind_runs_in_quarantine(dsn: str, processes: Processes) -> None:
    ids = suspects(dsn, "in_trio", "in_asyncio", "in_thread", "in_process")
    # The installed program: the parent of a fork is another.
    worker = await processes.pulse_trio(*RUN, f"--dsn={dsn}", "--quarantine-slots=1")
    for job_id in ids:
        state, attempt, pid = await settled(dsn, job_id)
        assert (state, attempt) == ("completed", 1)
        assert pid != worker.pid
        assert await in_quarantine(worker, job_id) == pid
    worker.send(signal.SIGTERM)
    assert await worker.ended() == 0


async def test_many_suspects_pass_one_after_another_through_few_processes(dsn: str, processes: Processes) -> None:
    ids = suspects(dsn, *["in_trio"] * 100)
    worker = await processes.command(*RUN, f"--dsn={dsn}", "--quarantine-slots=2")
    results = [await settled(dsn, job_id) for job_id in ids]
    assert {(state, attempt) for state, attempt, _ in results} == {("completed", 1)}
    assert len({pid for *_, pid in results}) == 2
    worker.send(signal.SIGTERM)
    assert await worker.ended() == 0


async def test_a_worker_that_is_killed_while_the_process_starts_costs_the_job_no_attempt(
    dsn: str, processes: Processes
) -> None:
    """The process ended, and its job's lease ran out: twice so, and a job with two attempts was dead that had never begun."""
    (job_id,) = suspects(dsn, "neighbour")
    for attempt in (1, 2):
        worker = await processes.command(*RUN, f"--dsn={dsn}", "--queues=default")
        pid = await in_quarantine(worker, job_id)
        worker.kill()
        await gone(pid)
        ended = attempts(dsn, job_id)
        assert [outcome for outcome, _ in ended] == ["released"] * attempt
        assert ended[-1][1].startswith("its worker ended before the job began")
    assert rows(dsn, "SELECT max_attempts - attempt FROM pulse.jobs") == [(20,)]
    await processes.command(*RUN, f"--dsn={dsn}")
    assert (await settled(dsn, job_id))[0] == "completed"


async def test_nothing_else_runs_in_a_process_in_which_a_suspect_runs(dsn: str, processes: Processes) -> None:
    with lent(dsn) as connection:
        client = SyncClient(connection)
        others = [client.enqueue("counted").id for _ in range(60)]
    ids = suspects(dsn, *["counted"] * 20)
    worker = await processes.command(*RUN, f"--dsn={dsn}", "--quarantine-slots=2", "--concurrency=20")
    beside = [(await settled(dsn, job_id))[2] for job_id in others]
    alone = [(await settled(dsn, job_id))[2] for job_id in ids]
    assert {most for _, most in alone} == {1}
    assert not {pid for pid, _ in alone} & {pid for pid, _ in beside}
    # Elsewhere jobs do run beside one another, so the count can tell.
    assert max(most for _, most in beside) > 1
    worker.send(signal.SIGTERM)
    assert await worker.ended() == 0


async def test_a_crash_in_a_process_that_had_run_another_suspect_does_not_count(dsn: str, processes: Processes) -> None:
    innocent, poison = suspects(dsn, "gated", "poison")
    worker = await processes.command(*RUN, f"--dsn={dsn}", "--quarantine-slots=1")
    process = await in_quarantine(worker, innocent)
    (processes.folder / "open").touch()
    assert await in_quarantine(worker, poison) == process
    await worker.line(rf"job {poison} .* crashed in quarantine .* this does not count towards its crash_limit")
    # From then on each attempt has a process in which nothing else has run.
    state, attempt, _ = await settled(dsn, poison)
    assert (state, attempt) == ("dead", 4)
    assert (await settled(dsn, innocent))[:2] == ("completed", 1)
    worker.send(signal.SIGTERM)
    assert await worker.ended() == 0


async def test_a_burst_waits_for_what_is_in_quarantine(dsn: str, processes: Processes) -> None:
    poison, *innocent = suspects(dsn, "poison", "neighbour", "neighbour")
    (processes.folder / "open").touch()
    worker = await processes.command(*RUN, f"--dsn={dsn}", "--burst")
    assert await worker.ended(within=60) == 0
    states = rows(dsn, "SELECT id, state FROM pulse.jobs ORDER BY id")
    assert states == [(poison, "dead"), *((job_id, "completed") for job_id in innocent)]


async def test_what_runs_in_quarantine_is_given_back_when_the_worker_stops(dsn: str, processes: Processes) -> None:
    (job_id,) = suspects(dsn, "endless")
    worker = await processes.command(*RUN, f"--dsn={dsn}", "--grace=0.3")
    process = await in_quarantine(worker, job_id)
    await until(dsn, "SELECT 1 FROM pulse.workers WHERE pid = %(pid)s AND running = 1", {"pid": process})
    worker.send(signal.SIGTERM)
    assert await worker.ended() == 3
    assert not alive(process)
    assert [outcome for outcome, _ in attempts(dsn, job_id)] == ["released"]
    assert rows(dsn, "SELECT running, deaths, max_attempts - attempt FROM pulse.quarantine") == [(False, 0, 20)]


async def test_a_worker_that_stops_while_a_process_of_its_quarantine_starts_has_interrupted_nothing(
    dsn: str, processes: Processes
) -> None:
    """It ended with exit code 3, as if its grace period had passed."""
    (processes.folder / "app.py").rename(processes.folder / "whole.py")
    (processes.folder / "app.py").write_text("from whole import *\n")
    worker = await processes.command(*RUN, f"--dsn={dsn}")
    await worker.line("started: all queues")
    (processes.folder / "app.py").write_text("import signal\nsignal.pause()\n")
    (job_id,) = suspects(dsn, "neighbour")
    await in_quarantine(worker, job_id)
    worker.send(signal.SIGTERM)
    assert await worker.ended(within=SOON) == 0
    assert attempts(dsn, job_id) == [("released", "the worker stopped before the job had ended")]


async def test_sigusr1_lets_what_runs_in_quarantine_go_on_and_nothing_else_begin(
    dsn: str, processes: Processes
) -> None:
    first, second = suspects(dsn, "gated", "neighbour")
    worker = await processes.command(*RUN, f"--dsn={dsn}", "--quarantine-slots=1")
    await in_quarantine(worker, first)
    worker.send(signal.SIGUSR1)
    await worker.line("no more claims")
    (processes.folder / "open").touch()
    assert (await settled(dsn, first))[0] == "completed"
    worker.send(signal.SIGTERM)
    assert await worker.ended() == 0
    assert rows(dsn, "SELECT attempt FROM pulse.jobs WHERE id = %(id)s", {"id": second}) == [(0,)]


async def test_a_worker_that_is_killed_takes_no_job_along_that_runs_in_quarantine(
    dsn: str, processes: Processes
) -> None:
    (job_id,) = suspects(dsn, "gated")
    worker = await processes.command(*RUN, f"--dsn={dsn}")
    process = await in_quarantine(worker, job_id)
    await until(dsn, "SELECT 1 FROM pulse.workers WHERE pid = %(pid)s AND running = 1", {"pid": process})
    worker.kill()
    await worker.line("the supervisor has gone|draining")
    (processes.folder / "open").touch()
    assert (await settled(dsn, job_id))[:2] == ("completed", 1)
    await gone(process)


async def test_a_process_that_does_not_come_up_is_not_the_jobs_fault(dsn: str, processes: Processes) -> None:
    (processes.folder / "app.py").rename(processes.folder / "whole.py")
    (processes.folder / "app.py").write_text("from whole import *\n")
    worker = await processes.command(*RUN, f"--dsn={dsn}")
    await worker.line("started: all queues")
    (processes.folder / "app.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    (job_id,) = suspects(dsn, "neighbour")
    await worker.line(
        rf"job {job_id} \(neighbour\) could not start in quarantine: .*signal 9 \(SIGKILL\); due again in 15"
    )
    ((outcome, _),) = await until(
        dsn,
        "SELECT outcome, error FROM pulse.attempts WHERE job_id = %(id)s AND outcome <> 'running'",
        {"id": job_id},
    )
    assert outcome == "released"
    assert rows(dsn, "SELECT deaths, max_attempts - attempt FROM pulse.quarantine") == [(0, 20)]


async def test_a_handler_that_cannot_be_cancelled_ends_with_its_process_and_its_job_is_cancelled(
    dsn: str, processes: Processes
) -> None:
    (job_id,) = suspects(dsn, "stubborn")
    worker = await processes.command(*RUN, f"--dsn={dsn}", "--cleanup=0.2")
    process = await in_quarantine(worker, job_id)
    await until(dsn, "SELECT 1 FROM pulse.workers WHERE pid = %(pid)s AND running = 1", {"pid": process})
    SyncClient(dsn).cancel(job_id, reason="enough")
    assert (await settled(dsn, job_id))[:2] == ("cancelled", 1)
    await gone(process)


async def test_a_handler_that_holds_the_loop_for_a_lease_is_killed_and_that_is_not_held_against_it(
    dsn: str, processes: Processes
) -> None:
    (job_id,) = suspects(dsn, "holds_the_loop")
    # Long enough for a loaded machine: what follows is sooner than the process's own alarm clock by a lease less 1.5 s.
    worker = await processes.command(*RUN, f"--dsn={dsn}", "--lease=4", "--heartbeat=1", "--cleanup=0.2")
    process = await in_quarantine(worker, job_id)
    await worker.line(rf"job {job_id} .* its event loop did not turn for 4 s; this does not count", within=60)
    await gone(process)
    assert rows(dsn, "SELECT deaths FROM pulse.quarantine WHERE id = %(id)s", {"id": job_id}) == [(0,)]


EMBEDDED = """
import sys, trio
from app import handlers
from pulse_trio import Worker
trio.run(Worker(handlers, sys.argv[1], app="app:handlers", burst=True, poll=0.2).run)
"""


async def test_an_embedded_worker_that_was_told_where_its_handlers_are_does_the_same(
    dsn: str, scripts: Processes
) -> None:
    poison, innocent = suspects(dsn, "poison", "neighbour")
    (scripts.folder / "program.py").write_text(EMBEDDED)
    program = await scripts.command("program.py", dsn)
    assert await program.ended(within=60) == 0
    assert (await settled(dsn, poison))[:2] == ("dead", 3)
    state, _, pid = await settled(dsn, innocent)
    assert (state, int(pid) != program.pid) == ("completed", True)


async def test_doctor_and_jobs_show_say_what_is_in_quarantine_and_since_when(dsn: str, processes: Processes) -> None:
    (job_id,) = suspects(dsn, "gated")
    found = json.loads(await processes.run("doctor", "--json", f"--dsn={dsn}", code=1))
    (waiting,) = [f for f in found["findings"] if f["check"] == "quarantine"]
    assert f"job {job_id} (gated) of default has been in quarantine for" in waiting["what"]
    assert "2 crashes" in waiting["what"]
    shown = await processes.run("jobs", "show", str(job_id), f"--dsn={dsn}")
    assert "quarantine" in shown
    assert "2 crashes, 0 of them seen to be its own" in shown
