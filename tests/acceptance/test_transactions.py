"""kill -9 at every await of a handler in turn: its writes and the completion of its job agree every time."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg

from pulse_trio import SyncClient
from support.workers import rows

if TYPE_CHECKING:
    from pulse_trio.testing.faults.processes import Processes

JOBS = 150
BOTH = """SELECT (SELECT coalesce(json_object_agg(id, result ORDER BY id), '{}') FROM pulse.jobs WHERE state = 'completed'),
                 (SELECT coalesce(json_object_agg(job, attempt ORDER BY job), '{}') FROM public.ledger)"""


async def test_killed_at_every_await_in_turn_a_handlers_writes_and_its_completion_agree(
    dsn: str, processes: Processes, tmp_path: Path
) -> None:
    shutil.copy(Path(__file__).parents[1] / "support" / "killed_app.py", tmp_path / "app.py")
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE public.ledger (job bigint, attempt int)")
        client = SyncClient(connection)
        for number in range(JOBS):
            client.enqueue("pay", queue=f"q{number}")

    killer = await processes.python("app.py", dsn, env={**os.environ})
    # It forks a worker for each job, which is killed at its own place, until one place is past the handler's end.
    assert await killer.ended(within=150) == 0, killer.report()
    places = int((killer.stdout.splitlines() or ["0"])[-1])
    assert 15 < places < JOBS

    ((completed, ledger),) = rows(dsn, BOTH)
    assert completed == ledger
    # Some died before their commit and some after it.
    assert 0 < len(completed) < places
    assert rows(dsn, "SELECT count(*) FROM pulse.jobs WHERE state = 'running'") == [(places - len(completed) + 1,)]

    rows(dsn, "UPDATE pulse.job SET lease_until = now() - interval '1 s' WHERE state = 2 RETURNING 1")
    worker = await processes.command("run", "app:handlers", "--burst", f"--dsn={dsn}", "--watchdog=0.2")
    assert await worker.ended(within=60) == 0
    ((completed, ledger),) = rows(dsn, BOTH)
    assert completed == ledger
    assert rows(dsn, "SELECT count(*), count(DISTINCT job) FROM public.ledger") == [(JOBS, JOBS)]
