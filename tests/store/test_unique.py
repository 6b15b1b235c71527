"""Unique keys: while live, for a period, until some time after the end; skipped, replaced or refused; exact under a race."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pulse_trio import ConfigurationError, Handlers, InvalidTransition, JobExists, SyncClient
from pulse_trio.client import request_by_name
from pulse_trio.store import new_jobs, operations
from support.stores import LOCK_WAITED_FOR, Window, claim_one, end

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from pulse_trio.store import WorkerStore
    from pulse_trio.store.new_jobs import Enqueued

PRODUCERS = 8
KEYS = 40
ROUNDS = 5


def ask(window: Window, queue: str, key: str = "k", args: Any = None, **options: Any) -> Enqueued:
    return window.do(new_jobs.enqueue(request_by_name("noop", args, queue=queue, unique_key=key, **options)))


async def finish(store: WorkerStore, queue: str) -> None:
    assert (await store.settle([end(await claim_one(store, queue))])).accepted


def pass_the_hold(window: Window, queue: str) -> None:
    """The time for which the queue's keys are held from their enqueue on is over."""
    window.run("UPDATE unique_hold SET until = now() - interval '1 ms' WHERE queue = %s", queue)


def finished_long_ago(window: Window, job_id: int, ago: str) -> None:
    window.run("UPDATE job_archive SET finished_at = finished_at - %s::interval WHERE id = %s", ago, job_id)


def many(window: Window, requests: list[Any]) -> list[Enqueued]:
    return SyncClient(window.dsn).enqueue_many(requests)


WAYS: dict[str, Callable[[Window, str], int]] = {
    "one": lambda window, queue: ask(window, queue).id,
    "many": lambda window, queue: many(window, [request_by_name("noop", queue=queue, unique_key="k")])[0].id,
    "sql": lambda window, queue: window.value("SELECT enqueue('noop', queue => %s, unique_key => 'k')", queue),
    "sql many": lambda window, queue: window.value(
        "SELECT enqueue_many('noop', ARRAY['{}']::jsonb[], queue => %s, unique_keys => '{k}')", queue
    ),
}


@pytest.mark.parametrize("way", WAYS)
async def test_a_key_unique_for_a_period_outlives_its_job_whoever_asks(
    way: str, store: WorkerStore, window: Window, queue: str
) -> None:
    first = ask(window, queue, unique_for=3600)
    assert first.added
    assert WAYS[way](window, queue) == first.id
    await finish(store, queue)
    assert WAYS[way](window, queue) == first.id
    assert window.value("SELECT count(*) FROM job WHERE queue = %s", queue) == 0
    pass_the_hold(window, queue)
    assert WAYS[way](window, queue) > first.id


async def test_finishing_a_job_writes_nothing_to_its_hold(store: WorkerStore, window: Window, queue: str) -> None:
    def version() -> Any:
        return window.value("SELECT (ctid, xmin, xmax)::text FROM unique_hold WHERE queue = %s", queue)

    for options in ({"unique_for": 3600}, {"unique_after": 3600}):
        for kind in ("completed", "discarded", "cancelled"):
            window.run("DELETE FROM unique_hold WHERE queue = %s", queue)
            ask(window, queue, f"{kind} {options}", **options)
            before = version()
            assert before is not None
            assert (await store.settle([end(await claim_one(store, queue), kind)])).accepted
            assert version() == before


async def test_a_key_unique_for_a_period_is_unique_while_live_too(
    store: WorkerStore, window: Window, queue: str
) -> None:
    first = ask(window, queue, unique_for=timedelta(hours=1))
    pass_the_hold(window, queue)
    assert ask(window, queue, unique_for=3600) == (first.id, False, False)
    await finish(store, queue)
    assert ask(window, queue, unique_for=3600).added


@pytest.mark.parametrize("way", WAYS)
async def test_a_key_unique_after_the_end_is_free_when_that_time_has_passed(
    way: str, store: WorkerStore, window: Window, queue: str
) -> None:
    first = ask(window, queue, unique_after=60)
    assert WAYS[way](window, queue) == first.id
    await finish(store, queue)
    assert WAYS[way](window, queue) == first.id
    finished_long_ago(window, first.id, "61 s")
    assert WAYS[way](window, queue) > first.id


def test_a_period_counts_from_the_enqueue_by_the_databases_clock(window: Window, queue: str) -> None:
    first = ask(window, queue, unique_for=90, unique_after=5)
    (hold,) = window.run("SELECT job_id, until, after FROM unique_hold WHERE queue = %s", queue)
    assert hold["job_id"] == first.id
    assert hold["until"] - window.job(first.id)["created_at"] == timedelta(seconds=90)
    assert hold["after"] == timedelta(seconds=5)


