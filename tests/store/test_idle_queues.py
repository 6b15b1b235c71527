"""Who is told of a job: only idle workers of its queue make an enqueue notify, by whatever way it comes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pulse_trio import SyncClient
from pulse_trio.client import request_by_name
from pulse_trio.handlers import schedule
from pulse_trio.migrate import known_migrations, migrate_sync
from pulse_trio.store import new_jobs, operations, queues
from pulse_trio.timing import timing
from support.stores import Window, claim, end, open_store

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pulse_trio.jobs import OutcomeKind
    from pulse_trio.store import WorkerStore

IDLE_BEFORE_0011 = "SELECT pg_advisory_lock_shared(hashtextextended('pulse idle', 0))"
"""What workers of versions that know no migration 0011 hold, whatever queues they serve."""


def told(window: Window, do: Callable[[], Any] | None = None) -> list[str]:
    """The queues that were notified since `window` listens; or while `do` was done."""
    if do is not None:
        window.run("LISTEN pulse")
        do()
    # What was sent before comes before.
    window.run("NOTIFY pulse, ' end'")
    heard: list[str] = []
    for notify in window.connection.notifies(timeout=10):
        if notify.payload == " end":
            break
        heard.append(notify.payload)
    return heard


def idle_locks(window: Window) -> int:
    """How many advisory locks are held in this database: idle workers', and what a producer left."""
    return window.value(
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"
        " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    )


async def by_client(window: Window, _: WorkerStore, queue: str) -> None:
    window.enqueue(queue)


async def by_client_unique(window: Window, _: WorkerStore, queue: str) -> None:
    window.enqueue(queue, unique_key="k")


async def by_client_unique_for(window: Window, _: WorkerStore, queue: str) -> None:
    window.enqueue(queue, unique_key="k", unique_for=60)


async def by_statement(window: Window, _: WorkerStore, queue: str) -> None:
    window.enqueue_many(5, queue)


async def by_statement_unique(window: Window, _: WorkerStore, queue: str) -> None:
    requests = [request_by_name("noop", queue=queue, unique_key=f"k{n}") for n in range(20)]
    window.do(new_jobs.enqueue_many(requests))


async def by_copy(window: Window, _: WorkerStore, queue: str) -> None:
    requests = [request_by_name("noop", queue=queue) for _ in range(20)]
    assert len(SyncClient(window.dsn).enqueue_many(requests)) == 20


async def by_function(window: Window, _: WorkerStore, queue: str) -> None:
    window.run("SELECT enqueue('noop', queue => %s)", queue)


async def by_function_unique(window: Window, _: WorkerStore, queue: str) -> None:
    window.run("SELECT enqueue('noop', queue => %s, unique_key => 'k')", queue)


async def by_function_many(window: Window, _: WorkerStore, queue: str) -> None:
    window.run("SELECT enqueue_many('noop', ARRAY['{}', '{}']::jsonb[], %s)", queue)


async def by_transaction(window: Window, _: WorkerStore, queue: str) -> None:
    with psycopg.connect(window.dsn) as connection, connection.transaction():
        SyncClient(connection).enqueue_many([request_by_name("noop", queue=queue)])


async def by_schedule(window: Window, store: WorkerStore, queue: str) -> None:
    made = schedule(
        queue, lambda given: request_by_name("noop", given, queue=queue), None, timing("0 * * * *", None, None)
    )
    await store.declare_schedules([made])
    window.run("UPDATE schedule SET next_due = clock_timestamp() WHERE name = %s", queue)
    fired, _ = await store.fire_schedules()
    assert [f.name for f in fired] == [queue]
    window.run("DELETE FROM schedule WHERE name = %s", queue)


async def by_release(window: Window, store: WorkerStore, queue: str) -> None:
    # With a delay: adding them tells nobody.
    window.make_due(*(window.enqueue(queue, delay=600) for _ in range(2)))
    assert len((await store.settle([end(c, "released") for c in await claim(store, queue)])).accepted) == 2


async def by_rescue(window: Window, store: WorkerStore, queue: str) -> None:
    job_id = window.enqueue(queue, delay=600)
    window.make_due(job_id)
    assert len(await claim(store, queue)) == 1
    window.expire(job_id)
    assert (await store.rescue()).rescued == 1


async def by_hand_when_waiting(window: Window, _: WorkerStore, queue: str) -> None:
    window.do(operations.retry(window.enqueue(queue, delay=600)))


async def by_hand_when_finished(window: Window, store: WorkerStore, queue: str) -> None:
    job_id = window.enqueue(queue, delay=600)
    window.make_due(job_id)
    await store.settle([end(c) for c in await claim(store, queue)])
    window.do(operations.retry(job_id))


async def by_resuming(window: Window, _: WorkerStore, queue: str) -> None:
    window.do(queues.pause(queue))
    assert window.do(queues.resume(queue))


WAYS = [
    by_client,
    by_client_unique,
    by_client_unique_for,
    by_statement,
    by_statement_unique,
    by_copy,
    by_function,
    by_function_unique,
    by_function_many,
    by_transaction,
    by_schedule,
    by_release,
    by_rescue,
    by_hand_when_waiting,
    by_hand_when_finished,
    by_resuming,
]


@pytest.mark.parametrize("way", WAYS)
async def test_only_an_idle_worker_of_the_queue_is_told_of_it(
    way: Callable[[Window, WorkerStore, str], Awaitable[None]], store: WorkerStore, window: Window, queue: str
) -> None:
    window.run("LISTEN pulse")
    for waits, heard in (([f"{queue}-other"], []), ([f"{queue}-b", queue], [queue]), (None, [queue])):
        async with open_store(window.dsn, queues=waits) as worker:
            await worker.announce_idle()
            assert idle_locks(window) == (len(waits) if waits else 1)
            await way(window, store, queue)
            assert told(window) == heard
            # No producer kept what it asked for.
            await worker.withdraw_idle()
            assert idle_locks(window) == 0
        window.run("DELETE FROM job WHERE queue = %s", queue)
        window.run("DELETE FROM unique_hold WHERE queue = %s", queue)


@pytest.mark.parametrize("kind", ["failed", "snoozed", "released"])
async def test_what_is_due_later_tells_nobody(
    kind: OutcomeKind, store: WorkerStore, window: Window, queue: str
) -> None:
    window.run("LISTEN pulse")
    window.enqueue(queue)
    async with open_store(window.dsn, queues=[queue]) as worker:
        await worker.announce_idle()
        window.enqueue(queue, delay=60)
        await store.settle([end(c, kind, delay=60.0) for c in await claim(store, queue)])
        assert told(window) == []
        await worker.withdraw_idle()


async def test_what_goes_by_all_queues_tells_whoever_waits(window: Window, queue: str) -> None:
    window.do(queues.pause(kind=queue))
    window.run("LISTEN pulse")
    async with open_store(window.dsn, queues=[queue]) as worker:
        await worker.announce_idle()
        window.do(queues.resume(kind=queue))
        assert told(window) == [""]
        await worker.withdraw_idle()


async def test_a_worker_of_many_queues_holds_one_lock_for_all(window: Window, queue: str) -> None:
    window.run("LISTEN pulse")
    async with open_store(window.dsn, queues=[f"{queue}-{n}" for n in range(33)]) as worker:
        await worker.announce_idle()
        assert idle_locks(window) == 1
        window.enqueue(f"{queue}-7")
        assert told(window) == [f"{queue}-7"]
        await worker.withdraw_idle()
        assert idle_locks(window) == 0


async def test_who_does_not_get_the_lock_of_an_announcement_waits_for_its_poll_and_leaves_nothing(
    window: Window, queue: str
) -> None:
    async with open_store(window.dsn, queues=[f"{queue}-a", queue]) as worker:
        with psycopg.connect(window.dsn, autocommit=True) as frozen:
            # A producer's process that was stopped between the lock and its release.
            frozen.execute("SELECT pg_advisory_lock(hashtextextended('pulse idle ' || %s::text, 0))", [queue])
            await worker.announce_idle()
            assert worker.idle
            # Before its connection is closed: a server that is busy may take a while to notice that, and keeps the lock.
            frozen.execute("SELECT pg_advisory_unlock_all()")
        await worker.withdraw_idle()
        assert idle_locks(window) == 0
        await worker.announce_idle()
        assert idle_locks(window) == 2
        await worker.withdraw_idle()
        assert idle_locks(window) == 0


async def test_who_announces_after_a_job_is_committed_sees_it_when_he_looks_again(window: Window, queue: str) -> None:
    """The two orders there are: the producer sees the announcement, or the worker's look after it sees the job."""
    window.run("LISTEN pulse")
    async with open_store(window.dsn, queues=[queue]) as worker:
        window.enqueue(queue)
        assert told(window) == []
        await worker.announce_idle()
        assert [found.queue for found in (await worker.sweep([queue])).found] == [queue]
        window.enqueue(queue)
        assert told(window) == [queue]
        await worker.withdraw_idle()


def test_a_worker_that_waits_while_the_migration_is_applied_is_still_told(
    empty_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = known_migrations()
    monkeypatch.setattr("pulse_trio.migrate.known_migrations", lambda: [m for m in known if m.version < 11])
    migrate_sync(empty_dsn)
    # No further: a later one changes the table, and waits for whoever writes it.
    monkeypatch.setattr("pulse_trio.migrate.known_migrations", lambda: [m for m in known if m.version < 12])
    enqueue = "SELECT pulse.enqueue('noop', queue => 'mail')"
    with (
        Window(empty_dsn) as window,
        psycopg.connect(empty_dsn, autocommit=True) as old,
        psycopg.connect(empty_dsn, autocommit=True) as producer,
    ):
        assert told(window, lambda: producer.execute(enqueue)) == []
        old.execute(IDLE_BEFORE_0011)
        assert told(window, lambda: producer.execute(enqueue)) == ["mail"]
        with producer.transaction():
            producer.execute(enqueue)
            # Nobody waits for a producer's open transaction, and the other way round.
            assert migrate_sync(empty_dsn)[0] == "0011_idle_queues"
            producer.execute(enqueue)
        assert told(window) == ["mail"]
        assert told(window, lambda: producer.execute(enqueue)) == ["mail"]
        old.execute("SELECT pg_advisory_unlock_all()")
        assert told(window, lambda: producer.execute(enqueue)) == []
