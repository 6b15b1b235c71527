"""Limits on a real database: never over, whoever claims at the same time; in fair turns; freed by whatever ends a job."""

from __future__ import annotations

import json
import math
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio.handlers import Handlers, QueueLimits, Rate
from pulse_trio.states import options_of
from pulse_trio.store import new_jobs
from pulse_trio.store.links import WORKER_SETTINGS
from support.stores import Window, claim, end, open_store

if TYPE_CHECKING:
    from pulse_trio.jobs import Claim, OutcomeKind
    from pulse_trio.store import WorkerStore


async def take(store: WorkerStore, queue: str, limit: int = 100, turns: str = "{}") -> list[Claim]:
    return (await store.claim_limited(queue, limit, turns)).claims


def keys(window: Window, claims: list[Claim]) -> list[str]:
    """The keys of these jobs, in order."""
    return [window.value("SELECT coalesce(key, '') FROM job WHERE id = %s", c.id) for c in claims]


async def limit(store: WorkerStore, queue: str, **limits: Any) -> None:
    await store.declare_limits([QueueLimits(queue, **limits)])


async def test_a_retention_that_handlers_declare_is_kept_by_those_who_say_nothing_of_it(
    store: WorkerStore, window: Window, queue: str
) -> None:
    def kept() -> timedelta:
        return window.value("SELECT retention FROM queue WHERE name = %s", queue)

    handlers = Handlers()
    handlers.queue(queue, retention=timedelta(days=3))
    await store.declare_limits(handlers.queue_limits)
    assert kept() == timedelta(days=3)
    await limit(store, queue, limit=3)
    assert kept() == timedelta(days=3)


# How many at once


async def test_a_queue_runs_no_more_than_its_limit_and_a_place_is_free_when_a_job_ends(
    store: WorkerStore, other: WorkerStore, window: Window, queue: str
) -> None:
    await limit(store, queue, limit=3)
    ids = window.enqueue_many(6, queue)
    assert await claim(store, queue) == []
    first = await take(store, queue)
    assert [c.id for c in first] == ids[:3]
    answer = await other.claim_limited(queue, 10)
    assert (answer.claims, answer.again_in, answer.blocked) == ([], None, True)
    await store.complete_and_claim(0, [], [end(first[1])])
    assert [c.id for c in await take(other, queue)] == [ids[3]]
    assert await take(store, queue) == []


@pytest.mark.parametrize("kind", ["completed", "failed", "discarded", "cancelled", "snoozed", "released", "timeout"])
async def test_every_end_of_a_job_frees_its_place(
    kind: OutcomeKind, store: WorkerStore, window: Window, queue: str
) -> None:
    await limit(store, queue, limit=1)
    window.enqueue_many(2, queue)
    (held,) = await take(store, queue)
    await store.settle([end(held, kind, delay=3600.0)])
    assert len(await take(store, queue)) == 1


async def test_a_rescue_frees_the_place_and_the_next_attempt_takes_it_again(
    store: WorkerStore, other: WorkerStore, window: Window, queue: str
) -> None:
    await limit(store, queue, limit=1)
    (job_id,) = window.enqueue_many(1, queue)
    await take(store, queue)
    window.expire(job_id)
    # A lease that has run out still counts: its worker may be at work until somebody has taken the job from it.
    assert await take(other, queue) == []
    await other.rescue()
    (again,) = await take(other, queue)
    assert (again.id, again.attempt) == (job_id, 2)
    window.enqueue_many(1, queue)
    assert await take(other, queue) == []


async def test_a_key_runs_no_more_than_its_jobs_say(store: WorkerStore, window: Window, queue: str) -> None:
    for _ in range(3):
        window.enqueue(queue, key="a", limit=2)
        window.enqueue(queue, key="b", limit=1)
        window.enqueue(queue, key="c")
    assert sorted(keys(window, await take(store, queue))) == ["a", "a", "b", "c", "c", "c"]


async def test_jobs_of_every_kind_share_the_limit_and_the_rate_of_one_key(
    store: WorkerStore, other: WorkerStore, window: Window, queue: str
) -> None:
    handlers = Handlers()

    @handlers.job(queue=queue, key="github", limit=2, rate="3/h")
    async def fetch() -> None: ...

    @handlers.job(queue=queue, key="github", limit=2, rate="3/h")
    async def push() -> None: ...

    for handler in (fetch, push, fetch, push):
        window.do(new_jobs.enqueue(handler.request()))
    first = await take(store, queue)
    assert [c.kind for c in first] == ["fetch", "push"]
    assert await take(other, queue) == []
    await store.settle([end(c) for c in first])
    # Of the rate, one start is left.
    assert [c.kind for c in await take(other, queue)] == ["fetch"]
    answer = await store.claim_limited(queue, 100)
    assert answer.claims == []
    assert answer.again_in == pytest.approx(1200, abs=30)


