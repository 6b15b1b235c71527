"""maintain(): days ahead, retention, and an index that stays narrow."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import psycopg
import pytest
import trio
from psycopg.conninfo import conninfo_to_dict

from pulse_trio import InvalidArguments, InvalidName
from pulse_trio.migrate import migrate_sync
from pulse_trio.store import history
from support.stores import Window, claim, end, open_store

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from support.databases import Databases

PARENTS = ("job_archive", "attempt")


@pytest.fixture(scope="module")
def migrated(databases: Databases) -> Generator[str]:
    """The name of a database as the migrations leave it: with all days to come, and never maintained."""
    with databases.empty() as dsn:
        migrate_sync(dsn)
        yield str(conninfo_to_dict(dsn)["dbname"])


@pytest.fixture
def alone(databases: Databases, migrated: str) -> Generator[Window]:
    with databases.copied(migrated) as dsn, Window(dsn) as window:
        yield window


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
    alone.run("UPDATE maintenance SET maintained_at = '-infinity'")
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


def test_a_session_is_known_for_as_long_as_its_jobs_may_be(alone: Window) -> None:
    for session, ended, seen in [
        (1, "now() - interval '10 days'", "now() - interval '10 days'"),
        (2, "now() - interval '8 days'", "now() - interval '8 days'"),
        (3, "NULL", "now() - interval '10 days'"),
        (4, "NULL", "now() - interval '6 days'"),
    ]:
        alone.run(
            "INSERT INTO session (id, host, pid, version, concurrency, lease, ended_at, seen_at)"
            f" VALUES ({session}, 'h', 1, '0', 1, '30 s', {ended}, {seen})"
        )
    alone.do(history.set_retention("long", timedelta(days=20)))
    maintain(alone)
    assert [r["id"] for r in alone.run("SELECT id FROM session ORDER BY id")] == [1, 2, 3, 4]
    alone.do(history.set_retention("long", None))
    maintain(alone)
    assert [r["id"] for r in alone.run("SELECT id FROM session ORDER BY id")] == [2, 4]


# Retention of single queues


def make_days(window: Window, *offsets: int) -> None:
    for offset in offsets:
        for parent in PARENTS:
            window.run(
                f"CREATE TABLE {parent}_{day(offset)} PARTITION OF {parent}"
                f" FOR VALUES FROM ('{day(offset)} 00:00Z') TO ('{day(offset + 1)} 00:00Z')"
            )


def noon(offset: int) -> datetime:
    return datetime.now(UTC).replace(hour=12, minute=0, second=0, microsecond=0) + timedelta(days=offset)


def finished(window: Window, queue: str, offset: int, count: int = 1) -> list[int]:
    """Jobs that finished on a day, each with an attempt; their ids."""
    rows = window.run(
        "WITH done AS (INSERT INTO job_archive (id, finished_at, started_at, run_at, created_at, locked_by, attempt, failures,"
        "  max_attempts, priority, state, queue, kind, args)"
        " SELECT nextval('job_id_seq'), %s, %s, %s, %s, 1, 1, 0, 20, 0, 4, %s, 'k', '{}' FROM generate_series(1, %s)"
        " RETURNING id, finished_at), tried AS ("
        "  INSERT INTO attempt SELECT id, 1, 1, finished_at, finished_at, 'failed' FROM done)"
        " SELECT id FROM done",
        *[noon(offset)] * 4, queue, count,
    )  # fmt: skip
    return [r["id"] for r in rows]


def kept(window: Window) -> set[int]:
    rows = window.run("SELECT id FROM job_archive")
    # Attempts go with their jobs.
    assert {r["id"] for r in rows} == {r["job_id"] for r in window.run("SELECT job_id FROM attempt")}
    return {r["id"] for r in rows}


def sweep(window: Window, retention: str = "7 days", pages: int = 2000) -> int:
    """Prunes to the end of a sweep; how many calls that took."""
    calls = 1
    while window.value("SELECT prune(%s, %s)", retention, pages):
        calls += 1
    return calls


def test_a_queue_with_a_shorter_retention_loses_its_jobs_sooner_and_others_do_not(alone: Window) -> None:
    make_days(alone, -5, -3)
    alone.do(history.set_retention("short", timedelta(days=2)))
    old, new = finished(alone, "short", -5, 3) + finished(alone, "short", -3), finished(alone, "short", -1)
    others = finished(alone, "other", -5) + finished(alone, "other", -3) + finished(alone, "other", 0)
    maintain(alone)
    sweep(alone)
    assert kept(alone) == {*new, *others}
    assert not kept(alone) & set(old)


def test_a_queue_with_a_longer_retention_keeps_its_days_and_the_others_jobs_still_go(alone: Window) -> None:
    make_days(alone, -40, -20, -9, -6)
    alone.do(history.set_retention("audit", timedelta(days=30)))
    finished(alone, "audit", -40)
    gone = finished(alone, "other", -20) + finished(alone, "other", -9)
    audit = finished(alone, "audit", -20)
    recent = finished(alone, "other", -6)
    _, dropped = maintain(alone)
    assert dropped == [f"{p}_{day(-40)}" for p in PARENTS]
    sweep(alone)
    assert kept(alone) == {*audit, *recent}
    assert not kept(alone) & set(gone)


def test_a_day_that_the_sweep_has_emptied_is_dropped_before_its_time(alone: Window) -> None:
    make_days(alone, -20, -9)
    alone.do(history.set_retention("audit", timedelta(days=30)))
    finished(alone, "other", -20)
    audit = finished(alone, "audit", -9)
    sweep(alone)
    alone.run(f"VACUUM job_archive_{day(-20)}, attempt_{day(-20)}")
    assert maintain(alone)[1] == [f"{p}_{day(-20)}" for p in PARENTS]
    assert kept(alone) == set(audit)


def test_one_call_reads_a_bounded_number_of_pages_and_the_next_goes_on(alone: Window) -> None:
    make_days(alone, -4, -3)
    alone.do(history.set_retention("short", timedelta(hours=1)))
    for offset in (-4, -3):
        finished(alone, "short", offset, 2000)
    sizes = [alone.value(f"SELECT pg_relation_size('job_archive_{day(o)}') / 8192") for o in (-4, -3)]
    assert min(sizes) > 10
    before = alone.value("SELECT count(*) FROM job_archive")
    assert alone.value("SELECT prune('7 days', 5)")
    assert 0 < before - alone.value("SELECT count(*) FROM job_archive") < 1000
    # Vacuum cuts off emptied pages at the end: the sweep has to bear it.
    alone.run("VACUUM job_archive")
    assert sweep(alone, pages=5) > 2
    assert kept(alone) == set()


def test_days_in_which_nothing_more_comes_of_age_are_not_read_again(alone: Window) -> None:
    make_days(alone, -6, -5, -4)
    alone.do(history.set_retention("short", timedelta(days=2)))
    for offset in (-6, -5, -4, -1):
        finished(alone, "other", offset, 500)
    assert sweep(alone, pages=1) > 20
    late = finished(alone, "short", -5)
    assert sweep(alone, pages=1) < 5
    assert set(late) < kept(alone)
    # A new rule may ask for more of any day.
    alone.do(history.set_retention("other", timedelta(days=3)))
    sweep(alone)
    assert len(kept(alone)) == 500


async def test_a_worker_does_all_of_it_in_the_background(alone: Window) -> None:
    make_days(alone, -3)
    old = finished(alone, "short", -3)
    alone.do(history.set_retention("short", timedelta(days=1)))
    async with open_store(alone.dsn) as store:
        assert not await store.maintain(7 * 86400.0)
    assert not kept(alone) & set(old)


async def test_maintenance_that_another_worker_has_just_done_is_not_done_again(alone: Window) -> None:
    async with open_store(alone.dsn) as store:
        assert not await store.maintain(7 * 86400.0)
        drop(alone, [5])
        assert not await store.maintain(7 * 86400.0)
        assert day(5) not in days(alone, "attempt")
        alone.run("UPDATE maintenance SET maintained_at = now() - interval '1 h'")
        assert not await store.maintain(7 * 86400.0)
        assert day(5) in days(alone, "attempt")


async def test_maintenance_that_could_not_be_done_is_tried_again_soon(alone: Window) -> None:
    alone.run("UPDATE maintenance SET maintained_at = '-infinity'")
    drop(alone, [3])
    async with open_store(alone.dsn) as store:
        with Window(alone.dsn) as other, other.connection.transaction():
            other.run("SELECT FROM job_archive")
            assert await store.maintain(7 * 86400.0)
        assert not await store.maintain(7 * 86400.0)
    assert day(3) in days(alone, "attempt")


def test_maintenance_takes_no_advisory_lock(alone: Window) -> None:
    """Whoever may connect can hold one: who takes one for maintenance lets a stranger stop it."""
    drop(alone, [3])
    archive(alone, 1, datetime.now(UTC) - timedelta(days=3))
    held = "SELECT count(*) AS n FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"
    with alone.connection.transaction():
        assert maintain(alone, "1 day")[0]
        alone.run("SELECT prune('1 hour')")
        alone.run("SELECT prune_unique_holds()")
        assert alone.value(held) == 0


@pytest.mark.parametrize("retention", [timedelta(0), timedelta(seconds=-1), timedelta.max], ids=str)
def test_a_retention_that_is_none_is_refused(alone: Window, retention: timedelta) -> None:
    with pytest.raises(InvalidArguments, match="retention"):
        alone.do(history.set_retention("q", retention))
    with pytest.raises(InvalidName):
        alone.do(history.set_retention("no queue", timedelta(days=1)))
    assert alone.do(history.retentions()) == {}


def test_nobody_else_may_call_it_unasked(alone: Window) -> None:
    for function in ("maintain(interval)", "upkeep(interval)", "prune(interval, int)"):
        assert not alone.value("SELECT has_function_privilege('pg_monitor', %s::regprocedure, 'execute')", function)


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
