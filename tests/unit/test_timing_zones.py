"""Cron in time zones against an implementation of its own: another parser, days and not steps, and every time on the wall
looked up in the zone.

What a schedule means there: an expression whose minute and hour both begin without `*` is a time of day. It comes once for each
such time on the wall: the first time if the clock shows it twice, at the end of the gap if it is leapt over, once for several
that are leapt over. Everything else comes at each moment at which the clock shows a fitting time: not in a gap, twice where
it shows it twice.
"""

from __future__ import annotations

import calendar
import os
import random
from datetime import UTC, date, datetime, timedelta
from functools import cache
from typing import TYPE_CHECKING, NamedTuple
from zoneinfo import ZoneInfo

import pytest

from pulse_trio.timing import Timing

if TYPE_CHECKING:
    from collections.abc import Iterator

ZONES = (
    "Africa/Cairo", "Africa/Casablanca", "America/Asuncion", "America/Havana", "America/Los_Angeles", "America/New_York",
    "America/Nuuk", "America/Santiago", "America/Sao_Paulo", "America/St_Johns", "Antarctica/Troll", "Asia/Amman",
    "Asia/Beirut",
    "Asia/Gaza", "Asia/Jerusalem", "Asia/Kathmandu", "Asia/Kolkata", "Asia/Pyongyang", "Asia/Tehran", "Asia/Tokyo",
    "Atlantic/Azores", "Australia/Adelaide", "Australia/Lord_Howe", "Australia/Sydney", "Europe/Berlin", "Europe/Dublin",
    "Europe/London", "Pacific/Apia", "Pacific/Chatham", "Pacific/Norfolk",
)  # fmt: skip
FIRST, LAST = 2017, 2026
SIZE = int(os.environ.get("CRON_EXPRESSIONS", "6"))
"""Random expressions; docs/how-to/periodic.md has the figures of 500."""
DAY = timedelta(days=1)


class Plan(NamedTuple):
    """An expression, read."""

    minutes: list[int]
    hours: list[int]
    days: set[int]
    months: set[int]
    weekdays: set[int]
    both: bool
    of_day: bool

    def fits(self, day: date) -> bool:
        month_day, weekday = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        return day.month in self.months and ((month_day and weekday) if self.both else (month_day or weekday))


def read(expression: str) -> Plan:
    minute, hour, day, month, weekday = expression.split()
    return Plan(
        sorted(numbers(minute, 0, 59)),
        sorted(numbers(hour, 0, 23)),
        numbers(day, 1, 31),
        numbers(month, 1, 12),
        {n % 7 for n in numbers(weekday, 0, 7)},
        day.startswith("*") or weekday.startswith("*"),
        not minute.startswith("*") and not hour.startswith("*"),
    )


def numbers(field: str, low: int, high: int) -> set[int]:
    found: set[int] = set()
    for part in field.split(","):
        span, _, step = part.partition("/")
        if span == "*":
            first, last = low, high
        elif "-" in span:
            first, last = map(int, span.split("-"))
        else:
            first = int(span)
            last = high if step else first
        found |= set(range(first, last + 1, int(step or 1)))
    return found


def occurrences(plan: Plan, zone: ZoneInfo, after: datetime, until: datetime) -> list[datetime]:
    """All after the one moment and not after the other, in order."""
    found: set[datetime] = set()
    day = after.astimezone(zone).date() - DAY
    while day <= until.astimezone(zone).date() + DAY:
        if plan.fits(day):
            for hour in plan.hours:
                for minute in plan.minutes:
                    found.update(instants(datetime(day.year, day.month, day.day, hour, minute), zone, plan.of_day))
        day += DAY
    return sorted(moment for moment in found if after < moment <= until)


@cache
def instants(wall: datetime, zone: ZoneInfo, of_day: bool) -> tuple[datetime, ...]:
    """When the clock shows this time. The expressions share most times, so each is looked up once."""
    early, late = (wall.replace(tzinfo=zone, fold=fold).astimezone(UTC) for fold in (0, 1))
    if early == late:
        return (early,)
    if early < late:
        return (early,) if of_day else (early, late)
    # Leapt over. PEP 495: `late` is before the gap and `early` after it.
    return (change_between(zone, late, early),) if of_day else ()