async def test_a_limit_of_a_key_holds_over_priorities(store: WorkerStore, window: Window, queue: str) -> None:
    for priority in (0, 5, 9):
        window.enqueue(queue, key="a", limit=2, priority=priority)
    assert [c.priority for c in await take(store, queue)] == [9, 5]


async def test_the_queues_limit_for_each_key_counts_where_a_job_says_nothing(
    store: WorkerStore, window: Window, queue: str
) -> None:
    await limit(store, queue, key_limit=1)
    for _ in range(3):
        window.enqueue(queue, key="a")
        window.enqueue(queue, key="b", limit=2)
        window.enqueue(queue)
    assert sorted(keys(window, await take(store, queue))) == ["a", "b", "b"]
    # Jobs without a key are nobody's: they go the fast way.
    assert len(await claim(store, queue)) == 3


async def test_the_strictest_of_a_keys_jobs_in_line_counts(store: WorkerStore, window: Window, queue: str) -> None:
    for allowed in (3, 1, 3):
        window.enqueue(queue, key="a", limit=allowed)
    assert len(await take(store, queue)) == 1


async def test_options_that_make_no_sense_hold_up_nobody(store: WorkerStore, window: Window, queue: str) -> None:
    window.run(
        "INSERT INTO job (kind, queue, key, options) VALUES ('noop', %s, 'a', %s)",
        queue,
        json.dumps({"limit": "x", "rate": "y"}),
    )
    assert len(await take(store, queue)) == 1


# How often


async def test_a_rate_lets_a_burst_start_and_then_says_when_the_next_may(
    store: WorkerStore, window: Window, queue: str
) -> None:
    await limit(store, queue, rate=Rate(4, 3600.0))
    window.enqueue_many(10, queue)
    answer = await store.claim_limited(queue, 100)
    assert len(answer.claims) == 4
    answer = await store.claim_limited(queue, 100)
    assert (answer.claims, answer.blocked) == ([], True)
    assert answer.again_in == pytest.approx(900, abs=30)
    # A token has come since.
    window.run("UPDATE bucket SET full_at = full_at - interval '901 s' WHERE queue = %s", queue)
    assert len(await take(store, queue)) == 1
    assert await take(store, queue) == []


async def test_a_rate_of_a_key_is_its_own(store: WorkerStore, window: Window, queue: str) -> None:
    for _ in range(5):
        window.enqueue(queue, key="a", rate="2/h")
        window.enqueue(queue, key="b", rate="3/h")
    assert sorted(keys(window, await take(store, queue))) == ["a", "a", "b", "b", "b"]
    answer = await store.claim_limited(queue, 100)
    assert answer.claims == []
    assert answer.again_in == pytest.approx(1200, abs=30)


@pytest.mark.parametrize("left", [-60.0, 0.045])
@pytest.mark.parametrize("name", ["expires", "deadline"])
@pytest.mark.parametrize("of", ["the queue", "the key of the queue", "the key's own"])
async def test_what_never_starts_takes_no_token(
    store: WorkerStore, window: Window, queue: str, of: str, name: str, left: float
) -> None:
    """A queue in which more arrived than its rate lets start came to a standstill: each token went to a job that had expired,
    or had by the time that its worker came to it. `left`: seconds until then."""
    rates = {"the queue": {"rate": Rate(5, 3600.0)}, "the key of the queue": {"key_rate": Rate(5, 3600.0)}}
    await limit(store, queue, **rates.get(of, {}))
    options = {"rate": "5/h"} if of == "the key's own" else {}
    gone = [window.enqueue(queue, key="a", **options) for _ in range(5)]
    odd = window.enqueue(queue, key="a", **options)
    later = [window.enqueue(queue, key="a", **options) for _ in range(6)]
    said = "coalesce(options::jsonb, '{}') || jsonb_build_object(%s::text, %s::json)"
    set_options = f"UPDATE job SET options = {said} WHERE id = ANY (%s)"
    window.run(set_options, name, '"soon"', [odd])
    window.run(set_options, name, str(time.time() + left), gone)
    answer = await store.claim_limited(queue, 100)
    assert ([c.id for c in answer.claims], answer.again_in) == (gone, 0)
    for taken in answer.claims:
        told = options_of(taken)
        assert min(told.expires or math.inf, told.deadline or math.inf) < time.time()
    # One with a moment that is none takes a token: it starts, as far as the database knows.
    answer = await store.claim_limited(queue, 100)
    assert [c.id for c in answer.claims] == [odd, *later[:4]]
    answer = await store.claim_limited(queue, 100)
    assert (answer.claims, answer.again_in) == ([], pytest.approx(720, abs=30))


