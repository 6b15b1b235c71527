"""Lists with filters, and what is done to many jobs at once."""

from __future__ import annotations

import math
import re
import threading
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pulse_trio import (
    InvalidArguments,
    InvalidTransition,
    SyncClient,
    TookTooLong,
    UnknownJob,
    UsageError,
    open_client,
)
from pulse_trio.sql import statement
from pulse_trio.store import history, operations
from support.stores import Window, claim, claim_one, end, open_store

if TYPE_CHECKING:
    from collections.abc import Generator

    from pulse_trio.store import WorkerStore
    from support.databases import Databases

ROWS = 100_000


def listing(chosen: Any) -> Any:
    return history.jobs(chosen, limit=100)


def listed(window: Window, **chosen: Any) -> list[int]:
    limit = chosen.pop("limit", 100)
    return [j.id for j in window.do(history.jobs(chosen, limit=limit))]  # type: ignore[arg-type]


# Filters


async def test_every_filter_finds_its_jobs_and_no_others(alone: Window) -> None:
    store_a = open_store(alone.dsn)
    async with store_a as one, open_store(alone.dsn) as two:
        ids = alone.enqueue_many(6, "q", unique_key=None)
        done, dead, cancelled, failed, snoozed = await claim(one, "q", 5)
        running = await claim_one(two, "q")
        await one.settle([
            end(done), end(dead, "discarded", error="ValueError: No Luck\n\ntrace"), end(cancelled, "cancelled", error="why"),
            end(failed, "failed", delay=600.0, error="KeyError: luck?"), end(snoozed, "snoozed", delay=600.0),
        ])  # fmt: skip
        keyed = alone.enqueue("other", kind="special", unique_key="k")

        assert listed(alone, state="completed") == [done.id]
        assert listed(alone, state="dead") == [dead.id]
        assert listed(alone, state="cancelled") == [cancelled.id]
        assert listed(alone, state="retryable") == [failed.id]
        assert listed(alone, state="scheduled") == [snoozed.id]
        assert listed(alone, state="running") == [running.id]
        assert listed(alone, state="available") == [keyed]
        assert listed(alone, queue="q") == ids[::-1]
        assert listed(alone, kind="special") == [keyed]
        assert listed(alone, unique_key="k") == [keyed]
        assert listed(alone, error="no LUCK") == [dead.id]
        assert listed(alone, error="luck") == [failed.id, dead.id]
        assert listed(alone, error="%") == []
        assert listed(alone, worker=two.session) == [running.id]
        assert listed(alone, worker=str(one.session)) == [cancelled.id, dead.id, done.id]
        (row,) = alone.run("SELECT host, pid FROM session WHERE id = %s", one.session)
        assert listed(alone, worker=f"{row['host']}:{row['pid']}") == [running.id, cancelled.id, dead.id, done.id]
        assert listed(alone, state="dead", queue="other") == []
        assert listed(alone, limit=2) == [keyed, running.id]


async def test_a_jobs_time_is_its_end_and_before_that_its_enqueue(
    store: WorkerStore, window: Window, queue: str
) -> None:
    old, new, live = window.enqueue_many(3, queue)
    first, second, _ = await claim(store, queue)
    await store.settle([end(first), end(second)])
    window.run("UPDATE job_archive SET finished_at = now() - interval '2 h' WHERE id = %s", old)
    window.run("UPDATE job SET created_at = now() - interval '3 h' WHERE id = %s", live)

    assert listed(window, queue=queue, since=timedelta(hours=1)) == [new]
    assert listed(window, queue=queue, since=timedelta(hours=2.5)) == [new, old]
    assert listed(window, queue=queue, until=timedelta(hours=2.5)) == [live]
    moment = datetime.now(UTC) - timedelta(hours=1)
    assert listed(window, queue=queue, since=moment) == [new]
    assert listed(window, queue=queue, until=moment) == [live, old]


