"""An operator takes running jobs from their workers: released or completed by force, with everything that belongs to an end."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import trio
import trio.testing

from pulse_trio import AeadCodec, Handlers, InvalidTransition, Job, SyncClient, UnknownJob, open_client
from pulse_trio.observe import FenceLost, JobEnded
from pulse_trio.store import history
from support.embedded_workers import working
from support.stores import Window, claim_one, end, open_store
from support.workers import until

if TYPE_CHECKING:
    from collections.abc import Callable

    from pulse_trio.store import WorkerStore


@pytest.fixture
def client(room_dsn: str) -> SyncClient:
    return SyncClient(room_dsn)


async def test_a_released_job_is_due_again_with_its_budget_and_the_old_attempt_can_report_nothing(
    client: SyncClient, store: WorkerStore, other: WorkerStore, window: Window, queue: str
) -> None:
    job_id = window.enqueue(queue, max_attempts=1)
    old = await claim_one(store, queue)
    assert client.release(job_id, force=True) == "available"
    job = window.job(job_id)
    assert (job["state"], job["attempt"], job["max_attempts"], job["worker"]) == ("available", 1, 2, None)
    (attempt,) = window.attempts(job_id)
    assert (attempt["outcome"], attempt["error"].startswith("released by force by ")) == ("released", True)
    assert not (await store.beat([old])).renewed
    new = await claim_one(other, queue)
    assert (new.attempt, new.failures) == (2, 0)
    for kind in ("completed", "failed"):
        settled = await store.settle([end(old, kind, result="1" if kind == "completed" else None, error="no")])
        assert [o.claim for o in settled.refused] == [old]
    assert (await other.settle([end(new, "completed", result="2")])).accepted
    assert window.job(job_id)["result"] == 2


async def test_a_completed_job_is_finished_with_its_result_and_the_handler_can_report_nothing(
    client: SyncClient, store: WorkerStore, window: Window, queue: str
) -> None:
    job_id = window.enqueue(queue)
    claimed = await claim_one(store, queue)
    assert client.complete(job_id, {"by": "hand"}) == "completed"
    job = window.job(job_id)
    assert (job["state"], job["result"], job["error"]) == ("completed", {"by": "hand"}, None)
    assert not (await store.beat([claimed])).renewed
    assert [o.claim for o in (await store.settle([end(claimed, "failed", error="no")])).refused] == [claimed]
    assert window.state(job_id) == "completed"
    assert client.result(job_id) == {"by": "hand"}


@pytest.mark.parametrize("act", ["release", "complete"])
@pytest.mark.parametrize("state", ["available", "scheduled", "completed", "dead", "cancelled", "unknown"])
async def test_what_does_not_run_is_refused_and_left(
    act: str, state: str, client: SyncClient, store: WorkerStore, window: Window, queue: str
) -> None:
    job_id = (
        2**40
        if state == "unknown"
        else window.enqueue(queue, max_attempts=1, delay=60 if state == "scheduled" else None)
    )
    if state in ("completed", "dead"):
        kind = "completed" if state == "completed" else "failed"
        await store.settle([end(await claim_one(store, queue), kind, error="e" if state == "dead" else None)])
    if state == "cancelled":
        client.cancel(job_id)
    before = window.run("SELECT count(*) AS lines FROM audit")
    do: Callable[[], Any] = {
        "release": lambda: client.release(job_id, force=True),
        "complete": lambda: client.complete(job_id),
    }[act]
    if state == "unknown":
        with pytest.raises(UnknownJob, match="There is no job"):
            do()
    else:
        with pytest.raises(InvalidTransition, match=f"is {state}: only a running job can be {act}d by force"):
            do()
        assert window.state(job_id) == state
    assert window.run("SELECT count(*) AS lines FROM audit") == before


async def test_without_force_only_what_a_silent_worker_holds_is_released(
    client: SyncClient, store: WorkerStore, window: Window, queue: str
) -> None:
    job_id = window.enqueue(queue)
    await claim_one(store, queue)
    with pytest.raises(InvalidTransition, match=r"signs of life.*--force"):
        client.release(job_id)
    assert window.state(job_id) == "running"
    window.run("UPDATE session SET seen_at = now() - interval '1 hour' WHERE id = %s", store.session)
    assert client.release(job_id) == "available"


@pytest.mark.parametrize("act", ["release", "complete"])
async def test_a_job_whose_cancellation_was_asked_for_ends_with_its_ledger(
    act: str, client: SyncClient, store: WorkerStore, window: Window, queue: str
) -> None:
    job_id = window.enqueue(queue)
    await claim_one(store, queue)
    client.cancel(job_id, reason="enough")
    ended = "cancelled" if act == "release" else "completed"
    assert (client.release(job_id, force=True) if act == "release" else client.complete(job_id)) == ended
    job = window.job(job_id)
    assert (job["state"], job["cancel_reason"]) == (ended, "enough" if act == "release" else None)
    (record,) = client.cancellations(job_id)
    assert record.ended_as == ended
    assert record.ended_at is not None


@pytest.mark.parametrize("act", ["release", "complete"])
async def test_a_row_that_a_transaction_holds_is_refused_within_a_bounded_wait_and_the_others_are_moved(
    act: str, client: SyncClient, store: WorkerStore, window: Window, queue: str
) -> None:
    locked, free = window.enqueue(queue), window.enqueue(queue)
    await claim_one(store, queue)
    await claim_one(store, queue)
    with psycopg.connect(window.dsn) as holder:
        holder.execute("SELECT FROM pulse.job WHERE id = %s FOR UPDATE", [locked])
        done = client.run(
            history.release_batch([locked, free], force=True)
            if act == "release"
            else history.complete_batch([locked, free])
        )
    assert list(done.moved) == [free]
    assert "another transaction holds its row" in done.refused[locked]
    assert window.state(locked) == "running"


@pytest.mark.parametrize("act", ["release", "complete"])
async def test_a_cancellation_that_a_transaction_holds_leaves_the_job_as_it_was_and_is_not_audited(
    act: str, client: SyncClient, store: WorkerStore, window: Window, queue: str
) -> None:
    job_id = window.enqueue(queue)
    await claim_one(store, queue)
    client.cancel(job_id, reason="enough")
    with psycopg.connect(window.dsn) as holder:
        holder.execute("SELECT FROM pulse.cancellation WHERE job_id = %s FOR UPDATE", [job_id])
        done = client.run(
            history.release_batch([job_id], force=True) if act == "release" else history.complete_batch([job_id])
        )
    assert (done.moved, list(done.refused)) == ({}, [job_id])
    assert window.state(job_id) == "running"
    assert window.run("SELECT FROM audit WHERE job_ids = ARRAY[%s::bigint] AND act = %s", job_id, act) == []


async def test_both_write_a_line_of_the_audit_trail(
    client: SyncClient, store: WorkerStore, window: Window, queue: str
) -> None:
    one, two = window.enqueue(queue), window.enqueue(queue)
    await claim_one(store, queue)
    await claim_one(store, queue)
    client.release(one, force=True)
    client.complete(two, 7)
    found = window.run(
        "SELECT act, job_ids, role, details FROM audit WHERE job_ids <@ %s::bigint[]"
        " AND act IN ('release', 'complete') ORDER BY id",
        [one, two],
    )
    assert [(e["act"], e["job_ids"], e["details"]) for e in found] == [
        ("release", [one], {"force": True}),
        ("complete", [two], None),
    ]
    assert {e["role"] for e in found} == {window.value("SELECT session_user::text")}


@pytest.mark.parametrize("act", ["release", "complete"])
async def test_the_place_of_a_limited_queue_is_free_again(
    act: str, client: SyncClient, store: WorkerStore, window: Window, queue: str
) -> None:
    client.limit_queue(queue, limit=1)
    first, second = window.enqueue(queue), window.enqueue(queue)
    (claimed,) = (await store.claim_limited(queue, 5)).claims
    assert claimed.id == first
    assert (await store.claim_limited(queue, 5)).claims == []
    if act == "release":
        client.release(first, force=True)
    else:
        client.complete(first)
    (after,) = (await store.claim_limited(queue, 5)).claims
    assert after.id in (first, second)


async def test_a_waiter_hears_of_a_completion_and_a_batch_finishes(alone: Window) -> None:
    async with open_client(alone.dsn) as client, open_store(alone.dsn) as store:
        async with client.batch() as batch:
            ref = await batch.enqueue("noop")
        await claim_one(store)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(complete_when_awaited, alone, ref.id)
            with trio.fail_after(20):
                assert await ref.result() == "by hand"
        await store.finish_batches()
        assert (await batch.status()).completed == 1


async def complete_when_awaited(window: Window, job_id: int) -> None:
    # The wait is told by locks; whatever the order, the waiter looks again by itself.
    async with open_client(window.dsn) as client:
        await client.complete(job_id, "by hand")


async def test_a_result_is_encoded_for_those_who_read_it(alone: Window) -> None:
    codec = AeadCodec({"k": b"k" * 32}, "k")
    client = SyncClient(alone.dsn, codec=codec)
    job_id = client.enqueue("greet", {"name": "Ada"}).id
    async with open_store(alone.dsn) as store:
        await claim_one(store)
        client.complete(job_id, "secret")
    assert "secret" not in json.dumps(alone.job(job_id)["result"])
    assert client.result(job_id) == "secret"


@pytest.mark.parametrize("act", ["release", "complete"])
async def test_a_wedged_handler_is_cancelled_at_once_long_before_its_next_beat(act: str, alone: Window) -> None:
    handlers = Handlers()
    began, cancelled = trio.Event(), trio.Event()
    attempts: list[int] = []

    @handlers.job
    async def wedged(job: Job) -> str:
        attempts.append(job.attempt)
        if job.attempt > 1:
            return "again"
        began.set()
        try:
            await trio.sleep_forever()
        finally:
            assert job.cancel_reason == "fence-lost"
            cancelled.set()
        raise AssertionError

    job_id = alone.enqueue(kind="wedged")
    async with (
        working(handlers, alone.dsn, lease=600, heartbeat=200, poll=0.05) as heard,
        open_client(alone.dsn) as client,
    ):
        await began.wait()
        # What is notified before the worker listens is lost: its next beat, minutes later here, would find out.
        listening = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN %%'"
        await until(alone.dsn, listening)
        if act == "release":
            assert await client.release(job_id, force=True) == "available"
        else:
            assert await client.complete(job_id, "by hand") == "completed"
        with trio.fail_after(40):
            await cancelled.wait()
        await heard.until(FenceLost, job_id=job_id)
        if act == "release":
            await heard.until(JobEnded, job_id=job_id, outcome="completed")
    assert alone.job(job_id)["result"] == ("again" if act == "release" else "by hand")
    assert attempts == ([1, 2] if act == "release" else [1])


async def test_forged_notifications_about_a_running_job_leave_it_alone(alone: Window) -> None:
    handlers = Handlers()
    began, go = trio.Event(), trio.Event()

    @handlers.job
    async def patient() -> str:
        began.set()
        await go.wait()
        return "done"

    job_id = alone.enqueue(kind="patient")
    async with working(handlers, alone.dsn) as heard:
        await began.wait()
        for _ in range(200):
            alone.run("SELECT pg_notify('pulse', %s)", f"look_for_cancel {job_id}")
        await trio.testing.wait_all_tasks_blocked(0.3)
        assert heard.of(FenceLost) == []
        go.set()
    assert alone.job(job_id)["result"] == "done"
