"""Durable handlers on real PostgreSQL, with workers in the test's own Trio run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pulse_trio import states
from pulse_trio.testing.kept import keeping
from support.trees import Trees

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def late_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed attempt is due again in an hour, so that no burst runs it by chance: the delay is drawn from 0 on."""
    monkeypatch.setattr(states, "retry_delay", lambda _: 3600.0)


@pytest.fixture
def trees(dsn: str) -> Iterator[Trees]:
    with keeping(dsn):
        grown = Trees(dsn)
        yield grown
        grown.window.close()
