"""Unique keys are locked in one order over a whole call, so that no two calls deadlock, whatever is finished meanwhile."""

from __future__ import annotations

import os
import random
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import psycopg
import pytest

from pulse_trio import DatabaseUnavailable, Handlers, SyncClient, open_client
from pulse_trio.postgres import TrioConnection
from support.stores import LOCK_WAITED_FOR, Window

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence

    from pulse_trio import JobRequest

handlers = Handlers()
LARGE = 10_000
SEED = 6
CALLS = int(os.environ.get("PULSE_TRIO_CALLS", "120"))
"""Drawn calls that meet; 400 in `make test-long`. In a statement without its order, 120 deadlocked in three runs of three."""


@handlers.job
async def take(n: int = 0, text: str = "") -> None: ...


@pytest.fixture
def window(dsn: str) -> Generator[Window]:
    with Window(dsn) as window:
        yield window


def keyed(keys: Iterable[int], *, queue: str = "default", text: str = "") -> list[JobRequest]:
    # Letters of both cases and beyond ASCII: collations put these in another order than bytes.
    return [
        take.options(unique_key=f"{'aBcDé-'[n % 6]}{n}", queue=queue).request(place, text)
        for place, n in enumerate(keys)
    ]


async def stream(requests: Sequence[JobRequest]) -> AsyncGenerator[JobRequest]:
    for request in requests:
        yield request


def deadlocks(window: Window) -> int:
    window.run("SELECT pg_stat_clear_snapshot()")
    return window.value("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")


