"""Pages of jobs: every filter finds what `jobs list` finds, page by page, and looks at a bounded number of rows."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from pulse_trio import InvalidArguments, UsageError
from pulse_trio.sql import statement
from pulse_trio.store import history, operations, searching
from support.stores import Window

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from pulse_trio.store.history import JobFilter
    from support.databases import Databases


LIVE = """
INSERT INTO job (id, queue, kind, key, unique_key, priority, state, run_at, created_at, attempt, locked_by, started_at,
                 lease_until)
SELECT %s, %s, %s, %s, %s, %s, s, now() + make_interval(secs => %s), now() - make_interval(hours => %s),
       CASE s WHEN 2 THEN 1 ELSE 0 END, CASE s WHEN 2 THEN 7 ELSE 0 END, now(),
       CASE s WHEN 2 THEN now() + interval '1 h' ELSE 'infinity' END
FROM (SELECT %s::int AS s) t
"""
FINISHED = """
INSERT INTO job_archive (id, queue, kind, key, unique_key, priority, state, run_at, created_at, attempt, locked_by, started_at,
                         finished_at, failures, max_attempts, args, error)
SELECT %s, %s, %s, %s, %s, 0, %s, t, t, 1, 7, t, t, 0, 20, '{}', %s FROM (SELECT now() - make_interval(hours => %s) AS t) times
"""
BULK = """
INSERT INTO job (queue, kind, key) SELECT 'old', 'rare', CASE WHEN n > 5 THEN 'rare' END FROM generate_series(1, 9) n;
INSERT INTO job (queue, kind) SELECT 'bulk', 'noop' FROM generate_series(1, 30000);
INSERT INTO job_archive (id, queue, kind, priority, state, run_at, created_at, attempt, locked_by, started_at, finished_at,
                         failures, max_attempts, args)
