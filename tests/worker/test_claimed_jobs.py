"""Jobs that are claimed and whose handlers have not begun: what becomes of them meanwhile is known when they would begin."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from pulse_trio.jobs import CancelRequest, Claim, Job
from pulse_trio.worker.jobs.job_states import LOST, REPORTED

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio.testing import MockClock

    from pulse_trio.worker.building import Parts
    from pulse_trio.worker.jobs.running_job import RunningJob
    from support.stage import Stage


def lose(parts: Parts, job: RunningJob) -> None:
    """As a beat that finds no row."""
    parts.jobs.lose(job)
    job.lose()


def ask(parts: Parts, job: RunningJob) -> None:
    parts.services.cancellations.reach(job, CancelRequest(message="please"))


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
        parts.jobs.due.clear()  # the test runs it itself
        happens(parts, job)
        assert await parts.runner.run(job) is None
        await parts.reports.drained()
        assert (began, list(parts.jobs), parts.jobs.running) == ([], [], 0)
        # The database knows no such job, and refuses its report.
        assert parts.jobs.tally.ended == {"lost": 1}
        assert ([] if job.outcome is None else [job.outcome.kind]) == outcomes
        assert job.state == state


async def test_the_timeout_of_a_job_that_has_not_begun_cannot_strike(stage: Stage, autojump_clock: MockClock) -> None:
    """Its own timeout, which may be longer than the worker's, is read when it begins."""
    began: list[int] = []

    @stage.handlers.job
    async def count() -> None:
        began.append(1)

    async with stage.working(timeout=5) as worker:
        parts = worker._parts
        assert parts is not None
        claim = Claim(99, 1, 20, 0, 0, "", "default", "count", "{}", '{"timeout": 60}', stage.store.session)
        (job,) = parts.runner.accept([claim], trio.current_time())
        parts.jobs.due.clear()  # the test runs it itself
        autojump_clock.jump(6)  # handlers of other jobs block the loop
        job.renew(trio.current_time())
        assert (job.cancel_reason, job.reason) == (None, None)
        assert await parts.runner.run(job) is None
        assert (began, job.outcome and job.outcome.kind) == ([1], "completed")


async def test_a_job_that_begins_while_the_beat_that_loses_it_is_on_its_way_is_cancelled(stage: Stage) -> None:
    cancelled = trio.Event()
    reasons: list[str | None] = []

    @stage.handlers.job
    async def waits(job: Job) -> None:
        try:
            await trio.sleep_forever()
        finally:
            reasons.append(job.cancel_reason)
            cancelled.set()

    async with stage.working() as worker, trio.open_nursery() as nursery:
        parts = worker._parts
        assert parts is not None
        claim = Claim(99, 1, 20, 0, 0, "", "default", "waits", "{}", None, stage.store.session)
        (job,) = parts.runner.accept([claim], trio.current_time())
        parts.jobs.due.clear()  # the test runs it itself
        job.join_heartbeat()  # the beat is sent: there is no nursery yet that a heartbeat could join
        nursery.start_soon(parts.runner.run, job)
        await trio.testing.wait_all_tasks_blocked()
        lose(parts, job)
        with trio.fail_after(1):
            await cancelled.wait()
    assert reasons == ["fence-lost"]
