"""When a worker counts as stale, and that it is told of once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import pytest

from support.stores import Window, open_store

if TYPE_CHECKING:
    from pulse_trio.store import WorkerStore


@pytest.fixture
def window(alone: Window) -> Window:
    """Stale workers are told to whoever asks first: no other test may ask."""
    return alone


def silence(window: Window, store: WorkerStore, seconds: float) -> None:
    """As if the worker had shown no sign of life for so long."""
    window.run(
        "UPDATE session SET seen_at = now() - make_interval(secs => %s) WHERE id = %s", float(seconds), store.session
    )


def state(window: Window, store: WorkerStore) -> str:
    return window.value("SELECT state FROM workers WHERE id = %s", store.session)


@pytest.mark.parametrize(
    ("stale", "silent", "shown"),
    [
        (0, 20, "running"), (0, 40, "stale"), (0, 3500, "stale"), (0, 3700, "gone"),
        (300, 200, "running"), (300, 400, "stale"), (300, 3700, "stale"), (300, 4000, "gone"),
        (10, 9, "running"), (10, 20, "stale"), (86400, 80000, "running"), (86400, 88000, "stale"),
    ],
)  # fmt: skip
async def test_a_worker_is_stale_after_its_setting_or_its_lease_and_gone_an_hour_later(
    window: Window, stale: float, silent: float, shown: str
) -> None:
    async with open_store(window.dsn, stale=stale) as store, open_store(window.dsn) as watch:
        silence(window, store, silent)
        assert state(window, store) == shown
        told = await watch.stale_workers()
        assert [event.session for event in told] == ([store.session] if shown == "stale" else [])


async def test_a_stale_worker_is_told_of_by_one_watchdog_once_until_it_is_heard_of(window: Window) -> None:
    async with open_store(window.dsn) as store, open_store(window.dsn) as first, open_store(window.dsn) as second:
        await store.touch(7, set(), draining=False)
        silence(window, store, 40)
        assert await store.stale_workers() == []  # not of itself: it is back
        (told,) = await first.stale_workers()
        row = window.run("SELECT host, pid FROM session WHERE id = %s", store.session)[0]
        assert (told.session, told.host, told.pid) == (store.session, row["host"], row["pid"])
        assert 40 <= told.seconds < 60
        assert told.running == 7
        assert [await s.stale_workers() for s in (first, second, first)] == [[], [], []]
        await store.touch(7, set(), draining=False)
        assert await second.stale_workers() == []
        window.run("UPDATE session SET stale_at = now() - interval '2 h' WHERE id = %s", store.session)
        silence(window, store, 40)
        assert [event.session for event in await second.stale_workers()] == [store.session]
        await store.end_sessions()
        silence(window, store, 50)
        assert await second.stale_workers() == []


async def test_a_watchdog_does_not_wait_for_another_that_tells(window: Window) -> None:
    async with open_store(window.dsn) as store, open_store(window.dsn) as watch:
        silence(window, store, 40)
        with psycopg.connect(window.dsn) as other:
            other.execute("SELECT FROM pulse.session WHERE id = %s FOR UPDATE", [store.session])
            assert await watch.stale_workers() == []
        assert len(await watch.stale_workers()) == 1


async def test_a_worker_of_before_is_stale_after_its_lease(window: Window) -> None:
    window.run(
        "INSERT INTO session (id, host, pid, version, concurrency, lease) VALUES (5, 'old', 1, '0.1', 1, '30 s')"
    )
    async with open_store(window.dsn) as watch:
        window.run("UPDATE session SET seen_at = now() - interval '40 s' WHERE id = 5")
        assert [(event.host, event.session) for event in await watch.stale_workers()] == [("old", 5)]
