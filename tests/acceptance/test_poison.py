"""A job that kills its worker process: dead after its crashes, and nobody else pays for them."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from pulse_trio import SyncClient
from support.workers import rows, settled

if TYPE_CHECKING:
    from support.processes import Processes


async def test_a_job_that_kills_its_process_is_dead_and_its_neighbours_budget_is_untouched(
    dsn: str, processes: Processes, tmp_path: Path
) -> None:
    shutil.copy(Path(__file__).parents[1] / "support" / "poison_app.py", tmp_path / "app.py")
    client = SyncClient(dsn)
    poison, *others = [client.enqueue(kind).id for kind in ["poison", *["neighbour"] * 6]]
    supervisor = await processes.pulse_trio(
        "run", "app:handlers", f"--dsn={dsn}", "--processes=2", "--concurrency=10", "--watchdog=0.5", "--poll=0.2"
    )
    assert (await settled(dsn, poison))[0] == "dead"
    for job_id in others:
        assert (await settled(dsn, job_id))[0] == "completed"
    ((error,),) = rows(dsn, "SELECT error FROM pulse.jobs WHERE state = 'dead'")
    assert error.startswith("CrashLimit: 3 times its worker died with it, the last time with nothing else running")
    assert "the worker process died" in error
    # One attempt of the budget was used by each: the one that completed it.
    assert rows(dsn, "SELECT DISTINCT max_attempts - attempt FROM pulse.jobs WHERE state = 'completed'") == [(19,)]
    # They were there: some attempt of a neighbour ended with the death of its worker.
    assert rows(
        dsn, "SELECT count(*) > 0 FROM pulse.attempts WHERE outcome = 'rescued' AND job_id <> %(id)s", {"id": poison}
    ) == [(True,)]
    # The last crash took nobody along.
    ((alone,),) = rows(
        dsn,
        "SELECT count(*) FROM pulse.attempts WHERE worker ="
        " (SELECT worker FROM pulse.attempts WHERE job_id = %(id)s ORDER BY attempt DESC LIMIT 1) AND outcome = 'rescued'",
        {"id": poison},
    )
    assert alone == 1
    supervisor.send(signal.SIGTERM)
    assert await supervisor.ended() == 0
