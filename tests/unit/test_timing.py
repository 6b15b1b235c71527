"""When schedules are due: cron expressions, time zones, the two nights, intervals and what is caught up."""

from __future__ import annotations

import itertools
import time
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from pulse_trio import ConfigurationError
from pulse_trio.timing import MOST_CAUGHT_UP, Timing, due, timing

if TYPE_CHECKING:
    from pulse_trio.timing import CatchUp

SPRING = "2026-03-28T22:00Z"  # the clocks go from 02:00 to 03:00 at 2026-03-29T01:00Z
AUTUMN = "2026-10-24T22:00Z"  # the clocks go from 03:00 to 02:00 at 2026-10-25T01:00Z


def at(text: str) -> datetime:
    return datetime.fromisoformat(text)


def upcoming(expression: str, after: str, count: int, zone: str = "Europe/Berlin") -> list[str]:
    found = itertools.islice(Timing(expression, zone).occurrences(at(after)), count)
    return [moment.strftime("%m-%dT%H:%M") + moment.strftime(":%S").removesuffix(":00") + "Z" for moment in found]


# The two nights


@pytest.mark.parametrize("expression", ["30 2 * * *", "0 30 2 * * *"])
def test_a_daily_time_that_the_clock_leaps_over_comes_once_at_the_end_of_the_gap(expression: str) -> None:
    assert upcoming(expression, SPRING, 3) == ["03-29T01:00Z", "03-30T00:30Z", "03-31T00:30Z"]


@pytest.mark.parametrize("expression", ["30 2 * * *", "0 30 2 * * *"])
def test_a_daily_time_that_the_clock_shows_twice_comes_the_first_time(expression: str) -> None:
    assert upcoming(expression, AUTUMN, 3) == ["10-25T00:30Z", "10-26T01:30Z", "10-27T01:30Z"]


def test_hourly_is_every_real_hour_in_both_nights() -> None:
    assert upcoming("0 * * * *", SPRING, 5) == [
        "03-28T23:00Z",
        "03-29T00:00Z",
        "03-29T01:00Z",
        "03-29T02:00Z",
        "03-29T03:00Z",
    ]
    assert upcoming("@hourly", AUTUMN, 5) == [
        "10-24T23:00Z",
        "10-25T00:00Z",
        "10-25T01:00Z",
        "10-25T02:00Z",
        "10-25T03:00Z",
    ]


@pytest.mark.parametrize("night", [SPRING, AUTUMN])
def test_every_quarter_of_an_hour_is_every_fifteen_real_minutes_in_both_nights(night: str) -> None:
    found = list(itertools.islice(Timing("*/15 * * * *", "Europe/Berlin").occurrences(at(night)), 40))
    assert {later - earlier for earlier, later in itertools.pairwise(found)} == {timedelta(minutes=15)}


def test_times_in_a_gap_are_one_occurrence() -> None:
    assert upcoming("0,20,40 2,3 * * *", SPRING, 4) == ["03-29T01:00Z", "03-29T01:20Z", "03-29T01:40Z", "03-30T00:00Z"]


@pytest.mark.parametrize("now", ["2026-10-25T00:45Z", "2026-10-25T01:00Z", "2026-10-25T01:15Z", "2026-10-25T01:30Z"])
def test_in_the_repeated_hour_what_has_come_does_not_come_again(now: str) -> None:
    assert upcoming("30 2 * * *", now, 1) == ["10-26T01:30Z"]


def test_occurrences_are_the_same_from_wherever_one_asks() -> None:
    for expression in ("30 2 * * *", "0,30 1-3 * * *", "*/20 * * * *", "30 */10 2 * * *", "15 0 * * SUN"):
        for night in (SPRING, AUTUMN):
            timing = Timing(expression, "Europe/Berlin")
            moments = [at(night) + timedelta(minutes=n, seconds=n % 60) for n in range(2 * 24 * 60)]
            whole = itertools.takewhile(lambda m: m <= moments[-1], timing.occurrences(at(night)))  # noqa: B023
            assert {timing.after(moment) for moment in moments} == {*whole, timing.after(moments[-1])}


# Expressions


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("*/5 * * * *", ["01-01T00:05Z", "01-01T00:10Z"]),
        ("*/20 * * * * *", ["01-01T00:00:20Z", "01-01T00:00:40Z"]),
        ("0 9 * JAN MON-FRI", ["01-01T09:00Z", "01-02T09:00Z"]),
        ("0 0 L * *", ["01-31T00:00Z", "02-28T00:00Z"]),
        ("0 0 29 2 *", ["02-29T00:00Z", "02-29T00:00Z"]),
        ("@daily", ["01-02T00:00Z", "01-03T00:00Z"]),
        ("@Weekly", ["01-04T00:00Z", "01-11T00:00Z"]),
        ("@monthly", ["02-01T00:00Z", "03-01T00:00Z"]),
        ("@yearly", ["01-01T00:00Z", "01-01T00:00Z"]),
    ],
)
def test_expressions_are_read(expression: str, expected: list[str]) -> None:
    assert upcoming(expression, "2026-01-01T00:00Z", 2, "UTC") == expected


