"""When a schedule is due: plain functions over instants, no clock and no I/O.

A cron expression is read by cronsim; what this module adds is one rule for the nights on which clocks change, the same for
five fields and for six. A time of day (neither the minute nor the hour field begins with `*`) is a time on the wall: it comes
once a day, at the first moment after the gap where the clock leaps over it, and only the first time where the clock shows it
twice. Everything else (`0 * * * *`, `*/15 * * * *`) goes by real time: every hour that passes, as in Vixie's cron.

`every` is aligned to 1970-01-01 00:00 UTC, so that it never drifts and is the same on every worker.
"""

from __future__ import annotations

import difflib
import errno
import itertools
from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, tzinfo
from typing import TYPE_CHECKING, Literal, cast
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from cronsim import CronSim, CronSimError

from .errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator

CatchUp = Literal["skip", "last", "all"]
CATCH_UP: tuple[CatchUp, ...] = ("skip", "last", "all")

ON_TIME = timedelta(seconds=30)
"""An occurrence fired within this is late, not missed: whatever the policy, it is fired."""
MOST_CAUGHT_UP = 1000
"""What catch_up="all" fires at most: the latest of them."""

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SHORTEST, LONGEST = timedelta(seconds=1), timedelta(days=3650)
_MAX_EXPRESSION = 256
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""A zone's file could not be opened for want of something: that says nothing about the zone."""
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
    """A cron expression in a time zone, or an interval. Made by `timing`, or from a row that was written by it.

    Raises `ConfigurationError` when it is read for the first time and cannot be.
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
        local = moment.astimezone(self._zone)
        last = moment
        for found in CronSim(self._fields, local.replace(tzinfo=None, fold=0) if self._on_the_wall else local):
            instant = _instant_of(found, self._zone) if self._on_the_wall else found.astimezone(UTC)
            # Two times on the wall may be one instant (in a gap), or one that has passed (when clocks go back).
            if instant > last:
                last = instant
                yield instant

    def latest(self, since: datetime, until: datetime, limit: int) -> list[datetime]:
        """The last `limit` occurrences after `since` and not after `until`, in order.

        Looks back in growing steps: a year of seconds is not walked for its last one.
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

    Within `ON_TIME` nothing was missed: all of them are fired. After that the policy decides over everything that has
    come since: none, the last, or all (the latest `MOST_CAUGHT_UP`).
    """
    missed = now - next_due > ON_TIME
    if missed and catch_up == "skip":
        return []
    limit = 1 if missed and catch_up == "last" else MOST_CAUGHT_UP
    return [next_due, *timing.latest(next_due, now, limit)][-limit:]


def timing(cron: str | None, every: float | timedelta | None, timezone: str | None) -> Timing:
    """What a caller asked for: a cron expression with its time zone (UTC by default), or seconds.

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
        raise ConfigurationError(_bad_field(what, parts, str(error))) from None
    if never:
        raise ConfigurationError(f"{what} never comes.")
    return text


def _bad_field(what: str, parts: list[str], error: str) -> str:
    name = error.removeprefix("Bad ")
    value = dict(zip(list(_FIELDS)[-len(parts) :], parts, strict=True)).get(name, "")
    return f"{what} has a bad {name} field: {value!r}. It takes {_FIELDS.get(name, 'numbers')}, with * , - and /."


def _instant_of(wall: datetime, zone: tzinfo) -> datetime:
    """When the clock on the wall shows this time (the first time, if twice), or passes it in a leap."""
    while True:
        instant = wall.replace(tzinfo=zone).astimezone(UTC)
        if instant.astimezone(zone).replace(tzinfo=None) == wall:
            return instant
        # In the gap: to its end, which falls on a whole minute everywhere since 1972.
        wall = wall.replace(second=0) + timedelta(minutes=1)
