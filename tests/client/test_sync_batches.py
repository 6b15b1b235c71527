"""Batches of programs without an event loop."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pulse_trio import (
    BatchResult,
    Handlers,
    InvalidArguments,
    InvalidName,
    InvalidTransition,
    State,
    SyncBatch,
    SyncClient,
    UnknownBatch,
    UsageError,
    open_client,
)
from support.stores import claim, claim_one, end, open_store

if TYPE_CHECKING:
    from support.stores import Window

handlers = Handlers()


@handlers.job
async def step(n: int) -> int:
    return n


@handlers.job(queue="after")
async def report(batch: int = 0) -> None: ...


def callbacks(window: Window) -> list[Any]:
    return [row["args"] for row in window.run("SELECT args FROM jobs WHERE kind = 'report' ORDER BY id")]


def test_jobs_are_grouped_and_counted(dsn: str) -> None:
    client = SyncClient(dsn)
    said: list[int] = []
    with client.batch(name="nightly") as batch:
        first = batch.enqueue(step, 1)
        by_name = batch.enqueue("elsewhere", {"a": 1}, queue="other")
        many = batch.enqueue_many((step.request(n) for n in range(6000)), progress=said.append)
        assert batch.status().closed_at is None
    status = batch.status()
    assert repr(batch) == f"<SyncBatch {batch.id} 'nightly'>"
    assert (status.id, status.name, status.total, status.waiting) == (batch.id, "nightly", 6002, 6002)
    assert (status.closed_at is not None, status.finished_at) == (True, None)
    assert len({first.id, by_name.id, *(one.id for one in many)}) == 6002
    assert said[-1] == 6000


async def test_it_ends_with_its_last_job_and_says_what_failed(dsn: str, window: Window) -> None:
    client = SyncClient(dsn)
    with client.batch() as batch:
        batch.on_complete = report.request(batch.id)
        jobs = [batch.enqueue(step.options(max_attempts=1), n) for n in range(2)]
    async with open_store(dsn) as store:
        done, dead = await claim(store)
        await store.settle([end(done), end(dead, "failed", error="ValueError: no")])
        with pytest.raises(TimeoutError, match=rf"Batch {batch.id} did not finish within 0 s"):
            batch.wait(timeout=0)
        assert await store.finish_batches() == [batch.id]
    result = batch.wait(timeout=0)
    assert (result.succeeded, result.status.completed, result.status.dead) == (False, 1, 1)
    assert [(one.job_id, one.state, one.error) for one in result.failures] == [
        (jobs[1].id, State.DEAD, "ValueError: no")
    ]
    assert callbacks(window) == [{"batch": batch.id}]


async def test_who_waits_is_told_when_it_finishes(dsn: str) -> None:
    client, ended = SyncClient(dsn), list[BatchResult]()
    with client.batch() as batch:
        batch.enqueue(step, 1)
    waiting = threading.Thread(target=lambda: ended.append(batch.wait(timeout=60)))
    waiting.start()
    async with open_store(dsn) as store:
        await store.settle([end(await claim_one(store))])
        await store.finish_batches()
    waiting.join()
    assert [result.succeeded for result in ended] == [True]


async def test_a_batch_whose_block_fails_stays_open_for_whoever_ends_it(dsn: str, window: Window) -> None:
    client, made = SyncClient(dsn), list[SyncBatch]()

    def fail() -> None:
        with client.batch(on_complete=report.request(7)) as batch:
            made.append(batch)
            batch.enqueue(step, 1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    async with open_store(dsn) as store, open_client(dsn) as other:
        await store.settle([end(await claim_one(store))])
        assert await store.finish_batches() is None
        again = client.open_batch(made[0].id)
        again.enqueue(step, 2)
        await (await other.open_batch(again.id)).close()
        again.close()
        with pytest.raises(InvalidTransition, match="is closed: it takes no more"):
            again.enqueue(step, 3)
        with pytest.raises(InvalidTransition, match="is closed: it takes no more"):
            again.enqueue_many(step.request(n) for n in range(6000))
        await store.settle([end(await claim_one(store))])
        assert await store.finish_batches() == [again.id]
    assert window.value("SELECT count(*) FROM jobs WHERE kind = 'step'") == 2
    assert callbacks(window) == [{"batch": 7}]


def test_what_is_left_is_cancelled_and_an_open_batch_is_closed(dsn: str, window: Window) -> None:
    client = SyncClient(dsn)
    with client.batch() as batch:
        batch.enqueue_many(step.request(n) for n in range(20))
        assert batch.cancel(reason="no need") == 20
        with pytest.raises(InvalidTransition, match="it takes no more jobs"):
            batch.enqueue(step, 20)
    assert (batch.status().cancelled, batch.status().closed_at is not None) == (20, True)
    assert batch.cancel() == 0
    assert window.value("SELECT DISTINCT cancel_reason FROM jobs") == "no need"


def test_a_batch_of_the_callers_transaction_goes_with_it(dsn: str, window: Window) -> None:
    with psycopg.connect(dsn) as connection:
        client = SyncClient(dsn).using(connection)
        with client.batch(on_complete=report.request(1)) as batch:
            batch.enqueue(step, 1)
            batch.enqueue_many(step.options(unique_key=f"{n}").request(n) for n in range(2))
        with pytest.raises(UsageError, match="inside a transaction"):
            batch.wait(timeout=1)
        assert batch.status().total == 3
        connection.rollback()
    with pytest.raises(UnknownBatch, match=f"There is no batch {batch.id}\\."):
        SyncClient(dsn).open_batch(batch.id)
    assert window.value("SELECT count(*) FROM batch_job") == 0
    assert window.value("SELECT count(*) FROM job") == 0


def test_the_callback_that_another_producer_has_set_stays_when_the_block_ends(dsn: str, window: Window) -> None:
    client = SyncClient(dsn)
    with client.batch() as batch:
        other = client.open_batch(batch.id)
        other.on_complete = report.request(2)
        other.enqueue(step, 1)
    assert json.loads(window.value("SELECT callback FROM batch")["args"]) == {"batch": 2}


def test_a_live_job_with_the_unique_key_is_a_member(dsn: str) -> None:
    client = SyncClient(dsn)
    there = client.enqueue(step.options(unique_key="one"), 1)
    with client.batch() as batch:
        met = batch.enqueue(step.options(unique_key="one"), 1)
        many = batch.enqueue_many([step.options(unique_key="two").request(2)] * 2)
    assert (met.id, met.added) == (there.id, False)
    assert [one.added for one in many] == [True, False]
    assert batch.status().total == 2


def test_bad_input_is_refused_before_anything_is_written(dsn: str, window: Window) -> None:
    client = SyncClient(dsn)
    wrong: Any = report
    with pytest.raises(InvalidArguments, match="on_complete must be a request"), client.batch(on_complete=wrong):
        pass
    with pytest.raises(InvalidName), client.batch(name="\0"):
        pass
    assert window.value("SELECT count(*) FROM batch") == 0
    bad: Any
    for bad in ("1", True):
        with pytest.raises(InvalidArguments, match="A batch's id is a whole number"):
            client.open_batch(bad)
    with pytest.raises(UnknownBatch):
        client.open_batch(2**63)


def test_progress_that_raises_leaves_nothing(dsn: str, window: Window) -> None:
    def stop(_: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), SyncClient(dsn).batch() as batch:
        batch.enqueue_many([step.request(1)], progress=stop)
    assert window.value("SELECT count(*) FROM job") == 0