@pytest.mark.parametrize(
    ("chosen", "error", "what"),
    [
        ({"state": "done"}, InvalidArguments, "no state 'done'; there are: scheduled"),
        ({"since": datetime(2026, 1, 1)}, InvalidArguments, "needs its offset"),
        ({"worker": "web-1"}, InvalidArguments, "host:pid"),
        ({"worker": "web-1:x"}, InvalidArguments, "host:pid"),
        ({"worker": "nowhere:1"}, UsageError, "No worker nowhere:1 is known"),
    ],
    ids=str,
)
def test_a_filter_that_cannot_be_meant_is_refused(
    chosen: dict[str, Any], error: type[Exception], what: str, window: Window
) -> None:
    with pytest.raises(error, match=what):
        listed(window, **chosen)


async def test_clients_take_the_same_filters(store: WorkerStore, window: Window, queue: str) -> None:
    first, second = window.enqueue_many(2, queue)
    await store.settle([end(await claim_one(store, queue), "discarded", error="x")])
    sync = SyncClient(window.dsn)
    assert [j.id for j in sync.jobs(queue=queue)] == [second, first]
    async with open_client(window.dsn) as client:
        assert await client.jobs(queue=queue, state="dead", error="X") == sync.jobs(queue=queue, state="dead")
        assert [j.id for j in await client.jobs(queue=queue, before=second, limit=1)] == [first]


# Attempts


@pytest.mark.parametrize(
    "kind", ["completed", "failed", "timeout", "discarded", "cancelled", "snoozed", "released", "rescued"]
)
async def test_every_outcome_leaves_an_attempt_with_its_worker_its_times_and_its_error(
    kind: Any, store: WorkerStore, window: Window, queue: str
) -> None:
    job_id = window.enqueue(queue)
    error = None if kind in ("completed", "snoozed", "released") else "ValueError: no\n\nTraceback ..."
    await store.settle([end(await claim_one(store, queue), kind, delay=60.0, error=error)])
    (session,) = window.run("SELECT host, pid FROM session WHERE id = %s", store.session)
    for retried in (False, True):
        if retried:
            # A person's retry takes the archive's row, and no attempt with it.
            window.do(history.retry_batch([job_id]))
        (attempt, *_) = window.do(operations.attempts(job_id))
        assert (attempt.attempt, attempt.outcome, attempt.error) == (1, kind, error)
        assert (attempt.worker, attempt.host, attempt.pid) == (store.session, session["host"], session["pid"])
        assert attempt.started_at is not None
        assert attempt.ended_at is not None
        assert attempt.started_at <= attempt.ended_at


# Plans


@pytest.fixture(scope="module")
def large(databases: Databases) -> Generator[Window]:
    """100,000 finished jobs over eight days, one in 500 dead, one in 1,000 with a unique key; as many that wait."""
    with databases.migrated() as dsn, Window(dsn) as window:
        today = datetime.now(UTC).date()
        for back in range(2, 9):
            day = today - timedelta(days=back)
            window.run(
                f"CREATE TABLE job_archive_{day:%Y%m%d} PARTITION OF job_archive"
                f" FOR VALUES FROM ('{day} 00:00Z') TO ('{day + timedelta(days=1)} 00:00Z')"
            )
        window.run(
            "INSERT INTO job_archive (id, finished_at, started_at, run_at, created_at, locked_by, attempt, failures,"
            " max_attempts, priority, state, queue, kind, args, unique_key, error)"
            " SELECT n, t, t, t, t, n % 10, 1, 0, 20, 0, CASE WHEN n % 500 = 0 THEN 5 ELSE 4 END, 'q' || n % 5,"
            "   'kind' || n % 7, '{}', CASE WHEN n % 1000 = 0 THEN 'u' || n END, CASE WHEN n % 500 = 0 THEN 'boom' END"
            f" FROM generate_series(1, {ROWS}) n,"
            f" LATERAL (SELECT now() - interval '8 days' + n * interval '8 days' / {ROWS} AS t) moment"
        )
        window.run(
            "INSERT INTO job (id, kind, queue, created_at, unique_key, state, attempt, locked_by, lease_until)"
            f" SELECT {ROWS} + n, 'kind' || n % 7, 'q' || n % 5, now(), CASE WHEN n % 1000 = 0 THEN 'v' || n END,"
            "   1 + running, running, 9 * running, CASE running WHEN 1 THEN now() + interval '1 h' ELSE 'infinity' END"
            f" FROM generate_series(1, {ROWS}) n, LATERAL (SELECT (n % 1000 = 0)::int AS running) r"
        )
        window.run("VACUUM ANALYZE job")
        window.run("ANALYZE job_archive")
        yield window


