"""The public views show what the design says, and clients read them."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Literal

import pytest

from pulse_trio import InvalidTransition, State, SyncClient, UnknownJob, open_client
from pulse_trio.jobs import Progress
from pulse_trio.states import FINISHED, STOPPED
from pulse_trio.store import history, life, operations, searching
from support.stores import Window, claim, claim_one, end, open_store

if TYPE_CHECKING:
    from pulse_trio.jobs import OutcomeKind
    from pulse_trio.store import WorkerStore

# design.md section 5
COLUMNS = {
    "jobs": "id queue kind state priority attempt max_attempts run_at created_at started_at finished_at worker lease_until"
    " args result error cancel_reason unique_key progress progress_message key"
    " parent_id root_id child_key tags meta",
    "workers": "id host pid state started_at seen_at queues concurrency running version",
    "queues": "name paused available scheduled running oldest_available_age limit rate key_limit key_rate"
    " oldest_running_age dead suspended",
    "attempts": "job_id attempt worker started_at ended_at outcome error",
}


UNLIMITED = dict.fromkeys(("limit", "rate", "key_limit", "key_rate"))
QUIET = UNLIMITED | {"oldest_running_age": None, "dead": 0, "suspended": 0}


@pytest.mark.parametrize("view", COLUMNS)
def test_the_views_have_the_promised_columns(view: str, window: Window) -> None:
    rows = window.run(
        "SELECT column_name FROM information_schema.columns"
        " WHERE table_schema = 'pulse' AND table_name = %s ORDER BY ordinal_position",
        view,
    )
    assert " ".join(r["column_name"] for r in rows) == COLUMNS[view]


@pytest.mark.parametrize(
    "query",
    ["SELECT state, count(*) FROM jobs GROUP BY state", "SELECT id, kind, state FROM jobs ORDER BY id DESC LIMIT 100"],
)
def test_who_does_not_ask_for_errors_and_progress_reads_none(query: str, window: Window) -> None:
    """A count by state computed the error of each live job: 14 us each. PostgreSQL leaves out what nobody asks for if both
    halves of the view have the same types."""
    plan = "\n".join(row["QUERY PLAN"] for row in window.run(f"EXPLAIN (VERBOSE) {query}"))
    assert "job_archive" in plan
    assert not any(table in plan for table in ("attempt_", "progress", "member"))


async def test_one_queue_with_a_job_in_every_state(store: WorkerStore, window: Window, queue: str) -> None:
    ids = window.enqueue_many(7, queue)
    a, b, c, d, e, f, _ = await claim(store, queue)
    window.value("SELECT suspend(%s, %s, %s, '{}', '{}', '{approved}', NULL)", f.id, f.attempt, f.session)
    await store.settle([
        end(a), end(b, "discarded", error="x"), end(c, "cancelled", error="y"),
        end(d, "failed", delay=600.0, error="z"), end(e, "snoozed", delay=600.0),
    ])  # fmt: skip
    ids.append(window.enqueue(queue))
    window.run("UPDATE job SET run_at = now() - interval '90 s' WHERE id = %s", ids[-1])
    window.enqueue(queue, delay=60)

    expected = ["completed", "dead", "cancelled", "retryable", "scheduled", "suspended", "running", "available"]
    assert [window.state(i) for i in ids] == expected
    assert {State(s) for s in expected} == set(State)
    (row,) = window.run("SELECT * FROM queues WHERE name = %s", queue)
    age, running = row.pop("oldest_available_age"), row.pop("oldest_running_age")
    counts = {"available": 1, "scheduled": 3, "running": 1, "dead": 1, "suspended": 1}
    assert row == {"name": queue, "paused": False} | counts | UNLIMITED
    assert timedelta(0) < running < timedelta(seconds=60)
    assert timedelta(seconds=90) <= age < timedelta(seconds=120)
    counts = window.do(operations.count_by_state(queue=queue))
    assert counts == dict.fromkeys(State, 1) | {State.SCHEDULED: 2}


def test_a_queue_that_was_paused_is_shown_even_when_it_is_empty(window: Window, queue: str) -> None:
    window.run("INSERT INTO queue (name, paused_at) VALUES (%s, now())", queue)
    (row,) = window.run("SELECT * FROM queues WHERE name = %s", queue)
    assert row == {
        "name": queue, "paused": True, "available": 0, "scheduled": 0, "running": 0, "oldest_available_age": None
    } | QUIET  # fmt: skip


async def test_an_attempt_without_a_start_does_not_fail_the_list(window: Window, queue: str) -> None:
    window.run(
        "INSERT INTO job (kind, queue, started_at, state, attempt, locked_by, lease_until)"
        " VALUES ('x', %s, '-infinity', 2, 1, 1, now())",
        queue,
    )
    (row,) = window.run("SELECT * FROM queues WHERE name = %s", queue)
    assert (row["running"], row["oldest_running_age"]) == (1, None)


async def test_workers_show_who_works_on_what(alone: Window) -> None:
    async with (
        open_store(alone.dsn, queues=["b", "a"], concurrency=7) as one,
        open_store(alone.dsn) as two,
    ):
        await one.touch(3, set(), draining=True)
        rows = {r["id"]: r for r in alone.run("SELECT * FROM workers")}
        assert set(rows) == {one.session, two.session}
        mine = rows[one.session]
        assert (mine["host"], mine["pid"], mine["version"]) == (
            socket.gethostname(),
            os.getpid(),
            version("pulse-trio"),
        )
        assert (mine["queues"], mine["concurrency"], mine["running"], mine["state"]) == (["b", "a"], 7, 3, "draining")
        assert mine["started_at"] < mine["seen_at"]
        assert (rows[two.session]["queues"], rows[two.session]["state"]) == (["*"], "running")

        alone.run("UPDATE session SET seen_at = now() - interval '31 s' WHERE id = %s", two.session)
        assert alone.value("SELECT state FROM workers WHERE id = %s", two.session) == "stale"
        await one.end_sessions()
        assert alone.value("SELECT state FROM workers WHERE id = %s", one.session) == "gone"
        client = SyncClient(alone.dsn)
        assert [w.id for w in client.run(operations.workers())] == [two.session]
        assert {w.id for w in client.run(operations.workers(gone=True))} == {one.session, two.session}


async def test_clients_read_a_job_as_the_view_shows_it(store: WorkerStore, window: Window, queue: str) -> None:
    job_id = window.enqueue(queue, args={"a": [1, None]}, unique_key="k")
    await store.settle([end(await claim_one(store, queue), result='{"b": "ü"}')])
    shown = window.job(job_id)
    record = SyncClient(window.dsn).job(job_id)
    assert {name: getattr(record, name) for name in shown} == shown
    assert isinstance(record.state, State)
    async with open_client(window.dsn) as client:
        assert await client.job(job_id) == record
        assert [a.outcome for a in await client.attempts(job_id)] == ["completed"]


async def test_what_the_last_attempt_said_of_its_progress_stays_with_a_finished_job(
    store: WorkerStore, window: Window, queue: str
) -> None:
    job_id = window.enqueue(queue)
    kinds: tuple[OutcomeKind, ...] = ("failed", "completed")
    for attempt, kind in enumerate(kinds, 1):
        claimed = await claim_one(store, queue)
        assert window.job(job_id)["progress"] is None
        await store.write_progress([Progress(claimed, attempt / 4, f"attempt {attempt}")])
        await store.settle([end(claimed, kind)])
    shown = window.job(job_id)
    assert (shown["state"], shown["progress"], shown["progress_message"]) == ("completed", 0.5, "attempt 2")


def test_an_unknown_job_is_named(window: Window) -> None:
    client = SyncClient(window.dsn)
    for ask in (client.job, client.retry):
        with pytest.raises(UnknownJob, match="no job 987654321"):
            ask(987654321)


async def test_jobs_are_listed_newest_first_filtered_and_paged(store: WorkerStore, window: Window, queue: str) -> None:
    ids = window.enqueue_many(7, queue)
    other = window.enqueue(queue, kind="other")
    await store.settle([end(c) for c in await claim(store, queue, 3)])

    def listed(limit: int = 100, before: int | None = None, **how: Any) -> list[int]:
        return [j.id for j in window.do(history.jobs({"queue": queue, **how}, limit=limit, before=before))]  # type: ignore[typeddict-item]

    assert listed() == [other, *reversed(ids)]
    assert listed(kind="other") == [other]
    assert listed(state="completed") == ids[2::-1]
    assert listed(state="dead") == []
    assert listed(limit=3) == [other, ids[6], ids[5]]
    assert listed(limit=3, before=ids[5]) == [ids[4], ids[3], ids[2]]


# A person's retry


@pytest.mark.parametrize("kind", ["completed", "discarded", "cancelled"])
async def test_a_finished_job_is_retried_under_its_id_with_its_attempts(
    kind: str, store: WorkerStore, window: Window, queue: str
) -> None:
    options = {"args": {"a": 1}, "max_attempts": 1, "priority": 3, "timeout": 9.0, "unique_key": "k"}
    job_id = window.enqueue(queue, **options)
    before = window.job(job_id)
    await store.settle([end(await claim_one(store, queue, priority=3), kind, error="why")])  # type: ignore[arg-type]
    assert window.job(job_id)["state"] in FINISHED

    assert window.do(operations.retry(job_id)) is State.AVAILABLE

    job = window.job(job_id)
    assert (job["state"], job["attempt"], job["max_attempts"]) == ("available", 1, 2)
    same = ("args", "priority", "unique_key", "kind", "queue", "created_at")
    assert {name: job[name] for name in same} == {name: before[name] for name in same}
    assert window.value("SELECT count(*) FROM jobs WHERE id = %s", job_id) == 1
    claimed = await claim_one(store, queue, priority=3)
    assert (claimed.attempt, claimed.failures, claimed.options) == (2, 0, '{"timeout":9.0}')
    assert [a["outcome"] for a in window.attempts(job_id)] == [kind, "running"]


async def test_a_waiting_job_is_hurried(store: WorkerStore, window: Window, queue: str) -> None:
    scheduled = window.enqueue(queue, delay=3600)
    assert window.do(operations.retry(scheduled)) is State.AVAILABLE
    assert (await claim_one(store, queue)).id == scheduled


async def test_a_retry_needs_its_unique_key_free(store: WorkerStore, window: Window, queue: str) -> None:
    job_id = window.enqueue(queue, unique_key="k")
    await store.settle([end(await claim_one(store, queue))])
    window.enqueue(queue, unique_key="k")
    with pytest.raises(InvalidTransition, match="unique key"):
        window.do(operations.retry(job_id))
    assert window.state(job_id) == "completed"


async def test_a_retry_wakes_idle_workers(store: WorkerStore, window: Window, queue: str) -> None:
    job_id = window.enqueue(queue)
    await store.settle([end(await claim_one(store, queue))])
    await store.announce_idle()
    window.run("LISTEN pulse")
    window.do(operations.retry(job_id))
    assert [n.payload for n in window.connection.notifies(timeout=10, stop_after=1)] == [queue]
    window.run("UNLISTEN pulse")
    await store.withdraw_idle()


@pytest.mark.parametrize(
    ("kind", "said", "counts"),
    [
        ("failed", "ValueError: no", True),
        ("rescued", "the lease expired", True),
        ("released", STOPPED, False),
        ("suspended", "the handler returned a value while it was being suspended", False),
        ("cancelled", "asked for by a person", False),
        ("released", "UnfitArguments: Arguments do not fit", True),
        ("released", "HandlerStuck: did not end within 7 s of its cancellation", True),
    ],
)
async def test_why_an_attempt_that_did_not_fail_had_ended_is_no_error_of_a_live_job(
    kind: OutcomeKind | Literal["suspended"], said: str, counts: bool, store: WorkerStore, window: Window, queue: str
) -> None:
    job_id = window.enqueue(queue)
    claimed = await claim_one(store, queue)
    if kind == "suspended":
        window.value(
            "SELECT suspend(%s, %s, %s, '{}', '{}', '{go}', NULL, %s)", job_id, claimed.attempt, claimed.session, said
        )
    else:
        await store.settle([end(claimed, kind, error=said)])
    if kind == "cancelled":
        window.do(operations.retry(job_id))
    job, attempts = window.do(operations.job(job_id)), window.do(operations.attempts(job_id))
    assert job.state not in FINISHED
    expected = said if counts else None
    assert (job.error, life.last_error(job, attempts)) == (expected, (expected, 1 if counts else None))
    # The filter goes by what is shown; the attempt's own line has it.
    assert window.do(history.matching({"queue": queue, "error": said})) == [job_id] * counts
    page = window.do(searching.search({"queue": queue, "error": said}, limit=5))
    assert [found.id for found in page.jobs] == [job_id] * counts
    assert attempts[0].error == said


async def test_a_job_that_was_given_back_shows_what_it_failed_of_before(
    store: WorkerStore, window: Window, queue: str
) -> None:
    job_id = window.enqueue(queue)
    ends: list[tuple[OutcomeKind, str]] = [("failed", "ValueError: no"), ("released", STOPPED)]
    for kind, said in ends:
        await store.settle([end(await claim_one(store, queue), kind, error=said)])
        window.make_due(job_id)
    job = window.do(operations.job(job_id))
    assert job.error == "ValueError: no"
    assert life.last_error(job, window.do(operations.attempts(job_id))) == ("ValueError: no", 1)