SELECT 100000 + n, 'bulk', 'noop', 0, CASE WHEN n % 100 = 0 THEN 5 ELSE 4 END, now(), now(), 1, 7, now(), now(), 0, 20, '{}'
FROM generate_series(1, 30000) n
"""
LARGE = """
INSERT INTO job (id, queue, kind, args)
SELECT 1000 + n, 'large', 'noop', json_build_object('a', repeat(md5(n::text), 20000)) FROM generate_series(1, 6) n
"""


@pytest.fixture(scope="module")
def mixed(databases: Databases) -> Generator[Window]:
    """120 jobs in every state, of a few queues, kinds and keys."""
    dice = random.Random(16)
    with databases.migrated() as dsn, Window(dsn) as window:
        window.run(
            "INSERT INTO session (id, host, pid, version, concurrency, lease) VALUES (7, 'web-1', 11, '1', 8, '1 h')"
        )
        for n in range(1, 121):
            names = dice.choice("abc"), dice.choice(["mail", "image"]), dice.choice([None, None, "acme", "other"])
            unique = f"u{n}" if n % 10 == 0 else None
            if n % 2 or n % 10 == 0:
                places = dice.choice([0, 0, 5]), dice.choice([-60, 3600]), n % 50, dice.choice([1, 2, 3])
                window.run(LIVE, n, *names, unique, *places)
            else:
                state = dice.choice([4, 4, 5, 6])
                window.run(
                    FINISHED,
                    n,
                    *names,
                    unique,
                    state,
                    None if state == 4 else dice.choice(["ValueError: no", "Boom"]),
                    n % 50,
                )
        window.run("ANALYZE job")
        window.run("ANALYZE job_archive")
        yield window


FILTERS: list[JobFilter] = [
    {},
    *(
        {"state": state}
        for state in ("scheduled", "available", "running", "retryable", "suspended", "completed", "dead")
    ),
    {"state": "cancelled", "kind": "mail"},
    {"queue": "a"},
    {"queue": "a", "state": "available"},
    {"queue": "b", "state": "dead"},
    {"queue": "none"},
    {"kind": "image"},
    {"key": "acme"},
    {"key": "acme", "queue": "c", "state": "scheduled"},
    {"unique_key": "u40"},
    {"unique_key": "u40", "queue": "none"},
    {"worker": 7},
    {"worker": "web-1:11", "state": "running"},
    {"error": "valueerror"},
    {"since": timedelta(hours=5)},
    {"since": timedelta(hours=30), "until": timedelta(hours=9), "queue": "b"},
    {"since": datetime(2020, 1, 1, tzinfo=UTC), "until": datetime(2100, 1, 1, tzinfo=UTC), "kind": "mail"},
]


def everything(room: Window, chosen: JobFilter, **options: Any) -> list[int]:
    """The ids of all pages."""
    ids, before = list[int](), None
    for _ in range(120):
        found = room.do(searching.search(chosen, before=before, **options))
        ids += [job.id for job in found.jobs]
        if found.before is None:
            return ids
        assert before is None or found.before < before
        before = found.before
    raise AssertionError("the pages do not end")


def driven(
    room: Window, operation: operations.Operation[searching.Found], first: Callable[[operations.Query], object]
) -> searching.Found:
    """Runs an operation, and calls `first` before each of its statements."""

    def watched() -> operations.Operation[searching.Found]:
        try:
            query = next(operation)
            while True:
                first(query)
                query = operation.send((yield query))
        except StopIteration as stop:
            return stop.value

    return room.do(watched())


@pytest.mark.parametrize("window_of", [10, searching.WINDOW])
@pytest.mark.parametrize("chosen", FILTERS, ids=str)
def test_the_pages_together_are_what_the_list_has(chosen: JobFilter, window_of: int, mixed: Window) -> None:
    listed = mixed.do(history.matching(chosen))
    assert everything(mixed, chosen, limit=7, window=window_of) == listed


def test_a_page_that_a_window_does_not_fill_says_how_far_it_came(mixed: Window) -> None:
    found = mixed.do(searching.search({"kind": "none"}, limit=5, window=10))
    assert (found.jobs, found.before, found.looked_to) == ([], found.looked_to, found.looked_to)
    assert found.looked_to is not None
    last = mixed.do(searching.search({"kind": "none"}, limit=5, window=1000))
    assert (last.jobs, last.before, last.looked_to) == ([], None, None)


def test_the_few_jobs_of_a_queue_are_found_below_any_number_of_newer_ones(mixed: Window) -> None:
    mixed.run("INSERT INTO job (id, queue, kind) VALUES (-5, 'stuck', 'noop')")
    try:
        found = mixed.do(searching.search({"queue": "stuck", "state": "available"}, limit=5, window=3))
        assert [job.id for job in found.jobs] == [-5]
    finally:
        mixed.run("DELETE FROM job WHERE id = -5")


def test_large_arguments_make_a_page_shorter_not_larger(mixed: Window) -> None:
    mixed.run(LARGE)
    try:
        found = mixed.do(searching.search({"queue": "large"}, limit=50))
        assert (len(found.jobs), found.before) == (1, 1006)
        assert len(everything(mixed, {"queue": "large"}, limit=50)) == 6
    finally:
        mixed.run("DELETE FROM job WHERE queue = 'large'")


def test_unknown_states_and_workers_are_refused(mixed: Window) -> None:
    with pytest.raises(InvalidArguments, match="There is no state 'lost'"):
        mixed.do(searching.search({"state": "lost"}, limit=5))
    with pytest.raises(UsageError, match="No worker web-9:1 is known"):
        mixed.do(searching.search({"worker": "web-9:1"}, limit=5))


@pytest.fixture(scope="module")
def large(databases: Databases) -> Generator[Window]:
    """30,000 live and 30,000 finished jobs of one queue, and a few of another that are older than all of these."""
    with databases.migrated() as dsn, Window(dsn) as window:
        window.run(BULK)
        window.run("VACUUM ANALYZE job")
        window.run("ANALYZE job_archive")
        yield window


@pytest.mark.parametrize(
    "chosen",
    [
        {"kind": "none"}, {"state": "completed", "kind": "none"}, {"state": "dead", "kind": "none"}, {"queue": "old"},
        {"queue": "bulk", "kind": "none"}, {"key": "rare"}, {"key": "none"}, {"unique_key": "none"}, {"error": "none"},
        {"state": "available", "queue": "old"}, {"since": timedelta(hours=1), "kind": "none"}, {"queue": "none"},
    ],
    ids=str,
)  # fmt: skip
def test_no_filter_reads_a_table_from_end_to_end(chosen: JobFilter, large: Window) -> None:
    """Counted in pages of the tables: a window of 1,000 rows of each, and never the thousands of pages that they have."""
    whole = large.value("SELECT (pg_relation_size('job') / 8192)::int")
    pages = 0

    def count(query: operations.Query) -> None:
        nonlocal pages
        pages += large.pages(statement(query.name, "pulse"), query.parameters)

    driven(large, searching.search(chosen, limit=50, window=1000), count)
    assert whole > 450
    assert pages < 350
