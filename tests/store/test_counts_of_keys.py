"""The figures of a queue with keys are counted up to a bound, and no more is read for them: in rows, not in time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from psycopg.rows import tuple_row

from pulse_trio.sql import statement
from pulse_trio.store.links import WORKER_SETTINGS
from support.stores import Window

if TYPE_CHECKING:
    from collections.abc import Generator

    from support.databases import Databases

DUE = 25_000
"""Of each kind: due at their birth, and due since."""
MOST = 100


@pytest.fixture(scope="module")
def crowded(databases: Databases) -> Generator[Window]:
    with databases.migrated() as dsn, Window(dsn) as window:
        window.run(
            "INSERT INTO job (kind, queue, key, run_at, created_at)"
            f" SELECT 'noop', 'q', 'k' || n, now(), now() FROM generate_series(1, {DUE}) n"
        )
        window.run(
            "INSERT INTO job (kind, queue, key, run_at, created_at)"
            f" SELECT 'noop', 'q', 'k' || n, now(), now() - interval '1 h' FROM generate_series(1, {DUE}) n"
        )
        # Others in many queues, so that those of one queue seem few.
        window.run(
            "INSERT INTO job (kind, queue, key) SELECT 'noop', 'z' || n / 1000, 'k' || n FROM generate_series(1, 40000) n"
        )
        yield window


def rows_of(plan: dict[str, Any]) -> list[tuple[str, float]]:
    """Each scan of jobs with the rows that one run of it gave."""
    found = [(plan["Node Type"], plan["Actual Rows"])] if "Scan" in plan["Node Type"] and "Index Name" in plan else []
    for child in plan.get("Plans", ()):
        found += rows_of(child)
    return found


@pytest.mark.parametrize("analyzed", [False, True])
@pytest.mark.parametrize("worker", [True, False])
def test_no_part_of_the_count_reads_more_rows_than_it_may_give(
    crowded: Window, *, worker: bool, analyzed: bool
) -> None:
    if analyzed:
        crowded.run("VACUUM ANALYZE job")
    with crowded.connection.transaction(force_rollback=True):
        if worker:
            crowded.use_settings(WORKER_SETTINGS, local=True)
        # As where the table is far larger than memory: a page out of turn is dear, and a bitmap reads pages in turn.
        crowded.run("SET LOCAL random_page_cost = 100")
        explain = b"EXPLAIN (ANALYZE, FORMAT JSON) " + statement("metrics_queues", "pulse")
        (row,) = crowded.connection.execute(explain, {"most": MOST}).fetchall()

    scans = rows_of(row["QUERY PLAN"][0]["Plan"])
    assert scans
    assert [scan for scan in scans if scan[1] > MOST] == []


def test_the_count_says_as_many_as_it_may(crowded: Window) -> None:
    cursor = crowded.connection.cursor(row_factory=tuple_row)
    rows = cursor.execute(statement("metrics_queues", "pulse"), {"most": MOST}).fetchall()

    assert [row[1] for row in rows if row[0] == "q"] == [2 * MOST]
