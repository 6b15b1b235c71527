"""What a supervisor does with the jobs of a child that died, in virtual time; the rest is tried on real processes."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import trio

from pulse_trio.errors import DatabaseUnavailable
from pulse_trio.observe import Observer
from pulse_trio.settings import WorkerSettings
from pulse_trio.store.worker import HandedBack
from pulse_trio.worker import Supervisor

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest


class Store:
    """Its table is locked for so many seconds from now."""

    def __init__(self, seconds: float) -> None:
        self._locked_until = trio.current_time() + seconds
        self.handed_back_at: float | None = None

    async def rescue_sessions(self, sessions: Sequence[int], limit: int = 1000) -> HandedBack:
        await trio.sleep(1)
        if trio.current_time() < self._locked_until:
            raise DatabaseUnavailable("canceling statement due to lock timeout")
        self.handed_back_at = trio.current_time()
        return HandedBack(0, 0)


async def hand_back(store: Any) -> None:
    """As for a child that has died; its second part, in the background."""
    supervisor = Supervisor([], {}, store, settings=WorkerSettings(processes=2), observer=Observer())
    child: Any = SimpleNamespace(sessions=[5], process=SimpleNamespace(pid=1))
    await supervisor._rescue_late(child)


async def test_what_a_dead_child_held_is_handed_back_when_the_server_answers_again() -> None:
    """Found by `make chaos SEED=5`: the table was locked for a moment, and the jobs waited for the end of their leases."""
    begun = trio.current_time()
    store = Store(7)
    await hand_back(store)
    assert store.handed_back_at is not None
    assert 7 <= store.handed_back_at - begun <= 9


async def test_what_cannot_be_handed_back_within_a_lease_is_left_to_the_watchdog() -> None:
    begun = trio.current_time()
    store = Store(1000)
    await hand_back(store)
    assert store.handed_back_at is None
    assert trio.current_time() - begun <= WorkerSettings().lease


async def test_a_child_that_is_being_started_when_the_supervisor_is_told_to_stop_is_told_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was left out: the supervisor waited for ever for a child that knew nothing."""
    supervisor = Supervisor([], {}, SimpleNamespace(), settings=WorkerSettings(processes=2), observer=Observer())  # type: ignore[arg-type]
    told: list[signal.Signals] = []

    async def open_process(*_: Any, **__: Any) -> Any:
        supervisor.stop()
        return SimpleNamespace(pid=1, returncode=None, send_signal=told.append)

    monkeypatch.setattr(trio.lowlevel, "open_process", open_process)
    child = await supervisor._spawn()
    await child.line.aclose()
    child.words.close()
    assert told == [signal.SIGTERM]
