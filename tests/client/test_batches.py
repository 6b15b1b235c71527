"""Batches: jobs that are waited for together, and their callback job, enqueued exactly once."""

from __future__ import annotations

import json
from typing import Any

import anyio
import psycopg
import pytest
import trio

from pulse_trio import (
    Batch,
    Handlers,
    InvalidArguments,
    InvalidName,
    InvalidTransition,
    JobExists,
    State,
    UnknownBatch,
    UsageError,
    open_client,
)
from pulse_trio.client import Client
from pulse_trio.postgres import TrioConnection
from pulse_trio.store import batches, finishing
from pulse_trio.store.operations import run
from support.stores import ENDS_WAITED_FOR, Window, claim, claim_one, end, open_store

pytestmark = pytest.mark.anyio  # On Trio and on asyncio.
handlers = Handlers()
on_trio = pytest.mark.parametrize("anyio_backend", ["trio"])
"""For tests with a worker's store in them, which lives on Trio."""


@handlers.job
async def step(n: int) -> int:
    return n


@handlers.job(queue="after")
async def report(batch: int = 0) -> None: ...


def callbacks(window: Window) -> list[dict[str, Any]]:
    return window.run("SELECT id, args FROM jobs WHERE kind = 'report' ORDER BY id")


async def test_jobs_are_grouped_and_counted(dsn: str) -> None:
    async with open_client(dsn) as client:
        async with client.batch(name="nightly") as batch:
            first = await batch.enqueue(step, 1)
            by_name = await batch.enqueue("elsewhere", {"a": 1}, queue="other")
            refs = await batch.enqueue_many(step.request(n) for n in range(6000))
            assert (await batch.status()).closed_at is None
        status = await batch.status()
        assert (status.id, status.name, status.total, status.waiting) == (batch.id, "nightly", 6002, 6002)
        assert status.closed_at is not None
        assert status.finished_at is None
        assert len({first.id, by_name.id, *(ref.id for ref in refs)}) == 6002
        assert await first.status() is State.AVAILABLE


@on_trio
async def test_a_batch_ends_with_its_last_job_and_says_what_failed(dsn: str, window: Window) -> None:
    async with open_client(dsn) as client, open_store(dsn) as store:
        async with client.batch() as batch:
            refs = [await batch.enqueue(step.options(max_attempts=1), n) for n in range(4)]
        done, dead, cancelled, last = await claim(store)
        await store.settle([end(done), end(dead, "failed", error="ValueError: no")])
        await store.settle([end(cancelled, "cancelled", error="by hand")])
        assert await store.finish_batches() == []
        status = await batch.status()
        assert (status.completed, status.dead, status.cancelled, status.running) == (1, 1, 1, 1)
        with pytest.raises(TimeoutError, match=rf"Batch {batch.id} did not finish"):
            await batch.wait(timeout=0.05)
        await store.settle([end(last, "snoozed")])
        assert (await batch.status()).waiting == 1
        assert await store.finish_batches() == []
        await store.settle([end(await claim_one(store))])
        assert await store.finish_batches() == [batch.id]
        result = await batch.wait(timeout=0)
        assert not result.succeeded
        counts = result.status
        assert (counts.total, counts.completed, counts.dead, counts.cancelled) == (4, 2, 1, 1)
        assert [(f.job_id, f.kind, f.state, f.error) for f in result.failures] == [
            (refs[1].id, "step", State.DEAD, "ValueError: no"),
            (refs[2].id, "step", State.CANCELLED, "by hand"),
        ]
        # What is known of a finished batch outlives its jobs.
        window.run("DELETE FROM job_archive")
        assert await batch.status() == counts
        assert await (await client.open_batch(batch.id)).status() == counts


@on_trio
async def test_who_waits_is_woken_when_it_finishes(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pulse_trio.client.waiting._FIRST", 3600.0)
    async with open_client(dsn) as client, open_store(dsn) as store:
        async with client.batch() as batch:
            await batch.enqueue(step, 1)
        results: list[bool] = []

        async def wait() -> None:
            results.append((await batch.wait(timeout=20)).succeeded)

        with Window(dsn) as window:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait)
                await store.settle([end(await claim_one(store))])
                with anyio.fail_after(20):
                    while window.value(ENDS_WAITED_FOR) < 2:  # noqa: ASYNC110 -- PostgreSQL tells nobody
                        await anyio.sleep(0.01)
                await store.finish_batches()
    assert results == [True]