async def test_a_retried_or_rescued_job_does_not_collide_with_itself(
    store: WorkerStore, window: Window, queue: str
) -> None:
    first = ask(window, queue, unique_for=3600, unique_after=3600)
    claimed = await claim_one(store, queue)
    await store.settle([end(claimed, "failed", delay=0.0, error="x")])
    await claim_one(store, queue)
    window.expire(first.id)
    assert await store.rescue() == (1, 0)
    await finish(store, queue)
    assert window.do(operations.retry(first.id)) == "available"
    assert ask(window, queue) == (first.id, False, False)
    await finish(store, queue)
    assert window.state(first.id) == "completed"
    assert ask(window, queue) == (first.id, False, False)


async def test_a_finished_job_is_not_retried_beside_a_live_one_with_its_key(
    store: WorkerStore, window: Window, queue: str
) -> None:
    first = ask(window, queue)
    await finish(store, queue)
    ask(window, queue, unique_for=60)
    with pytest.raises(InvalidTransition, match="same unique key"):
        window.do(operations.retry(first.id))


def test_a_period_asked_for_while_another_job_lives_is_not_taken(window: Window, queue: str) -> None:
    live = ask(window, queue)
    assert ask(window, queue, unique_for=3600) == (live.id, False, False)
    assert ask(window, queue, unique_after=3600) == (live.id, False, False)
    assert window.value("SELECT count(*) FROM unique_hold WHERE queue = %s", queue) == 0


# On conflict


def test_replacing_gives_a_waiting_job_the_new_arguments_and_time(window: Window, queue: str) -> None:
    first = ask(window, queue, args={"v": 1}, delay=60)
    at = datetime(2040, 1, 1, tzinfo=UTC)
    done = ask(window, queue, args={"v": 2}, at=at, priority=3, timeout=5, on_conflict="replace")
    assert done == (first.id, False, True)
    job, row = window.job(first.id), window.row(first.id)
    assert row is not None
    assert (job["args"], job["run_at"], job["priority"], row["options"]) == ({"v": 2}, at, 3, {"timeout": 5})
    assert ask(window, queue, key="new", on_conflict="replace").added


async def test_a_job_that_is_replaced_has_the_attempts_that_the_new_work_asks_for(
    window: Window, store: WorkerStore, queue: str
) -> None:
    first = ask(window, queue, max_attempts=2)
    await store.settle([end(await claim_one(store, queue), "failed", error="no")])
    assert ask(window, queue, args={"v": 2}, max_attempts=3, on_conflict="replace") == (first.id, False, True)
    states: list[str] = []
    for _ in range(3):
        await store.settle([end(await claim_one(store, queue), "failed", error="no")])
        states.append(window.state(first.id))
    assert states == ["available", "available", "dead"]
    job = window.job(first.id)
    assert (job["attempt"], job["max_attempts"]) == (4, 4)


async def test_a_running_job_is_not_replaced_and_the_answer_says_so(
    store: WorkerStore, window: Window, queue: str
) -> None:
    first = ask(window, queue, args={"v": 1}, unique_for=3600)
    claimed = await claim_one(store, queue)
    assert ask(window, queue, args={"v": 2}, on_conflict="replace") == (first.id, False, False)
    assert window.job(first.id)["args"] == {"v": 1}
    await store.settle([end(claimed)])
    assert ask(window, queue, args={"v": 3}, on_conflict="replace") == (first.id, False, False)
    pass_the_hold(window, queue)
    assert ask(window, queue, args={"v": 4}, on_conflict="replace").added


def test_raising_names_the_job_and_leaves_the_callers_transaction_alive(window: Window, queue: str) -> None:
    first = ask(window, queue)
    requests = [request_by_name("noop", queue=queue, unique_key=k, on_conflict="raise") for k in ("new", "k")]
    with psycopg.connect(window.dsn) as connection:
        client = SyncClient(connection)
        with pytest.raises(JobExists, match=f"Job {first.id} of queue '{queue}'") as caught:
            client.enqueue("noop", queue=queue, unique_key="k", on_conflict="raise")
        assert caught.value.job_id == first.id
        with pytest.raises(JobExists):
            client.enqueue_many(requests)
        assert client.enqueue("noop", queue=queue).added
    assert window.value("SELECT count(*) FROM job WHERE queue = %s", queue) == 2
    with pytest.raises(psycopg.errors.UniqueViolation, match="has the unique key k already"):
        window.run("SELECT enqueue('noop', queue => %s, unique_key => 'k', on_conflict => 'raise')", queue)


