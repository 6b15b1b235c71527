"""A row that somebody else has locked delays its own job and no other."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import psycopg
import pytest
import trio

from pulse_trio.errors import DatabaseUnavailable
from pulse_trio.store import ClaimCursor
from support.stores import Window, claim, end

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator

    from pulse_trio.store import WorkerStore


@contextmanager
def locked(window: Window, job_id: int) -> Generator[None]:
    """Another transaction holds the row, as a person's half-finished UPDATE would."""
    with psycopg.connect(window.dsn) as connection:
        connection.execute("SELECT FROM pulse.job WHERE id = %s FOR UPDATE", [job_id])
        yield


async def test_of_a_batch_of_completions_only_the_locked_one_comes_back_again(
    store: WorkerStore, window: Window, queue: str
) -> None:
    window.enqueue_many(3, queue)
    first, second, third = await claim(store, queue)
    outcomes = [end(c, result=f'"{c.id}"') for c in (third, second, first)]
    with locked(window, second.id):
        accepted, refused, again = await store.settle(outcomes)
        assert {o.claim for o in accepted} == {first, third}
        assert refused == []
        assert [o.claim for o in again] == [second]
        assert window.state(second.id) == "running"

    accepted, refused, again = await store.settle(again)
    assert ([o.claim for o in accepted], refused, again) == ([second], [], [])
    assert [window.job(c.id)["result"] for c in (first, second, third)] == [str(c.id) for c in (first, second, third)]


async def test_a_claim_brings_new_jobs_although_a_completion_is_locked(
    store: WorkerStore, window: Window, queue: str
) -> None:
    window.enqueue_many(2, queue)
    first, second = await claim(store, queue)
    new = window.enqueue(queue)
    with locked(window, first.id):
        claims, _, (accepted, refused, again), *_ = await store.complete_and_claim(
            10, [ClaimCursor(queue, 0)], [end(first), end(second)]
        )
    assert [c.id for c in claims] == [new]
    assert ([o.claim for o in accepted], refused, [o.claim for o in again]) == ([second], [], [first])


async def test_of_a_batch_of_failures_only_the_locked_one_comes_back_again_and_nobody_waits(
    store: WorkerStore, window: Window, queue: str
) -> None:
    window.enqueue_many(3, queue)
    failed, snoozed, dead = await claim(store, queue)
    outcomes = [
        end(failed, "failed", error="x", delay=60.0),
        end(snoozed, "snoozed", delay=60.0),
        end(dead, "discarded"),
    ]
    with locked(window, snoozed.id):
        accepted, refused, again = await store.settle(outcomes)
    assert {o.claim for o in accepted} == {failed, dead}
    assert refused == []
    assert [o.claim for o in again] == [snoozed]
    assert [window.state(c.id) for c in (failed, snoozed, dead)] == ["retryable", "running", "dead"]


async def test_a_beat_tells_renewed_locked_and_lost_apart_without_waiting(
    store: WorkerStore, window: Window, queue: str
) -> None:
    window.enqueue_many(3, queue)
    free, held, lost = await claim(store, queue)
    await store.settle([end(lost)])
    with locked(window, held.id):
        beat = await store.beat([lost, held, free])
    assert (beat.renewed, beat.locked) == ({free}, {held})


async def test_a_beat_passes_a_row_whose_lock_is_weaker(store: WorkerStore, window: Window, queue: str) -> None:
    # A foreign key of the user's takes FOR KEY SHARE.
    window.enqueue(queue)
    (ours,) = await claim(store, queue)
    with psycopg.connect(window.dsn) as connection:
        connection.execute("SELECT FROM pulse.job WHERE id = %s FOR KEY SHARE", [ours.id])
        assert (await store.beat([ours])).renewed == {ours}


async def test_a_rescue_leaves_a_locked_row_for_the_next_tick(store: WorkerStore, window: Window, queue: str) -> None:
    ids = window.enqueue_many(2, queue)
    await claim(store, queue)
    window.expire(*ids)
    with locked(window, ids[0]):
        assert await store.rescue() == (1, 0)
    assert [window.state(i) for i in ids] == ["running", "available"]
    assert await store.rescue() == (1, 0)


async def test_a_rescue_respects_a_beat_that_is_being_committed(store: WorkerStore, window: Window, queue: str) -> None:
    (job_id,) = window.enqueue_many(1, queue)
    await claim(store, queue)
    window.expire(job_id)
    with psycopg.connect(window.dsn) as connection:
        connection.execute("UPDATE pulse.job SET lease_until = now() + interval '30 s' WHERE id = %s", [job_id])
        assert await store.rescue() == (0, 0)
    assert await store.rescue() == (0, 0)


async def test_a_locked_table_is_the_databases_fault_and_passes(store: WorkerStore, window: Window, queue: str) -> None:
    window.enqueue_many(2, queue)
    first, second = await claim(store, queue)

    async def refused(call: Callable[[], Awaitable[object]]) -> None:
        with pytest.raises(DatabaseUnavailable, match="lock"):
            await call()

    with psycopg.connect(window.dsn) as connection:
        connection.execute("LOCK TABLE pulse.job IN ACCESS EXCLUSIVE MODE")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(refused, lambda: store.complete_and_claim(1, [ClaimCursor(queue, 0)], [end(first)]))
            nursery.start_soon(refused, lambda: store.settle([end(second, "failed")]))
            nursery.start_soon(refused, lambda: store.beat([first]))
            nursery.start_soon(refused, store.rescue)
    assert (await store.beat([first])).renewed == {first}
    assert len((await store.settle([end(first), end(second)])).accepted) == 2


async def test_opposite_batch_orders_do_not_deadlock(
    store: WorkerStore, other: WorkerStore, window: Window, queue: str
) -> None:
    for _ in range(10):
        window.enqueue_many(200, queue)
        claims = await claim(store, queue, 200)
        accepted: list[int] = []

        async def settle(via: WorkerStore, reverse: bool, *, claims: list = claims, to: list = accepted) -> None:
            outcomes = [end(c) for c in (reversed(claims) if reverse else claims)]
            settlement = await via.settle(outcomes)
            to.extend(o.claim.id for o in settlement.accepted)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(settle, store, False)
            nursery.start_soon(settle, other, True)
            nursery.start_soon(store.beat, claims)
        assert sorted(accepted) == sorted(c.id for c in claims)
