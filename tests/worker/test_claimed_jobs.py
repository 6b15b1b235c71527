"""Jobs that are claimed and whose handlers have not begun: what becomes of them meanwhile is known when they would begin."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from pulse_trio.jobs import Claim
from pulse_trio.worker.jobs.job_table import LOST, REPORTED

if TYPE_CHECKING:
    from collections.abc import Callable

    from pulse_trio.worker.building import Parts
    from pulse_trio.worker.jobs.running_job import RunningJob
    from support.stage import Stage


def lose(parts: Parts, job: RunningJob) -> None:
    """As a beat that finds no row."""
    parts.jobs.lose(job)
    job.lose()


def ask(parts: Parts, job: RunningJob) -> None:
    parts.services.cancellations.reach(job, "please")


def stop(parts: Parts, _job: RunningJob) -> None:
    parts.jobs.cancel_all("shutdown")


@pytest.mark.parametrize(
    ("happens", "outcomes", "state"),
    [(lose, [], LOST), (ask, ["cancelled"], REPORTED), (stop, ["released"], REPORTED)],
)
async def test_a_job_that_is_lost_or_cancelled_before_its_handler_begins_never_begins(
    stage: Stage, happens: Callable[[Parts, RunningJob], None], outcomes: list[str], state: str
) -> None:
    began: list[int] = []

    @stage.handlers.job
    async def count() -> None:
        began.append(1)

    async with stage.working() as worker:
        parts = worker._parts
        assert parts is not None
        claim = Claim(99, 1, 20, 0, 0, "", "default", "count", "{}", None, stage.store.session)
        (job,) = parts.runner.accept([claim], trio.current_time())
        happens(parts, job)
        assert await parts.runner.run(job) is None
        await parts.services.reports.drained()
        assert (began, list(parts.jobs), parts.jobs.running) == ([], [], 0)
        assert parts.jobs.tally.ended == dict.fromkeys(outcomes or ["lost"], 1)
        assert job.state == state
