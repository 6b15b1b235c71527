"""What pages read again and again: right while there is little, bounded and about right when there is much."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pulse_trio.sql import statement
from pulse_trio.store import watching
from support.stores import Window

if TYPE_CHECKING:
    from collections.abc import Generator


@pytest.fixture
def window(dsn: str) -> Generator[Window]:
    with Window(dsn) as window:
        yield window


TENTH_DEAD = "CASE WHEN n % 10 = 0 THEN 5 ELSE 4 END"
HALF_CANCELLED = "CASE WHEN n % 10 = 0 THEN 5 WHEN n % 10 < 6 THEN 6 ELSE 4 END"


def archive(
    window: Window, count: int, *, wait: float = 2, ran: float = 1, at: str = "now()", states: str = TENTH_DEAD
) -> None:
    """Jobs that finished evenly over the 50 minutes before `at`, in order."""
    window.run("SELECT maintain('7 days')")
    # A new database has no part of yesterday, and a job may have finished then.
    window.run("""DO $$ DECLARE yesterday date := (now() AT TIME ZONE 'UTC')::date - 1; BEGIN
      EXECUTE format('CREATE TABLE IF NOT EXISTS %I PARTITION OF job_archive FOR VALUES FROM (%L) TO (%L)',
        'job_archive_' || to_char(yesterday, 'YYYYMMDD'), yesterday::timestamp AT TIME ZONE 'UTC',
        (yesterday + 1)::timestamp AT TIME ZONE 'UTC'); END $$""")
    window.run(
        "INSERT INTO job_archive (id, finished_at, started_at, run_at, created_at, locked_by, attempt, failures, max_attempts,"
        " priority, state, queue, kind, args)"
        f" SELECT n, f, f - {ran} * interval '1 s', f - {wait + ran} * interval '1 s', f, 9, 1, 0, 20, 0,"
        f"  {states}, 'q', 'noop', '{{}}'"
        f" FROM generate_series(1, {count}) n, LATERAL (SELECT {at} - interval '50 min' * ({count} - n) / {count} AS f) t"
    )


MIDNIGHT = "(date_trunc('day', now() AT TIME ZONE 'UTC') AT TIME ZONE 'UTC')"


@pytest.mark.parametrize("count", [500, 60_000])
@pytest.mark.parametrize("minutes", [-1, 0, 10, 49, 55])
def test_the_figures_look_back_an_hour_over_midnight(window: Window, count: int, minutes: int) -> None:
    moment = f"{MIDNIGHT} + interval '{minutes} min'"
    archive(window, count, at=moment)

    found = window.do(watching.figures(window.value(f"SELECT {moment}")))

    assert found.exact == (count == 500)
    assert found.total.jobs == pytest.approx(count, rel=0 if found.exact else 0.05)
    assert (found.since, len(found.minutes)) == (3600, 60)
    busy = [minute.jobs for minute in found.minutes if minute.ago < 50]
    assert min(busy[1:]) == pytest.approx(count / 50, rel=0.3)


def test_the_figures_of_few_jobs_are_exact(window: Window) -> None:
    archive(window, 500)

    found = window.do(watching.figures())

    assert found.exact
    assert (found.total.jobs, found.total.sampled, found.total.dead) == (500, 500, 50)
    assert (found.total.wait, found.total.run) == (pytest.approx(2), pytest.approx(1))
    assert sum(minute.jobs for minute in found.minutes) == 500
    assert sum(minute.dead for minute in found.minutes) == 50


def test_the_figures_of_many_jobs_are_about_right_and_cost_a_bounded_number_of_pages(window: Window) -> None:
    archive(window, 60_000)

    found = window.do(watching.figures())
    pages = window.pages(
        statement("recent_figures", "pulse"), {"minutes": watching.MINUTES, "probes": watching.PROBES, "at": None}
    )

    assert not found.exact
    assert found.total.sampled < 12_000
    assert found.total.jobs == pytest.approx(60_000, rel=0.05)
    assert sum(minute.jobs for minute in found.minutes) == pytest.approx(60_000, rel=0.05)
    assert found.total.wait == pytest.approx(2)
    assert pages < 400
    # A tenth of them died, in the same count as the jobs: it was that of the sample.
    assert found.total.dead == pytest.approx(6_000, rel=0.05)
    assert sum(minute.dead for minute in found.minutes) == pytest.approx(6_000, rel=0.1)
    for minute in found.minutes:
        assert minute.dead is not None
        assert minute.dead <= minute.jobs


@pytest.mark.parametrize("count", [500, 60_000])
def test_cancelled_jobs_are_in_no_figure_be_it_exact_or_an_estimate(window: Window, count: int) -> None:
    archive(window, count, states=HALF_CANCELLED)

    found = window.do(watching.figures())

    assert found.exact == (count == 500)
    assert found.total.jobs == pytest.approx(count / 2, rel=0 if found.exact else 0.05)
    assert found.total.dead == pytest.approx(count / 10, rel=0 if found.exact else 0.05)
    assert sum(minute.jobs for minute in found.minutes) == pytest.approx(found.total.jobs)


def test_how_many_died_in_a_minute_of_which_the_sample_has_no_job_is_not_known(window: Window) -> None:
    def rows(*minutes: tuple[float, int, int]) -> list[tuple[float | int | None, ...]]:
        pages = [(0, 200.0, 20, 5.0, 0, None, None, None), (0, 20.0, 20, 5.0, 0, None, None, None)]
        told = [(1, minute, jobs, 1.0, dead, 1.0, 1.0, 1.0) for minute, jobs, dead in minutes]
        return [*pages, *told, (1, None, 40, 1.0, 10, 1.0, 1.0, 1.0), (2, 300.0, 0, 1e9, 0, None, None, None)]

    operation = watching.figures()
    next(operation)
    with pytest.raises(StopIteration) as stop:
        operation.send(rows((3.0, 20, 10), (0.0, 20, 0)))
    found: watching.Figures = stop.value.value
    assert (found.total.jobs, found.total.dead) == (200, 50)
    by_ago = {minute.ago: minute for minute in found.minutes}
    assert by_ago[3].dead == by_ago[3].jobs / 2
    assert (by_ago[0].dead, by_ago[1].dead, by_ago[5].dead) == (0, None, 0)
    assert by_ago[1].jobs > 0


def test_nothing_finished_is_no_figure_and_no_error(window: Window) -> None:
    found = window.do(watching.figures())

    assert (found.total.jobs, found.total.wait) == (0, None)


def test_the_depths_of_few_jobs_are_exact(window: Window) -> None:
    window.enqueue_many(3, "mail")
    window.enqueue("mail", delay=3600)
    found = {q.name: q for q in window.do(watching.depths()).queues}

    assert (found["mail"].available, found["mail"].scheduled, found["mail"].capped) == (3, 1, False)
    assert found["mail"].about is None


def test_a_count_ends_at_its_bound_and_the_statistics_say_about_how_many_there_are(
    window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "MOST", 100)
    window.enqueue_many(2000, "mail")
    window.enqueue_many(5, "small")
    window.run("ANALYZE job")

    found = {q.name: q for q in window.do(watching.depths()).queues}

    assert (found["mail"].available, found["mail"].capped) == (100, True)
    assert found["mail"].about == pytest.approx(2000, rel=0.1)
    assert (found["small"].available, found["small"].capped) == (5, False)


def test_running_jobs_fill_the_bound_of_the_due_ones_and_tell_how_long_the_oldest_runs(window: Window) -> None:
    window.enqueue_many(120, "mail")
    window.run(
        "UPDATE job SET state = 2, attempt = 1, locked_by = 7, lease_until = now() + interval '1 h',"
        " started_at = now() - interval '2 h' WHERE id IN (SELECT id FROM job ORDER BY id LIMIT 20)"
    )

    (cut,) = window.do(watching.depths(100)).queues
    (whole,) = window.do(watching.listed()).queues

    assert (cut.available + cut.running, cut.more_due, cut.more_later, cut.record.at_least) == (100, True, False, True)
    assert (whole.available, whole.running, whole.more_due, whole.record.at_least) == (100, 20, False, False)
    assert whole.longest == pytest.approx(7200, abs=60)
    assert whole.record.oldest_running_age == whole.longest


def test_the_more_queues_have_jobs_the_fewer_of_each_a_list_counts(
    window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "ALL", 600)
    for queue in ("a", "b"):
        window.enqueue_many(400, queue)

    assert [(q.available, q.more_due) for q in window.do(watching.listed()).queues] == [(300, True), (300, True)]


def test_a_walk_over_the_queues_that_reached_its_bound_is_told(window: Window) -> None:
    window.run("INSERT INTO job (kind, queue, run_at) SELECT 'noop', 'q' || n, now() FROM generate_series(1, 300) n")

    assert window.do(watching.depths()).cut_short


def test_a_queue_without_jobs_is_known_by_its_pause(window: Window) -> None:
    from pulse_trio.store import queues

    window.do(queues.pause("quiet"))

    (found,) = window.do(watching.depths()).queues

    assert (found.name, found.paused, found.available) == ("quiet", True, 0)
    assert found.paused_at is not None


def test_the_jobs_of_a_large_batch_are_not_counted_one_by_one(window: Window, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "FEW_MEMBERS", 10)
    ids = window.enqueue_many(30)
    for size in (5, 30):
        batch = window.value("INSERT INTO batch (name) VALUES (%s) RETURNING id", f"of {size}")
        window.run("INSERT INTO batch_job SELECT %s, unnest(%s::bigint[])", batch, ids[:size])

    large, small = window.do(watching.batches(limit=10))

    assert (large.total, large.waiting) == (30, None)
    assert (small.total, small.waiting) == (5, 5)


def test_where_more_died_than_are_counted_no_queue_says_that_fewer_did(
    window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One queue's deaths hid those of the others: `dead` was 0 there, and nothing said that the count had ended."""
    # Of the newest ones, which are looked at, half were cancelled.
    for first, jobs, queue, state in ((1, 3, "quiet", 5), (4, 15, "noisy", 5), (19, 5, "noisy", 6)):
        window.run(
            "INSERT INTO job_archive (id, finished_at, started_at, run_at, created_at, locked_by, attempt,"
            " failures, max_attempts, priority, state, queue, kind, args)"
            " SELECT i, now(), now(), now(), now(), 7, 1, 1, 1, 0, %s, %s, 'noop', '{}'"
            " FROM generate_series(%s::int, %s::int) i",
            state,
            queue,
            first,
            first + jobs - 1,
        )
    for most, told in ((10, {"noisy": (5, True)}), (100, {"noisy": (15, False), "quiet": (3, False)})):
        monkeypatch.setattr(watching, "DEAD", most)
        monkeypatch.setattr(watching, "ALL_DEAD", most)
        for found in (window.do(watching.depths()), window.do(watching.listed())):
            assert {q.name: (q.dead, q.record.dead_at_least) for q in found.queues} == told
            assert found.dead_capped == (most == 10)
            assert not any(q.record.at_least for q in found.queues)


def test_one_batch_of_many_jobs_costs_the_page_of_all_no_more_than_its_bound(window: Window) -> None:
    """Two million members that a waiter had given a batch kept the page of all batches from answering: what became of them was
    counted before the statement asked whether there were too many, and for each other batch the whole table was read."""
    window.run("INSERT INTO batch (name) SELECT 'b' || n FROM generate_series(1, 30) n")
    window.run("INSERT INTO batch_job (batch_id, job_id) SELECT 7, n FROM generate_series(1, 150000) n")
    window.run("INSERT INTO batch_job (batch_id, job_id) SELECT n, 5 FROM generate_series(8, 20) n")
    window.run("VACUUM ANALYZE batch_job")
    window.run("ANALYZE batch")
    asked = {"limit": 51, "before": 2**62, "few": watching.FEW_MEMBERS, "most": watching.MOST_MEMBERS}
    assert window.pages(statement("batches", "pulse"), asked) < 3000
    found = {batch.id: batch for batch in window.do(watching.batches(limit=51))}
    assert (found[7].total, found[7].removed, found[7].completed) == (watching.MOST_MEMBERS, None, None)
    assert (found[8].total, found[8].removed, found[1].total) == (1, 1, 0)
