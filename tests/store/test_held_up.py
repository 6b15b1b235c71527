"""An open transaction that has a unique key holds up what is to have that key, and nothing else: schedules and batches."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import trio

from pulse_trio import DatabaseUnavailable, Handlers, SyncClient, open_client
from pulse_trio.observe import EnqueueHeldUp
from pulse_trio.store import held_up
from pulse_trio.store.links import WORKER_SETTINGS
from support.stores import claim_one, end, open_store

from .test_schedules import come, make

if TYPE_CHECKING:
    from collections.abc import Generator

    from pulse_trio import Batch
    from support.stores import Window

handlers = Handlers()


@handlers.job
async def step() -> None: ...


@handlers.job(queue="after")
async def report(batch: int) -> None: ...


@contextmanager
def holding(window: Window, how: str, queue: str = "default") -> Generator[psycopg.Connection]:
    """Somebody's transaction that has a unique key, and stays open."""
    if how == "a cancelled job's":
        with psycopg.connect(window.dsn) as connection:
            SyncClient(connection).enqueue("noop", unique_key="k", queue=queue, delay=3600)
    with psycopg.connect(window.dsn) as connection:
        client = SyncClient(connection)
        if how == "a new job's":
            client.enqueue("noop", unique_key="k", queue=queue, delay=3600)
        elif how == "a lasting key":
            client.enqueue("noop", unique_key="k", queue=queue, delay=3600, unique_for=3600)
        else:
            connection.execute("SELECT pulse.cancel(id) FROM pulse.jobs WHERE unique_key = 'k'")
        yield connection
        connection.rollback()


HELD = ("a new job's", "a lasting key", "a cancelled job's")


@pytest.fixture(autouse=True)
def again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_up, "FIRST", 0.01)
    monkeypatch.setattr(held_up, "LONGEST", 0.02)


@pytest.mark.parametrize("how", HELD)
async def test_a_schedule_whose_key_is_held_waits_and_the_others_fire(alone: Window, how: str) -> None:
    told: list[object] = []
    names = ["before", "held", "with a key", "after"]
    keys = {"held": "k", "with a key": "other"}
    async with open_store(alone.dsn, on_event=told.append) as store:

        async def come_to_it() -> None:
            await trio.sleep(await store.next_schedule() or 0)

        await store.declare_schedules([make(name, unique_key=keys.get(name)) for name in names])
        with holding(alone, how):
            for name in names:
                come(alone, name)
            fired, broken = await store.fire_schedules()
            assert ({one.name for one in fired}, broken) == ({"before", "with a key", "after"}, [])
            for _ in range(3):
                # It stands aside, and is tried again after a time.
                assert 0 <= (await store.next_schedule() or 0) <= 0.02
                await come_to_it()
                assert await store.fire_schedules() == ([], [])
            come(alone, "before")
            assert [one.name for one in (await store.fire_schedules())[0]] == ["before"]
        assert told == [EnqueueHeldUp("the schedule 'held'", "default", "k")]
        await come_to_it()
        (fired,), broken = await store.fire_schedules()
        # The job that somebody was about to cancel has its key still.
        assert (fired.name, fired.added, broken) == ("held", how != "a cancelled job's", [])
        assert (await store.next_schedule() or 0) > 1


async def test_another_worker_fires_what_one_has_put_aside_and_nothing_is_kept_of_it(alone: Window) -> None:
    async with open_store(alone.dsn) as store, open_store(alone.dsn) as other:
        await store.declare_schedules([make("held", unique_key="k")])
        come(alone, "held")
        with holding(alone, HELD[0]):
            assert await store.fire_schedules() == ([], [])
        assert [one.name for one in (await other.fire_schedules())[0]] == ["held"]
        await trio.sleep(await store.next_schedule() or 0)
        assert await store.fire_schedules() == ([], [])
        assert (await store.next_schedule() or 0) > 1


async def test_what_comes_after_it_waits_for_locks_as_long_as_before(alone: Window) -> None:
    async with open_store(alone.dsn) as store, store.links.watch.using() as connection, connection.transaction():

        async def waits() -> str:
            (row,) = await (await connection.execute("SHOW lock_timeout")).fetchall()
            return row[0]

        async with held_up.waiting_briefly(connection):
            assert await waits() == "10ms"
        assert await waits() == WORKER_SETTINGS["lock_timeout"]


async def test_a_lock_of_the_table_is_nobodys_key(alone: Window) -> None:
    async with open_store(alone.dsn) as store:
        await store.declare_schedules([make("one"), make("keyed", unique_key="k")])
        for name in ("one", "keyed"):
            come(alone, name)
        with psycopg.connect(alone.dsn) as other:
            other.execute("LOCK TABLE pulse.job IN EXCLUSIVE MODE")
            with pytest.raises(DatabaseUnavailable, match="lock timeout"):
                await store.fire_schedules()
        await trio.sleep(0.02)
        assert len((await store.fire_schedules())[0]) == 2


@pytest.mark.parametrize("how", HELD[:2])
async def test_a_batch_whose_callbacks_key_is_held_waits_and_the_others_finish(alone: Window, how: str) -> None:
    told: list[object] = []
    async with open_client(alone.dsn) as client, open_store(alone.dsn, on_event=told.append) as store:

        async def batch_of(callback: Any) -> Batch:
            async with client.batch(on_complete=callback) as batch:
                await batch.enqueue(step)
            await store.settle([end(await claim_one(store, "default"))])
            return batch

        held = await batch_of(report.options(unique_key="k").request(1))
        free = [await batch_of(report.request(2)), await batch_of(report.options(unique_key="other").request(3))]
        with holding(alone, how, "after"):
            assert await store.finish_batches() == [batch.id for batch in free]
            assert await store.finish_batches() == []
            assert (await held.status()).finished_at is None
            late = await batch_of(None)
            assert await store.finish_batches() == [late.id]
        assert told == [EnqueueHeldUp(f"the finished batch {held.id}", "after", "k")]
        await trio.sleep(0.02)
        assert await store.finish_batches() == [held.id]
        status = await held.status()
        assert status.callback_error is None
        assert alone.value("SELECT kind FROM jobs WHERE id = %s", status.callback_job_id) == "report"
        assert await store.finish_batches() is None
