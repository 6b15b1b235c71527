"""Worker processes that are paused, blocked, starved of CPU, or stopped while they start; and namesakes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import trio

from pulse_trio.settings import WorkerSettings
from support.sink import Sink, open_sink
from support.stores import Window, claim_one, end, open_store
from support.workers import CLEANUP, HEARTBEAT, LEASE, enqueue, rows, settled, until, worker

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator
    from pathlib import Path

    from pulse_trio.testing.faults.processes import Processes

MARGIN = WorkerSettings(lease=LEASE, heartbeat=HEARTBEAT, cleanup=CLEANUP).margin
LEFT = "SELECT extract(epoch FROM lease_until - clock_timestamp())::float8 FROM pulse.job WHERE id = %(id)s"
LEASE_END = "SELECT extract(epoch FROM lease_until)::float8 FROM pulse.job WHERE id = %(id)s"
RESCUES = "SELECT count(*) FROM pulse.attempts WHERE outcome = 'rescued'"


@pytest.fixture
async def sink(tmp_path: Path) -> AsyncGenerator[Sink]:
    async with open_sink(tmp_path) as sink:
        yield sink


async def renewed(dsn: str, job_id: int) -> None:
    """Waits for the next beat."""
    ((now,),) = rows(dsn, LEASE_END, {"id": job_id})
    await until(dsn, f"{LEASE_END} AND extract(epoch FROM lease_until) > {now}", {"id": job_id})


async def test_after_a_pause_shorter_than_the_lease_less_the_margin_everything_goes_on(
    dsn: str, processes: Processes, sink: Sink
) -> None:
    (job_id,) = enqueue(dsn)
    paused = await worker(processes, dsn)
    await sink.until("start", attempt=1)
    await worker(processes, dsn)  # somebody who would rescue
    await renewed(dsn, job_id)
    paused.send(signal.SIGSTOP)
    # Longer than a beat's interval, shorter than T - M from the beat just seen.
    await trio.sleep(HEARTBEAT + 0.5)
    paused.send(signal.SIGCONT)
    await renewed(dsn, job_id)
    sink.let_go()
    assert await settled(dsn, job_id) == ("completed", 1, "attempt 1")
    assert rows(dsn, RESCUES) == [(0,)]
    assert not sink.all("cancelled")


async def test_who_blocks_the_loop_is_named_with_its_place_long_before_its_lease_is_at_risk(
    dsn: str, processes: Processes, sink: Sink, tmp_path: Path
) -> None:
    (job_id,) = enqueue(dsn, "blocking", folder=str(tmp_path))
    running = await worker(processes, dsn)  # with the lag_warning that everybody has
    await sink.until("start", attempt=1)
    await running.line(rf"job {job_id} \(blocking\) has blocked the event loop for")
    ((left,),) = rows(dsn, LEFT, {"id": job_id})
    await running.line(r'app\.py", line \d+, in blocking')
    assert left > MARGIN
    (tmp_path / "go-1").touch()
    assert await settled(dsn, job_id) == ("completed", 1, "attempt 1")
    await running.line(rf"job {job_id} \(blocking\) blocked the event loop for .*turns again")


@contextmanager
def busy(core: int) -> Generator[None]:
    """Somebody who never rests on that core."""
    program = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        try:
            yield
        finally:
            process.kill()


async def test_a_worker_starved_of_cpu_keeps_its_leases(dsn: str, processes: Processes, sink: Sink) -> None:
    ids = enqueue(dsn, count=20)
    starved = await worker(processes, dsn)
    await sink.until("start", attempt=1, count=20)
    await worker(processes, dsn, "--queues=other")  # somebody who would rescue, and is not starved
    core = min(os.sched_getaffinity(0))
    for thread in os.listdir(f"/proc/{starved.pid}/task"):
        os.sched_setaffinity(int(thread), {core})
        os.setpriority(os.PRIO_PROCESS, int(thread), 19)
    with busy(core), busy(core):
        # T = 3H, for three leases.
        await until(
            dsn,
            "SELECT FROM pulse.jobs WHERE state = 'running' "
            f"HAVING min(extract(epoch FROM lease_until - started_at)) > {4 * LEASE}",
        )
        assert rows(dsn, RESCUES) == [(0,)]
    sink.let_go()
    for job_id in ids:
        assert await settled(dsn, job_id) == ("completed", 1, "attempt 1")
    assert not sink.all("cancelled")


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("milliseconds", [0, 100, 200, 300, 400, 500, None])
async def test_a_worker_that_is_told_to_stop_while_it_starts_never_claims_afterwards(
    milliseconds: int | None, count: int, dsn: str, processes: Processes, sink: Sink
) -> None:
    starting = await worker(processes, dsn, f"--processes={count}")
    if milliseconds is None:
        # The last moment before the first claim.
        await starting.line("handlers: " if count == 1 else "worker process")
    else:
        await trio.sleep(milliseconds / 1000)
    starting.send(signal.SIGTERM)
    (job_id,) = enqueue(dsn)
    # Before Python has installed its handler, the signal's own meaning holds.
    assert await starting.ended() in (0, -signal.SIGTERM)
    # Nothing that it started lives on, and nothing was claimed.
    ((alive,),) = rows(dsn, "SELECT count(*) FROM pulse.workers WHERE state <> 'gone'")
    assert alive == 0
    assert rows(dsn, "SELECT state, attempt FROM pulse.jobs WHERE id = %(id)s", {"id": job_id}) == [("available", 0)]
    assert not sink.events


async def test_a_worker_with_the_host_and_process_number_of_a_dead_one_does_not_keep_its_leases(dsn: str) -> None:
    with Window(dsn) as window:
        job_id = window.enqueue(max_attempts=5)
        async with open_store(dsn) as dead:  # its process ended without a word
            lost = await claim_one(dead)
            async with open_store(dsn) as again:
                assert window.value("SELECT count(DISTINCT (host, pid)) FROM session") == 1
                assert again.session != dead.session
                # It lives, and says so; the other's lease goes on to run out all the same.
                ends = window.value("SELECT lease_until FROM job")
                await again.touch(0, set(), draining=False)
                assert (await again.beat([])).renewed == frozenset()
                assert window.value("SELECT lease_until FROM job") == ends
                window.expire(job_id)
                assert (await again.rescue()).rescued == 1
                claimed = await claim_one(again)
                assert (claimed.id, claimed.attempt) == (job_id, 2)
                assert (await dead.settle([end(lost)])).refused != []
                assert (await again.settle([end(claimed)])).accepted != []


def test_by_default_a_blocked_loop_is_told_of_well_before_a_lease_can_run_out() -> None:
    settings = WorkerSettings()
    # It is noticed within two and a half times the setting; a beat may be due just then.
    assert 2.5 * settings.lag_warning < settings.lease - settings.margin - settings.heartbeat