def change_between(zone: ZoneInfo, before: datetime, after: datetime) -> datetime:
    offset = before.astimezone(zone).utcoffset()
    while after - before > timedelta(seconds=1):
        middle = before + (after - before) / 2
        middle = middle.replace(microsecond=0)
        if middle.astimezone(zone).utcoffset() == offset:
            before = middle
        else:
            after = middle
    return after


def some_field(choose: random.Random, low: int, high: int) -> str:
    def one() -> str:
        # Never a range of one value with a step: cronsim reads 7-7/2 as 7/2.
        a, b = sorted(choose.sample(range(low, high + 1), 2))
        return choose.choice(
            (str(a), f"{a}-{b}", f"{a}-{b}/{choose.randint(1, 7)}", f"*/{choose.randint(1, 15)}", str(b))
        )

    return ",".join(one() for _ in range(choose.choice((1, 1, 1, 2))))


def some_expressions(count: int) -> list[str]:
    choose = random.Random(20261122)
    found = [
        "*/15 3 * * *",
        "*/15 */2 * * *",
        "0 * * * *",
        "30 2 * * *",
        "*/20 0-3 * * *",
        "15,45 1-3 * * *",
        "*/30 23,0,1 * * *",
    ]
    while len(found) < count:
        minute, hour = (
            some_field(choose, 0, 59),
            choose.choice(("*", some_field(choose, 0, 23), some_field(choose, 0, 4))),
        )
        day = choose.choice(("*", "*", "*", some_field(choose, 1, 28)))
        month = choose.choice(("*", "*", "*", some_field(choose, 1, 12)))
        weekday = choose.choice(("*", "*", "*", some_field(choose, 0, 6)))
        found.append(f"{minute} {hour} {day} {month} {weekday}")
    return found[:count]


def changes(zone: ZoneInfo) -> Iterator[datetime]:
    """Days in which the zone's offset changes."""
    day = datetime(FIRST, 1, 1, tzinfo=UTC)
    while day.year <= LAST:
        if day.astimezone(zone).utcoffset() != (day + DAY).astimezone(zone).utcoffset():
            yield day
        day += DAY


@pytest.mark.parametrize("name", ZONES)
def test_occurrences_around_every_change_of_ten_years_are_those_of_another_implementation(name: str) -> None:
    zone = ZoneInfo(name)
    # The day of each change and half a day at either side, and as long at a moment without one in each year.
    starts = [day - DAY / 2 for day in changes(zone)]
    starts += [datetime(year, 5, 1 + year % 20, 7, tzinfo=UTC) for year in range(FIRST, LAST + 1)]
    for expression in some_expressions(SIZE):
        plan, timing = read(expression), Timing(expression, name)
        for after in starts:
            until = after + 2 * DAY
            found: list[datetime] = []
            for moment in timing.occurrences(after):
                if moment > until:
                    break
                found.append(moment)
            assert found == occurrences(plan, zone, after, until), (expression, name, after)
    instants.cache_clear()  # a zone's times are no other's


@pytest.mark.parametrize("expression", ["17 4 * * *", "0 */6 1,15 * *", "*/30 2 * * 1", "0 0 29 2 *", "59 23 31 12 *"])
@pytest.mark.parametrize("name", ["Australia/Lord_Howe", "Africa/Casablanca", "America/Havana", "Pacific/Apia"])
def test_ten_years_without_a_break_are_those_of_another_implementation(expression: str, name: str) -> None:
    after, until = datetime(FIRST, 1, 1, tzinfo=UTC), datetime(LAST + 1, 1, 1, tzinfo=UTC)
    found: list[datetime] = []
    for moment in Timing(expression, name).occurrences(after):
        if moment > until:
            break
        found.append(moment)
    assert found == occurrences(read(expression), ZoneInfo(name), after, until)
    assert len(found) >= calendar.leapdays(FIRST, LAST + 1)


@pytest.mark.parametrize(
    ("expression", "name", "after", "expected"),
    [
        ("*/15 3 * * *", "Australia/Lord_Howe", "2026-10-03T15:00Z", ["16:00", "16:15", "16:30", "16:45"]),
        ("*/15 */2 * * *", "Asia/Beirut", "2026-03-28T21:30Z", ["23:00", "23:15", "23:30", "23:45", "01:00"]),
    ],
)
def test_clocks_that_move_by_half_an_hour_or_at_midnight(
    expression: str, name: str, after: str, expected: list[str]
) -> None:
    found = Timing(expression, name).occurrences(datetime.fromisoformat(after))
    assert [next(found).strftime("%H:%M") for _ in expected] == expected