def plan_of(window: Window, *, analyze: bool = False, limit: int = 50, **chosen: Any) -> str:
    operation = history.matching(chosen, limit=limit)  # type: ignore[arg-type]
    query = next(operation)
    how = b"EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF, SUMMARY OFF) " if analyze else b"EXPLAIN (COSTS OFF) "
    with psycopg.connect(window.dsn) as connection:
        rows = connection.execute(how + statement(query.name, "pulse"), query.parameters).fetchall()
    return "\n".join([line for (line,) in rows])


def read(plan: str) -> float:
    """The most rows that one scan read or threw away."""
    rows = [float(r) for r in re.findall(r"Scan.*?actual rows=([\d.]+)", plan)]
    removed = [float(r) for r in re.findall(r"Rows Removed by \w+(?: \w+)*: (\d+)", plan)]
    return max(rows + removed)


@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"state": "completed"},
        {"state": "dead"},
        {"state": "cancelled"},
        {"state": "available"},
        {"queue": "q1"},
        {"kind": "kind3"},
        {"worker": 3, "state": "completed"},
        {"unique_key": "u5000"},
        {"unique_key": "v5000"},
        {"error": "boom", "state": "dead"},
        {"state": "completed", "since": timedelta(hours=1)},
        {"state": "dead", "queue": "q0", "kind": "kind0"},
    ],
    ids=str,
)
def test_a_list_walks_indexes_and_reads_little_of_a_large_archive(chosen: dict[str, Any], large: Window) -> None:
    # A partition that is empty may be scanned; a day has 12,500 rows.
    plan = plan_of(large, analyze=True, **chosen)
    assert read(plan) <= 1000, plan


def test_a_finished_state_leaves_the_live_table_alone_and_a_live_one_the_archive(large: Window) -> None:
    assert not re.search(r"on job j|on job\b(?!_)", plan_of(large, state="dead"))
    assert "job_archive" not in plan_of(large, state="running")


def test_what_runs_is_found_by_the_lease_index(large: Window) -> None:
    # Below PostgreSQL 16 there is no such index.
    exists = large.value("SELECT to_regclass('job_lease')") is not None
    assert ("Bitmap Index Scan on job_lease" in plan_of(large, state="running", limit=1000)) == exists


def test_days_before_since_are_not_opened(large: Window) -> None:
    plan = plan_of(large, analyze=True, state="completed", since=timedelta(hours=1))
    scanned = {p for p in re.findall(r"on (job_archive_\w+)", plan) if "never executed" not in plan}
    assert len(scanned) <= 3 + 8  # today, yesterday if it is past midnight, the default, and the days ahead
    assert f"job_archive_{datetime.now(UTC).date() - timedelta(days=5):%Y%m%d}" not in plan


