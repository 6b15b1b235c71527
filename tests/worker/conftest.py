"""Workers on a store in memory and a clock that jumps to the next deadline as soon as everybody waits: no real I/O here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio.testing import MockClock

from pulse_trio.worker.claiming.claim_size import ClaimSize
from support.collecting import has_mark, is_async_test
from support.stage import Recorder, Stage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from trio.abc import Clock

    from pulse_trio.testing.memory import MemoryDatabase


def on_virtual_time(async_fn: Callable[..., Awaitable[Any]], *, clock: Clock | None, instruments: Any) -> Any:
    """pytest-trio's way to run a test, on the clock of its `autojump_clock` if it asks for that, else on one of its own."""
    return trio.run(async_fn, clock=clock or MockClock(autojump_threshold=0), instruments=instruments)


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Module | pytest.Class, name: str, obj: object) -> None:
    """On virtual time, but for what is marked `real_clock`."""
    if is_async_test(collector, name, obj) and not has_mark(collector, obj, "trio", "anyio", "real_clock"):
        pytest.mark.trio(run=on_virtual_time)(obj)


@pytest.fixture(autouse=True)
def longest_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    """A retry waits as long as it may: 4 s the first time."""
    monkeypatch.setattr("pulse_trio.states.random.uniform", lambda _, high: high)


@pytest.fixture
def stage() -> Stage:
    """A database, handlers and a worker over them."""
    return Stage()


@pytest.fixture
def database(stage: Stage) -> MemoryDatabase:
    return stage.database


@pytest.fixture
def events(stage: Stage) -> Recorder:
    return stage.events


@pytest.fixture
def claim_ahead(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """So many jobs are claimed ahead: virtual time does not tell a worker how short its jobs are. A worker that gives jobs back
    does so no more."""

    def decide(count: int) -> None:
        def look_ahead(self: ClaimSize, *, may_exceed: bool) -> None:
            slots = self._jobs.slots
            slots.ahead = count if may_exceed and not slots.lenders and not slots.beside else 0
            if self._jobs.running > slots.count:
                slots.claimed_ahead.give()

        monkeypatch.setattr(ClaimSize, "_look_ahead", look_ahead)

    return decide
