"""Claiming: what is due, in order, up to the limit, and never twice."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import trio

from pulse_trio.store import ClaimCursor
from pulse_trio.store.claimed import cursors_after
from pulse_trio.worker.claiming.cursors import ClaimCursors
from support.stores import Window, claim, claim_one, end, open_store, sweep

if TYPE_CHECKING:
    from pulse_trio.jobs import Claim
    from pulse_trio.store import WorkerStore


async def test_a_claim_sets_running_lease_holder_and_attempt_at_once(
    store: WorkerStore, window: Window, queue: str
) -> None:
    job_id = window.enqueue(
        queue, kind="mail", args={"to": "ünïcode \U0001f600"}, priority=3, max_attempts=7, timeout=9, unique_key="k"
    )
    claimed = await claim_one(store, queue, priority=3)

    row = window.row(job_id)
    assert row is not None
    assert (row["state"], row["locked_by"], row["attempt"]) == (2, store.session, 1)
    lease = timedelta(seconds=30)
    (times,) = window.run(
        "SELECT clock_timestamp() - started_at AS age, lease_until - started_at AS lease FROM job WHERE id = %s", job_id
    )
    assert timedelta(0) <= times["age"] < timedelta(seconds=10)
    # Two readings of the clock, and PostgreSQL sets the lease's first.
    assert abs(times["lease"] - lease) < timedelta(milliseconds=50)
    assert (claimed.id, claimed.attempt, claimed.session) == (job_id, 1, store.session)
    assert (claimed.kind, claimed.queue, claimed.priority) == ("mail", queue, 3)
    assert (claimed.max_attempts, claimed.failures) == (7, 0)
    assert claimed.args == '{"to":"ünïcode \U0001f600"}'
    assert claimed.options == '{"timeout":9}'


async def test_the_lease_counts_from_before_the_statement_was_sent(
    store: WorkerStore, window: Window, queue: str
) -> None:
    window.enqueue(queue)
    before = trio.current_time()
    exchange = await store.complete_and_claim(1, [ClaimCursor(queue, 0)])
    assert before <= exchange.sent <= trio.current_time()


async def test_within_a_slot_claims_come_first_in_first_out(store: WorkerStore, window: Window, queue: str) -> None:
    ids = [window.enqueue(queue) for _ in range(5)]
    window.run("UPDATE job SET run_at = now() - interval '1 h' WHERE id = %s", ids[3])

    claims = [await claim_one(store, queue) for _ in range(3)] + await claim(store, queue)

    assert [c.id for c in claims] == [ids[3], ids[0], ids[1], ids[2], ids[4]]


async def test_a_tie_of_due_times_is_decided_by_id(store: WorkerStore, window: Window, queue: str) -> None:
    ids = window.enqueue_many(50, queue)
    assert [c.id for c in await claim(store, queue, 20)] == ids[:20]
    assert [c.id for c in await claim(store, queue, 50)] == ids[20:]


async def test_claims_go_by_priority_then_by_the_listed_order_of_queues(
    store: WorkerStore, window: Window, queue: str
) -> None:
    first, second = f"{queue}.z-first", f"{queue}.a-second"
    jobs = {
        (name, priority): window.enqueue(name, priority=priority) for name in (second, first) for priority in (-1, 5, 0)
    }
    book = ClaimCursors((first, second), ClaimCursor)
    book.swept((await store.sweep((first, second))).found)

    order: list[int] = []
    for _ in range(len(jobs)):
        (claimed,) = (await store.complete_and_claim(1, book.slots)).claims
        order.append(claimed.id)

    assert order == [jobs[name, priority] for priority in (5, 0, -1) for name in (first, second)]


async def test_a_batch_over_several_slots_is_put_in_their_order(store: WorkerStore, window: Window, queue: str) -> None:
    late_but_first = f"{queue}.a"
    low = [window.enqueue(queue) for _ in range(2)]
    high = [window.enqueue(queue, priority=9) for _ in range(2)]
    other = [window.enqueue(late_but_first) for _ in range(2)]
    book = ClaimCursors((late_but_first, queue), ClaimCursor)
    book.swept((await store.sweep((late_but_first, queue))).found)

    claims = (await store.complete_and_claim(100, book.slots)).claims

    assert [c.id for c in claims] == high + other + low


@pytest.mark.parametrize("limit", [0, 1, 5, 7, 12, 15, 100])
async def test_the_limit_holds_across_slots_and_the_first_slots_come_first(
    limit: int, store: WorkerStore, window: Window, queue: str
) -> None:
    ids = {p: window.enqueue_many(5, queue, priority=p) for p in (2, 1, 0)}

    claims = (await store.complete_and_claim(limit, [ClaimCursor(queue, p) for p in (2, 1, 0)])).claims

    assert {c.id for c in claims} == set((ids[2] + ids[1] + ids[0])[:limit])
    running = window.value("SELECT count(*) FROM job WHERE queue = %s AND state = 2", queue)
    assert running == min(limit, 15)


async def test_a_job_that_is_not_due_is_not_claimed(store: WorkerStore, window: Window, queue: str) -> None:
    window.enqueue(queue, delay=3600)
    due = window.enqueue(queue)
    assert [c.id for c in await claim(store, queue)] == [due]


async def test_a_job_waiting_for_its_retry_is_claimed_when_that_is_due(
    store: WorkerStore, window: Window, queue: str
) -> None:
    job_id = window.enqueue(queue)
    await store.settle([end(await claim_one(store, queue), "failed", delay=3600)])
    assert await claim(store, queue) == []
    window.make_due(job_id)
    assert (await claim_one(store, queue)).failures == 1


async def test_a_running_job_is_not_claimed_again(
    store: WorkerStore, other: WorkerStore, window: Window, queue: str
) -> None:
    window.enqueue(queue)
    await claim_one(store, queue)
    assert await claim(store, queue) == []
    assert await claim(other, queue) == []


async def test_an_expired_job_is_not_claimed_before_it_is_rescued(
    store: WorkerStore, window: Window, queue: str
) -> None:
    job_id = window.enqueue(queue)
    await claim_one(store, queue)
    window.expire(job_id)
    assert await claim(store, queue) == []
    await store.rescue()
    assert (await claim_one(store, queue)).id == job_id


async def test_locked_rows_are_skipped_and_found_later(store: WorkerStore, window: Window, queue: str) -> None:
    ids = window.enqueue_many(5, queue)
    with window.connection.transaction():
        window.run("SELECT FROM job WHERE id = ANY (%s) FOR UPDATE", [ids[0], ids[2]])
        assert [c.id for c in await claim(store, queue)] == [ids[1], ids[3], ids[4]]
    assert [c.id for c in await claim(store, queue)] == [ids[0], ids[2]]


async def test_a_row_that_a_foreign_key_check_holds_is_claimed(store: WorkerStore, window: Window, queue: str) -> None:
    # FOR NO KEY UPDATE, not FOR UPDATE: a user's table may reference job ids.
    job_id = window.enqueue(queue)
    with window.connection.transaction():
        window.run("SELECT FROM job WHERE id = %s FOR KEY SHARE", job_id)
        assert (await claim_one(store, queue)).id == job_id


# Cursors


async def test_a_row_below_the_cursor_is_left_to_the_sweep(store: WorkerStore, window: Window, queue: str) -> None:
    ids = window.enqueue_many(2, queue)
    window.run("UPDATE job SET run_at = now() - interval '1 h' WHERE id = %s", ids[0])
    window.run("UPDATE job SET run_at = now() - interval '1 min' WHERE id = %s", ids[1])
    (first,) = await claim(store, queue, 1)
    (second,) = await claim(store, queue, 1)
    book = ClaimCursors(None, ClaimCursor)
    book.swept(list((await store.sweep([queue])).found))
    book.claimed(cursors_after([first, second]), every=True)
    backdated = window.enqueue(queue)
    window.run("UPDATE job SET run_at = now() - interval '30 min' WHERE id = %s", backdated)

    assert (await store.complete_and_claim(10, book.slots)).claims == []

    book.swept((await store.sweep([queue])).found)
    assert [c.id for c in (await store.complete_and_claim(10, book.slots)).claims] == [backdated]


async def test_rows_above_the_cursor_are_claimed(store: WorkerStore, window: Window, queue: str) -> None:
    ids = window.enqueue_many(3, queue)
    window.run("UPDATE job SET run_at = now() - interval '1 h'")
    run_at = window.value("SELECT run_at::text FROM job WHERE id = %s", ids[1])
    # The cursor itself is claimed again if it is there: a released job may have come back with the same due time.
    claims = (await store.complete_and_claim(10, [ClaimCursor(queue, 0, run_at, ids[1])])).claims
    assert [c.id for c in claims] == ids[1:]


async def test_a_commit_of_the_last_50_ms_is_not_hidden_by_the_cursor(
    store: WorkerStore, window: Window, queue: str
) -> None:
    # Conclusive only if the claim came within 50 ms of the row's run_at, by the database's clock.
    for _ in range(100):
        job_id = window.enqueue(queue)
        run_at = window.value("SELECT run_at::text FROM job WHERE id = %s", job_id)
        later = window.value("SELECT (clock_timestamp() + interval '10 s')::text")
        claims = (await store.complete_and_claim(1, [ClaimCursor(queue, 0, later, 2**62)])).claims
        age = window.value("SELECT clock_timestamp() - %s::timestamptz", run_at)
        if age < timedelta(milliseconds=50):
            assert [c.id for c in claims] == [job_id]
            return
        window.run("DELETE FROM job WHERE queue = %s", queue)
    pytest.fail("no claim was fast enough to tell")


async def test_the_cursor_a_claim_gives_survives_any_date_style(alone: Window) -> None:
    name = alone.value("SELECT current_database()")
    alone.run(f"ALTER DATABASE \"{name}\" SET DateStyle = 'German, DMY'")
    alone.run(f"ALTER DATABASE \"{name}\" SET TimeZone = 'Asia/Kathmandu'")
    async with open_store(alone.dsn) as store:
        ids = alone.enqueue_many(3, "q")
        alone.run("UPDATE job SET run_at = timestamptz '2001-02-03 04:05:06.789012Z' + id * interval '1 microsecond'")
        book = ClaimCursors(None, ClaimCursor)
        book.swept((await store.sweep(None)).found)
        for expected in ids:
            result = await store.complete_and_claim(1, book.slots)
            book.claimed(result.cursors, every=True)
            assert [c.id for c in result.claims] == [expected]


# Slots


async def test_slots_are_every_pair_of_queue_and_priority_that_has_live_jobs(
    store: WorkerStore, window: Window, queue: str
) -> None:
    for name, priority in [("b", 0), ("a", 2), ("a", -3), ("b", 0)]:
        window.enqueue(f"{queue}.{name}", priority=priority)
    finished = window.enqueue(f"{queue}.c")
    await store.settle([end(await claim_one(store, f"{queue}.c"))])
    assert window.row(finished) is None

    found = (await store.sweep(None)).found

    ours = [(f.queue.removeprefix(f"{queue}."), f.priority) for f in found if f.queue.startswith(queue)]
    assert sorted(ours) == [("a", -3), ("a", 2), ("b", 0)]


async def test_slots_are_limited_to_the_queues_asked_for(store: WorkerStore, window: Window, queue: str) -> None:
    window.enqueue(queue)
    window.enqueue(f"{queue}.other")
    assert [f.queue for f in (await store.sweep([queue, "nowhere"])).found] == [queue]
    assert (await store.sweep([])).found == []


async def test_a_paused_queue_is_left_out_until_it_is_resumed(store: WorkerStore, window: Window, queue: str) -> None:
    window.enqueue(queue)
    window.run("INSERT INTO queue (name, paused_at) VALUES (%s, now())", queue)
    assert await sweep(store, [queue]) == []
    window.run("UPDATE queue SET paused_at = NULL WHERE name = %s", queue)
    assert await sweep(store, [queue]) == [ClaimCursor(queue, 0)]


async def test_a_slot_tells_when_its_next_job_falls_due(store: WorkerStore, window: Window, queue: str) -> None:
    window.enqueue(queue)
    assert [f.next_due_in for f in (await store.sweep([queue])).found] == [None]
    window.enqueue(queue, delay=7200)
    window.enqueue(queue, delay=3600)
    (found,) = (await store.sweep([queue])).found
    assert found.next_due_in is not None
    assert 3500 < found.next_due_in <= 3600


async def test_a_job_of_the_far_future_stops_nobody(store: WorkerStore, window: Window, queue: str) -> None:
    due = window.enqueue(queue)
    window.run("SELECT enqueue('noop', queue => %s, run_at => '9999-12-30')", queue)
    (found,) = (await store.sweep([queue])).found
    assert found.next_due_in is not None
    assert found.next_due_in > 1e9
    assert [c.id for c in await claim(store, queue)] == [due]


# Races


async def test_concurrent_claimers_never_get_the_same_row(room_dsn: str, window: Window, queue: str) -> None:
    ids = window.enqueue_many(1000, queue) + window.enqueue_many(1000, queue, priority=1)
    got: list[Claim] = []

    async def greedy(store: WorkerStore, limit: int) -> None:
        while claims := (await store.complete_and_claim(limit, [ClaimCursor(queue, 1), ClaimCursor(queue, 0)])).claims:
            got.extend(claims)

    async with open_store(room_dsn) as a, open_store(room_dsn) as b, open_store(room_dsn) as c:
        async with trio.open_nursery() as nursery:
            for store, limit in ((a, 7), (b, 11), (c, 3)):
                nursery.start_soon(greedy, store, limit)
        # Whoever met a locked row went on without it.
        await greedy(a, 1000)

        assert sorted(c.id for c in got) == sorted(ids)
        assert {c.attempt for c in got} == {1}
        holders = {r["id"]: r["locked_by"] for r in window.run("SELECT id, locked_by FROM job WHERE queue = %s", queue)}
        assert holders == {c.id: c.session for c in got}


async def test_claims_and_completions_of_several_workers_at_once_lose_and_repeat_nothing(
    room_dsn: str, window: Window, queue: str
) -> None:
    ids = window.enqueue_many(1500, queue)
    accepted: list[int] = []

    async def work(store: WorkerStore, limit: int) -> None:
        done: list[Claim] = []
        while True:
            claims, _, settlement, *_ = await store.complete_and_claim(
                limit, [ClaimCursor(queue, 0)], [end(c) for c in reversed(done)]
            )
            accepted.extend(o.claim.id for o in settlement.accepted)
            assert (settlement.refused, settlement.again) == ([], [])
            done = claims
            if not claims:
                return

    async with open_store(room_dsn) as a, open_store(room_dsn) as b:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(work, a, 13)
            nursery.start_soon(work, b, 29)
        await work(a, 1000)
        await work(a, 1000)

    assert sorted(accepted) == sorted(ids)
    assert window.value("SELECT count(*) FROM job_archive WHERE queue = %s AND attempt = 1", queue) == 1500
