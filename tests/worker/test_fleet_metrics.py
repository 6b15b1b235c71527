"""What a supervisor makes of its children's figures and of their silence: on virtual time."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from pulse_trio import Handlers, Worker
from pulse_trio.observe import ChildStarted, Observer
from pulse_trio.settings import WorkerSettings
from pulse_trio.store import WorkerStore
from pulse_trio.store.figures import Sample
from pulse_trio.worker.metrics.figures import Figures
from pulse_trio.worker.metrics.of_fleet import BEGINS, LATE, FleetMetrics

LEASE, CONNECT = 20.0, 30.0
ENDED = "pulse_jobs_ended_total"


def fleet() -> FleetMetrics:
    settings = WorkerSettings(processes=1, lease=LEASE, heartbeat=5.0, connect_timeout=CONNECT)
    return FleetMetrics(settings, WorkerStore(""), Observer([]))


def figures(**more: Any) -> dict[str, Any]:
    counted = Figures()
    counted.count(ENDED, ("q", "a", "completed"), 3)
    return {**counted.encoded(), "unready": None, "unhealthy": None, **more}


async def test_a_silent_child_is_unready_after_seconds_and_unhealthy_only_after_its_lease(
    autojump_clock: object,
) -> None:
    metrics = fleet()
    metrics.heard(7, figures())
    assert metrics.unready() is None
    await trio.sleep(LATE + 1)
    assert "worker process 7: nothing was heard" in str(metrics.unready())
    assert metrics.unhealthy() is None
    await trio.sleep(LEASE)
    assert "worker process 7: nothing was heard" in str(metrics.unhealthy())


async def test_a_child_that_says_nothing_from_its_start_is_unhealthy_in_the_end(autojump_clock: object) -> None:
    metrics = fleet()
    metrics.listeners()[ChildStarted](ChildStarted(7))
    await trio.sleep(BEGINS + CONNECT - 1)
    assert metrics.unhealthy() is None
    assert "it starts" in str(metrics.unready())
    await trio.sleep(2)
    assert "worker process 7: nothing was heard" in str(metrics.unhealthy())


async def test_figures_of_another_version_leave_out_what_is_not_known() -> None:
    metrics, told = fleet(), figures()
    told["values"] += [["pulse_newer", [], 1], [ENDED, ["one label"], 1], ["pulse_claim_seconds", [], 1]]
    told["histograms"] += [
        ["pulse_newer", [], [1], 1.0],
        ["pulse_claim_seconds", [], [1, 2], 1.0],
        [ENDED, [], [1], 1.0],
    ]
    metrics.heard(7, told)
    found = metrics.figures()
    assert found.values[ENDED] == {("q", "a", "completed"): 3}
    assert found.histograms.keys() <= {"pulse_claim_seconds"}
    assert "pulse_newer" not in found.values


@pytest.mark.parametrize("told", [{}, [], figures(values=1), figures(values=[["a"]]), figures(values=[[[], 1, 2]])])
async def test_figures_that_cannot_be_read_harm_nothing_and_are_logged_once(
    told: Any, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = fleet()
    metrics.heard(7, figures())
    for _ in range(2):
        metrics.heard(7, told)
    assert metrics.figures().values[ENDED] == {("q", "a", "completed"): 3}
    assert ["cannot be read" in record.message for record in caplog.records] == [True]


async def test_a_queue_that_a_child_declares_is_shown_with_0_while_it_is_empty(autojump_clock: object) -> None:
    metrics = fleet()
    metrics.heard(7, figures(queues=["declared"]))
    metrics.heard(8, figures())  # of a version that does not say which
    metrics._sampler._sample, metrics._sampler._valid_until = Sample([], 0, {}, cut_short=False), 60.0
    assert metrics.figures().values["pulse_queue_oldest_seconds"] == {("declared",): 0}


async def test_a_worker_tells_its_supervisor_which_queues_it_declares(autojump_clock: object) -> None:
    told: list[dict[str, Any]] = []

    class Line:
        def tell_figures(self, figures: Any) -> None:
            told.append(json.loads(json.dumps(figures)))

    handlers = Handlers()
    handlers.queue("declared", limit=3)
    worker = Worker(handlers, "", http="127.0.0.1:0", queues=["served"], figures_to=Line())
    assert worker._metrics is not None
    worker._metrics._tell(worker._metrics._line)  # type: ignore[arg-type]
    assert told[0]["queues"] == ["declared", "served"]
