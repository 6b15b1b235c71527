"""Rescue: what a vanished worker held goes through the normal path, due at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from pulse_trio.store import WorkerStore
from support.stores import Window, claim, claim_one, end, open_store

if TYPE_CHECKING:
    from pulse_trio.store import Rescue


async def test_an_expired_lease_puts_the_job_back_at_once_with_its_attempt_and_failures(
    store: WorkerStore, window: Window, queue: str
) -> None:
    job_id = window.enqueue(queue)
    await store.settle([end(await claim_one(store, queue), "failed", error="first")])
    claimed = await claim_one(store, queue)
    window.expire(job_id)

    assert await store.rescue() == (1, 0)

    row = window.row(job_id)
    assert row is not None
    assert (row["state"], row["attempt"], row["failures"], row["max_attempts"]) == (3, 2, 1, 20)
    assert (row["locked_by"], row["lease_until"]) == (0, "infinity")
    job = window.job(job_id)
    assert job["state"] == "available"
    assert (job["worker"], job["lease_until"]) == (None, None)
    assert job["error"] == "lease expired: the worker was gone or cut off"
    last = window.attempts(job_id)[-1]
    assert (last["attempt"], last["worker"], last["outcome"]) == (2, claimed.session, "rescued")
    assert last["started_at"] <= last["ended_at"]


async def test_a_rescued_job_comes_due_now_and_not_in_the_past(store: WorkerStore, window: Window, queue: str) -> None:
    # So it lands above the cursors of workers, and behind what is due already.
    job_id = window.enqueue(queue)
    await claim_one(store, queue)
    window.expire(job_id)
    before = window.value("SELECT clock_timestamp()")
    await store.rescue()
    assert before <= window.job(job_id)["run_at"] <= window.value("SELECT clock_timestamp()")


async def test_a_job_whose_budget_the_lost_attempt_used_up_is_dead(
    store: WorkerStore, window: Window, queue: str
) -> None:
    job_id = window.enqueue(queue, max_attempts=2)
    for expected in ((1, 0), (0, 1)):
        await claim_one(store, queue)
        window.expire(job_id)
        assert await store.rescue() == expected
    job = window.job(job_id)
    assert (job["state"], job["attempt"]) == ("dead", 2)
    assert job["error"].startswith("lease expired")


async def test_a_living_lease_is_not_rescued(store: WorkerStore, window: Window, queue: str) -> None:
    job_id = window.enqueue(queue)
    await claim_one(store, queue)
    assert await store.rescue() == (0, 0)
    assert window.state(job_id) == "running"


async def test_one_tick_rescues_no_more_than_its_limit(store: WorkerStore, window: Window, queue: str) -> None:
    ids = window.enqueue_many(10, queue)
    await claim(store, queue)
    window.expire(*ids)
    assert [(await store.rescue(4)).rescued for _ in range(4)] == [4, 4, 2, 0]


async def test_two_watchdogs_at_once_rescue_each_job_once(room_dsn: str, window: Window, queue: str) -> None:
    async with open_store(room_dsn) as worker, open_store(room_dsn) as one, open_store(room_dsn) as two:
        for _ in range(5):
            ids = window.enqueue_many(300, queue)
            await claim(worker, queue, 300)
            window.expire(*ids)
            rescues: list[Rescue] = []

            async def watch(store: WorkerStore, limit: int, *, to: list[Rescue] = rescues) -> None:
                to.append(await store.rescue(limit))

            async with trio.open_nursery() as nursery:
                for store, limit in ((one, 200), (two, 200)):
                    nursery.start_soon(watch, store, limit)
            rescues.append(await one.rescue())
            assert sum(r.rescued for r in rescues) == 300
            assert window.value("SELECT count(*) FROM attempt WHERE job_id = ANY (%s)", ids) == 300
            assert {c.attempt for c in await claim(worker, queue, 300)} == {2}


async def test_what_dead_sessions_hold_is_rescued_before_its_lease_runs_out(
    store: WorkerStore, other: WorkerStore, window: Window, queue: str
) -> None:
    ids = window.enqueue_many(3, queue)
    dead = await claim(store, queue, 2)
    alive = await claim(other, queue, 1)

    rescued, buried, jobs = await other.rescue_sessions([store.session, 12345])
    assert (rescued, buried, sorted(jobs)) == (2, 0, [(i, "noop") for i in ids[:2]])

    assert [window.state(i) for i in ids] == ["available", "available", "running"]
    assert (await other.beat(alive)).renewed == set(alive)
    assert (await store.beat(dead)).renewed == set()
    assert window.job(ids[0])["error"] == "the worker process died"
    assert await other.rescue_sessions([]) == (0, 0, ())


async def test_rescue_needs_no_session(room_dsn: str, window: Window, queue: str, store: WorkerStore) -> None:
    job_id = window.enqueue(queue)
    await claim_one(store, queue)
    window.expire(job_id)
    stranger = WorkerStore(room_dsn)
    try:
        assert await stranger.rescue() == (1, 0)
    finally:
        await stranger.aclose()
