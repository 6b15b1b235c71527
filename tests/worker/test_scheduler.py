"""The scheduler in a worker: it sleeps until the next occurrence, on a clock that jumps."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import trio

from pulse_trio import Handlers
from pulse_trio.observe import DatabaseFound, DatabaseLost, ScheduleBroken, ScheduleFired
from pulse_trio.store import Broken
from pulse_trio.testing.memory import MIDNIGHT, MemoryStore, unavailable

if TYPE_CHECKING:
    from support.stage import Recorder, Stage


@pytest.fixture
def minutely(stage: Stage) -> Stage:
    """A handler that is called every minute, and writes down when."""

    @stage.handlers.cron("* * * * *")
    @stage.handlers.job
    async def tick() -> float:
        return trio.current_time()

    return stage


def seconds(stage: Stage, name: str = "tick") -> list[float]:
    """The occurrences fired, in virtual seconds."""
    return [(moment - MIDNIGHT).total_seconds() for moment in sorted(stage.database.schedules[name].fired)]


async def test_an_occurrence_is_fired_at_its_moment_and_its_job_runs(minutely: Stage, events: Recorder) -> None:
    async with minutely.working():
        await trio.sleep(200)
    assert seconds(minutely) == [60, 120, 180]
    fired = events.of(ScheduleFired)
    assert [(f.name, f.due_at, f.added) for f in fired] == [
        ("tick", MIDNIGHT + timedelta(seconds=n), True) for n in (60, 120, 180)
    ]
    assert events.when(ScheduleFired) == pytest.approx([60, 120, 180], abs=0.001)
    assert [minutely.database.state(f.job_id) for f in fired] == ["completed"] * 3


async def test_it_sleeps_between_occurrences_and_asks_at_its_tick(minutely: Stage) -> None:
    async with minutely.working():
        await trio.sleep(59)
        assert minutely.store.calls.count("fire_schedules") == 0
        assert minutely.store.calls.count("next_schedule") <= 31
        await trio.sleep(2)
        assert minutely.store.calls.count("fire_schedules") == 1


async def test_a_schedule_made_at_run_time_is_found_within_a_tick(stage: Stage) -> None:
    elsewhere = Handlers()
    elsewhere.cron(every=3)(elsewhere.job(name="tick")(lambda: None))
    stage.handlers.cron("@hourly")(stage.handlers.job(name="hourly")(lambda: None))

    async with stage.working():
        await trio.sleep(10)
        # The worker that fires it has no handler for it, and needs none.
        await MemoryStore(stage.database).declare_schedules(elsewhere.schedules)
        await trio.sleep(7)
    assert seconds(stage) == [12, 15]


async def test_many_workers_fire_each_occurrence_once(minutely: Stage) -> None:
    stores = [MemoryStore(minutely.database) for _ in range(3)]
    async with minutely.working(stores[0]), minutely.working(stores[1]), minutely.working(stores[2]):
        await trio.sleep(200)
    assert seconds(minutely) == [60, 120, 180]
    assert len(minutely.database.jobs) == 3


async def test_what_another_worker_took_and_dropped_is_fired_soon_after(minutely: Stage, events: Recorder) -> None:
    async with minutely.working():
        await trio.sleep(50)
        minutely.database.taken.add("tick")
        await trio.sleep(12.5)
        assert events.of(ScheduleFired) == []
        minutely.database.taken.clear()
        await trio.sleep(0.2)
        assert seconds(minutely) == [60]
    # It asked again and again, but not in a hot loop.
    assert minutely.store.calls.count("fire_schedules") < 30


async def test_an_outage_is_told_once_and_what_came_meanwhile_is_caught_up(minutely: Stage, events: Recorder) -> None:
    async with minutely.working():
        await trio.sleep(90)
        minutely.store.trouble["next_schedule"] = unavailable
        await trio.sleep(600)
        del minutely.store.trouble["next_schedule"]
        await trio.sleep(3700)
    assert [e.loop for e in events.of(DatabaseLost)] == [e.loop for e in events.of(DatabaseFound)] == ["scheduler"]
    caught_up = [moment for moment in seconds(minutely) if moment <= 690]
    # The policy is "last": of ten missed, one; which one depends on when it tried again.
    assert caught_up[0] == 60
    assert len(seconds(minutely)) == len(minutely.database.jobs)
    missed = [moment for moment in range(120, 690, 60) if moment not in caught_up]
    assert len(missed) >= 8


async def test_an_answer_that_was_lost_fires_nothing_twice(minutely: Stage) -> None:
    minutely.store.silence["fire_schedules"] = unavailable
    async with minutely.working():
        await trio.sleep(100)
        minutely.store.silence.clear()
        await trio.sleep(100)
    assert seconds(minutely) == [60, 120, 180]
    assert len(minutely.database.jobs) == 3


async def test_declarations_are_tried_until_the_database_has_them(minutely: Stage) -> None:
    minutely.store.trouble["declare_schedules"] = unavailable
    async with minutely.working():
        await trio.sleep(5)
        assert minutely.database.schedules == {}
        minutely.store.trouble.clear()
        await trio.sleep(200)
        assert "tick" in minutely.database.schedules
    assert minutely.store.calls.count("declare_schedules") < 20


async def test_a_worker_that_drains_fires_no_more(stage: Stage) -> None:
    @stage.handlers.cron(every=5)
    @stage.handlers.job
    async def long() -> None:
        await trio.sleep(20)

    async with stage.working(grace=100) as worker:
        await trio.sleep(6)
        worker.stop()
    assert seconds(stage, "long") == [5]


async def test_a_burst_fires_what_is_due_and_runs_it(minutely: Stage) -> None:
    await minutely.burst()
    assert minutely.database.jobs == {}
    await trio.sleep(70)

    async def slow() -> None:
        await trio.sleep(3)

    # The claimer has found nothing long before the scheduler has looked.
    minutely.store.trouble["next_schedule"] = slow
    report = await minutely.burst()
    assert report.ended == {"completed": 1}
    assert seconds(minutely) == [60]


async def test_a_schedule_that_cannot_go_on_is_told(
    minutely: Stage, events: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(self: MemoryStore) -> Any:
        await trio.lowlevel.checkpoint()
        self.database.schedules["tick"].paused = True
        return [], [Broken("tick", "why")]

    monkeypatch.setattr(MemoryStore, "fire_schedules", broken)
    async with minutely.working():
        await trio.sleep(70)
    assert events.of(ScheduleBroken) == [ScheduleBroken("tick", "why")]


async def test_fires_are_pruned_hourly(minutely: Stage) -> None:
    async with minutely.working():
        await trio.sleep(2 * 3600 + 10)
    assert minutely.store.calls.count("prune_fires") == 3