@on_trio
async def test_the_callback_is_enqueued_once_whoever_looks(dsn: str, window: Window) -> None:
    async with open_client(dsn) as client, open_store(dsn) as store, open_store(dsn) as other:
        async with client.batch(on_complete=report.request(7)) as batch:
            await batch.enqueue(step, 1)
        claimed = await claim_one(store)
        await store.finish_batches()
        assert callbacks(window) == []
        await store.settle([end(claimed)])
        async with anyio.create_task_group() as tasks:
            for each in (store, other) * 3:
                tasks.start_soon(each.finish_batches)
        ((job_id, args),) = [(c["id"], c["args"]) for c in callbacks(window)]
        assert args == {"batch": 7}
        assert (await batch.status()).callback_job_id == job_id
        assert (await client.job(job_id)).queue == "after"


@on_trio
async def test_a_batch_whose_last_live_job_another_worker_has_just_found_does_not_finish(
    dsn: str, window: Window
) -> None:
    """That worker was given the batch, which seemed to have no live job, and looked above the mark alone: with two workers 17
    of 1,000 batches of one job finished while it ran, and their counts are final."""
    async with open_client(dsn) as client, open_store(dsn) as store, await TrioConnection.connect(dsn) as other:
        async with client.batch() as batch:
            ended, _ = [await batch.enqueue(step, n) for n in range(2)]
        first, last = await claim(store)
        assert first.id == ended.id
        await store.settle([end(first)])
        assert await store.finish_batches() == []
        assert window.run("SELECT mark FROM batch") == [{"mark": last.id}]
        # As PostgreSQL gives it to one who began to look before that, and locks it after it.
        async with other.transaction():
            assert await run(other, "pulse", batches.finish([batch.id])) == []
        await store.settle([end(last)])
        assert await store.finish_batches() == [batch.id]
        assert (await batch.status()).completed == 2


