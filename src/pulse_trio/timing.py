"""When a schedule is due: plain functions over instants, no clock and no I/O.

cronsim reads the cron expression. This module adds one rule for the nights on which clocks change, the same for five fields and
for six. A time of day (neither the minute nor the hour field begins with `*`) is a wall-clock time: it comes once a day, at the
first moment after the gap if the clock leaps over it, and only the first time if the clock shows it twice. All other
expressions (`0 * * * *`, `*/15 * * * *`) go by real time: each moment at which the clock shows a matching time.

`every` is aligned to 1970-01-01 00:00 UTC, so that it never drifts and is the same on every worker.
"""

from __future__ import annotations

import difflib
import errno
import itertools
from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, tzinfo
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, cast
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from cronsim import CronSim, CronSimError

from .errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator

CatchUp = Literal["skip", "last", "all"]
CATCH_UP: tuple[CatchUp, ...] = ("skip", "last", "all")

ON_TIME = timedelta(seconds=30)
"""An occurrence fired within this time is late, not missed: it is fired under every policy."""
MOST_CAUGHT_UP = 1000
"""The most that catch_up="all" fires: the latest ones."""

_YEARS = 50
"""How far ahead an occurrence is looked for."""
_LAST_YEAR = 9997
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SHORTEST, LONGEST = timedelta(seconds=1), timedelta(days=3650)
_MAX_EXPRESSION = 256
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""A zone's file could not be opened for lack of a resource: that proves nothing about the zone."""
_FIELDS = {
    "second": "0-59",
    "minute": "0-59",
    "hour": "0-23",
    "day-of-month": "1-31, L or LW",
    "month": "1-12 or JAN-DEC",
    "day-of-week": "0-7 or SUN-SAT, 5L, MON#2",
}
_NAMED = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}


