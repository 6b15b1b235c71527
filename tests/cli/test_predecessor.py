"""What a process reports for the one that it has replaced."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio
import trio.testing

from pulse_trio.cli import predecessor
from pulse_trio.errors import DatabaseUnavailable
from pulse_trio.jobs import Claim, Outcome
from pulse_trio.store.outcomes import Settlement

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

STUCK = Outcome(Claim(1, 1, 3, 0, 0, "", "default", "swallows", "{}", None, 7), "released")


class Server:
    """A database that is away until so many tries have been made."""

    def __init__(self, tries: int) -> None:
        self.tries = tries
        self.told: list[Outcome] = []

    def connect(self, *_: object, **__: object) -> Server:
        return self

    async def settle(self, outcomes: Sequence[Outcome]) -> Settlement:
        await trio.lowlevel.checkpoint()
        self.tries -= 1
        if self.tries >= 0:
            raise DatabaseUnavailable("away")
        self.told += outcomes
        return Settlement(list(outcomes), [], [])

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()


async def test_a_database_that_is_away_for_a_moment_is_asked_again(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that ends then has no worker that would try again."""
    server = Server(3)
    monkeypatch.setattr(predecessor, "WorkerStore", server.connect)
    assert not await predecessor._report_to("dbname=x", "pulse", [STUCK])
    assert server.told == [STUCK]


async def test_a_database_that_stays_away_is_left_after_a_while(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, begun = Server(10_000), trio.current_time()
    monkeypatch.setattr(predecessor, "WorkerStore", server.connect)
    assert await predecessor._report_to("dbname=x", "pulse", [STUCK]) == [STUCK]
    assert trio.current_time() - begun == 5
