"""Workers that claim from one queue with keys or limits take turns: who waits, and how many jobs a turn brings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from pulse_trio.handlers import QueueLimits, Rate
from support.stores import Window

if TYPE_CHECKING:
    from pulse_trio.store import Limited, WorkerStore

WAITING = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%claim_limited(%'
"""


async def waiting(window: Window) -> None:
    """Returns when a claim waits for its turn."""
    with trio.fail_after(30):
        while not window.value(WAITING):  # noqa: ASYNC110 -- PostgreSQL tells nobody
            await trio.sleep(0.01)


async def test_a_claim_waits_for_its_turn_and_sees_what_the_one_before_it_did(
    store: WorkerStore, other: WorkerStore, window: Window, queue: str
) -> None:
    await store.declare_limits([QueueLimits(queue, limit=3)])
    ids = window.enqueue_many(5, queue)
    await store.claim_limited(queue, 1)
    answers: list[Limited] = []

    async def claim() -> None:
        answers.append(await other.claim_limited(queue, 5, wait=30.0))

    async with trio.open_nursery() as nursery:
        with window.connection.transaction():
            # As a claim of another worker, which takes one of the two places that are left.
            window.run("SELECT FROM claim_turn WHERE queue = %s FOR UPDATE", queue)
            nursery.start_soon(claim)
            with Window(window.dsn, schema=window.schema) as second:
                await waiting(second)
            running = "state = 2, attempt = 1, locked_by = 1, lease_until = now() + interval '1 h'"
            window.run(f"UPDATE job SET {running} WHERE id = %s", ids[1])
            window.run("INSERT INTO permit (queue, key, job_id, attempt) VALUES (%s, '', %s, 1)", queue, ids[1])
    (answer,) = answers
    assert [c.id for c in answer.claims] == [ids[2]]
    assert answer.waited
    # It says so only of itself.
    assert not (await other.claim_limited(queue, 5, answer.turns)).waited


async def test_a_turn_that_does_not_come_is_waited_for_no_longer_than_was_said(
    store: WorkerStore, window: Window, queue: str
) -> None:
    window.enqueue(queue, key="a")
    await store.claim_limited(queue, 0)
    with window.connection.transaction():
        window.run("SELECT FROM claim_turn WHERE queue = %s FOR UPDATE", queue)
        answer = await store.claim_limited(queue, 5, '{"0": "z"}', wait=0.01)
    assert (answer.claims, answer.blocked, answer.waited) == ([], True, True)
    assert answer.again_in == pytest.approx(0.005)
    (claim,) = (await store.claim_limited(queue, 5, answer.turns, wait=0.01)).claims
    assert claim.attempt == 1


async def test_a_claim_that_waited_for_nobody_does_not_say_so(store: WorkerStore, window: Window, queue: str) -> None:
    window.enqueue(queue, key='"waited": true')
    await store.claim_limited(queue, 0)
    answer = await store.claim_limited(queue, 5, wait=1.0)
    assert (len(answer.claims), answer.waited) == (1, False)


@pytest.mark.parametrize("keyed", [True, False])
async def test_a_claim_brings_as_many_jobs_as_it_asks_for(
    keyed: bool, store: WorkerStore, window: Window, queue: str
) -> None:
    """Of 300 keys at most, or as many jobs without one, before."""
    await store.declare_limits([QueueLimits(queue, rate=Rate(10_000, 1.0))])
    key = "'k' || n" if keyed else "NULL"
    window.run(
        f"INSERT INTO job (kind, args, queue, key) SELECT 'k', '{{}}', %s, {key} FROM generate_series(1, 450) AS n",
        queue,
    )
    answer = await store.claim_limited(queue, 440)
    assert len(answer.claims) == 440
    assert len((await store.claim_limited(queue, 440, answer.turns)).claims) == 10


async def test_keys_that_give_no_job_are_looked_at_as_before_however_many_do(
    store: WorkerStore, window: Window, queue: str
) -> None:
    """350 full keys between 200 free ones and 100 more: the look ends among the full ones, and the next goes on there."""
    await store.declare_limits([QueueLimits(queue, key_limit=1)])
    insert = (
        "INSERT INTO job (kind, args, queue, key) SELECT 'k', '{}', %s, %s || n FROM generate_series(1001, %s) AS n"
    )
    window.run(insert, queue, "b", 1350)
    taken, turns = 0, "{}"
    while claims := (answer := await store.claim_limited(queue, 500, turns)).claims:
        taken, turns = taken + len(claims), answer.turns
    assert taken == 350
    for letter, last in (("a", 1200), ("b", 1350), ("c", 1100)):
        window.run(insert, queue, letter, last)
    first = await store.claim_limited(queue, 500)
    assert len(first.claims) == 200
    second = await store.claim_limited(queue, 500, first.turns)
    assert len(second.claims) == 100


async def test_a_job_without_a_key_that_is_locked_or_due_later_is_passed_by(
    store: WorkerStore, window: Window, queue: str
) -> None:
    await store.declare_limits([QueueLimits(queue, rate=Rate(10_000, 1.0))])
    ids = window.enqueue_many(3, queue)
    window.run("UPDATE job SET run_at = now() + interval '600 s' WHERE id = %s", ids[2])
    with window.connection.transaction():
        window.run("SELECT FROM job WHERE id = %s FOR UPDATE", ids[0])
        answer = await store.claim_limited(queue, 5)
        assert [c.id for c in answer.claims] == [ids[1]]
        # The first is due, and held; the second runs; the third says when to come back.
        answer = await store.claim_limited(queue, 5, answer.turns)
        assert answer.claims == []
        assert answer.again_in == pytest.approx(600, abs=10)
    assert [c.id for c in (await store.claim_limited(queue, 5)).claims] == [ids[0]]
