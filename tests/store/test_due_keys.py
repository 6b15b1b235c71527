"""A look at a queue with keys costs what is due there, whatever else stands in it: counted in pages, not in time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pulse_trio.store.links import WORKER_SETTINGS
from support.stores import Window, end, open_store

if TYPE_CHECKING:
    from collections.abc import Generator

    from pulse_trio.store import WorkerStore
    from support.databases import Databases

SCHEDULED = 100_000
FEW_PAGES = 1500
"""Of 8 KiB, in memory: about two milliseconds. A look at the 100,000 keys took 400,000."""


def look(queue: str, most: int = 50) -> str:
    return f"SELECT count((c.claimed).id) FROM claim_limited('{queue}', 7, '30 s', {most}, '{{}}', '{{}}') c"


@pytest.fixture(scope="module")
def crowded(databases: Databases) -> Generator[Window]:
    """100,000 keys with a job each that is scheduled for tomorrow."""
    with databases.migrated() as dsn, Window(dsn) as window:
        window.use_settings(WORKER_SETTINGS)
        # The plans of this session are made now, on empty tables.
        for _ in range(6):
            window.run(look("q"))
        window.run(
            "INSERT INTO job (kind, queue, key, run_at)"
            f" SELECT 'noop', 'q', 'k' || n, now() + interval '1 day' FROM generate_series(1, {SCHEDULED}) n"
        )
        yield window


@pytest.mark.parametrize("analyzed", [False, True])
async def test_one_due_key_among_many_scheduled_ones_is_claimed_by_the_first_look(
    crowded: Window, analyzed: bool
) -> None:
    if analyzed:
        crowded.run("VACUUM ANALYZE job")
    due = crowded.enqueue("q", key="k77777")
    async with open_store(crowded.dsn) as store:
        answer = await store.claim_limited("q", 50)
        assert [c.id for c in answer.claims] == [due]
        await store.settle([end(c) for c in answer.claims])
    again = crowded.enqueue("q", key="k77778")
    try:
        assert crowded.pages(look("q")) < FEW_PAGES
    finally:
        # The next test finds what this one found, whatever comes of it.
        crowded.run("DELETE FROM job WHERE id = %s", again)


async def test_a_look_that_finds_nothing_due_is_as_cheap_and_says_when_something_is(crowded: Window) -> None:
    assert crowded.pages(look("q")) < FEW_PAGES
    async with open_store(crowded.dsn) as store:
        answer = await store.claim_limited("q", 50)
    assert (answer.claims, answer.blocked) == ([], False)
    assert answer.again_in == pytest.approx(86_400, abs=600)


async def test_what_was_scheduled_is_claimed_in_fair_turns_once_it_is_due(crowded: Window) -> None:
    crowded.run(
        "INSERT INTO job (kind, queue, key, created_at, run_at)"
        " SELECT 'noop', 'fair', CASE WHEN n <= 300 THEN 'a' ELSE 'b' END, now() - interval '1 h', now() - interval '1 s'"
        " FROM generate_series(1, 400) n"
    )
    async with open_store(crowded.dsn) as store:
        answer = await store.claim_limited("fair", 20)
        keys = [crowded.value("SELECT key FROM job WHERE id = %s", c.id) for c in answer.claims]
    assert keys == ["a", "b"] * 10


async def test_a_retry_a_snooze_and_a_release_wait_for_their_time_and_come_back(crowded: Window) -> None:
    job_id = crowded.enqueue("again", key="a")
    async with open_store(crowded.dsn) as store:
        for kind in ("failed", "snoozed", "released"):
            (claim,) = (await store.claim_limited("again", 5)).claims
            delay = 0.0 if kind == "released" else 600.0
            await store.settle([end(claim, kind, delay=delay)])  # pyright: ignore[reportArgumentType]
            if delay:
                answer = await store.claim_limited("again", 5)
                assert answer.claims == []
                assert answer.again_in == pytest.approx(600, abs=60)
                crowded.make_due(job_id)
        assert [c.id for c in (await store.claim_limited("again", 5)).claims] == [job_id]


async def test_many_priorities_of_blocked_jobs_cost_a_look_little_and_are_all_looked_at(
    crowded: Window, queue: str
) -> None:
    """Each priority of one key, whose only place is taken; and below them all a job that may start."""
    crowded.run(
        "INSERT INTO job (kind, queue, key, priority, options)"
        " SELECT 'noop', %s, 'a', n, '{\"limit\": 1}' FROM generate_series(1, 400) n",
        queue,
    )
    last = crowded.enqueue(queue, key="b", priority=-5)
    async with open_store(crowded.dsn) as store:
        (first,) = (await store.claim_limited(queue, 1)).claims
        assert first.priority == 400
        assert crowded.pages(look(queue)) < FEW_PAGES
        turns, found = "{}", []
        for _ in range(400 // 6 + 3):
            answer = await store.claim_limited(queue, 5, turns)
            turns, found = answer.turns, answer.claims
            if found:
                break
            assert answer.again_in is not None
            assert answer.again_in <= 0.005
            assert len(turns) < 2000
        assert [c.id for c in found] == [last]


@pytest.mark.parametrize("key", ["'k' || n", "NULL"])
async def test_many_priorities_of_scheduled_jobs_hide_nothing_that_is_due(
    crowded: Window, queue: str, key: str
) -> None:
    crowded.run("INSERT INTO queue (name, max_running) VALUES (%s, 5)", queue)
    crowded.run(
        "INSERT INTO job (kind, queue, key, priority, run_at)"
        f" SELECT 'noop', %s, {key}, n, now() + interval '1 day' FROM generate_series(1, 4000) n",
        queue,
    )
    last = crowded.enqueue(queue, key="z", priority=-5)
    assert crowded.pages(look(queue)) < FEW_PAGES
    async with open_store(crowded.dsn) as store:
        turns, found = "{}", []
        for _ in range(1 if key != "NULL" else 22):
            answer = await store.claim_limited(queue, 5, turns)
            turns, found = answer.turns, answer.claims
            if found:
                break
        assert [c.id for c in found] == [last]


HOSTILE = [
    '{"limit":1e999}', '{"limit":-1e999}', '{"limit":1e-999}', '{"limit":0}', '{"limit":-3}', '{"limit":[1]}', '{"limit":null}',
    '{"limit":true}', '{"rate":["x",1]}', '{"rate":[0,1]}', '{"rate":[1,0]}', '{"rate":[1e999,1]}', '{"rate":[1,1e999]}',
    '{"rate":[1]}', '{"rate":[]}', '{"rate":{}}', '{"rate":[1,-1]}', '{"rate":[1e308,1e-308]}', '{"rate":[1,1e300]}',
    '{"limit":"\\u0000"}', '{"\\u0000":1,"limit":1}', '{"x":"\\ud800","limit":1}', '[1,2]', '"limit"', "3", "null", "{}",
    '{"limit":' + "9" * 2000 + "}", '{"x":' + "[" * 3000 + "]" * 3000 + "}", '{"limit":' + "1" * 5000 + "}",
]  # fmt: skip


@pytest.mark.parametrize("options", HOSTILE, ids=lambda text: text[:24])
async def test_options_that_make_no_sense_stop_neither_their_queue_nor_their_key(
    store: WorkerStore, window: Window, queue: str, options: str
) -> None:
    window.run("INSERT INTO job (kind, queue, key, options) VALUES ('noop', %s, 'a', %s)", queue, options)
    others = [window.enqueue(queue, key=key) for key in ("a", "b")]
    claimed = [c.id for c in (await store.claim_limited(queue, 5)).claims]
    assert len(claimed) == 3
    assert set(others) < set(claimed)


@pytest.mark.parametrize("seconds", ["Infinity", "NaN", "1e-300", "1e300"])
async def test_a_rate_of_a_queue_that_makes_no_sense_stops_nothing(
    store: WorkerStore, window: Window, queue: str, seconds: str
) -> None:
    window.run(
        "INSERT INTO queue (name, rate_count, rate_seconds, key_rate_count, key_rate_seconds)"
        f" VALUES (%s, 5, '{seconds}', 5, '{seconds}')",
        queue,
    )
    window.run("INSERT INTO bucket VALUES (%s, '', '-infinity'), (%s, 'a', '-infinity')", queue, queue)
    for _ in range(3):
        window.enqueue(queue, key="a")
    turns = "{}"
    for expected in (2, 1, 0):
        answer = await store.claim_limited(queue, 2, turns)
        turns = answer.turns
        assert len(answer.claims) == expected
    window.run("UPDATE bucket SET full_at = 'infinity' WHERE queue = %s", queue)
    window.enqueue(queue, key="a")
    await store.claim_limited(queue, 2, turns)


@pytest.mark.parametrize("key", ["'k'", "NULL"])
async def test_a_job_that_is_due_at_infinity_does_not_end_the_looks_at_its_queue(key: str, alone: Window) -> None:
    alone.run("ALTER DOMAIN due_time DROP CONSTRAINT due_time_check")
    alone.run("INSERT INTO queue (name, max_running) VALUES ('endless', 5)")
    for due_at in ("infinity", "now"):
        alone.run(f"INSERT INTO job (kind, queue, key, run_at) VALUES ('noop', 'endless', {key}, '{due_at}')")
    async with open_store(alone.dsn) as store:
        assert len((await store.claim_limited("endless", 5)).claims) == 1
        assert len((await store.claim_limited("endless", 5)).claims) == 0