async def test_a_bucket_never_holds_more_than_its_burst(store: WorkerStore, window: Window, queue: str) -> None:
    await limit(store, queue, rate=Rate(3, 1.0))
    window.enqueue_many(10, queue)
    window.run("INSERT INTO bucket VALUES (%s, '', now() - interval '1 day')", queue)
    assert len(await take(store, queue)) == 3


async def test_a_higher_rate_takes_effect_with_the_next_claim(store: WorkerStore, window: Window, queue: str) -> None:
    await limit(store, queue, rate=Rate(2, 3600.0), key_rate=Rate(2, 3600.0))
    for _ in range(30):
        window.enqueue(queue, key="a")
    assert len(await take(store, queue)) == 2
    await limit(store, queue, rate=Rate(1000, 1.0), key_rate=Rate(2, 3600.0))
    answer = await store.claim_limited(queue, 100)
    assert (answer.claims, answer.blocked) == ([], True)
    await limit(store, queue, rate=Rate(1000, 1.0), key_rate=Rate(1000, 1.0))
    assert len(await take(store, queue)) == 28


async def test_what_was_taken_under_the_old_rate_counts_under_a_lower_one_and_no_more_than_it_holds(
    store: WorkerStore, window: Window, queue: str
) -> None:
    await limit(store, queue, rate=Rate(1000, 1.0))
    window.enqueue_many(410, queue)
    assert len(await take(store, queue, 200)) + len(await take(store, queue, 200)) == 400
    # 5 an hour: empty, and a token in twelve minutes; not in a hundred hours.
    await limit(store, queue, rate=Rate(5, 3600.0))
    answer = await store.claim_limited(queue, 100)
    assert answer.claims == []
    assert answer.again_in == pytest.approx(720, abs=30)


async def test_of_a_new_rate_that_is_not_much_lower_the_rest_may_start(
    store: WorkerStore, window: Window, queue: str
) -> None:
    await limit(store, queue, rate=Rate(10, 3600.0))
    window.enqueue_many(20, queue)
    assert len(await take(store, queue, 4)) == 4
    await limit(store, queue, rate=Rate(6, 3600.0))
    assert len(await take(store, queue)) == 2


async def test_a_bucket_of_the_version_before_holds_a_higher_rate_back_no_longer_than_one_lap(
    store: WorkerStore, window: Window, queue: str
) -> None:
    """Its bucket does not say which rate filled it."""
    await limit(store, queue, rate=Rate(1000, 1.0))
    window.run("INSERT INTO bucket (queue, key, full_at) VALUES (%s, '', now() + interval '1 h')", queue)
    window.enqueue(queue)
    answer = await store.claim_limited(queue, 100)
    assert answer.claims or answer.again_in == pytest.approx(0.001)


@pytest.mark.parametrize("ahead", ["1 h", "3 years", "300 years", "infinity"])
@pytest.mark.parametrize("keyed", [False, True])
async def test_a_bucket_of_a_clock_that_was_ahead_counts_as_full_and_is_set_right(
    store: WorkerStore, window: Window, queue: str, keyed: bool, ahead: str
) -> None:
    """Its queue stood still for as long as the server's clock had been ahead, with 9 of 10 tokens left."""
    window.run(
        "INSERT INTO bucket (queue, key, full_at, count, seconds)"
        " VALUES (%s, %s, CASE WHEN %s = 'infinity' THEN 'infinity' ELSE now() + nullif(%s, 'infinity')::interval END, 10, 60)",
        queue, "a" if keyed else "", ahead, ahead,
    )  # fmt: skip
    if keyed:
        for _ in range(12):
            window.enqueue(queue, key="a", rate="10/min")
    else:
        await limit(store, queue, rate=Rate(10, 60.0))
        window.enqueue_many(12, queue)
    assert len(await take(store, queue, 4)) == 4
    left = window.value("SELECT extract(epoch FROM full_at - now())::float8 FROM bucket WHERE queue = %s", queue)
    assert left == pytest.approx(24, abs=5)
    assert len(await take(store, queue)) == 6
    assert await take(store, queue) == []


