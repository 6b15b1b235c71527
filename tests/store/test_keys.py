"""The jobs of one key (tenant), and the keys with the most jobs that are due."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import psycopg
import pytest

from pulse_trio import SyncClient, TookTooLong
from pulse_trio.sql import statement
from pulse_trio.store import queues
from support.stores import end, open_store

if TYPE_CHECKING:
    from support.stores import Window


def test_jobs_are_listed_by_their_key(alone: Window) -> None:
    client = SyncClient(alone.dsn)
    mine = [alone.enqueue(key="a"), alone.enqueue("other", key="a")]
    alone.enqueue(key="b")
    alone.enqueue()
    client.cancel(mine[0])
    assert [job.id for job in client.jobs(key="a")] == mine[::-1]
    assert [job.id for job in client.jobs(key="a", queue="other")] == mine[1:]
    assert [job.id for job in client.jobs(key="a", state="cancelled")] == mine[:1]
    assert client.jobs(key="nobody") == []


async def test_the_keys_with_the_most_due_jobs_come_first(alone: Window) -> None:
    client = SyncClient(alone.dsn)
    for key, due, later in (("small", 1, 3), ("large", 3, 0), ("later", 0, 2)):
        for delay in [None] * due + [600] * later:
            alone.enqueue("q", key=key, delay=delay)
    alone.enqueue("other", key="large")
    alone.enqueue("q")
    async with open_store(alone.dsn) as store:
        (running,) = (await store.claim_limited("other", 5)).claims
        assert [(k.queue, k.key, k.waiting, k.running) for k in client.queue_keys()] == [
            ("q", "large", 3, 0),
            ("q", "small", 1, 0),
            ("other", "large", 0, 1),
            ("q", "later", 0, 0),
        ]
        await store.settle([end(running)])
    assert [k.key for k in client.queue_keys("q", limit=2)] == ["large", "small"]
    ages = {k.key: k.oldest_available_age for k in client.queue_keys("q")}
    assert ages["later"] is None
    assert ages["large"] is not None
    assert ages["large"] >= 0
    alone.run("UPDATE job SET run_at = '0001-01-03' WHERE key = 'small'")
    assert client.queue_keys("q")


def test_one_queues_keys_are_found_by_their_index_among_many_jobs(alone: Window) -> None:
    alone.run(
        "INSERT INTO job (queue, kind, key) SELECT CASE WHEN n % 100 = 0 THEN 'few' ELSE 'many' END, 'noop', 'k' || n % 1000"
        " FROM generate_series(1, 200000) n; ANALYZE job"
    )
    text = statement("queue_keys", "pulse")
    with psycopg.connect(alone.dsn, cursor_factory=psycopg.ClientCursor) as connection:
        cursor = connection.execute(b"EXPLAIN (FORMAT JSON) " + text, {"queue": "few", "limit": 10})
        plan = json.dumps(cursor.fetchone())
    assert "job_keyed" in plan
    assert "Seq Scan" not in plan
    client = SyncClient(alone.dsn)
    assert [(k.key, k.waiting) for k in client.queue_keys("few", limit=1)] == [("k0", 200)]
    with pytest.raises(TookTooLong):
        client.run(queues.keys(timeout=0.001))
