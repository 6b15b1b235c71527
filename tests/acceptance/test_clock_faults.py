"""Workers whose whole machine believes in another day: by libfaketime, which tells every program under it so."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pulse_trio import SyncClient
from support.workers import LEASE, RUN, WATCHDOG, rows, settled, until

if TYPE_CHECKING:
    from pulse_trio.testing.faults.processes import Processes, Running

DAY = 86400
SLACK = 30.0
"""Seconds that a loaded machine may take for anything; a clock that mattered would make it a day, or before its time."""
APP = """
import time

import trio

from pulse_trio import Handlers, Job

handlers = Handlers()


@handlers.job
async def clock() -> float:
    return time.time()


@handlers.job(max_attempts=3)
async def slow(job: Job) -> int:
    if job.attempt == 1:
        await trio.sleep_forever()
    return job.attempt
"""


def library() -> str | None:
    """Where libfaketime is: as its Python package brings it (a dependency of the tests), or as distributions install it."""
    package = importlib.util.find_spec("libfaketime")
    places = [Path(package.origin).parent / "vendor/libfaketime/src"] if package and package.origin else []
    places += [Path("/usr/lib/faketime"), *Path("/usr/lib").glob("*/faketime")]
    return next((str(place / "libfaketime.so.1") for place in places if (place / "libfaketime.so.1").exists()), None)


def the_library() -> str:
    """`library()`; raises where there is none, so that no worker is without it unseen."""
    found = library()
    assert found is not None, "no libfaketime here: pip install libfaketime, or the distribution's package"
    return found


pytestmark = pytest.mark.skipif(
    sys.platform != "linux" and library() is None,
    reason="needs libfaketime, which our dependencies bring for Linux only",
)


async def worker(processes: Processes, dsn: str, shift: str, queues: str) -> Running:
    faked = {
        "LD_PRELOAD": the_library(),
        "FAKETIME": shift,
        # A wrong date does not make a machine's monotonic clock jump.
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_DONT_RESET": "1",
    }
    return await processes.pulse_trio(*RUN, f"--dsn={dsn}", f"--queues={queues}", env=faked)


@pytest.mark.parametrize(("dying", "living"), [("+1d", "-1d"), ("-1d", "+1d")])
async def test_workers_whose_clocks_are_a_day_off_claim_keep_and_rescue_as_any_other(
    dying: str, living: str, dsn: str, processes: Processes
) -> None:
    (processes.folder / "app.py").write_text(APP)
    client = SyncClient(dsn)
    doomed = await worker(processes, dsn, dying, "a,both")
    await worker(processes, dsn, living, "b,both")

    # They do believe in another day.
    for queue, shift in (("a", dying), ("b", living)):
        _, _, told = await settled(dsn, client.enqueue("clock", queue=queue).id)
        assert abs(told - time.time() - (DAY if shift == "+1d" else -DAY)) < 60
        # A delay is kept to all the same.
        delayed = client.enqueue("clock", queue=queue, delay=1.5).id
        await settled(dsn, delayed)
        late = "SELECT extract(epoch FROM started_at - run_at)::float8 FROM pulse.jobs WHERE id = %(id)s"
        assert 0 <= rows(dsn, late, {"id": delayed})[0][0] < SLACK

    # Beats keep a job for longer than its lease; once its worker is dead, the other has it when the lease is over, not before.
    slow = client.enqueue("slow", queue="a").id
    await until(dsn, f"SELECT FROM pulse.jobs WHERE lease_until > started_at + interval '{2 * LEASE} s'")
    doomed.kill()
    ((ends,),) = rows(
        dsn, "SELECT extract(epoch FROM lease_until)::float8 FROM pulse.job WHERE id = %(id)s", {"id": slow}
    )
    await until(dsn, "SELECT FROM pulse.attempts WHERE outcome = 'rescued'")
    ((rescued,),) = rows(
        dsn, "SELECT extract(epoch FROM ended_at)::float8 FROM pulse.attempts WHERE outcome = 'rescued'"
    )
    assert 0 <= rescued - ends < WATCHDOG + SLACK
