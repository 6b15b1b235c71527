"""Real workers, killed, stopped and cut off; see the table of faults in docs/explanation/proof.md."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from support.sink import Sink, open_sink
from support.workers import LEASE, WATCHDOG, enqueue, rows, settled, until, worker

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from pulse_trio.testing.faults.processes import Processes
    from pulse_trio.testing.faults.proxy import Proxy

SLACK = 2.0  # seconds that a loaded machine may take between a watchdog's tick and its commit


@pytest.fixture
async def sink(tmp_path: Path) -> AsyncGenerator[Sink]:
    async with open_sink(tmp_path) as sink:
        yield sink


async def test_the_jobs_of_a_killed_worker_run_again_within_lease_and_tick(
    dsn: str, processes: Processes, sink: Sink
) -> None:
    ids = enqueue(dsn, count=50)
    doomed = await worker(processes, dsn)
    await sink.until("start", attempt=1, count=50)
    doomed.kill()
    ((killed_at,),) = rows(dsn, "SELECT clock_timestamp()")
    await worker(processes, dsn)
    await sink.until("start", attempt=2, count=50)
    sink.let_go()
    for job_id in ids:
        assert await settled(dsn, job_id) == ("completed", 2, "attempt 2")
    rescued = rows(dsn, "SELECT job_id, ended_at FROM pulse.attempts WHERE outcome = 'rescued'")
    assert sorted(job for job, _ in rescued) == ids
    assert max((ended - killed_at).total_seconds() for _, ended in rescued) < LEASE + WATCHDOG + SLACK
    # A rescue does not back off: the next attempt begins when somebody has room.
    gaps = rows(
        dsn,
        "SELECT max(extract(epoch FROM b.started_at - a.ended_at))::float8 FROM pulse.attempts a "
        "JOIN pulse.attempts b ON b.job_id = a.job_id AND b.attempt = 2 WHERE a.attempt = 1",
    )
    assert gaps[0][0] < SLACK


async def test_a_worker_stopped_past_its_lease_cancels_its_handler_when_it_goes_on(
    dsn: str, processes: Processes, sink: Sink
) -> None:
    (job_id,) = enqueue(dsn)
    zombie = await worker(processes, dsn)
    await sink.until("start", attempt=1)
    zombie.send(signal.SIGSTOP)
    await worker(processes, dsn)
    await sink.until("start", attempt=2)
    zombie.send(signal.SIGCONT)
    (cancelled,) = await sink.until("cancelled", attempt=1)
    assert cancelled.reason in ("fence-lost", "lease-unproven")
    sink.let_go(lambda start: start.attempt == 2)
    assert await settled(dsn, job_id) == ("completed", 2, "attempt 2")
    assert not sink.all("end", attempt=1)


async def test_the_report_of_a_zombie_is_refused(dsn: str, processes: Processes, sink: Sink, tmp_path: Path) -> None:
    (job_id,) = enqueue(dsn, "blocking", folder=str(tmp_path))
    zombie = await worker(processes, dsn)
    await sink.until("start", attempt=1)
    zombie.send(signal.SIGSTOP)
    await worker(processes, dsn)
    await sink.until("start", attempt=2)
    (tmp_path / "go-2").touch()
    assert await settled(dsn, job_id) == ("completed", 2, "attempt 2")
    (tmp_path / "go-1").touch()
    zombie.send(signal.SIGCONT)
    await zombie.line("lost its fence at its report of completed")
    assert await settled(dsn, job_id) == ("completed", 2, "attempt 2")
    zombie.send(signal.SIGTERM)
    assert await zombie.ended() == 0
    # Its handler returned, and the worker has completed nothing.
    assert "jobs: 1 lost" in zombie.stderr


@pytest.mark.parametrize("how", ["swallow", "hold", "to_server", "to_client"])
async def test_a_worker_cut_off_ends_its_handlers_before_anyone_else_starts_them(
    dsn: str, processes: Processes, sink: Sink, proxy: Proxy, how: str
) -> None:
    ids = enqueue(dsn, count=5)
    cut_off = await worker(processes, proxy.dsn)
    await sink.until("start", attempt=1, count=5)
    if how in ("swallow", "hold"):
        getattr(proxy, how)()
    else:
        getattr(proxy, how).swallow()  # one direction alone
    await worker(processes, dsn)
    again = await sink.until("start", attempt=2, count=5)
    cancelled = await sink.until("cancelled", attempt=1, count=5)
    assert {c.reason for c in cancelled} == {"lease-unproven"}
    ended = {c.job: c.at for c in cancelled}
    assert all(ended[start.job] < start.at for start in again)
    sink.let_go(lambda start: start.attempt == 2)
    for job_id in ids:
        assert await settled(dsn, job_id) == ("completed", 2, "attempt 2")
    # Cut off or not, it can be stopped.
    cut_off.send(signal.SIGTERM)
    await cut_off.ended()


async def test_a_worker_goes_on_when_each_of_its_connections_is_terminated(
    dsn: str, processes: Processes, sink: Sink
) -> None:
    (job_id,) = enqueue(dsn)
    running = await worker(processes, dsn)
    await sink.until("start", attempt=1)
    for name in ("claims", "settles", "beats", "watchdog", "listener"):
        rows(
            dsn,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name = %(name)s AND datname = current_database()",
            {"name": f"pulse-trio {name}"},
        )
    sink.let_go()
    assert await settled(dsn, job_id) == ("completed", 1, "attempt 1")
    (after,) = enqueue(dsn)
    assert await settled(dsn, after) == ("completed", 1, "attempt 1")
    running.send(signal.SIGTERM)
    assert await running.ended() == 0


async def test_the_first_sigterm_drains_and_exits_0(dsn: str, processes: Processes, sink: Sink) -> None:
    (job_id,) = enqueue(dsn)
    running = await worker(processes, dsn)
    await sink.until("start")
    running.send(signal.SIGTERM)
    # A claim may be under way when the signal comes, and take what is enqueued then.
    await until(dsn, "SELECT 1 FROM pulse.workers WHERE state = 'draining'")
    (later,) = enqueue(dsn)
    sink.let_go()
    assert await running.ended() == 0
    assert await settled(dsn, job_id) == ("completed", 1, "attempt 1")
    assert rows(dsn, "SELECT state, attempt FROM pulse.jobs WHERE id = %(id)s", {"id": later}) == [("available", 0)]


async def test_a_terminal_that_closes_drains_and_may_say_so_twice(dsn: str, processes: Processes, sink: Sink) -> None:
    """It ended the worker at once, and its jobs came back when their leases were over."""
    (job_id,) = enqueue(dsn)
    running = await worker(processes, dsn)
    await sink.until("start")
    running.send(signal.SIGHUP)
    await until(dsn, "SELECT 1 FROM pulse.workers WHERE state = 'draining'")
    running.send(signal.SIGHUP)
    sink.let_go()
    assert await running.ended() == 0
    assert await settled(dsn, job_id) == ("completed", 1, "attempt 1")


async def test_when_the_grace_has_passed_jobs_are_released_unharmed_and_it_exits_3(
    dsn: str, processes: Processes, sink: Sink
) -> None:
    (job_id,) = enqueue(dsn)
    running = await worker(processes, dsn, "--grace=0.2")
    await sink.until("start")
    running.send(signal.SIGTERM)
    assert await running.ended() == 3
    (cancelled,) = sink.all("cancelled")
    assert cancelled.reason == "shutdown"
    budget = rows(dsn, "SELECT state, attempt, max_attempts FROM pulse.jobs WHERE id = %(id)s", {"id": job_id})
    assert budget == [("available", 1, 6)]
    assert rows(dsn, "SELECT state FROM pulse.workers") == [("gone",)]


async def test_a_second_sigterm_stops_at_once_and_exits_3(dsn: str, processes: Processes, sink: Sink) -> None:
    (job_id,) = enqueue(dsn)
    running = await worker(processes, dsn, "--grace=3600")
    await sink.until("start")
    running.send(signal.SIGTERM)
    await running.line("(?i)drain|stopping|SIGTERM")
    running.send(signal.SIGTERM)
    assert await running.ended() == 3
    state = rows(dsn, "SELECT state, attempt FROM pulse.jobs WHERE id = %(id)s", {"id": job_id})
    assert state == [("available", 1)]


async def test_run_waits_for_an_absent_database_and_says_so(
    dsn: str, processes: Processes, sink: Sink, proxy: Proxy
) -> None:
    (job_id,) = enqueue(dsn)
    proxy.refuse()
    running = await worker(processes, proxy.dsn)
    await running.line("(?i)wait")
    proxy.forward()
    sink.let_go()
    assert await settled(dsn, job_id) == ("completed", 1, "attempt 1")
    running.send(signal.SIGTERM)
    assert await running.ended() == 0
