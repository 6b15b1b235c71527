"""The seconds of jobs in the metrics: of each job its own, whichever task ran it and whatever came next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import Discard, Job
from support.stage import parts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pulse_trio import Worker
    from pulse_trio.worker.metrics.figures import Histogram
    from support.stage import Stage


class Line:
    """Takes figures, as a supervisor does."""

    def tell_figures(self, figures: Mapping[str, Any]) -> None:
        """The test reads them from the worker."""


def metered(stage: Stage, **settings: Any) -> Worker:
    """A worker that counts its jobs for a supervisor, until nothing is due."""
    return stage.worker(burst=True, http="127.0.0.1:0", figures_to=Line(), **settings)


def run_seconds(worker: Worker) -> dict[str, Histogram]:
    """The run times by kind."""
    assert worker._metrics is not None
    found = worker._metrics.meter.figures(parts(worker).jobs)
    return {kind: histogram for (_, kind), histogram in found.histograms["pulse_job_run_seconds"].items()}


@pytest.mark.parametrize("concurrency", [1, 3, 50])
async def test_a_job_that_waits_takes_its_own_seconds_and_its_neighbours_none_of_them(
    stage: Stage, concurrency: int
) -> None:
    @stage.handlers.job
    async def quick() -> None:
        pass

    @stage.handlers.job
    async def slow(seconds: float) -> None:
        await trio.sleep(seconds)

    for seconds in (0.3, 7, 0, 40):
        stage.enqueue("quick")
        stage.enqueue("slow", seconds=seconds)
        stage.enqueue("quick")
    worker = metered(stage, concurrency=concurrency)
    await worker.run()
    found = run_seconds(worker)
    assert (found["quick"].count, found["quick"].sum) == (8, 0)
    assert found["slow"].count == 4
    assert found["slow"].sum == pytest.approx(47.3)
    assert [count for count in found["slow"].counts if count] == [1, 1, 1, 1]


async def test_seconds_of_jobs_whose_nursery_is_not_handed_on_or_that_fail_are_counted(stage: Stage) -> None:
    @stage.handlers.job
    async def parent(job: Job) -> None:
        job.nursery.start_soon(trio.sleep, 3)

    @stage.handlers.job
    async def refused() -> None:
        await trio.sleep(2)
        raise Discard

    @stage.handlers.job
    async def late() -> None:
        raise AssertionError

    stage.enqueue("parent")
    stage.enqueue("refused")
    stage.enqueue("late", options='{"expires": 1}')
    stage.enqueue("parent")
    worker = metered(stage, concurrency=1)
    await worker.run()
    found = run_seconds(worker)
    assert (found["parent"].count, found["parent"].sum) == (2, 6)
    assert (found["refused"].count, found["refused"].sum) == (1, 2)
    assert found["late"].count == 0
