"""Workers on a store in memory and a clock that jumps to the next deadline as soon as everybody waits: no real I/O here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from trio.testing import MockClock

from support.stage import Recorder, Stage

if TYPE_CHECKING:
    from support.fake_store import FakeDatabase


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "trio", {"clock": MockClock(autojump_threshold=0)}


@pytest.fixture(autouse=True)
def longest_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    """A retry waits as long as it may: 4 s the first time."""
    monkeypatch.setattr("pulse_trio.states.random.uniform", lambda _, high: high)


@pytest.fixture
def stage() -> Stage:
    """A database, handlers and a worker over them."""
    return Stage()


@pytest.fixture
def database(stage: Stage) -> FakeDatabase:
    return stage.database


@pytest.fixture
def events(stage: Stage) -> Recorder:
    return stage.events
