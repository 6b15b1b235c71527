"""Who counts the queues for metrics, how often, and when a backlog is reported: on virtual time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio

from pulse_trio.errors import DatabaseUnavailable
from pulse_trio.observe import Observer, QueueBacklog, ScheduleLate
from pulse_trio.store.figures import QueueFigure, Sample
from pulse_trio.worker.metrics.figures import Figures
from pulse_trio.worker.metrics.sampler import Alarm, Sampler

if TYPE_CHECKING:
    import pytest


class Schema:
    """One turn, and what is counted."""

    def __init__(self) -> None:
        self.holder: int | None = None
        self.until = 0.0
        self.oldest = 0.0
        self.late = 0.0
        self.takes = 0.0
        self.paused = False
        self.away = False
        self.rows_in_time = 10_000
        self.cut_short = False
        self.asked: list[int] = []
        self.samples: list[float] = []

    async def take_turn(self, who: int, seconds: float) -> bool:
        if self.away:
            raise DatabaseUnavailable("away")
        if self.holder not in (None, who) and trio.current_time() < self.until:
            return False
        self.holder, self.until = (who if seconds else None), trio.current_time() + seconds
        return True

    async def sample(self, most: int, schedules: int) -> Sample:
        self.asked.append(most)
        if most > self.rows_in_time:
            raise DatabaseUnavailable("canceling statement due to statement timeout")
        await trio.sleep(self.takes)
        self.samples.append(trio.current_time())
        mail = QueueFigure("mail", 20_000, 1, 2, self.oldest, self.paused)
        return Sample([mail], 3, {"nightly": self.late}, self.cut_short)


class Heard:
    def __init__(self) -> None:
        self.events: list[Any] = []

    def listeners(self) -> dict[type[Any], Any]:
        return {QueueBacklog: self.events.append, ScheduleLate: self.events.append}


def told(sampler: Sampler) -> dict[str, dict[tuple[str, ...], float]]:
    figures = Figures()
    sampler.tell(figures)
    return figures.values


async def test_one_process_counts_and_another_takes_over_when_it_is_gone(autojump_clock: object) -> None:
    schema = Schema()
    one, other = Sampler(schema, Observer()), Sampler(schema, Observer(), ["empty"])
    async with trio.open_nursery() as nursery:
        scope = trio.CancelScope()

        async def first() -> None:
            with scope:
                await one.run()

        nursery.start_soon(first)
        await trio.sleep(1)
        nursery.start_soon(other.run)
        await trio.sleep(100)
        assert told(other) == {}
        figures = told(one)
        assert figures["pulse_queue_jobs"] == {
            ("mail", "available"): 10_000,
            ("mail", "scheduled"): 1,
            ("mail", "running"): 2,
            ("mail", "suspended"): 0,
        }
        assert figures["pulse_quarantined_jobs"] == {(): 3}
        assert figures["pulse_schedule_late_seconds"] == {("nightly",): 0}
        scope.cancel()
        await trio.sleep(6)
        # It gave its turn back.
        assert told(other)["pulse_queue_jobs"][("empty", "available")] == 0
        nursery.cancel_scope.cancel()


async def test_figures_that_are_no_longer_this_processs_are_not_shown(autojump_clock: object) -> None:
    schema = Schema()
    sampler = Sampler(schema, Observer())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sampler.run)
        await trio.sleep(1)
        assert told(sampler) != {}
        schema.away = True
        await trio.sleep(30)
        assert told(sampler) == {}
        schema.away = False
        await trio.sleep(60)
        assert told(sampler) != {}
        nursery.cancel_scope.cancel()


async def test_a_count_that_takes_too_long_counts_fewer_jobs_and_then_more_again(
    autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    schema, heard = Schema(), Heard()
    schema.rows_in_time, schema.takes, schema.oldest = 700, 0.05, 100
    sampler = Sampler(schema, Observer([heard]))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sampler.run)
        await trio.sleep(60)
        assert told(sampler)["pulse_queue_oldest_seconds"] == {("mail",): 100}
        await trio.sleep(300)
        assert schema.asked[:3] == [10_000, 2500, 625]
        assert set(schema.asked[3:]) == {625}
        schema.rows_in_time, schema.takes = 10_000, 0.001
        await trio.sleep(120)
        assert schema.asked[-1] == 10_000
        nursery.cancel_scope.cancel()
    assert [type(event) for event in heard.events] == [QueueBacklog]
    assert ["could not be counted" in record.message for record in caplog.records] == [True]


async def test_a_process_that_cannot_count_gives_its_turn_to_one_that_can(autojump_clock: object) -> None:
    schema, unfit = Schema(), Schema()
    unfit.rows_in_time = 0
    unfit.take_turn = schema.take_turn
    other = Sampler(schema, Observer())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Sampler(unfit, Observer()).run)
        await trio.sleep(1)
        nursery.start_soon(other.run)
        await trio.sleep(60)
        assert told(other) != {}
        nursery.cancel_scope.cancel()
    assert schema.holder is None


async def test_a_queue_that_may_not_have_been_counted_is_not_shown_with_0(autojump_clock: object) -> None:
    schema = Schema()
    sampler = Sampler(schema, Observer(), ["empty"])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sampler.run)
        await trio.sleep(1)
        assert told(sampler)["pulse_queue_oldest_seconds"] == {("mail",): 0, ("empty",): 0}
        schema.cut_short = True
        await trio.sleep(60)
        assert told(sampler)["pulse_queue_oldest_seconds"] == {("mail",): 0}
        nursery.cancel_scope.cancel()


async def test_a_count_that_takes_more_than_a_thousandth_of_the_longest_pause_counts_fewer_jobs_from_then_on(
    autojump_clock: object,
) -> None:
    schema = Schema()
    schema.takes = 0.24
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Sampler(schema, Observer()).run)
        await trio.sleep(70)
        assert schema.asked == [10_000, 5000]
        schema.takes = 0.04
        await trio.sleep(300)
        assert set(schema.asked[2:]) == {2500}
        nursery.cancel_scope.cancel()


async def test_counting_takes_a_thousandth_of_the_time(autojump_clock: object) -> None:
    schema = Schema()
    schema.takes = 0.03
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Sampler(schema, Observer()).run)
        await trio.sleep(300)
        nursery.cancel_scope.cancel()
    assert len(schema.samples) * schema.takes <= 300 / 1000 + schema.takes


async def test_a_backlog_and_a_late_schedule_are_reported_once_until_they_are_over(autojump_clock: object) -> None:
    schema, heard = Schema(), Heard()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Sampler(schema, Observer([heard])).run)
        for schema.oldest, schema.late in [(59, 59), (61, 70), (62, 40), (31, 70), (61, 29), (10, 70), (61, 70)]:
            await trio.sleep(6)
        nursery.cancel_scope.cancel()
    assert [type(event) for event in heard.events] == [QueueBacklog, ScheduleLate, ScheduleLate, QueueBacklog]
    assert heard.events[:2] == [QueueBacklog("mail", 10_000, 61), ScheduleLate("nightly", 70)]


async def test_a_paused_queue_does_not_fall_behind(autojump_clock: object) -> None:
    schema, heard = Schema(), Heard()
    schema.oldest, schema.paused = 1000, True
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Sampler(schema, Observer([heard])).run)
        await trio.sleep(20)
        nursery.cancel_scope.cancel()
    assert heard.events == []


def test_an_alarm_forgets_what_is_gone() -> None:
    alarm = Alarm(60)
    assert alarm.crossed({"a": 61}) == ["a"]
    assert alarm.crossed({}) == []
    assert alarm.crossed({"a": 61}) == ["a"]
