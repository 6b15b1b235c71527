"""What the meter counts, and that no producer makes its labels grow without end."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pulse_trio.jobs import Claim
from pulse_trio.observe import FenceLost, LeaseUnproven
from pulse_trio.worker.metrics.catalogue import OTHER, PAIRS, QUEUES, WAITS
from pulse_trio.worker.metrics.figures import Figures, Histogram
from pulse_trio.worker.metrics.meter import JobMeter
from pulse_trio.worker.metrics.of_worker import LostLeases

if TYPE_CHECKING:
    from collections.abc import Sequence


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


def told(waits: Sequence[float]) -> list[str]:
    """The moments at which jobs were due that have waited so long at second 1,000,000."""
    return [str(datetime.fromtimestamp(1_000_000 - wait, UTC)) for wait in waits]


@pytest.mark.parametrize(
    "waits",
    [
        [3600.0 - n / 1_000_000 for n in range(500)],
        [n / 10_000 for n in range(500)],
        [1.5**n / 1000 for n in range(40)],
        [0.005, 0.005, 0.00501, 0.1, 0.1, 7200.0, 7200.5],
        [60.0] * 300,
        [0.3],
    ],
)
@pytest.mark.parametrize("order", ["longest first", "shortest first", "any"])
def test_waits_of_a_batch_fall_into_the_buckets_that_each_would_whatever_their_order(
    waits: list[float], order: str
) -> None:
    waits = sorted(waits, reverse=order == "longest first")
    if order == "any":
        random.Random(5).shuffle(waits)
    counting, one_by_one = meter("a", "b"), Histogram(WAITS)
    # Half of them are of another queue, half of the rest of another kind.
    jobs = [
        job("q" if n % 2 else "p", "a" if n % 4 else "b", due)
        for n, due in enumerate([d for d in told(waits) for _ in "pq"])
    ]
    counting.accepted(jobs, 1_000_000.0)
    for due in told(waits):
        one_by_one.observe(1_000_000 - datetime.fromisoformat(due).timestamp())
    for found in counting.figures([]).histograms["pulse_job_wait_seconds"].values():
        assert found.counts == one_by_one.counts
        assert found.sum == pytest.approx(one_by_one.sum, rel=0.06, abs=0.0005 * len(waits))


def test_a_batch_from_a_backlog_costs_the_reading_of_few_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    class Counted(datetime):
        @classmethod
        def fromisoformat(cls, text: str) -> Any:
            read.append(text)
            return datetime.fromisoformat(text)

    monkeypatch.setattr("pulse_trio.worker.metrics.meter.datetime", Counted)
    counting = meter("a")
    counting.accepted([job("q", "a", due) for due in told([3600.0 - n / 1000 for n in range(500)])], 1_000_000.0)
    assert len(read) <= 4


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


def test_a_lease_that_was_not_renewed_in_time_is_lost_once_though_its_report_finds_another_attempt() -> None:
    """A worker that was stopped (SIGSTOP) for longer than its leases counted each twice."""
    figures = Figures()
    heard = LostLeases(figures).listeners()
    for job_id in (1, 2):
        heard[LeaseUnproven](LeaseUnproven(job_id, "mail", 1))
    for job_id, attempt in ((1, 1), (1, 2), (3, 1)):
        heard[FenceLost](FenceLost(job_id, "mail", attempt, "report of released"))
    assert figures.values["pulse_leases_lost_total"] == {("lease-unproven",): 2, ("fence-lost",): 2}
