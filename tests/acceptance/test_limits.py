"""A limit under fire: five real workers on one queue, one of them killed again and again.

LIMITS_SECONDS=60 makes it as long as the goal asks for.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import trio

from pulse_trio import SyncClient
from pulse_trio.client import request_by_name
from support.workers import rows

if TYPE_CHECKING:
    from pulse_trio.testing.faults.processes import Processes, Running

LIMIT, WORKERS = 3, 5
LEASE, WATCHDOG = 3.0, 0.5
SLACK = 2.0  # seconds that a loaded machine may take between a watchdog's tick, its commit and the next claim
KILL_EVERY = 5.0
SECONDS = float(os.environ.get("LIMITS_SECONDS", "10"))
APP = """
import trio

from pulse_trio import Handlers

handlers = Handlers()
handlers.queue("narrow", limit=3)


@handlers.job(queue="narrow")
async def work() -> None:
    await trio.sleep(0.3)
"""
RUN = [
    "run", "app", f"--lease={LEASE}", "--heartbeat=0.8", f"--watchdog={WATCHDOG}", "--cleanup=0.2", "--poll=0.5",
]  # fmt: skip
# Every attempt on the limited queue by the database's clock, and whether its worker was killed.
ATTEMPTS = """
    SELECT extract(epoch FROM a.started_at)::float8, extract(epoch FROM coalesce(a.ended_at, clock_timestamp()))::float8,
           a.outcome, s.pid
    FROM pulse.attempts a JOIN pulse.session s ON s.id = a.worker ORDER BY a.started_at
"""
Attempt = tuple[float, float, str, int]


async def worker(processes: Processes, dsn: str) -> Running:
    started = await processes.command(*RUN, env={"PULSE_TRIO_DSN": dsn})
    await started.line("started")
    return started


def at_once(attempts: list[Attempt]) -> list[tuple[float, int]]:
    """(moment, how many run from then on), for each moment at which that changes."""
    # An end before a start of the same moment: the claim had seen it.
    changes = sorted([(a[0], 1) for a in attempts] + [(a[1], -1) for a in attempts], key=lambda c: (c[0], c[1]))
    running, found = 0, []
    for moment, change in changes:
        running += change
        found.append((moment, running))
    return found


async def test_a_limit_of_three_holds_while_workers_are_killed_and_is_used_again_within_lease_and_tick(
    processes: Processes, dsn: str
) -> None:
    (processes.folder / "app.py").write_text(APP)
    SyncClient(dsn).enqueue_many(request_by_name("work", queue="narrow") for _ in range(int(SECONDS * 20)))
    # The limit is there before anybody claims: a worker that starts writes it down first.
    running = {w.pid: w for w in [await worker(processes, dsn) for _ in range(WORKERS)]}
    killed: dict[int, float] = {}
    began = trio.current_time()
    for turn in range(1, int(SECONDS // KILL_EVERY) + 1):
        await trio.sleep_until(began + turn * KILL_EVERY)
        pid, moment = await victim(dsn)
        running.pop(pid).kill()
        killed[pid] = moment
        replacement = await worker(processes, dsn)
        running[replacement.pid] = replacement
    await trio.sleep(LEASE + WATCHDOG + SLACK)
    attempts: Any = rows(dsn, ATTEMPTS)
    assert max(n for _, n in at_once(attempts)) == LIMIT
    assert [a for a in attempts if a[2] == "rescued"], "nobody who was killed held a job"
    for pid, moment in killed.items():
        living = [a for a in attempts if a[3] != pid and killed.get(a[3], moment) >= moment]
        again = min((t for t, n in at_once(living) if n == LIMIT and t > moment), default=float("inf"))
        assert again - moment < LEASE + WATCHDOG + SLACK
    for process in running.values():
        process.send(signal.SIGTERM)


async def victim(dsn: str) -> tuple[int, float]:
    """The process of a worker that holds a job, and when that was."""
    while True:
        found = rows(
            dsn,
            "SELECT s.pid, extract(epoch FROM clock_timestamp())::float8 FROM pulse.job j"
            " JOIN pulse.session s ON s.id = j.locked_by WHERE j.state = 2 AND j.queue = 'narrow' ORDER BY random() LIMIT 1",
        )
        if found:
            return found[0]
        await trio.sleep(0.05)