async def test_a_bucket_that_is_full_within_the_time_of_its_rate_holds_back(
    store: WorkerStore, window: Window, queue: str
) -> None:
    await limit(store, queue, rate=Rate(10, 3600.0))
    window.run(
        "INSERT INTO bucket (queue, key, full_at, count, seconds) VALUES (%s, '', now() + interval '3600 s', 10, 3600)",
        queue,
    )
    window.enqueue(queue)
    assert await take(store, queue) == []


# Whose turn it is


async def test_a_tenant_with_many_jobs_does_not_starve_one_with_few(
    store: WorkerStore, other: WorkerStore, window: Window, queue: str
) -> None:
    # A's 100,000 came first.
    window.run(
        "INSERT INTO job (kind, queue, key, run_at)"
        " SELECT 'noop', %s, 'a', now() - interval '1 h' FROM generate_series(1, 100000)",
        queue,
    )
    window.run("INSERT INTO job (kind, queue, key) SELECT 'noop', %s, 'b' FROM generate_series(1, 100)", queue)
    a = b = 0
    turns = ["{}", "{}"]
    while b < 100:
        for place, worker in enumerate((store, other)):
            answer = await worker.claim_limited(queue, 10, turns[place])
            turns[place] = answer.turns
            served = keys(window, answer.claims)
            a, b = a + served.count("a"), b + served.count("b")
            await worker.settle([end(c) for c in answer.claims])
    assert a < 1000
    assert a == pytest.approx(100, abs=20)


async def test_more_keys_than_one_look_takes_in_are_all_served(store: WorkerStore, window: Window, queue: str) -> None:
    window.run(
        "INSERT INTO job (kind, queue, key) SELECT 'noop', %s, 'k' || n %% 500 FROM generate_series(1, 1500) n", queue
    )
    served: list[str] = []
    turns = "{}"
    for _ in range(15):
        answer = await store.claim_limited(queue, 100, turns)
        turns = answer.turns
        served += keys(window, answer.claims)
    assert len(served) == 1500
    # Three laps: nobody is served twice before everybody was once.
    for lap in range(3):
        assert len(set(served[lap * 500 : (lap + 1) * 500])) == 500


async def test_a_key_at_its_limit_does_not_hide_the_keys_behind_it(
    store: WorkerStore, window: Window, queue: str
) -> None:
    for n in range(250):
        window.enqueue(queue, key=f"a{n:03}", limit=1)
    turns, running = "{}", 0
    while running < 250:
        answer = await store.claim_limited(queue, 1000, turns)
        turns, running = answer.turns, running + len(answer.claims)
    for n in range(250):
        window.enqueue(queue, key=f"a{n:03}", limit=1)
    last = window.enqueue(queue, key="z")
    for _ in range(3):
        answer = await store.claim_limited(queue, 10, turns)
        turns = answer.turns
        if answer.claims:
            break
        assert answer.again_in is not None
        assert answer.again_in < 0.1
    assert [c.id for c in answer.claims] == [last]


async def test_one_key_is_first_in_first_out_and_priority_comes_first(
    store: WorkerStore, window: Window, queue: str
) -> None:
    low = [window.enqueue(queue, key="a") for _ in range(3)]
    high = [window.enqueue(queue, key="a", priority=1) for _ in range(2)]
    assert [c.id for c in await take(store, queue)] == high + low


async def test_jobs_without_a_key_take_turns_as_one_more_key(store: WorkerStore, window: Window, queue: str) -> None:
    await limit(store, queue, limit=100)
    for _ in range(4):
        window.enqueue(queue)
        window.enqueue(queue, key="a")
    assert sorted(keys(window, await take(store, queue, 4))) == ["", "", "a", "a"]


# What is not due, paused, or locked


async def test_what_comes_due_later_is_told(store: WorkerStore, window: Window, queue: str) -> None:
    window.enqueue(queue, key="a", delay=600)
    answer = await store.claim_limited(queue, 5)
    assert (answer.claims, answer.blocked) == ([], False)
    assert answer.again_in == pytest.approx(600, abs=10)


