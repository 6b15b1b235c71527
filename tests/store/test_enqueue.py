"""Enqueuing: from Python, in the caller's transaction, and from SQL."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg.rows import DictRow, dict_row

from pulse_trio import Client, InvalidArguments, JobRequest, SyncClient, UsageError, open_client
from pulse_trio.client import request_by_name
from pulse_trio.postgres import TrioConnection
from pulse_trio.store import new_jobs
from support.stores import Window, claim_one, end

if TYPE_CHECKING:
    from pulse_trio.store import WorkerStore

SOON = timedelta(seconds=30)


def test_a_job_has_the_documented_defaults(window: Window) -> None:
    job = window.job(SyncClient(window.dsn).enqueue("noop").id)
    assert job["state"] == "available"
    assert (job["queue"], job["kind"], job["args"]) == ("default", "noop", {})
    assert (job["priority"], job["attempt"], job["max_attempts"]) == (0, 0, 20)
    assert job["run_at"] == job["created_at"]
    for name in (
        "started_at",
        "finished_at",
        "worker",
        "lease_until",
        "result",
        "error",
        "cancel_reason",
        "unique_key",
    ):
        assert job[name] is None
    row = window.row(job["id"])
    assert row is not None
    assert row["options"] is None


def test_sql_defaults_are_the_same_as_pythons(window: Window) -> None:
    by_python = window.row(SyncClient(window.dsn).enqueue("noop").id)
    by_sql = window.row(window.value("SELECT enqueue('noop')"))
    assert by_python is not None
    assert by_sql is not None
    for own in ("id", "ctid", "xmin", "run_at", "created_at"):
        del by_python[own], by_sql[own]
    assert by_python == by_sql


def test_every_option_is_written_on_the_row(window: Window, queue: str) -> None:
    run_at = datetime(2040, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
    options: dict[str, Any] = {"priority": -7, "max_attempts": 3, "run_at": run_at, "unique_key": "k"}
    by_python = window.enqueue(queue, args={"a": [1, None, "x"]}, timeout=1.5, **options)
    by_sql = window.value(
        "SELECT enqueue('noop', '{\"a\": [1, null, \"x\"]}', %s, -7, %s, 3, '1.5 s', 'k2')", queue, run_at
    )
    for job_id in (by_python, by_sql):
        job = window.job(job_id)
        assert job["state"] == "scheduled"
        assert {name: job[name] for name in ("priority", "max_attempts", "run_at")} == {
            name: options[name] for name in ("priority", "max_attempts", "run_at")
        }
        assert job["args"] == {"a": [1, None, "x"]}
        row = window.row(job_id)
        assert row is not None
        assert row["options"] == {"timeout": 1.5}


def test_a_delay_counts_from_the_transactions_start(window: Window, queue: str) -> None:
    job = window.job(window.enqueue(queue, delay=90.25))
    assert job["run_at"] - job["created_at"] == timedelta(seconds=90.25)
    assert window.job(window.enqueue(queue, delay=0))["state"] == "available"


def test_deadline_and_expiry_are_moments_by_the_databases_clock_however_a_job_is_enqueued(
    window: Window, queue: str
) -> None:
    moment = datetime(2040, 1, 1, tzinfo=UTC)
    options: dict[str, Any] = {"deadline": 90.5, "expires": timedelta(minutes=1), "timeout": 3}
    requests = [request_by_name("noop", queue=queue, **options) for _ in range(20)]
    client = SyncClient(window.dsn)
    ids = [window.enqueue(queue, **options), window.do(new_jobs.enqueue_many(requests[:1]))[0].id]
    ids += [done.id for done in client.enqueue_many(requests)]
    for job_id in ids:
        created = window.job(job_id)["created_at"].timestamp()
        row = window.row(job_id)
        assert row is not None
        assert row["options"] == pytest.approx({"timeout": 3, "deadline": created + 90.5, "expires": created + 60})
    row = window.row(window.enqueue(queue, deadline=moment, expires=5))
    assert row is not None
    assert row["options"]["deadline"] == moment.timestamp()
    assert row["options"]["expires"] < moment.timestamp()


def test_a_past_run_at_is_kept_and_due(window: Window, queue: str) -> None:
    run_at = datetime(2001, 1, 1, tzinfo=UTC)
    job = window.job(window.enqueue(queue, run_at=run_at))
    assert (job["state"], job["run_at"]) == ("available", run_at)


@pytest.mark.parametrize(
    "kind",
    [
        "a" * 256,
        "é" * 128,
        "; DROP TABLE job",
        "'\"\\{},",
        "NULL",
        "%s %(kind)s",
        "name with spaces",
        "\U0001f600",
        "{}",
    ],
)
async def test_hostile_kinds_round_trip(kind: str, store: WorkerStore, window: Window, queue: str) -> None:
    one = window.enqueue(queue, kind=kind)
    (many,) = window.do(new_jobs.enqueue_many([request_by_name(kind, queue=queue)]))
    by_sql = window.value("SELECT enqueue(%s, queue => %s)", kind, queue)
    for job_id in (one, many.id, by_sql):
        claimed = await claim_one(store, queue)
        assert (claimed.id, claimed.kind) == (job_id, kind)
        assert (await store.settle([end(claimed)])).accepted
        assert window.job(job_id)["kind"] == kind


@pytest.mark.parametrize("kind", ["", "a" * 257, "tab\there", "line\nbreak", "del\x7f"])
def test_invalid_kinds_are_refused_by_the_database_too(kind: str, window: Window) -> None:
    refused(window, JobRequest(kind=kind, args="{}"))
    with pytest.raises((psycopg.errors.CheckViolation, psycopg.DataError)):
        window.run("SELECT enqueue(%s)", kind)


@pytest.mark.parametrize("queue", ["", " ", "two words", "a" * 129, "é", "a\nb", "a,b", "a'b", 'a"b', "a;b", "%"])
def test_invalid_queue_names_are_refused_by_the_database_too(queue: str, window: Window) -> None:
    refused(window, JobRequest(kind="noop", args="{}", queue=queue))
    for statement in ("SELECT enqueue('noop', queue => %s)", "INSERT INTO queue (name) VALUES (%s)"):
        with pytest.raises(psycopg.errors.CheckViolation):
            window.run(statement, queue)


@pytest.mark.parametrize(
    "changes",
    [
        {"args": "[]"},
        {"args": '"text"'},
        {"args": "null"},
        {"args": "{"},
        {"args": '{"a": "' + "x" * 1_048_576 + '"}'},
        {"max_attempts": 0},
        {"max_attempts": 2**31},
        {"priority": 2**31},
        {"unique_key": ""},
        {"unique_key": "x" * 513},
        {"delay": 1e300},
        {"delay": 1e12},
        {"run_at": "the day after tomorrow"},
        {"run_at": "infinity"},
        {"options": "{"},
    ],
    ids=lambda changes: " ".join(f"{k}={v!r:.20}" for k, v in changes.items()),
)
def test_what_is_past_our_own_checks_is_refused_by_the_database(changes: dict[str, Any], window: Window) -> None:
    request: dict[str, Any] = {"kind": "noop", "args": "{}"} | changes
    refused(window, JobRequest(**request))


def refused(window: Window, request: JobRequest) -> None:
    """Both ways of enqueuing say whose fault it is, and write nothing."""
    before = window.value("SELECT count(*) FROM job")
    with pytest.raises(InvalidArguments):
        window.do(new_jobs.enqueue(request))
    with pytest.raises(InvalidArguments):
        window.do(new_jobs.enqueue_many([JobRequest(kind="fine", args="{}"), request]))
    assert window.value("SELECT count(*) FROM job") == before


# Unique keys


def test_a_duplicate_of_a_live_key_is_that_job(window: Window, queue: str) -> None:
    client = SyncClient(window.dsn)
    first = client.enqueue("noop", queue=queue, unique_key="k")
    second = client.enqueue("other", {"a": 1}, queue=queue, unique_key="k")
    assert (first.added, second.added) == (True, False)
    assert first.id == second.id
    assert window.value("SELECT enqueue('noop', queue => %s, unique_key => 'k')", queue) == first.id
    assert window.job(first.id)["kind"] == "noop"


def test_a_key_is_unique_within_its_queue(window: Window, queue: str) -> None:
    ids = {window.enqueue(f"{queue}.{n}", unique_key="k") for n in range(3)}
    assert len(ids) == 3


async def test_a_key_is_taken_while_its_job_runs_or_waits_for_a_retry_and_free_afterwards(
    store: WorkerStore, window: Window, queue: str
) -> None:
    first = window.enqueue(queue, unique_key="k")
    claimed = await claim_one(store, queue)
    assert window.enqueue(queue, unique_key="k") == first
    await store.settle([end(claimed, "failed", delay=0.0, error="x")])
    assert window.enqueue(queue, unique_key="k") == first
    await store.settle([end(await claim_one(store, queue))])
    second = window.enqueue(queue, unique_key="k")
    assert second != first
    await store.settle([end(await claim_one(store, queue), "discarded", error="x")])
    assert window.enqueue(queue, unique_key="k") not in (first, second)


def test_a_unique_key_is_exact_under_concurrent_producers(window: Window) -> None:
    producers, keys = 8, 20
    barrier = threading.Barrier(producers)

    def produce(number: int) -> list[tuple[int, bool]]:
        enqueued: list[tuple[int, bool]] = []
        with psycopg.connect(window.dsn, autocommit=True) as connection:
            client = SyncClient(connection)
            for key in range(keys):
                barrier.wait(30)
                if number == 0:
                    new_id = connection.execute(
                        "SELECT pulse.enqueue('noop', queue => 'race', unique_key => %s)", [f"k{key}"]
                    ).fetchone()
                    assert new_id is not None
                    enqueued.append((new_id[0], False))
                elif number == 1:
                    (done,) = client.enqueue_many([request_by_name("noop", queue="race", unique_key=f"k{key}")])
                    enqueued.append((done.id, done.added))
                else:
                    one = client.enqueue("noop", queue="race", unique_key=f"k{key}")
                    enqueued.append((one.id, one.added))
        return enqueued

    with ThreadPoolExecutor(producers) as pool:
        results = list(pool.map(produce, range(producers)))

    for answers in zip(*results, strict=True):
        assert len({job_id for job_id, _ in answers}) == 1
        # Number 0 asks in SQL, which does not say whether it added.
        assert sum(added for _, added in answers[1:]) <= 1
    assert window.value("SELECT count(*) FROM job WHERE queue = 'race'") == keys


def test_producers_of_overlapping_batches_do_not_deadlock(window: Window) -> None:
    barrier = threading.Barrier(4)

    def produce(number: int) -> list[int]:
        keys = [f"k{(7 * n + 11 * number) % 100}" for n in range(100)]
        requests = [request_by_name("noop", queue="batches", unique_key=key) for key in keys]
        with psycopg.connect(window.dsn, autocommit=True) as connection:
            barrier.wait(30)
            done = SyncClient(connection).enqueue_many(requests)
        return [e.id for _, e in sorted(zip(keys, done, strict=True))]

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(produce, range(4)))
    assert results.count(results[0]) == 4
    assert window.value("SELECT count(*) FROM job WHERE queue = 'batches'") == 100


# Batches


def test_a_batch_answers_in_the_order_of_the_requests_and_counts_its_ids_up(window: Window, queue: str) -> None:
    requests = [
        request_by_name("noop", {"n": n}, queue=f"{queue}.{(7 * n) % 3}", unique_key=f"{(13 * n) % 50}")
        for n in range(50)
    ]
    done = window.do(new_jobs.enqueue_many(requests))
    assert [e.added for e in done] == [True] * 50
    assert [e.id for e in done] == list(range(done[0].id, done[0].id + 50))
    assert [window.job(e.id)["args"]["n"] for e in done] == list(range(50))


def test_duplicates_inside_one_batch_are_the_first_of_them(window: Window, queue: str) -> None:
    live = window.enqueue(queue, unique_key="live")
    keys = ["a", None, "b", "a", "live", None, "b", "a"]
    done = window.do(new_jobs.enqueue_many([request_by_name("noop", queue=queue, unique_key=k) for k in keys]))
    assert [e.added for e in done] == [True, True, True, False, False, True, False, False]
    ids = [e.id for e in done]
    assert ids[3] == ids[7] == ids[0]
    assert ids[6] == ids[2]
    assert ids[4] == live
    assert len(set(ids)) == 5


def test_an_empty_batch_is_no_statement(window: Window) -> None:
    assert SyncClient(window.dsn).enqueue_many([]) == []


def test_batches_of_any_size_are_one_transaction(alone: Window) -> None:
    client = SyncClient(alone.dsn)
    requests = [request_by_name("noop", {"n": n}) for n in range(2345)]
    done = client.enqueue_many(iter(requests))
    assert len({e.id for e in done}) == 2345
    assert alone.value("SELECT count(DISTINCT xmin::text) FROM job") <= 3
    with pytest.raises(InvalidArguments):
        client.enqueue_many([*requests, JobRequest(kind="noop", args="{}", queue="no good")])
    assert alone.value("SELECT count(*) FROM job") == 2345


def test_batches_carry_every_option(window: Window, queue: str) -> None:
    options: dict[str, Any] = {
        "priority": 4,
        "max_attempts": 2,
        "timeout": 3.0,
        "unique_key": 'NULL "\\,{}',
        "run_at": datetime(2050, 1, 1, tzinfo=UTC),
    }
    one = window.enqueue(f"{queue}.1", args={"x": 'q"\\,{}'}, **options)
    (many,) = window.do(
        new_jobs.enqueue_many([request_by_name("noop", {"x": 'q"\\,{}'}, queue=f"{queue}.2", **options)])
    )
    rows = [window.row(one), window.row(many.id)]
    for row in rows:
        assert row is not None
        for own in ("id", "ctid", "xmin", "created_at", "queue"):
            del row[own]
    assert rows[0] == rows[1]


# In the caller's transaction


def test_using_a_sync_connection_commits_and_rolls_back_with_it(window: Window, queue: str) -> None:
    with psycopg.connect(window.dsn) as connection:
        client = SyncClient(window.dsn).using(connection)
        kept = client.enqueue("noop", queue=queue).id
        assert window.run("SELECT FROM job WHERE id = %s", kept) == []
        connection.commit()
        lost = [client.enqueue("noop", queue=queue).id]
        lost += [e.id for e in client.enqueue_many([request_by_name("noop", queue=queue)] * 3)]
        connection.rollback()
    assert window.state(kept) == "available"
    assert window.run("SELECT FROM job WHERE id = ANY (%s)", lost) == []


async def test_using_a_trio_connection_commits_and_rolls_back_with_it(window: Window, queue: str) -> None:
    lost: list[int] = []
    async with (
        open_client(window.dsn) as client,
        await TrioConnection.connect(window.dsn, autocommit=True) as connection,
    ):
        async with connection.transaction():
            kept = (await client.using(connection).enqueue("noop", queue=queue)).id
            assert window.run("SELECT FROM job WHERE id = %s", kept) == []
        async with connection.transaction(force_rollback=True):
            lost.append((await client.using(connection).enqueue("noop", queue=queue)).id)
            lost += [r.id for r in await client.using(connection).enqueue_many([request_by_name("noop")] * 3)]
    assert window.state(kept) == "available"
    assert window.run("SELECT FROM job WHERE id = ANY (%s)", lost) == []


async def test_a_refused_batch_leaves_the_callers_transaction_alive(window: Window, queue: str) -> None:
    bad = JobRequest(kind="noop", args="{}", queue="no good")
    with psycopg.connect(window.dsn) as connection:
        sync = SyncClient(connection)
        kept = [sync.enqueue("noop", queue=queue).id]
        with pytest.raises(InvalidArguments):
            sync.enqueue_many([bad])
        kept.append(sync.enqueue("noop", queue=queue).id)
    async with await TrioConnection.connect(window.dsn) as connection:
        client = Client(connection)
        with pytest.raises(InvalidArguments):
            await client.enqueue_many([bad])
        kept.append((await client.enqueue("noop", queue=queue)).id)
    assert [window.state(i) for i in kept] == ["available"] * 3


def test_an_aborted_transaction_is_named_as_such(window: Window) -> None:
    with psycopg.connect(window.dsn) as connection:
        with pytest.raises(psycopg.errors.DivisionByZero):
            connection.execute("SELECT 1/0")
        with pytest.raises(UsageError, match="aborted already"):
            SyncClient(connection).enqueue("noop")


def test_the_callers_row_factory_does_not_matter(window: Window, queue: str) -> None:
    with psycopg.Connection[DictRow].connect(window.dsn, row_factory=dict_row) as connection:
        client = SyncClient(connection)  # type: ignore[arg-type]
        first = client.enqueue("noop", queue=queue, unique_key="k")
        assert client.enqueue("noop", queue=queue, unique_key="k").id == first.id
        assert client.enqueue_many([request_by_name("noop", queue=queue)])[0].added
        assert client.job(first.id).queue == queue


def test_the_callers_cursor_class_does_not_matter(window: Window, queue: str) -> None:
    for factory in (psycopg.RawCursor, psycopg.ClientCursor):
        with psycopg.connect(window.dsn, cursor_factory=factory) as connection:
            assert SyncClient(connection).enqueue("noop", queue=queue).added


async def test_the_callers_row_factory_does_not_matter_on_trio(window: Window, queue: str) -> None:
    async with await TrioConnection[DictRow].connect(window.dsn, row_factory=dict_row) as connection:
        ref = await Client(connection).enqueue("noop", queue=queue)
        assert (await Client(connection).job(ref.id)).queue == queue


# From SQL


def test_sql_enqueues_in_the_callers_transaction(window: Window, queue: str) -> None:
    with psycopg.connect(window.dsn) as connection:
        row = connection.execute("SELECT pulse.enqueue('noop', queue => %s)", [queue]).fetchone()
        assert row is not None
        connection.rollback()
    assert window.run("SELECT FROM job WHERE id = %s", row[0]) == []


@pytest.mark.parametrize(
    "arguments",
    [
        "NULL",
        "'noop', '[]'",
        "'noop', NULL",
        "'noop', queue => NULL",
        "'noop', priority => NULL",
        "'noop', max_attempts => 0",
        "'noop', run_at => 'infinity'",
        "'noop', run_at => '-infinity'",
        "'noop', run_at => '12000-01-01'",
        "'noop', timeout => '0 s'",
        "'noop', timeout => '-1 s'",
        "'noop', timeout => '178000000 years'",
        "'noop', unique_key => ''",
        "'noop', jsonb_build_object('a', repeat('x', 1048577))",
        "repeat('k', 257)",
    ],
)
def test_sql_refuses_what_no_worker_or_client_could_handle(arguments: str, window: Window) -> None:
    with pytest.raises((psycopg.DataError, psycopg.IntegrityError)):
        window.run(f"SELECT enqueue({arguments})")


def test_sql_refuses_a_timeout_without_end(window: Window) -> None:
    if window.value("SELECT current_setting('server_version_num')::int") < 170000:
        pytest.skip("intervals are finite below PostgreSQL 17")
    with pytest.raises(psycopg.DataError):
        window.run("SELECT enqueue('noop', timeout => 'infinity')")


async def test_a_producer_needs_nothing_but_execute_on_enqueue(alone: Window) -> None:
    alone.run("CREATE ROLE producer_only")
    try:
        alone.run("GRANT USAGE ON SCHEMA pulse TO producer_only")
        alone.run("GRANT EXECUTE ON FUNCTION pulse.enqueue TO producer_only")
        alone.run("SET ROLE producer_only")
        job_id = alone.value("SELECT pulse.enqueue('noop', '{\"a\": 1}')")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            alone.run("SELECT FROM pulse.job")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            alone.run("SELECT pulse.maintain()")
        alone.run("RESET ROLE")
        assert alone.job(job_id)["args"] == {"a": 1}
    finally:
        alone.run("RESET ROLE; DROP OWNED BY producer_only; DROP ROLE producer_only")


def test_json_keeps_what_jsonb_would_round(window: Window, queue: str) -> None:
    big = 2**63 + 12345678901234567890
    job_id = window.enqueue(queue, args={"n": big, "f": 0.1, "s": "\u2028"})
    text = window.value("SELECT args::text FROM job WHERE id = %s", job_id)
    assert json.loads(text) == {"n": big, "f": 0.1, "s": "\u2028"}