async def test_large_calls_in_opposite_orders_do_not_deadlock(dsn: str, window: Window) -> None:
    forward = keyed(range(LARGE))
    # The same keys; in halves swapped, no slice of one call has a slice's keys of another.
    orders = [forward, forward[::-1], forward[LARGE // 2 :] + forward[: LARGE // 2]]
    answers: list[list[int]] = [[] for _ in range(4)]

    async def enqueue(place: int, requests: Any) -> None:
        answers[place] = [ref.id for ref in await client.enqueue_many(requests)]

    def enqueue_blocking(place: int, requests: Any) -> None:
        answers[place] = [one.id for one in SyncClient(dsn).enqueue_many(requests)]

    async with open_client(dsn) as client, anyio.create_task_group() as tasks:
        tasks.start_soon(enqueue, 0, orders[0])
        tasks.start_soon(enqueue, 1, stream(orders[1]))
        tasks.start_soon(enqueue, 2, orders[2])
        tasks.start_soon(anyio.to_thread.run_sync, enqueue_blocking, 3, orders[1])
    by_key = {row["unique_key"]: row["id"] for row in window.run("SELECT unique_key, id FROM job")}
    assert len(by_key) == LARGE
    for ids, requests in zip(answers, [*orders, orders[1]], strict=True):
        assert ids == [by_key[request.unique_key] for request in requests]
    assert deadlocks(window) == 0


async def test_random_calls_do_not_deadlock_while_jobs_finish(dsn: str, window: Window) -> None:
    draw = random.Random(SEED)
    calls = [
        [
            request
            for queue in draw.sample(["q", "r", "s"], 2)
            for request in keyed([draw.randrange(40) for _ in range(draw.randrange(1, 30))], queue=queue)
        ]
        for _ in range(CALLS)
    ]
    # Some in several slices: by size, not by count.
    for requests in calls[::20]:
        requests[:] = [take.options(unique_key=r.unique_key, queue=r.queue).request(0, "x" * 400_000) for r in requests]

    async def produce(client: Any, mine: list[list[JobRequest]]) -> None:
        for requests in mine:
            assert len(await client.enqueue_many(requests)) == len(requests)

    async def finish() -> None:
        async with await TrioConnection.connect(dsn, autocommit=True) as connection:
            while True:
                await connection.execute(
                    "DELETE FROM pulse.job WHERE id IN (SELECT id FROM pulse.job ORDER BY random() LIMIT 10"
                    " FOR UPDATE SKIP LOCKED)"
                )

    async with open_client(dsn, max_connections=8) as client, anyio.create_task_group() as finishing:
        finishing.start_soon(finish)
        async with anyio.create_task_group() as producers:
            for part in range(8):
                producers.start_soon(produce, client, calls[part::8])
        finishing.cancel_scope.cancel()
    assert deadlocks(window) == 0


async def test_jobs_of_a_large_keyed_call_run_in_the_order_they_were_given(dsn: str, window: Window) -> None:
    requests = keyed(random.Random(SEED).sample(range(LARGE), 6_000))
    # Some without a key among them, and one key twice.
    requests[10:20] = [take.request(n) for n in range(10, 20)]
    requests[5_500] = requests[7]
    seen: list[int] = []
    async with open_client(dsn) as client:
        refs = await client.enqueue_many(stream(requests), progress=seen.append)
    assert [ref.added for ref in refs] == [place != 5_500 for place in range(6_000)]
    assert refs[5_500].id == refs[7].id
    new = [ref.id for ref in refs if ref.added]
    assert new == sorted(new)
    stored = {row["id"]: row["unique_key"] for row in window.run("SELECT id, unique_key FROM job")}
    assert [stored[ref.id] for ref in refs] == [request.unique_key for request in requests]
    assert seen == sorted(seen)
    assert seen[-1] == 6_000


FORGETFUL = """
    CREATE OR REPLACE FUNCTION key_holders(queues text[], unique_keys text[], OUT ordinal bigint, OUT job_id bigint)
    RETURNS SETOF record LANGUAGE sql AS 'SELECT n, NULL::bigint FROM generate_series(1, cardinality($1)) n'
"""


@pytest.mark.parametrize("count", [4, 5_100], ids=["one slice", "several"])
async def test_a_key_whose_job_is_gone_before_it_was_found_is_enqueued_anew(
    count: int, dsn: str, window: Window
) -> None:
    requests = keyed(range(count))
    async with open_client(dsn) as client:
        (before,) = await client.enqueue_many(requests[2:3])
        window.run(FORGETFUL)
        refs = await client.enqueue_many(requests)
        done = SyncClient(dsn).enqueue_many(requests)
    assert [ref.added for ref in refs] == [place != 2 for place in range(count)]
    assert refs[2].id == before.id
    assert [one.id for one in done] == [ref.id for ref in refs]
    assert window.value("SELECT count(*) FROM job") == count


async def test_a_deadlock_with_what_the_callers_transaction_holds_is_tried_again_and_the_transaction_survives(
    dsn: str, window: Window
) -> None:
    (first,), (second,) = keyed([1]), keyed([2])
    holds, ended = anyio.Event(), anyio.Event()

    async def other() -> None:
        # Holds the second key and asks for the first. It is the one that gives up, and it takes back what it holds.
        async with await TrioConnection.connect(dsn, autocommit=True) as connection:
            with pytest.raises(psycopg.errors.DeadlockDetected):  # noqa: PT012 -- at the block's end, too
                async with connection.transaction():
                    await connection.execute("SET LOCAL deadlock_timeout = '600ms'")
                    await client.using(connection).enqueue_many([second])
                    holds.set()
                    await connection.execute("SELECT pulse.enqueue('take', unique_key => %s)", [first.unique_key])
        ended.set()

    async with (
        open_client(dsn) as client,
        await TrioConnection.connect(dsn, autocommit=True) as connection,
        anyio.create_task_group() as tasks,
    ):
        async with connection.transaction():
            # Finds the deadlock sooner than the other, and asks again; then it is the other's turn to find it.
            await connection.execute("SET LOCAL deadlock_timeout = '300ms'")
            await client.using(connection).enqueue_many([first])
            tasks.start_soon(other)
            await holds.wait()
            await lock_awaited(window)
            (ref,) = await client.using(connection).enqueue_many([second])
        await ended.wait()
    assert ref.added
    with anyio.fail_after(30):
        # A backend reports what it counted when it ends, a moment after its client has gone.
        while deadlocks(window) < 2:  # noqa: ASYNC110 -- PostgreSQL tells nobody
            await anyio.sleep(0.05)
    assert window.value("SELECT count(*) FROM job") == 2


async def lock_awaited(window: Window) -> None:
    """Waits until a backend waits for another's transaction."""
    with anyio.fail_after(30):
        # PostgreSQL tells nobody.
        while not window.value(LOCK_WAITED_FOR):  # noqa: ASYNC110 -- PostgreSQL tells nobody
            await anyio.sleep(0.01)


def test_a_deadlock_that_does_not_end_is_said_to_be_one(dsn: str, window: Window) -> None:
    window.run("""
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN RAISE EXCEPTION 'deadlock detected' USING ERRCODE = 'deadlock_detected'; END $$
    """)
    window.run("CREATE TRIGGER refuse BEFORE INSERT ON job FOR EACH ROW EXECUTE FUNCTION refuse()")
    enqueue: Callable[[], object] = partial(SyncClient(dsn).enqueue_many, keyed([1, 2]))
    with pytest.raises(DatabaseUnavailable, match="deadlock"):
        enqueue()


@pytest.mark.parametrize("function", ["add_jobs", "enqueue_many"])
def test_the_database_sorts_keys_as_clients_do(function: str, window: Window) -> None:
    # Most test databases sort by bytes anyway; users' do not. Whoever makes these functions anew has to keep that.
    source = window.value(
        "SELECT prosrc FROM pg_proc WHERE proname = %s AND pronamespace = 'pulse'::regnamespace", function
    )
    assert 'unique_key COLLATE "C"' in source