def test_a_list_that_takes_too_long_is_stopped_and_the_connection_is_as_before(large: Window) -> None:
    with psycopg.connect(large.dsn) as connection:
        connection.execute("SET statement_timeout = '77s'")
        client = SyncClient(connection)
        with pytest.raises(TookTooLong, match="took too long"):
            client.jobs(error="nowhere", timeout=0.001)
        # The caller's transaction goes on, with its own setting, after a failure and after a success.
        assert connection.execute("SHOW statement_timeout").fetchone() == ("77s",)
        with pytest.raises(InvalidArguments, match="timeout must be seconds from 0 on"):
            client.jobs(limit=1, timeout=math.nan)
        assert client.jobs(limit=1, timeout=60)
        assert connection.execute("SHOW statement_timeout").fetchone() == ("77s",)


# Retrying many


async def dead_jobs(window: Window, store: WorkerStore, queue: str, count: int, **options: Any) -> list[int]:
    ids = window.enqueue_many(count, queue, **options)
    await store.settle([end(c, "discarded", error="x") for c in await claim(store, queue, count)])
    return ids


async def test_a_filters_jobs_are_retried_oldest_first_and_no_others(
    store: WorkerStore, window: Window, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "BATCH", 2)
    ids = await dead_jobs(window, store, queue, 5)
    kept = window.enqueue(queue)
    await store.settle([end(await claim_one(store, queue))])

    done = window.do(history.retry_many({"state": "dead", "queue": queue}, limit=3))
    assert done == history.Retried(ids[:3], {})
    assert [window.state(i) for i in [*ids, kept]] == ["available"] * 3 + ["dead"] * 2 + ["completed"]
    rest = window.do(history.retry_many({"state": "dead", "queue": queue}))
    assert rest.retried == ids[3:]


async def test_with_a_rate_they_come_due_one_after_the_other(
    store: WorkerStore, window: Window, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "BATCH", 2)
    ids = await dead_jobs(window, store, queue, 5)
    window.do(history.retry_many({"state": "dead", "queue": queue}, rate=0.01))
    due = [window.job(i)["run_at"] for i in ids]
    gaps = [(later - sooner).total_seconds() for sooner, later in pairwise(due)]
    assert gaps == pytest.approx([100.0] * 4, abs=5.0)
    assert [window.state(i) for i in ids] == ["available"] + ["scheduled"] * 4


async def test_a_unique_key_in_use_refuses_one_retry_and_the_rest_goes_on(
    store: WorkerStore, window: Window, queue: str
) -> None:
    first = await dead_jobs(window, store, queue, 1, unique_key="k")
    second = await dead_jobs(window, store, queue, 1, unique_key="k")
    plain = await dead_jobs(window, store, queue, 1)
    live = window.enqueue(queue, unique_key="other")
    held = await dead_jobs(window, store, f"{queue}2", 1, unique_key="x")
    holder = window.enqueue(f"{queue}2", unique_key="x")

    done = window.do(history.retry_batch([*first, *second, *plain, live, *held, 987654321]))

    assert done.retried == [*first, *plain]
    assert set(done.refused) == {*second, live, *held, 987654321}
    assert "unique key" in done.refused[second[0]]
    assert f"the live job {holder} on that queue has the same unique key" in done.refused[held[0]]
    assert f"Job {live} is available" in done.refused[live]
    assert "There is no job 987654321" in done.refused[987654321]
    # What was refused is where it was, with everything.
    assert window.state(second[0]) == "dead"
    assert window.state(held[0]) == "dead"
    with pytest.raises(InvalidTransition, match=f"the live job {holder} on that queue has the same unique key"):
        window.do(operations.retry(held[0]))


async def test_a_deadline_that_has_passed_does_not_end_the_retry(
    store: WorkerStore, window: Window, queue: str
) -> None:
    past, ahead = window.enqueue_many(2, queue, timeout=9.0)
    await store.settle([end(c, "discarded", error="x") for c in await claim(store, queue)])
    for job_id, deadline in ((past, 1.0), (ahead, 1e11)):
        window.run(
            "UPDATE job_archive SET options = %s WHERE id = %s", f'{{"timeout":9.0,"deadline":{deadline}}}', job_id
        )
    window.do(history.retry_batch([past, ahead]))
    assert [window.value("SELECT options::jsonb FROM job WHERE id = %s", i) for i in (past, ahead)] == [
        {"timeout": 9.0}, {"timeout": 9.0, "deadline": 1e11},
    ]  # fmt: skip


