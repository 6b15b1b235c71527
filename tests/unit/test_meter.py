"""What the meter counts, and that no producer makes its labels grow without end."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from pulse_trio.jobs import Claim
from pulse_trio.worker.metrics.catalogue import OTHER, PAIRS, QUEUES
from pulse_trio.worker.metrics.figures import Figures, Histogram
from pulse_trio.worker.metrics.meter import JobMeter


class Clock:
    epoch_offset = 0.0


ENDED = "pulse_jobs_ended_total"


def meter(*kinds: str, queues: tuple[str, ...] = ()) -> JobMeter:
    return JobMeter(kinds, queues, Clock())


def job(queue: str, kind: str, run_at: str = "1970-01-01 00:00:10+00") -> Any:
    claim = Claim(1, 1, 20, 0, 0, run_at, queue, kind, "{}", None, 7)
    return SimpleNamespace(claim=claim, ended=False)


def end(counting: JobMeter, *jobs: Any) -> None:
    counting.accepted(jobs, 30.0)
    for one in jobs:
        one.begun = 30.0
        counting.ended(one, SimpleNamespace(kind="completed"), 31.0)  # pyright: ignore[reportArgumentType]


def test_kinds_without_a_handler_and_queues_beyond_the_bound_are_other() -> None:
    counting = meter("known", queues=("served",))
    end(counting, *[job(f"q{n}", f"kind {n}") for n in range(5000)], job("served", "known"))
    figures = counting.figures([])
    ended = figures.values[ENDED]
    assert len(ended) <= PAIRS + 2
    assert ended["served", "known", "completed"] == 1
    assert {kind for _, kind, _ in ended} == {"known", OTHER}
    assert sum(ended.values()) == 5001
    assert len(figures.histograms["pulse_job_wait_seconds"]) <= QUEUES + 2
    assert sum(each.count for each in figures.histograms["pulse_job_wait_seconds"].values()) == 5001


@pytest.mark.parametrize("run_at", ["-infinity", "0001-01-01 00:00:00+00 BC", "", "x" * 1000, "9999-12-31 00:00:00+00"])
def test_a_moment_that_cannot_be_read_counts_as_no_wait(run_at: str) -> None:
    counting = meter("a")
    end(counting, job("q", "a", run_at), job("q", "a"))
    waits = counting.figures([]).histograms["pulse_job_wait_seconds"][("q",)]
    assert (waits.count, waits.sum) == (2, 20.0)


def test_jobs_that_run_have_started_and_those_that_never_began_have_not() -> None:
    counting = meter("a")
    running, refused = job("q", "a"), job("q", "a")
    counting.accepted([running, refused], 30.0)
    running.begun = 30.0
    counting.ended(refused, SimpleNamespace(kind="released"), 31.0)  # pyright: ignore[reportArgumentType]
    refused.ended = True
    for _ in range(2):
        values = counting.figures([running, refused]).values
        assert values["pulse_jobs_started_total"] == {("q", "a"): 1}
        assert values["pulse_jobs_running"] == {("q",): 1}
        assert values[ENDED] == {("q", "a", "released"): 1}


@pytest.mark.parametrize("count", [0, 1, 7, 8, 500])
def test_many_values_fall_into_the_buckets_that_each_would(count: int) -> None:
    values = [(n * 37 % 101) / 10 for n in range(count)]
    one_by_one, together = Histogram((0.5, 1.0, 5.0)), Histogram((0.5, 1.0, 5.0))
    for value in values:
        one_by_one.observe(value)
    together.observe_all(values)
    assert together.counts == one_by_one.counts
    assert together.sum == pytest.approx(one_by_one.sum)


def test_figures_travel_as_json_and_only_totals_outlive_a_process() -> None:
    figures = Figures()
    figures.count(ENDED, ("q", "a", "completed"), 3)
    figures.set("pulse_jobs_running", 2, ("q",))
    figures.set("pulse_database_up", 1)
    figures.histogram("pulse_claim_seconds").observe(0.3)
    arrived = Figures.decoded(json.loads(json.dumps(figures.encoded())))
    arrived.add(figures)
    assert arrived.values[ENDED] == {("q", "a", "completed"): 6}
    assert arrived.values["pulse_jobs_running"] == {("q",): 4}
    assert arrived.values["pulse_database_up"] == {(): 1}
    assert arrived.histograms["pulse_claim_seconds"][()].count == 2
    ended = Figures()
    ended.add(arrived, only_totals=True)
    assert ended.values == {ENDED: {("q", "a", "completed"): 6}}