def test_the_zone_decides_what_a_day_is() -> None:
    assert upcoming("0 0 * * *", "2026-01-01T00:00Z", 1, "Asia/Tokyo") == ["01-01T15:00Z"]
    assert upcoming("0 0 * * *", "2026-01-01T00:00Z", 1, "America/New_York") == ["01-01T05:00Z"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"cron": "61 * * * *"}, "bad minute field: '61'. It takes 0-59"),
        ({"cron": "* 24 * * *"}, "bad hour field: '24'"),
        ({"cron": "* * 0 * *"}, "bad day-of-month field: '0'"),
        ({"cron": "* * * FOO *"}, "bad month field: 'FOO'"),
        ({"cron": "* * * * 8"}, "bad day-of-week field: '8'"),
        ({"cron": "77 * * * * *"}, "bad second field: '77'"),
        ({"cron": "0 0 30 2 *"}, "never comes: no month 2 has a day 30"),
        ({"cron": "*/0 * * * *"}, "bad minute field"),
        ({"cron": "* * *"}, "has 3 fields. It has five: minute, hour"),
        ({"cron": ""}, "has 0 fields"),
        ({"cron": "@often"}, "is not one of @yearly"),
        ({"cron": "1," * 200 + "1 * * * *"}, "longer than 256 characters"),
        ({"cron": 5}, "is text like"),
        (
            {"cron": "* * * * *", "timezone": "Europe/Berln"},
            "no time zone 'Europe/Berln'. Did you mean 'Europe/Berlin'",
        ),
        ({"cron": "* * * * *", "timezone": "europe/berlin"}, "Did you mean 'Europe/Berlin'"),
        ({"cron": "* * * * *", "timezone": "../../etc/passwd"}, "no time zone"),
        ({"cron": "* * * * *", "timezone": ""}, "no time zone"),
        ({"cron": "* * * * *", "timezone": "Europe"}, "no time zone"),
        ({"cron": "* * * * *", "timezone": 1}, "timezone must be a name"),
        ({}, "Give a cron expression or every="),
        ({"cron": "* * * * *", "every": 5}, "Give a cron expression or every="),
        ({"every": 0.5}, "from 1 second to 3,650 days, got 0.5 s"),
        ({"every": 0}, "from 1 second"),
        ({"every": -5}, "from 1 second"),
        ({"every": float("nan")}, "must be a number of seconds"),
        ({"every": float("inf")}, "must be a number of seconds"),
        ({"every": timedelta(days=4000)}, "3,650 days"),
        ({"every": "5"}, "seconds or a timedelta"),
        ({"every": True}, "seconds or a timedelta"),
        ({"every": 5, "timezone": "UTC"}, "timezone belongs to a cron expression"),
    ],
)
def test_what_cannot_be_is_refused_and_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        timing(given.get("cron"), given.get("every"), given.get("timezone"))
    assert said in str(refused.value)


# Intervals


def test_an_interval_is_aligned_and_does_not_drift() -> None:
    every = timing(None, 7, None)
    moment = at("2026-01-01T00:00:03.250Z")
    found = [moment := every.after(moment) for _ in range(1000)]  # type: ignore[arg-type]
    assert {int(m.timestamp()) % 7 for m in found if m} == {0}
    assert found[-1] - found[0] == timedelta(seconds=7 * 999)  # type: ignore[operator]
    # Asked late, by a little more each time, it still gives the same moments.
    assert every.after(found[0] + timedelta(seconds=6.9)) == found[1]  # type: ignore[operator]


def test_an_interval_of_fractions_is_exact() -> None:
    every = timing(None, timedelta(seconds=1.1), None)
    found = every.after(at("2026-01-01T00:00Z"))
    assert found is not None
    assert (found - at("1970-01-01T00:00Z")) % timedelta(seconds=1.1) == timedelta(0)


# Catching up


NOW = at("2026-01-01T12:00:10Z")
MINUTELY = Timing("* * * * *")


@pytest.mark.parametrize(("catch_up", "count"), [("skip", 0), ("last", 1), ("all", 10)])
def test_ten_minutes_down(catch_up: CatchUp, count: int) -> None:
    # 11:51 is the first that nobody fired, 12:00 the last.
    fired = due(MINUTELY, at("2026-01-01T11:51Z"), NOW, catch_up)
    assert len(fired) == count
    assert fired[-1:] == [at("2026-01-01T12:00Z")] * bool(count)


@pytest.mark.parametrize("catch_up", ["skip", "last", "all"])
def test_a_little_late_is_not_missed(catch_up: CatchUp) -> None:
    assert due(MINUTELY, at("2026-01-01T12:00Z"), NOW, catch_up) == [at("2026-01-01T12:00Z")]
    seconds = due(timing(None, 1, None), NOW - timedelta(seconds=29), NOW, catch_up)
    assert len(seconds) == 30


def test_what_is_due_is_fired_even_if_the_expression_does_not_say_so() -> None:
    moved = NOW - timedelta(minutes=10)
    assert due(Timing("0 0 * * *"), moved, NOW, "last") == [moved]


def test_all_is_bounded_to_the_latest() -> None:
    fired = due(timing(None, 1, None), NOW - timedelta(days=2), NOW, "all")
    assert len(fired) == MOST_CAUGHT_UP
    assert fired[-1] == NOW
    assert fired[0] == NOW - timedelta(seconds=MOST_CAUGHT_UP - 1)


@pytest.mark.parametrize("catch_up", ["last", "all"])
def test_years_of_seconds_are_not_walked(catch_up: CatchUp) -> None:
    began = time.process_time()
    assert due(Timing("* * * * * *", "Europe/Berlin"), NOW - timedelta(days=3650), NOW, catch_up)[-1] == NOW
    assert time.process_time() - began < 2


@pytest.mark.parametrize("limit", [1, 7, 1000])
@pytest.mark.parametrize("expression", ["* * * * *", "0 3 * * *", "0 0 29 2 *", "*/7 1,2 * * MON"])
def test_the_latest_are_the_end_of_all(expression: str, limit: int) -> None:
    timing = Timing(expression, "Europe/Berlin")
    since, until = at("2026-02-20T00:00Z"), at("2026-04-03T12:34Z")
    whole = list(itertools.takewhile(lambda moment: moment <= until, timing.occurrences(since)))
    assert timing.latest(since, until, limit) == whole[-limit:]