async def test_a_paused_queue_and_a_paused_kind_are_left_alone(store: WorkerStore, window: Window, queue: str) -> None:
    kind = f"k-{queue}"
    stopped = window.enqueue(queue, kind=kind, key="a")
    going = window.enqueue(queue, key="a")
    window.run("INSERT INTO paused_kind (kind) VALUES (%s)", kind)
    swept = await store.sweep([queue])
    assert kind in swept.paused_kinds
    assert [c.id for c in await take(store, queue)] == [going]
    window.run("INSERT INTO queue (name, paused_at) VALUES (%s, now())", queue)
    window.run("DELETE FROM paused_kind WHERE kind = %s", kind)
    swept = await store.sweep([queue])
    assert swept.limited == []
    assert await take(store, queue) == []
    window.run("UPDATE queue SET paused_at = NULL WHERE name = %s", queue)
    swept = await store.sweep([queue])
    assert swept.limited == [queue]
    assert [c.id for c in await take(store, queue)] == [stopped]


@pytest.mark.parametrize("known", [True, False])
async def test_a_claimer_does_not_wait_for_another(store: WorkerStore, window: Window, queue: str, known: bool) -> None:
    if known:
        assert await take(store, queue) == []
    window.enqueue(queue, key="a")
    with window.connection.transaction():
        # As a claimer at work in that queue, which is its first or not.
        window.run("INSERT INTO claim_turn (queue) VALUES (%s) ON CONFLICT DO NOTHING", queue)
        window.run("SELECT FROM claim_turn WHERE queue = %s FOR UPDATE", queue)
        answer = await store.claim_limited(queue, 5, '{"0": "z"}')
        assert (answer.claims, answer.blocked, answer.turns) == ([], True, '{"0": "z"}')
        assert answer.again_in == pytest.approx(0.005)
    assert len(await take(store, queue)) == 1


LOCK = "SELECT pg_advisory_xact_lock(hashtextextended('pulse limited ' || %s, 0))"


async def test_an_advisory_lock_that_a_stranger_holds_stops_no_limited_queue(
    store: WorkerStore, window: Window, queue: str
) -> None:
    window.run("UPDATE claim_turn SET since = now() - interval '61 s' WHERE queue = ''")
    window.enqueue(queue, key="a")
    with window.connection.transaction():
        window.run(LOCK, queue)
        assert len(await take(store, queue)) == 1


@pytest.mark.parametrize("since", ["NULL", "now()"])
async def test_for_a_minute_after_the_migration_a_claim_of_the_version_before_is_waited_for(
    store: WorkerStore, window: Window, queue: str, since: str
) -> None:
    """It was under way when the function was replaced, and holds the advisory lock only."""
    window.run(f"UPDATE claim_turn SET since = {since} WHERE queue = ''")
    window.enqueue(queue, key="a")
    with window.connection.transaction():
        window.run(LOCK, queue)
        answer = await store.claim_limited(queue, 5)
        assert (answer.claims, answer.blocked) == ([], True)
        assert answer.again_in == pytest.approx(0.005)
    assert len(await take(store, queue)) == 1
    assert window.value("SELECT since IS NOT NULL FROM claim_turn WHERE queue = ''")


async def test_a_queue_that_has_been_empty_for_long_leaves_no_row_behind(
    store: WorkerStore, window: Window, queue: str
) -> None:
    known = "SELECT count(*) FROM claim_turn WHERE queue = %s"
    assert await take(store, queue) == []
    assert window.value(known, queue) == 1
    window.run("UPDATE claim_turn SET since = now() - interval '1 h' WHERE queue = %s", queue)
    assert await take(store, queue) == []
    assert window.value(known, queue) == 0


# What is left behind


async def test_permits_and_buckets_that_count_no_more_are_pruned(
    store: WorkerStore, window: Window, queue: str
) -> None:
    await limit(store, queue, limit=2, rate=Rate(1000, 1.0))
    window.enqueue_many(3, queue)
    done, held = await take(store, queue)
    await store.settle([end(done)])
    window.run("UPDATE bucket SET full_at = now() - interval '1 s' WHERE queue = %s", queue)
    await store.prune_permits()
    assert [r["job_id"] for r in window.run("SELECT job_id FROM permit WHERE queue = %s", queue)] == [held.id]
    assert window.run("SELECT FROM bucket WHERE queue = %s", queue) == []
    assert len(await take(store, queue)) == 1


# What it reads


