"""The schedules, with their next occurrences."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING

from ...errors import UsageError
from ...store import schedules
from ...timing import Timing

if TYPE_CHECKING:
    from ...store.schedules import FireRecord, ScheduleRecord
    from ..database import Database

MOST = 200
COMING = 3
"""Occurrences that are shown of each."""
FIRES = 50


@dataclass(frozen=True)
class Shown:
    """A schedule without its job's arguments. `coming`: its next occurrences, none of a paused or broken one."""

    name: str
    state: str
    kind: str
    queue: str
    cron: str | None
    timezone: str
    every: float | None
    catch_up: str
    last_due: datetime | None
    last_job: int | None
    declared: bool
    declared_by: int
    paused_at: datetime | None
    problem: str | None
    coming: list[datetime] = field(default_factory=list[datetime])


@dataclass(frozen=True)
class Schedules:
    """The first schedules by name; `more`: there are more."""

    schedules: list[Shown]
    more: bool


@dataclass(frozen=True)
class Fires:
    """What a schedule has fired, latest first."""

    name: str
    fires: list[FireRecord]


async def read(database: Database) -> Schedules:
    """Reads them."""
    found = await database.read(schedules.schedules())
    return Schedules([_shown(each) for each in found[:MOST]], len(found) > MOST)


async def read_fires(database: Database, name: str) -> Fires:
    """The latest occurrences of one. Raises `UnknownSchedule`."""
    return Fires(name, await database.read(schedules.fires(name, limit=FIRES)))


def _shown(s: ScheduleRecord) -> Shown:
    return Shown(
        s.name, s.state, s.kind, s.queue, s.cron, s.timezone, s.every, s.catch_up, s.last_due, s.last_job, s.declared,
        s.declared_by, s.paused_at, s.problem, coming(s),
    )  # fmt: skip


def coming(s: ScheduleRecord) -> list[datetime]:
    """The next occurrences of an active schedule."""
    if s.state != "active" or s.next_due is None:
        return []
    try:
        timing = Timing(s.cron, s.timezone, None if s.every is None else timedelta(seconds=s.every))
        return [s.next_due, *islice(timing.occurrences(s.next_due), COMING - 1)]
    except (UsageError, ValueError, OverflowError, LookupError):
        # A row that was written by hand, and wrongly: its worker says what is wrong.
        return [s.next_due]