def test_a_batch_may_mix_everything_and_answers_in_order(window: Window, queue: str) -> None:
    live = ask(window, queue, "live", args={"v": 0})
    options: list[dict[str, Any]] = [
        {"unique_key": "b", "unique_for": 60}, {}, {"unique_key": "live", "on_conflict": "replace"},
        {"unique_key": "a"}, {"unique_key": "b"}, {"unique_key": "a", "on_conflict": "replace", "delay": 5},
    ]  # fmt: skip
    done = many(window, [request_by_name("noop", {"v": n}, queue=queue, **o) for n, o in enumerate(options)])
    assert [d.added for d in done] == [True, True, False, True, False, False]
    assert [d.replaced for d in done] == [False, False, True, False, False, True]
    assert (done[2].id, done[4].id, done[5].id) == (live.id, done[0].id, done[3].id)
    assert [window.job(d.id)["args"]["v"] for d in (done[0], done[2], done[3])] == [0, 2, 5]


@pytest.mark.parametrize(
    "options",
    [
        {"unique_for": 5}, {"unique_after": 5}, {"on_conflict": "replace"}, {"unique_key": "k", "on_conflict": "ignore"},
        {"unique_key": "k", "unique_for": 0}, {"unique_key": "k", "unique_after": -1}, {"unique_key": "k", "unique_for": "1"},
    ],
    ids=repr,
)  # fmt: skip
def test_options_of_uniqueness_that_cannot_work_are_refused(options: dict[str, Any], window: Window) -> None:
    with pytest.raises(ConfigurationError):
        request_by_name("noop", **options)
    named = ", ".join(f"{name} => '{value}'" for name, value in options.items())
    if options.get("unique_for") != "1":
        with pytest.raises(psycopg.DataError):
            window.run(f"SELECT enqueue('noop', {named})")


def test_a_handler_may_say_how_long_its_keys_are_unique(window: Window, queue: str) -> None:
    handlers = Handlers()

    @handlers.job(queue=queue, unique_for=timedelta(minutes=1), on_conflict="raise")
    async def greet(name: str) -> None: ...

    client = SyncClient(window.dsn)
    assert client.enqueue(greet.options(unique_key="ada"), "ada").added
    with pytest.raises(JobExists):
        client.enqueue(greet.options(unique_key="ada"), "ada")
    with pytest.raises(ConfigurationError, match="need a unique_key"):
        client.enqueue(greet, "ada")


# Races


@contextmanager
def in_a_thread(work: Callable[[], Any]) -> Generator[list[Any]]:
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(work()))
    thread.start()
    try:
        yield done
    finally:
        thread.join(60)


@pytest.mark.parametrize("way", WAYS)
def test_a_plain_key_sees_a_hold_that_was_committed_while_it_inserted(way: str, alone: Window) -> None:
    # The holder's job is gone again when the other producer's insert gets through: only the hold is left to be seen.
    with psycopg.connect(alone.dsn) as holder:
        held = SyncClient(holder).enqueue("noop", queue="q", unique_key="k", unique_for=3600)
        with Window(alone.dsn) as other, in_a_thread(lambda: WAYS[way](other, "q")) as answers:
            while not alone.value(LOCK_WAITED_FOR):
                pass
            holder.execute("DELETE FROM pulse.job WHERE id = %s", [held.id])
            holder.commit()
    assert answers == [held.id]
    assert alone.value("SELECT count(*) FROM job") == 0


def test_keys_are_exact_under_concurrent_producers_of_every_sort(alone: Window) -> None:
    barrier = threading.Barrier(PRODUCERS)
    sorts: list[dict[str, Any]] = [{}, {"unique_for": 3600}, {"unique_after": 3600}, {"on_conflict": "replace"}]

    def produce(number: int) -> list[Enqueued]:
        requests = [
            request_by_name("noop", {"n": number}, queue="race", unique_key=f"k{key}", **sorts[number % len(sorts)])
            for _ in range(ROUNDS)
            for key in range(KEYS)
        ]
        with psycopg.connect(alone.dsn, autocommit=True) as connection:
            client = SyncClient(connection)
            barrier.wait(60)
            if number >= PRODUCERS // 2:
                return client.enqueue_many(requests)
            return [operations.run_sync(connection, "pulse", new_jobs.enqueue(r)) for r in requests]

    with ThreadPoolExecutor(PRODUCERS) as pool:
        answers = [answer for answers in pool.map(produce, range(PRODUCERS)) for answer in answers]
    assert sum(answer.added for answer in answers) == KEYS
    assert len({answer.id for answer in answers}) == KEYS
    assert alone.value("SELECT count(*) FROM job") == KEYS
    assert alone.value("SELECT count(*) FROM unique_hold h WHERE job_id NOT IN (SELECT id FROM job)") == 0