@dataclass(frozen=True, slots=True)
class Timing:
    """A cron expression in a time zone, or an interval. Made by `timing`, or from a row that it wrote.

    Raises `ConfigurationError` at its first use if it cannot be read.
    """

    cron: str | None = None
    timezone: str = "UTC"
    every: timedelta | None = None
    _zone: tzinfo = field(init=False, repr=False, compare=False)
    _fields: str = field(init=False, repr=False, compare=False)
    _on_the_wall: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if (self.cron is None) == (self.every is None):
            raise ConfigurationError("Give a cron expression or every=, one of them.")
        zone = _zone_of(self.timezone)
        fields = _fields_of(self.cron) if self.cron is not None else ""
        parts = fields.split()[-5:]
        on_the_wall = bool(parts) and not parts[0].startswith("*") and not parts[1].startswith("*")
        for name, value in (("_zone", zone), ("_fields", fields), ("_on_the_wall", on_the_wall)):
            object.__setattr__(self, name, value)
        if self.every is not None:
            _check_every(self.every)

    def __str__(self) -> str:
        if self.cron is None:
            return f"every {cast('timedelta', self.every).total_seconds():g} s"
        return self.cron if self.timezone == "UTC" else f"{self.cron} {self.timezone}"

    def after(self, moment: datetime) -> datetime | None:
        """The first occurrence after a moment, in UTC; None if there is none within fifty years."""
        return next(self.occurrences(moment), None)

    def occurrences(self, moment: datetime) -> Iterator[datetime]:
        """Every occurrence after a moment, in order and in UTC."""
        if self.every is not None:
            first = EPOCH + ((moment - EPOCH) // self.every + 1) * self.every
            return (first + n * self.every for n in itertools.count())
        return self._of_cron(moment.astimezone(UTC))

    def _of_cron(self, moment: datetime) -> Iterator[datetime]:
        if self._zone is UTC:
            return iter(CronSim(self._fields, moment))
        return self._times_of_day(moment) if self._on_the_wall else self._by_real_time(moment)

    def _times_of_day(self, moment: datetime) -> Iterator[datetime]:
        last = moment
        for found in CronSim(self._fields, moment.astimezone(self._zone).replace(tzinfo=None, fold=0)):
            instant = _instant_of(found, self._zone)
            # Two wall-clock times may be one instant (in a gap), or one that has passed (when clocks go back).
            if instant > last:
                last = instant
                yield instant

    def _by_real_time(self, moment: datetime) -> Iterator[datetime]:
        """Every moment at which the wall clock shows a matching time.

        From one change of the zone's offset to the next a clock runs evenly, so cronsim gets each such stretch without a zone.
        With a zone it steps by whole hours, and lost or doubled times where clocks move by half an hour or off the hour.
        """
        start, inclusive = moment, False
        while start.year <= min(moment.year + _YEARS, _LAST_YEAR):
            end = _next_change(self._zone, start)
            offset = start.astimezone(self._zone).utcoffset() or timedelta(0)
            local = (start + offset).replace(tzinfo=None)
            for found in CronSim(self._fields, local - timedelta(seconds=1) if inclusive else local):
                instant = (found - offset).replace(tzinfo=UTC)
                if instant >= end:
                    break
                yield instant
            start, inclusive = end, True

    def latest(self, since: datetime, until: datetime, limit: int) -> list[datetime]:
        """The last `limit` occurrences after `since` and not after `until`, in order.

        Looks back in growing steps, so that it does not walk a year of seconds for the last one.
        """
        step = timedelta(minutes=1)
        while True:
            start = max(since, until - step)
            inside = itertools.takewhile(lambda moment: moment <= until, self.occurrences(start))
            found = deque(inside, maxlen=limit)
            if len(found) == limit or start == since:
                return list(found)
            step *= 8


def due(timing: Timing, next_due: datetime, now: datetime, catch_up: CatchUp) -> list[datetime]:
    """The occurrences to fire when `next_due` has come, in order.

    Within `ON_TIME` no occurrence was missed: all of them are fired. After that the policy decides about all occurrences since
    then: none, the last, or all (the latest `MOST_CAUGHT_UP`).
    """
    missed = now - next_due > ON_TIME
    if missed and catch_up == "skip":
        return []
    limit = 1 if missed and catch_up == "last" else MOST_CAUGHT_UP
    return [next_due, *timing.latest(next_due, now, limit)][-limit:]


def timing(cron: str | None, every: float | timedelta | None, timezone: str | None) -> Timing:
    """The timing for a caller's cron expression with its time zone (UTC by default), or for seconds.

    Raises `ConfigurationError`.
    """
    if every is not None and timezone is not None:
        raise ConfigurationError("timezone belongs to a cron expression; every= counts seconds and needs none.")
    return Timing(cron, "UTC" if timezone is None else timezone, None if every is None else _interval(every))


def _interval(every: object) -> timedelta:
    if isinstance(every, timedelta):
        return every
    if not isinstance(every, (int, float)) or isinstance(every, bool):
        raise ConfigurationError(f"every must be seconds or a timedelta, got {every!r}.")
    try:
        return timedelta(seconds=every)
    except (OverflowError, ValueError):
        raise ConfigurationError(f"every must be a number of seconds, got {every!r}.") from None


def _check_every(every: timedelta) -> None:
    if not SHORTEST <= every <= LONGEST:
        raise ConfigurationError(
            f"every must be from 1 second to {LONGEST.days:,} days, got {every.total_seconds():g} s."
        )


def _zone_of(name: object) -> tzinfo:
    if name == "UTC":
        return UTC
    if not isinstance(name, str):
        raise ConfigurationError(f"timezone must be a name like 'Europe/Berlin', got {name!r}.")
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno in _EXHAUSTED:
            raise
        known = {zone.lower(): zone for zone in available_timezones()}
        near = [known[key] for key in difflib.get_close_matches(name.lower(), known, n=3)]
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else " It looks like 'Europe/Berlin'."
        raise ConfigurationError(f"There is no time zone {name!r}.{hint}") from None


def _fields_of(expression: object) -> str:
    """The expression's fields as cronsim takes them."""
    if not isinstance(expression, str):
        raise ConfigurationError(f"A cron expression is text like '*/5 * * * *', got {expression!r}.")
    text = expression.strip()
    what = f"The cron expression {text[:_MAX_EXPRESSION]!r}"
    if text.startswith("@"):
        if text.lower() not in _NAMED:
            raise ConfigurationError(f"{what} is not one of {', '.join(_NAMED)}.")
        return _NAMED[text.lower()]
    if len(text) > _MAX_EXPRESSION:
        raise ConfigurationError(f"{what}... is longer than {_MAX_EXPRESSION} characters.")
    parts = text.split()
    if len(parts) not in (5, 6):
        raise ConfigurationError(
            f"{what} has {len(parts)} field{'s' * (len(parts) != 1)}. It has five: minute, hour, day-of-month, month, "
            "day-of-week; or six, with the second before them."
        )
    try:
        never = next(CronSim(text, EPOCH), None) is None
    except CronSimError as error:
        if str(error) == "Bad day-of-month" and _is_cron([*parts[:-2], "*", parts[-1]]):
            raise ConfigurationError(f"{what} never comes: no month {parts[-2]} has a day {parts[-3]}.") from None
        raise ConfigurationError(_bad_field(what, parts, str(error))) from None
    if never:
        raise ConfigurationError(f"{what} never comes.")
    return text


def _is_cron(parts: list[str]) -> bool:
    try:
        CronSim(" ".join(parts), EPOCH)
    except CronSimError:
        return False
    return True


def _bad_field(what: str, parts: list[str], error: str) -> str:
    name = error.removeprefix("Bad ")
    value = dict(zip(list(_FIELDS)[-len(parts) :], parts, strict=True)).get(name, "")
    return f"{what} has a bad {name} field: {value!r}. It takes {_FIELDS.get(name, 'numbers')}, with * , - and /."


def _next_change(zone: tzinfo, moment: datetime) -> datetime:
    """When the zone's offset changes next, or the next year begins, whichever comes first."""
    following = (change for change in _changes(zone, moment.year) if change > moment)
    return next(following, datetime(moment.year + 1, 1, 1, tzinfo=UTC))


@lru_cache(maxsize=1024)
def _changes(zone: tzinfo, year: int) -> tuple[datetime, ...]:
    """The moments of a year (in UTC) at which the zone's offset changes: zoneinfo has only offsets, so the moments are searched
    for."""
    found: list[datetime] = []
    begin, end = datetime(year, 1, 1, tzinfo=UTC), datetime(year + 1, 1, 1, tzinfo=UTC)
    while begin < end:
        # No zone changed twice within six hours.
        step = min(begin + timedelta(hours=6), end)
        if begin.astimezone(zone).utcoffset() != step.astimezone(zone).utcoffset():
            before, after = begin, step
            while after - before > timedelta(seconds=1):
                middle = before + timedelta(seconds=(after - before) // timedelta(seconds=2))
                same = middle.astimezone(zone).utcoffset() == begin.astimezone(zone).utcoffset()
                before, after = (middle, after) if same else (before, middle)
            found.append(after)
        begin = step
    return tuple(found)


def _instant_of(wall: datetime, zone: tzinfo) -> datetime:
    """When the wall clock shows this time (the first time, if twice), or leaps over it."""
    while True:
        instant = wall.replace(tzinfo=zone).astimezone(UTC)
        if instant.astimezone(zone).replace(tzinfo=None) == wall:
            return instant
        # In the gap: go to its end, which has been on a whole minute everywhere since 1972.
        wall = wall.replace(second=0) + timedelta(minutes=1)
