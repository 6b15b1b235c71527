"""maintain(): days ahead, retention, and an index that stays narrow."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import psycopg
import pytest
import trio

from support.stores import Window, claim, end, open_store

if TYPE_CHECKING:
    from collections.abc import Sequence

PARENTS = ("job_archive", "attempt")


def days(window: Window, parent: str) -> list[str]:
    """The days that have a partition."""
    rows = window.run(
        "SELECT relname FROM pg_inherits JOIN pg_class c ON c.oid = inhrelid WHERE inhparent = %s::regclass", parent
    )
    return sorted(r["relname"].removeprefix(f"{parent}_") for r in rows if not r["relname"].endswith("_default"))


def day(offset: int) -> str:
    return f"{datetime.now(UTC).date() + timedelta(days=offset):%Y%m%d}"


def maintain(window: Window, retention: str = "7 days") -> tuple[list[str], list[str]]:
    """(created, dropped)."""
    rows = window.run("SELECT * FROM maintain(%s)", retention)
    return [r["created"] for r in rows if r["created"]], [r["dropped"] for r in rows if r["dropped"]]


def drop(window: Window, offsets: Sequence[int]) -> None:
    for parent in PARENTS:
        for offset in offsets:
            window.run(f"DROP TABLE {parent}_{day(offset)}")


def archive(window: Window, job_id: int, finished_at: datetime) -> None:
    """A finished job as it was then; lands wherever the partitions say."""
    window.run(
        "INSERT INTO job_archive (id, finished_at, started_at, run_at, created_at, locked_by, attempt, failures, max_attempts,"
        " priority, state, queue, kind, args) VALUES (%s, %s, now(), now(), now(), 1, 1, 0, 20, 0, 4, 'q', 'k', '{}')",
        job_id, finished_at,
    )  # fmt: skip


def test_migration_makes_yesterday_today_and_a_week_ahead(alone: Window) -> None:
    expected = [day(offset) for offset in range(-1, 8)]
    for parent in PARENTS:
        assert days(alone, parent) == expected


def test_maintenance_makes_what_is_missing_and_is_idempotent(alone: Window) -> None:
    drop(alone, [0, 7])
    created, dropped = maintain(alone)
    assert sorted(created) == sorted(f"{parent}_{day(offset)}" for parent in PARENTS for offset in (0, 7))
    assert dropped == []
    assert maintain(alone) == ([], [])


def test_days_past_retention_are_dropped_and_the_last_day_kept_is_whole(alone: Window) -> None:
    for offset in (-9, -8, -7, -3):
        for parent in PARENTS:
            alone.run(
                f"CREATE TABLE {parent}_{day(offset)} PARTITION OF {parent}"
                f" FOR VALUES FROM ('{day(offset)} 00:00Z') TO ('{day(offset + 1)} 00:00Z')"
            )
    created, dropped = maintain(alone)
    assert created == []
    # What finished seven days and an hour ago stands in the partition of day -7 or -8; that of day -7 may still be wanted.
    assert sorted(dropped) == sorted(f"{parent}_{day(offset)}" for parent in PARENTS for offset in (-9, -8))
    assert maintain(alone, "1 day")[1] == [f"{p}_{day(o)}" for p in PARENTS for o in (-7, -3)]


def test_finished_jobs_within_retention_survive(alone: Window) -> None:
    kept = datetime.now(UTC) - timedelta(days=6, hours=23)
    archive(alone, 1, kept)
    archive(alone, 2, datetime.now(UTC))
    maintain(alone)
    assert alone.value("SELECT count(*) FROM job_archive") == 2


def test_rows_in_the_default_partition_do_not_stop_maintenance(alone: Window) -> None:
    # Nobody maintained for a week: today's jobs land in the default partition, and today's partition cannot be made.
    drop(alone, range(-1, 8))
    now = datetime.now(UTC)
    archive(alone, 1, now)
    archive(alone, 2, now - timedelta(days=30))
    alone.run(
        "INSERT INTO attempt (job_id, attempt, session, started_at, ended_at, outcome)"
        " VALUES (1, 1, 1, now(), now(), 'failed'), (2, 1, 1, now(), now() - interval '30 days', 'failed')"
    )
    created, _ = maintain(alone)
    assert sorted(created) == sorted(f"{p}_{day(o)}" for p in PARENTS for o in range(-1, 8) if o != 0)
    assert [r["id"] for r in alone.run("SELECT id FROM job_archive")] == [1]
    assert [r["job_id"] for r in alone.run("SELECT job_id FROM attempt")] == [1]
    assert maintain(alone) == ([], [])


async def test_completions_go_on_without_a_single_day(alone: Window) -> None:
    drop(alone, range(-1, 8))
    ids = alone.enqueue_many(2, "q")
    async with open_store(alone.dsn) as store:
        first, second = await claim(store, "q")
        assert len((await store.settle([end(first), end(second, "discarded", error="no")])).accepted) == 2
    assert [alone.state(i) for i in ids] == ["completed", "dead"]


async def test_two_maintainers_at_once_do_the_work_once(alone: Window) -> None:
    drop(alone, range(-1, 8))
    async with open_store(alone.dsn) as one, open_store(alone.dsn) as two, trio.open_nursery() as nursery:
        nursery.start_soon(one.maintain, 86400.0)
        nursery.start_soon(two.maintain, 86400.0)
    for parent in PARENTS:
        assert days(alone, parent) == [day(offset) for offset in range(-1, 8)]


def test_a_second_maintainer_does_not_wait_for_the_first(alone: Window) -> None:
    drop(alone, [3])
    with Window(alone.dsn) as other, other.connection.transaction():
        assert len(maintain(other)[0]) == 2
        assert maintain(alone) == ([], [])


def test_maintenance_gives_way_to_whoever_holds_the_archive(alone: Window) -> None:
    drop(alone, [3])
    with Window(alone.dsn) as other, other.connection.transaction():
        other.run("SELECT FROM job_archive")
        assert maintain(alone) == ([], [])
    assert len(maintain(alone)[0]) == 2


def test_maintenance_forgets_sessions_that_ended_long_ago(alone: Window) -> None:
    for session, ended, seen in [
        (1, "now() - interval '2 days'", "now() - interval '2 days'"),
        (2, "now()", "now()"),
        (3, "NULL", "now() - interval '8 days'"),
        (4, "NULL", "now() - interval '6 days'"),
    ]:
        alone.run(
            "INSERT INTO session (id, host, pid, version, concurrency, lease, ended_at, seen_at)"
            f" VALUES ({session}, 'h', 1, '0', 1, '30 s', {ended}, {seen})"
        )
    maintain(alone)
    assert [r["id"] for r in alone.run("SELECT id FROM session ORDER BY id")] == [2, 4]


def test_nobody_else_may_call_it_unasked(alone: Window) -> None:
    assert not alone.value("SELECT has_function_privilege('pg_monitor', 'maintain(interval)'::regprocedure, 'execute')")


async def test_maintenance_makes_the_watchdogs_index_narrow_again(alone: Window) -> None:
    if alone.value("SELECT to_regclass('job_lease')") is None:
        pytest.skip("below PostgreSQL 16 there is no such index")
    # Every page has held a running row, so every range holds a lease that has long expired.
    alone.enqueue_many(2000, "q")
    async with open_store(alone.dsn) as store:
        claims = await claim(store, "q", 2000)
        alone.expire(*[c.id for c in claims])
        await store.settle([end(c, "released") for c in claims])
    alone.run("VACUUM job")
    assert lossy_pages(alone) > 0

    maintain(alone)

    assert lossy_pages(alone) == 0


def lossy_pages(window: Window) -> int:
    """The pages of the live table that the watchdog's scan reads."""
    with psycopg.connect(window.dsn) as connection:
        connection.execute("SET LOCAL enable_seqscan = off; SET LOCAL enable_indexscan = off")
        plan = connection.execute(
            "EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF) SELECT id FROM pulse.job"
            " WHERE state = 2 AND lease_until < statement_timestamp()"
        ).fetchall()
    text = "\n".join(line for (line,) in plan)
    assert "Bitmap Index Scan on job_lease" in text
    return sum(int(n) for n in re.findall(r"lossy=(\d+)", text))