def read(window: Window) -> tuple[int, int]:
    """Whole readings of the live table, and rows fetched from it by index, in this transaction."""
    (row,) = window.run("SELECT seq_scan, idx_tup_fetch FROM pg_stat_xact_user_tables WHERE relid IN ('job'::regclass)")
    return row["seq_scan"], row["idx_tup_fetch"]


@pytest.mark.parametrize("analyzed", [False, True])
async def test_a_limited_claim_is_an_index_walk_also_when_planned_on_an_empty_table(analyzed: bool, dsn: str) -> None:
    with Window(dsn) as filler, Window(dsn) as window:
        window.use_settings(WORKER_SETTINGS)
        call = "SELECT count((c.claimed).id) AS n FROM claim_limited('q', 7, '30 s', 50, '{}', '{}') c"
        for _ in range(6):
            window.run(call)
        filler.run(
            "INSERT INTO job (kind, queue, priority, key, run_at, options)"
            " SELECT 'noop', 'q', n % 2, 'k' || n % 1000, now() - interval '1 h' + n * interval '1 ms', '{\"limit\": 3}'"
            " FROM generate_series(1, 100000) n"
        )
        if analyzed:
            filler.run("VACUUM ANALYZE job")
        with window.connection.transaction():
            before = read(window)
            began = time.perf_counter()
            assert window.value(call) == 50
            elapsed = time.perf_counter() - began
            scans, rows = (after - b for after, b in zip(read(window), before, strict=True))
        assert scans == 0
        # 200 keys with two rows each, and the probes that found them.
        assert rows < 3000
        assert elapsed < 0.5


# Many at once


async def test_claimers_at_the_same_time_never_go_over_the_limit(room_dsn: str, window: Window, queue: str) -> None:
    running = most = done = 0

    async def work(store: WorkerStore) -> None:
        nonlocal running, most, done
        turns = "{}"
        while done < 120:
            answer = await store.claim_limited(queue, 10, turns)
            turns = answer.turns
            running += len(answer.claims)
            most = max(most, running)
            if answer.claims:
                # Ours until the settlement is on its way.
                running -= len(answer.claims)
                await store.settle([end(c) for c in answer.claims])
                done += len(answer.claims)

    async with open_store(room_dsn) as declarer:
        await limit(declarer, queue, limit=3)
    window.enqueue_many(120, queue)
    async with (
        open_store(room_dsn) as a,
        open_store(room_dsn) as b,
        open_store(room_dsn) as c,
        open_store(room_dsn) as d,
        trio.open_nursery() as nursery,
    ):
        for store in (a, b, c, d):
            nursery.start_soon(work, store)
    assert most <= 3
    assert done == 120
    # By the database's clock: every attempt with all that ran at its start.
    assert (
        window.value(
            "SELECT max(n) FROM (SELECT count(*) AS n FROM job_archive a JOIN job_archive b"
            " ON b.queue = a.queue AND b.started_at <= a.started_at AND b.finished_at > a.started_at"
            " WHERE a.queue = %s GROUP BY a.id) t",
            queue,
        )
        <= 3
    )


@pytest.mark.parametrize("analyzed", [False, True])
async def test_cancelled_jobs_that_run_once_more_are_found_without_a_walk_over_live_jobs(
    analyzed: bool, dsn: str
) -> None:
    with Window(dsn) as filler, Window(dsn) as window:
        window.use_settings(WORKER_SETTINGS)
        call = "SELECT count(c.id) AS n FROM claim_cleanups('{q}', 7, '30 s', NULL, 50, NULL) c"
        for _ in range(6):
            window.run(call)
        filler.run(
            "INSERT INTO job (kind, queue, key, run_at, cancelling)"
            " SELECT 'noop', 'q', 'k' || n % 1000, now() - interval '1 h' + n * interval '1 ms', n % 2000 = 0"
            " FROM generate_series(1, 100000) n"
        )
        filler.run(
            "INSERT INTO cancellation (job_id, requested_by, ended_at, ended_as)"
            " SELECT id, 'tree', CASE WHEN NOT cancelling THEN now() END, CASE WHEN NOT cancelling THEN 'cancelled' END"
            " FROM job WHERE id % 10 = 0"
        )
        if analyzed:
            filler.run("VACUUM ANALYZE job, cancellation")
        with window.connection.transaction():
            before = read(window)
            assert window.value(call) == 50
            scans, rows = (after - b for after, b in zip(read(window), before, strict=True))
        assert scans == 0
        assert rows < 200