# Retention of holds


async def test_maintenance_forgets_holds_that_hold_nothing_and_keeps_the_others(
    store: WorkerStore, window: Window, queue: str
) -> None:
    expired, held, ended = (f"{queue}.{name}" for name in ("expired", "held", "ended"))
    cases: tuple[tuple[str, dict[str, Any]], ...] = (
        (expired, {"unique_for": 60}), (held, {"unique_for": 3600}), (ended, {"unique_after": 86400 * 30}),
    )  # fmt: skip
    for name, options in cases:
        ask(window, name, **options)
        await finish(store, name)
    pass_the_hold(window, expired)
    window.run("SELECT maintain()")
    assert holds(window, queue) == {expired, held, ended}, "taken within the hour: left alone"
    window.run("UPDATE unique_hold SET taken_at = now() - interval '2 h'")
    window.run("SELECT maintain()")
    assert holds(window, queue) == {held, ended}
    # The archive forgets the job; what it held stays held.
    window.run("DELETE FROM job_archive WHERE queue = %s", ended)
    assert not ask(window, ended).added


def holds(window: Window, queue: str) -> set[str]:
    return {row["queue"] for row in window.run("SELECT queue FROM unique_hold WHERE queue LIKE %s", f"{queue}%")}


# Many in SQL


def test_sql_enqueues_many_in_order(window: Window, queue: str) -> None:
    rows = window.run(
        "SELECT id FROM enqueue_many('noop', ARRAY(SELECT jsonb_build_object('n', n) FROM generate_series(1, 50) n),"
        " queue => %s, priority => 3, max_attempts => 2, timeout => '5 s') AS e(id)",
        queue,
    )
    ids = [row["id"] for row in rows]
    assert ids == sorted(ids)
    assert [window.job(i)["args"]["n"] for i in ids] == list(range(1, 51))
    row = window.row(ids[0])
    assert row is not None
    assert (row["priority"], row["max_attempts"], row["options"]) == (3, 2, {"timeout": 5})
    keyed = window.run(
        "SELECT id FROM enqueue_many('noop', ARRAY['{}', '{}', '{}']::jsonb[], queue => %s, unique_keys => '{b,a,b}') AS e(id)",
        queue,
    )
    assert keyed[0] == keyed[2] != keyed[1]
    assert window.run("SELECT enqueue_many('noop', '{}')") == []


def test_sql_writes_keys_moments_and_options(window: Window, queue: str) -> None:
    at = datetime(2040, 1, 1, tzinfo=UTC)
    ids = [
        window.value("SELECT enqueue('noop', queue => %s, key => 'a', deadline => %s, expires => %s)", queue, at, at),
        window.value("SELECT enqueue('noop', queue => %s, key => 'a', unique_key => 'u', deadline => %s, expires => %s)",
                     queue, at, at),
    ]  # fmt: skip
    rows = [window.row(job_id) for job_id in ids]
    assert [row and row["key"] for row in rows] == ["a", "a"]
    assert [row and row["options"] for row in rows] == [{"deadline": at.timestamp(), "expires": at.timestamp()}] * 2
    for extra in ("", ", unique_keys => '{v}'"):
        many = window.value(
            f"SELECT enqueue_many('noop', ARRAY['{{}}']::jsonb[], queue => %s, key => 'b'{extra})", queue
        )
        row = window.row(many)
        assert row is not None
        assert row["key"] == "b"
    with pytest.raises(psycopg.DataError):
        window.run("SELECT enqueue('noop', deadline => 'infinity')")


@pytest.mark.parametrize("arguments", ["unique_keys => '{a,b}'", "timeout => '0'", "queue => 'no good'"])
def test_sql_refuses_a_batch_as_a_whole(arguments: str, window: Window) -> None:
    with pytest.raises((psycopg.DataError, psycopg.IntegrityError)):
        window.run(f"SELECT enqueue_many('noop', ARRAY['{{}}']::jsonb[], {arguments})")
