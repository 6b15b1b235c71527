"""Real workers whose jobs are cancelled, run into their deadlines, or outlast a shutdown."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import psycopg
import pytest

from pulse_trio import SyncClient
from support.sink import Sink, open_sink
from support.workers import HEARTBEAT, enqueue, rows, until, worker

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from pulse_trio.testing.faults.processes import Processes

JOBS = int(os.environ.get("PULSE_TRIO_JOBS_AT_ONCE", "300"))
"""How many run when their worker is told to stop."""
SLACK = 2.0  # seconds that a loaded machine may take for what takes milliseconds on an idle one


@pytest.fixture
async def sink(tmp_path: Path) -> AsyncGenerator[Sink]:
    async with open_sink(tmp_path) as sink:
        yield sink


async def ended(dsn: str, job_id: int) -> tuple[str, float]:
    """What a cancelled job became, once the ledger says so; and the moment at which that was seen."""
    query = "SELECT ended_as FROM pulse.cancellations WHERE job_id = %(id)s AND ended_at IS NOT NULL"
    ((became,),) = await until(dsn, query, {"id": job_id})
    return became, time.monotonic()


async def test_running_jobs_are_cancelled_by_notification_and_the_others_go_on(
    dsn: str, processes: Processes, sink: Sink
) -> None:
    ids = enqueue(dsn, count=20)
    # Long heartbeats: only a notification can be this fast.
    await worker(processes, dsn, "--lease=90", "--heartbeat=30")
    await sink.until("start", count=20)
    asked_at = time.monotonic()
    SyncClient(dsn).cancel_many(ids[:10], reason="enough")
    cancelled = await sink.until("cancelled", count=10)
    assert {c.job for c in cancelled} == set(ids[:10])
    assert {c.reason for c in cancelled} == {"user"}
    assert max(c.at for c in cancelled) - asked_at < SLACK
    for job_id in ids[:10]:
        assert (await ended(dsn, job_id))[0] == "cancelled"
    ledger = rows(
        dsn,
        "SELECT count(*) FROM pulse.cancellations WHERE attempt = 1 AND reason = 'enough'"
        " AND requested_at <= delivered_at AND delivered_at <= ended_at",
    )
    assert ledger == [(10,)]
    sink.let_go()
    await until(dsn, "SELECT FROM pulse.jobs HAVING count(*) FILTER (WHERE state = 'completed') = 10")
    reasons = rows(dsn, "SELECT DISTINCT cancel_reason FROM pulse.jobs WHERE state = 'cancelled'")
    assert reasons == [("enough",)]


async def test_a_lost_notification_costs_a_heartbeat_at_most(dsn: str, processes: Processes, sink: Sink) -> None:
    (job_id,) = enqueue(dsn)
    await worker(processes, dsn)
    await sink.until("start")
    with psycopg.connect(dsn, autocommit=True) as connection:
        asked_at = time.monotonic()
        # What cancel_jobs() does, without its NOTIFY.
        connection.execute("UPDATE pulse.job SET cancelling = true WHERE id = %s", [job_id])
        connection.execute(
            "INSERT INTO pulse.cancellation (job_id, attempt, requested_by) VALUES (%s, 1, 'a test')", [job_id]
        )
    (cancelled,) = await sink.until("cancelled")
    assert cancelled.reason == "user"
    assert cancelled.at - asked_at < HEARTBEAT + SLACK
    assert (await ended(dsn, job_id))[0] == "cancelled"


async def test_when_the_end_is_recorded_nothing_of_the_job_runs_any_more(
    dsn: str, processes: Processes, sink: Sink
) -> None:
    (job_id,) = enqueue(dsn, "family")
    await worker(processes, dsn)
    await sink.until("start")
    SyncClient(dsn).cancel(job_id)
    became, seen_at = await ended(dsn, job_id)
    gone = await sink.until("gone", count=3)
    assert became == "cancelled"
    assert max(g.at for g in gone) <= seen_at


async def test_a_jobs_deadline_ends_it_wherever_it_is(dsn: str, processes: Processes, sink: Sink) -> None:
    client = SyncClient(dsn)
    # First, because on a busy machine a process may take as long to start as the deadline is away.
    await worker(processes, dsn)
    running = client.enqueue("held", {}, deadline=5).id
    late = client.enqueue("held", {}, deadline=0.01, delay=0.5).id
    stale = client.enqueue("held", {}, expires=0.01, delay=0.5).id
    enqueued_at = time.monotonic()
    (start,) = await sink.until("start")
    assert start.job == running
    (cancelled,) = await sink.until("cancelled")
    assert cancelled.reason == "deadline"
    # By the database's clock, which began a moment before ours here; the worker may be early by a round trip.
    assert -SLACK < cancelled.at - enqueued_at - 5 < SLACK
    await until(dsn, "SELECT FROM pulse.jobs HAVING count(*) FILTER (WHERE state = 'cancelled') = 3")
    found = rows(dsn, "SELECT id, cancel_reason FROM pulse.jobs ORDER BY id")
    assert found == [(running, "deadline"), (late, "deadline"), (stale, "expired")]
    assert len(sink.all("start")) == 1


async def test_sigterm_under_load_loses_nothing_and_the_next_worker_goes_on_at_once(
    dsn: str, processes: Processes, sink: Sink
) -> None:
    count = JOBS
    ids = enqueue(dsn, count=count)
    running = await worker(processes, dsn, f"--concurrency={count}", "--grace=2")
    await sink.until("start", attempt=1, count=count)
    running.send(signal.SIGTERM)
    await running.line("(?i)drain|stopping|SIGTERM")
    completing = set(ids[::3])
    sink.let_go(lambda start: start.job in completing)
    assert await running.ended(within=60) == 3
    found = rows(dsn, "SELECT state, attempt, max_attempts, count(*)::int FROM pulse.jobs GROUP BY 1, 2, 3 ORDER BY 1")
    # Completed, or released with the budget intact (5 when enqueued, 1 used, 1 given back); nothing else, and nothing lost.
    left = count - len(completing)
    assert found == [("available", 1, 6, left), ("completed", 1, 5, len(completing))]
    assert {c.reason for c in sink.all("cancelled")} == {"shutdown"}
    await worker(processes, dsn, f"--concurrency={count}")
    await sink.until("start", attempt=2, count=left)
    ((seconds,),) = rows(
        dsn,
        "SELECT extract(epoch FROM max(a.started_at) - max(w.started_at))::float8"
        " FROM pulse.attempts a JOIN pulse.workers w ON w.id = a.worker WHERE a.attempt = 2",
    )
    assert seconds < 1.0 + SLACK
    sink.let_go()
    await until(dsn, f"SELECT FROM pulse.jobs HAVING count(*) FILTER (WHERE state = 'completed') = {count}")
