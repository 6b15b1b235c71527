"""Workers that show no sign of life: told of once, by the watchdog of another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import ConfigurationError
from pulse_trio.observe import DatabaseFound, DatabaseLost, WorkerStale
from pulse_trio.settings import WorkerSettings
from pulse_trio.testing.memory import MemoryStore, unavailable

if TYPE_CHECKING:
    from support.stage import Recorder, Stage


@pytest.mark.parametrize(("stale", "after"), [(0.0, 30.0), (100.0, 100.0), (6.0, 6.0)])
async def test_one_watchdog_tells_once_of_a_worker_that_shows_no_sign_of_life(
    stale: float, after: float, stage: Stage, events: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    silent = MemoryStore(stage.database)
    worker = stage.worker(silent, stale=stale)
    async with trio.open_nursery() as nursery:
        await nursery.start(worker.run)
        async with stage.working(), stage.working(MemoryStore(stage.database)):
            await trio.sleep(200.7)  # between two signs of life
            assert events.of(WorkerStale) == []
            silent.trouble["touch"] = unavailable
            last, _ = stage.database.seen[silent.session]
            await trio.sleep(200)
            (told,) = events.of(WorkerStale)
            assert (told.session, told.running) == (silent.session, 0)
            # A tick of the watchdog later at most.
            assert after <= events.when(WorkerStale)[0] - last <= after + 5.1
            silent.trouble.clear()
            await trio.sleep(30)
            silent.trouble["touch"] = unavailable
            await trio.sleep(200)
            assert len(events.of(WorkerStale)) == 2
        worker.stop()
    said = [r for r in caplog.records if "no sign of life" in r.getMessage()]
    assert {r.levelname for r in said} == {"WARNING"}


@pytest.mark.parametrize(
    ("given", "interval"), [({}, 10), ({"stale": 300}, 10), ({"stale": 6}, 2), ({"stale": 30}, 10)]
)
async def test_signs_of_life_come_often_enough_for_two_to_be_lost(
    given: dict[str, Any], interval: float, stage: Stage
) -> None:
    async with stage.working(**given):
        await trio.sleep(60)
        assert stage.store.calls.count("touch") == pytest.approx(60 / interval, abs=1)


async def test_an_idle_worker_that_reaches_the_database_again_says_so(stage: Stage, events: Recorder) -> None:
    """It has no beats, and its signs of life said only that the database was lost."""
    async with stage.working():
        stage.store.trouble["touch"] = unavailable
        await events.first(DatabaseLost)
        stage.store.trouble.clear()
        await events.first(DatabaseFound)
        assert [event.loop for event in events.of(DatabaseLost)] == ["heartbeats"]
        assert [event.loop for event in events.of(DatabaseFound)] == ["heartbeats"]


@pytest.mark.parametrize("stale", [-1.0, float("nan"), float("inf")])
def test_a_time_that_cannot_be_is_refused(stale: float) -> None:
    with pytest.raises(ConfigurationError, match="'stale' must be from 0 to a thousand years"):
        WorkerSettings(stale=stale)