async def test_a_hurried_job_is_never_put_off_by_a_rate(window: Window, queue: str) -> None:
    soon = window.enqueue(queue, delay=30)
    window.do(history.retry_batch([soon], delay=3600.0))
    assert window.job(soon)["run_at"] < datetime.now(UTC) + timedelta(seconds=60)


async def test_two_retries_of_the_same_jobs_at_once_retry_each_once(
    store: WorkerStore, window: Window, queue: str
) -> None:
    ids = await dead_jobs(window, store, queue, 300)
    answers: list[history.Retried] = []
    start = threading.Barrier(2)

    def retry(ids: list[int]) -> None:
        start.wait()
        answers.append(window.do(history.retry_batch(ids)))

    both = [threading.Thread(target=retry, args=(order,)) for order in (ids, ids[::-1])]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert sorted(i for a in answers for i in a.retried) == ids
    assert window.value("SELECT count(*) FROM jobs WHERE queue = %s", queue) == 300
    assert {window.state(i) for i in ids} == {"available"}


def test_an_action_by_filter_needs_a_state(window: Window, queue: str) -> None:
    for action in (history.retry_many, history.delete_many):
        with pytest.raises(UsageError, match="Say which state"):
            window.do(action({"queue": queue}))


@pytest.mark.parametrize("name", ["since", "until"])
def test_a_moment_that_is_text_is_refused_as_what_it_is(name: str, window: Window) -> None:
    with pytest.raises(InvalidArguments, match=rf"^{name} is a datetime with its offset, or a timedelta.*'2h'"):
        listed(window, **{name: "2h"})


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_is_none_is_refused(rate: float, window: Window) -> None:
    with pytest.raises(InvalidArguments, match="rate"):
        window.do(history.retry_many({"state": "dead"}, rate=rate))


# Deleting


async def test_deleting_takes_the_job_and_its_attempts_and_never_a_running_one(
    store: WorkerStore, window: Window, queue: str
) -> None:
    ids = window.enqueue_many(5, queue)
    claims = await claim(store, queue, 4)
    await store.settle([
        end(claims[0]), end(claims[1], "discarded", error="x"), end(claims[2], "failed", delay=60.0, error="y"),
    ])  # fmt: skip
    client = SyncClient(window.dsn)
    for job_id in (ids[0], ids[1], ids[2], ids[4]):
        client.delete(job_id)
    with pytest.raises(InvalidTransition, match=f"Job {ids[3]} is running: cancel it first"):
        client.delete(ids[3])
    with pytest.raises(UnknownJob, match=f"no job {ids[0]}"):
        client.delete(ids[0])
    assert listed(window, queue=queue) == [ids[3]]
    assert window.value("SELECT count(*) FROM attempt WHERE job_id = ANY (%s)", ids) == 0
    assert (await store.settle([end(claims[3])])).accepted


async def test_deleting_many_goes_batch_by_batch_and_leaves_what_is_locked(
    window: Window, store: WorkerStore, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "BATCH", 2)
    ids = await dead_jobs(window, store, queue, 5)
    with Window(window.dsn) as other, other.connection.transaction():
        other.run("SELECT FROM job_archive WHERE id = %s FOR UPDATE", ids[2])
        done = window.do(history.delete_many({"state": "dead", "queue": queue}))
    assert done.deleted == [i for i in ids if i != ids[2]]
    assert "look again" in done.refused[ids[2]]
    async with open_client(window.dsn) as client:
        assert (await client.delete_many(state="dead", queue=queue)).deleted == [ids[2]]
        assert (await client.retry_many(state="dead", queue=queue)).retried == []
