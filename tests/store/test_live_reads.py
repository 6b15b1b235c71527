"""Below PostgreSQL 16 the watchdog reads a large live table only while a lease may run out that nobody renews, or now and then.

The tests take every server for an older one, and every table for a large one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pulse_trio.store import live_reads
from support.stores import Window, claim_one, open_store

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from pulse_trio.store import WorkerStore

SEEN = "UPDATE session SET seen_at = clock_timestamp() - lease * %s WHERE id = %s"


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_reads, "_INDEXED", 10**9)
    monkeypatch.setattr(live_reads, "_SMALL", 0)
    monkeypatch.setattr(live_reads, "_REST", 10**9)


@pytest.fixture
def window(dsn: str) -> Generator[Window]:
    with Window(dsn) as window:
        yield window


@pytest.fixture
async def store(dsn: str) -> AsyncGenerator[WorkerStore]:
    """A worker's store whose watchdog has read the table once."""
    async with open_store(dsn) as store:
        assert await store.rescue() == (0, 0)
        yield store


@pytest.fixture
async def other(dsn: str, window: Window, store: WorkerStore) -> AsyncGenerator[WorkerStore]:
    """Another worker's, elsewhere."""
    async with open_store(dsn) as other:
        window.run("UPDATE session SET host = 'elsewhere' WHERE id = %s", other.sessions.current)
        yield other


async def lost(store: WorkerStore, window: Window) -> None:
    """A job of this worker's has an expired lease."""
    job_id = window.enqueue()
    await claim_one(store)
    window.expire(job_id)


def held_by_nobody(window: Window) -> None:
    """A job that no known session holds has an expired lease."""
    job_id = window.enqueue()
    window.run(
        "UPDATE job SET state = 2, attempt = 1, locked_by = 7, lease_until = now() - interval '1 s', started_at = now()"
        " WHERE id = %s",
        job_id,
    )


async def test_a_fleet_that_shows_itself_has_no_table_read(store: WorkerStore, window: Window) -> None:
    await lost(store, window)
    assert await store.rescue() == (0, 0)


@pytest.mark.parametrize(("ago", "rescued"), [(0.4, 0), (0.6, 1), (9, 1), (11, 0)])
async def test_a_worker_that_missed_a_sign_of_life_has_it_read_for_ten_leases(
    store: WorkerStore, other: WorkerStore, window: Window, ago: float, rescued: int
) -> None:
    await lost(other, window)
    window.run(SEEN, ago, other.sessions.current)
    assert await store.rescue() == (rescued, 0)


async def test_the_end_of_a_worker_has_it_read_for_two_leases(
    store: WorkerStore, other: WorkerStore, window: Window
) -> None:
    await lost(other, window)
    await other.sessions.end_sessions()
    window.run("UPDATE session SET ended_at = ended_at - lease * 2.1 WHERE id = %s", other.sessions.current)
    assert await store.rescue() == (0, 0)
    window.run("UPDATE session SET ended_at = ended_at + lease WHERE id = %s", other.sessions.current)
    assert await store.rescue() == (1, 0)


async def test_a_session_in_place_of_another_has_it_read(store: WorkerStore, window: Window) -> None:
    """The answer to a claim was lost with its connection: the worker does not know of the job."""
    await lost(store, window)
    window.run(
        "INSERT INTO session (id, host, pid, version, concurrency, lease)"
        " SELECT id + 1, host, pid, version, concurrency, lease FROM session WHERE id = %s",
        store.sessions.current,
    )
    assert await store.rescue() == (1, 0)


async def test_it_is_read_now_and_then(store: WorkerStore, window: Window, monkeypatch: pytest.MonkeyPatch) -> None:
    held_by_nobody(window)
    assert await store.rescue() == (0, 0)
    store.upkeep._live_reads._rested = 0
    monkeypatch.setattr(live_reads, "_REST", 0)
    assert await store.rescue(1) == (1, 0)


async def test_more_than_one_tick_rescues_are_rescued_at_once(store: WorkerStore, window: Window) -> None:
    for _ in range(3):
        held_by_nobody(window)
    store.upkeep._live_reads._rested = 0
    assert [await store.rescue(2), await store.rescue(2), await store.rescue(2)] == [(2, 0), (1, 0), (0, 0)]


async def test_a_small_table_is_read_by_every_tick(
    store: WorkerStore, window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_reads, "_SMALL", 1 << 26)
    await lost(store, window)
    assert await store.rescue() == (1, 0)


async def test_where_an_index_has_the_leases_nothing_is_asked(
    store: WorkerStore, window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_reads, "_INDEXED", 160_000)
    if int(window.value("SHOW server_version_num")) < 160_000:
        pytest.skip("this server has no such index")
    await lost(store, window)
    assert await store.rescue() == (1, 0)
