"""Real workers fire a schedule of every second while one after the other is killed: each occurrence once.

`PULSE_TRIO_CRON=full` runs five workers for sixty seconds with a kill every ten; it prints its figures with `-s`.
"""

from __future__ import annotations

import os
from datetime import datetime, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING

import trio

from pulse_trio import SyncClient
from support.workers import rows, until

if TYPE_CHECKING:
    from pulse_trio.testing.faults.processes import Processes, Running

WORKERS, SECONDS, KILL_EVERY = (5, 60, 10) if os.environ.get("PULSE_TRIO_CRON") == "full" else (3, 10, 4)
APP = """
from datetime import datetime

from pulse_trio import Handlers

handlers = Handlers()


@handlers.cron(every=1, name="beat", due_as="at")
@handlers.job
async def beat(at: datetime) -> str:
    return at.isoformat()
"""


async def start(processes: Processes, dsn: str) -> Running:
    return await processes.command("run", "app:handlers", "--poll=0.2", f"--dsn={dsn}")


async def test_each_occurrence_is_fired_once_while_workers_are_killed(dsn: str, processes: Processes) -> None:
    (processes.folder / "app.py").write_text(APP)
    workers = [await start(processes, dsn) for _ in range(WORKERS)]
    await until(dsn, "SELECT FROM pulse.workers WHERE state = 'running' HAVING count(*) = %(n)s", {"n": WORKERS})
    await until(dsn, "SELECT FROM pulse.fires")
    kills = 0
    with trio.fail_after(SECONDS + 60):
        while True:
            ((fired,),) = rows(dsn, "SELECT count(*) FROM pulse.fires")
            if fired > SECONDS:
                break
            if fired >= (kills + 1) * KILL_EVERY:
                doomed = kills % WORKERS
                workers[doomed].kill()
                workers[doomed] = await start(processes, dsn)
                kills += 1
            await trio.sleep(0.1)
    SyncClient(dsn).pause_schedule("beat")

    fires = rows(dsn, "SELECT due_at, fired_at, job_id, added FROM pulse.fires ORDER BY due_at")
    assert kills >= SECONDS // KILL_EVERY - 1
    assert len(fires) > SECONDS
    # No second was left out, none has two jobs, and there are no other jobs.
    assert {later[0] - earlier[0] for earlier, later in pairwise(fires)} == {timedelta(seconds=1)}
    jobs = [job for _, _, job, added in fires if added]
    assert len(set(jobs)) == len(fires)
    assert rows(dsn, "SELECT id FROM pulse.jobs ORDER BY id") == [(job,) for job in sorted(jobs)]
    # And every one of them was run for its own second.
    await until(dsn, "SELECT FROM pulse.jobs WHERE state = 'completed' HAVING count(*) = %(n)s", {"n": len(fires)})
    results = dict(rows(dsn, "SELECT id, result FROM pulse.jobs"))
    assert all(datetime.fromisoformat(results[job]) == due_at for due_at, _, job, _ in fires)

    late = sorted((fired_at - due_at).total_seconds() * 1000 for due_at, fired_at, _, _ in fires)
    print(  # noqa: T201 -- the full run's figures, shown with -s
        f"\n{len(fires)} occurrences, {kills} kills, {WORKERS} workers; fired late by "
        f"{late[len(late) // 2]:.1f} ms (median), {late[-1]:.1f} ms (worst)"
    )