@on_trio
async def test_a_worker_that_dies_while_it_finishes_a_batch_leaves_it_to_the_next(
    dsn: str, window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_client(dsn) as client, open_store(dsn) as store, open_store(dsn) as other:
        async with client.batch(on_complete=report.request()) as batch:
            await batch.enqueue(step, 1)
        await store.settle([end(await claim_one(store))])
        real = finishing._call

        async def die(*args: Any) -> None:
            await real(*args)
            window.run(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = current_database()"
                " AND application_name = 'pulse-trio watchdog'"
            )

        monkeypatch.setattr(finishing, "_call", die)
        with pytest.raises(Exception, match="watchdog"):
            await store.finish_batches()
        assert callbacks(window) == []
        monkeypatch.setattr(finishing, "_call", real)
        assert await other.finish_batches() == [batch.id]
    assert len(callbacks(window)) == 1


@on_trio
async def test_an_empty_batch_finishes_at_once(dsn: str, window: Window) -> None:
    async with open_client(dsn) as client, open_store(dsn) as store:
        async with client.batch() as batch:
            # With the id of the batch, which is known only now.
            batch.on_complete = report.request(batch.id)
        assert await store.finish_batches() == [batch.id]
        assert await store.finish_batches() is None
    assert [c["args"] for c in callbacks(window)] == [{"batch": batch.id}]


@on_trio
async def test_an_open_batch_does_not_finish_and_takes_more(dsn: str, window: Window) -> None:
    async def fail(client: Client) -> None:
        async with client.batch(on_complete=report.request()) as batch:
            made.append(batch)
            await batch.enqueue(step, 1)
            raise ZeroDivisionError

    made: list[Batch] = []
    async with open_client(dsn) as client, open_store(dsn) as store:
        with pytest.raises(ZeroDivisionError):
            await fail(client)
        await store.settle([end(await claim_one(store))])
        assert await store.finish_batches() is None
        again = await client.open_batch(made[0].id)
        await again.enqueue(step, 2)
        await made[0].close()
        await made[0].close()
        assert await store.finish_batches() == []
        await store.settle([end(await claim_one(store))])
        assert await store.finish_batches() == [again.id]
        with pytest.raises(InvalidTransition, match="is closed: it takes no more"):
            await again.enqueue(step, 3)
        with pytest.raises(InvalidTransition, match="is closed: it takes no more"):
            await again.enqueue_many([step.request(3)])
    assert window.value("SELECT count(*) FROM jobs WHERE kind = 'step'") == 2
    assert len(callbacks(window)) == 1


class Lost(BaseException):
    """Ends a producer's block, as its death would."""


async def produce(client: Client, how: str, made: list[int]) -> None:
    """A producer that is lost in its block."""
    async with client.batch(on_complete=report.request(7) if how == "at its creation" else None) as batch:
        made.append(batch.id)
        if how == "in the block":
            batch.on_complete = report.request(batch.id)
        await batch.enqueue(step, 1)
        if how == "after a job":
            batch.on_complete = report.request(batch.id)
        await batch.enqueue_many([step.request(2)])
        raise Lost


@on_trio
@pytest.mark.parametrize("ends", ["close", "cancel"])
@pytest.mark.parametrize("how", ["at its creation", "in the block", "after a job", "not at all"])
async def test_another_program_ends_the_batch_of_a_producer_that_is_lost(
    how: str, ends: str, dsn: str, window: Window
) -> None:
    """The callback was in the producer's memory, and never enqueued. What was cancelled did not finish."""
    made: list[int] = []
    async with open_client(dsn) as client, open_store(dsn) as store:
        with pytest.raises(Lost):
            await produce(client, how, made)
        other = await client.open_batch(made[0])
        if ends == "close":
            await other.close()
            await store.settle([end(claim) for claim in await claim(store)])
        else:
            assert await other.cancel() == 2
        assert await store.finish_batches() == made
        assert (await other.wait(timeout=5)).status.total == 2
    wanted = {"at its creation": [{"batch": 7}], "not at all": []}.get(how, [{"batch": made[0]}])
    assert [job["args"] for job in callbacks(window)] == wanted


async def test_a_callback_is_changed_and_taken_back_by_whoever_says_so(dsn: str, window: Window) -> None:
    async with open_client(dsn) as client:
        async with client.batch(on_complete=report.request(1)) as batch:
            await batch.enqueue(step, 1)
            batch.on_complete = report.request(2)
        async with client.batch(on_complete=report.request(3)) as second:
            await second.enqueue(step, 2)
            second.on_complete = None
        with pytest.raises(Lost):
            await produce(client, "at its creation", lost := list[int]())
        opened = await client.open_batch(lost[0])
        assert opened.on_complete is None
        opened.on_complete = report.request(4)
        await opened.close()
    kept = window.run("SELECT callback FROM batch ORDER BY id")
    assert [row["callback"] and json.loads(row["callback"]["args"]) for row in kept] == [
        {"batch": 2},
        None,
        {"batch": 4},
    ]


@pytest.mark.parametrize("given", [None, 1])
@pytest.mark.parametrize("last", ["enqueues", "closes"])
async def test_the_callback_that_was_set_last_stays_whoever_closes(
    given: int | None, last: str, dsn: str, window: Window
) -> None:
    async with open_client(dsn) as client:
        async with client.batch(on_complete=None if given is None else report.request(given)) as batch:
            other = await client.open_batch(batch.id)
            other.on_complete = report.request(2)
            await other.enqueue(step, 1)
            await batch.enqueue(step, 2)
            if last == "closes":
                await other.close()
        # Set again, it is written again, though it is the same.
        async with client.batch(on_complete=(first := report.request(3))) as second:
            other = await client.open_batch(second.id)
            other.on_complete = None
            await other.enqueue(step, 1)
            second.on_complete = first
    kept = window.run("SELECT callback FROM batch ORDER BY id")
    assert [json.loads(row["callback"]["args"]) for row in kept] == [{"batch": 2}, {"batch": 3}]


@on_trio
async def test_a_batch_is_not_closed_while_somebody_adds_to_it(dsn: str, window: Window) -> None:
    waits = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%closed_at = now()%'"
    async with open_client(dsn) as client, open_store(dsn) as store, await TrioConnection.connect(dsn) as connection:
        with pytest.raises(Lost):
            await produce(client, "not at all", made := list[int]())
        batch = await client.open_batch(made[0])
        async with trio.open_nursery() as nursery, connection.transaction():
            await (await client.using(connection).open_batch(batch.id)).enqueue(step, 3)
            nursery.start_soon(batch.close)
            with trio.fail_after(20):
                while not window.run(waits):  # noqa: ASYNC110 -- the server tells nobody
                    await trio.sleep(0.01)
            assert await store.finish_batches() is None
        await store.settle([end(claim) for claim in await claim(store)])
        assert await store.finish_batches() == [batch.id]
        assert (await batch.status()).total == 3


@on_trio
@pytest.mark.parametrize("ends", ["close", "cancel"])
async def test_a_producer_whose_batch_another_program_has_ended_is_told(ends: str, dsn: str, window: Window) -> None:
    """Its jobs were taken, and ran in a batch that was cancelled; its callback was dropped, and nobody said so."""

    async def others_end(client: Client, batch: Batch) -> None:
        other = await client.open_batch(batch.id)
        await (other.close() if ends == "close" else other.cancel())

    async def produce_late(client: Client) -> None:
        async with client.batch() as batch:
            await others_end(client, batch)
            with pytest.raises(InvalidTransition, match="it takes no more jobs"):
                await batch.enqueue(step, 1)
            with pytest.raises(InvalidTransition, match="it takes no more jobs"):
                await batch.enqueue_many([step.request(1)])
            batch.on_complete = report.request(1)

    async with open_client(dsn) as client:
        with pytest.raises(InvalidTransition, match="its callback can be set no more"):
            await produce_late(client)
        async with client.batch(on_complete=report.request(2)) as batch:
            await others_end(client, batch)
        async with open_store(dsn) as store:
            await store.finish_batches()
    assert [job["args"] for job in callbacks(window)] == [{"batch": 2}]
    assert window.value("SELECT count(*) FROM jobs WHERE kind = 'step'") == 0


@on_trio
async def test_a_member_that_a_person_retries_is_waited_for(dsn: str) -> None:
    async with open_client(dsn) as client, open_store(dsn) as store:
        async with client.batch() as batch:
            first, last = [await batch.enqueue(step.options(max_attempts=1), n) for n in range(2)]
        one, two = await claim(store)
        await store.settle([end(one, "failed")])
        await store.finish_batches()
        await client.retry(first.id)
        await store.settle([end(two)])
        assert await store.finish_batches() == []
        await store.settle([end(await claim_one(store))])
        assert await store.finish_batches() == [batch.id]
        assert (await batch.status()).completed == 2
        await client.retry(last.id)
        assert (await batch.status()).waiting == 0


@on_trio
async def test_a_batch_is_read_once_however_often_it_is_asked(dsn: str, window: Window) -> None:
    async with open_client(dsn) as client, open_store(dsn) as store:
        async with client.batch() as batch:
            await batch.enqueue_many(step.request(n) for n in range(300))
        reads = "SELECT idx_scan FROM pg_stat_user_indexes WHERE indexrelname = 'batch_job_pkey'"
        looks: list[int] = []
        await store.finish_batches()
        for _ in range(3):
            await store.settle([end(c) for c in await claim(store, limit=100)])
            await store.finish_batches()
            mark = window.value("SELECT mark FROM batch WHERE id = %s", batch.id)
            for _ in range(5):
                assert await store.finish_batches() in ([], None)
            assert window.value("SELECT mark FROM batch WHERE id = %s", batch.id) == mark
            looks.append(mark)
        assert window.value(reads) is not None
        assert looks == sorted(looks)
        assert (await batch.wait(timeout=0)).status.completed == 300


async def test_what_is_left_is_cancelled(dsn: str, window: Window) -> None:
    async with open_client(dsn) as client:
        async with client.batch() as batch:
            await batch.enqueue_many(step.request(n) for n in range(20))
        assert await batch.cancel(reason="no need") == 20
        assert (await batch.status()).cancelled == 20
        assert await batch.cancel() == 0
    assert window.value("SELECT DISTINCT cancel_reason FROM jobs") == "no need"


async def test_a_batch_of_the_callers_transaction_goes_with_it(dsn: str, window: Window, anyio_backend: str) -> None:
    cls = TrioConnection if anyio_backend == "trio" else psycopg.AsyncConnection
    async with open_client(dsn) as client, await cls.connect(dsn) as connection:
        async with connection.transaction(force_rollback=True):
            async with client.using(connection).batch() as batch:
                await batch.enqueue(step, 1)
            with pytest.raises(
                UnknownBatch, match="one that a transaction makes is there for others when that has been"
            ):
                await batch.wait(timeout=5)
        with pytest.raises(UnknownBatch, match=f"There is no batch {batch.id}\\."):
            await client.open_batch(batch.id)
    assert window.value("SELECT count(*) FROM batch_job") == 0
    assert window.value("SELECT count(*) FROM job") == 0


async def test_a_live_job_with_the_unique_key_is_a_member(dsn: str) -> None:
    async with open_client(dsn) as client:
        there = await client.enqueue(step.options(unique_key="k"), 1)
        async with client.batch() as batch:
            for _ in range(2):
                assert (await batch.enqueue(step.options(unique_key="k"), 1)).id == there.id
        assert (await batch.status()).total == 1


@on_trio
async def test_a_callback_that_is_refused_does_not_hold_the_batch_up(dsn: str, window: Window) -> None:
    async with open_client(dsn) as client, open_store(dsn) as store:
        await client.enqueue(report.options(unique_key="k"))
        once = report.options(unique_key="k", on_conflict="raise")
        async with client.batch(on_complete=once.request()) as batch:
            pass
        with pytest.raises(JobExists):
            await client.enqueue(once)
        assert await store.finish_batches() == [batch.id]
        status = await batch.status()
        assert status.callback_job_id is None
        assert "unique key" in (status.callback_error or "")


async def test_bad_input_is_refused_before_anything_is_written(dsn: str, window: Window) -> None:
    async def bad(client: Client, **wrong: Any) -> None:
        async with client.batch(**wrong):
            pass

    async with open_client(dsn) as client:
        with pytest.raises(InvalidName):
            await bad(client, name="x" * 257)
        with pytest.raises(InvalidArguments, match=r"handler\.request\("):
            await bad(client, on_complete=report)
        with pytest.raises(UnknownBatch):
            await client.open_batch(0)
        with pytest.raises(UnknownBatch):
            await client.open_batch(10**6)
        for wrong in (1.0, True, "1", None):
            with pytest.raises(InvalidArguments, match="A batch's id is a whole number"):
                await client.open_batch(wrong)  # type: ignore[arg-type] -- what is tried
        async with client.batch() as batch:
            with pytest.raises(InvalidArguments):
                await batch.enqueue(step, "x")  # type: ignore[arg-type]
    assert window.value("SELECT count(*) FROM batch") == 1
    assert window.value("SELECT count(*) FROM job") == 0


async def test_a_client_on_a_connection_alone_cannot_wait(dsn: str, anyio_backend: str) -> None:
    cls = TrioConnection if anyio_backend == "trio" else psycopg.AsyncConnection
    async with await cls.connect(dsn, autocommit=True) as connection:
        async with Client(connection).batch() as batch:
            pass
        with pytest.raises(UsageError, match="cannot wait for batches"):
            await batch.wait()


@on_trio
async def test_what_is_old_is_forgotten(dsn: str, window: Window) -> None:
    async with open_client(dsn) as client, open_store(dsn) as store:
        for _ in range(2):
            async with client.batch() as batch:
                await batch.enqueue(step, 1)
        await store.settle([end(c) for c in await claim(store)])
        await store.finish_batches()
        window.run("UPDATE batch SET finished_at = now() - interval '2 days' WHERE id <> %s", batch.id)
        live, gone = window.enqueue(), 10**6
        window.run(
            "INSERT INTO progress SELECT id, 1, 0.5, NULL, now() - interval '2 days' FROM unnest(%s::bigint[]) id",
            [live, gone],
        )
        await store.prune_results(86400)
    assert [row["id"] for row in window.run("SELECT id FROM batch")] == [batch.id]
    assert [row["batch_id"] for row in window.run("SELECT DISTINCT batch_id FROM batch_job")] == [batch.id]
    assert [row["job_id"] for row in window.run("SELECT job_id FROM progress")] == [live]
