"""A job's events as bars on one axis, from the enqueue to the end or to now, in parts of a thousand.

A row has dots where the job waited and a bar where it ran; everything else that happened is a mark.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...states import FINISHED

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from ...records import JobRecord
    from ...store.life import Entry

WIDE = 1000
_LEAST = 6
"""The narrowest bar: an attempt of a millisecond after a week's wait is still seen."""
_FIRST, _LAST = 20, 80
"""How many events are shown; a job that snoozes may have any number."""


@dataclass(frozen=True, slots=True)
class Row:
    """One event: where the job's wait before it began, where it begins and how wide it is. A due time that has not come has no
    place on the axis (`at` is None). `left_out` is the number of events that are not shown before this one."""

    entry: Entry
    waited_from: int
    at: int | None
    width: int
    left_out: int = 0

    @property
    def tone(self) -> str:
        """The state or outcome that colours it."""
        return (self.entry.outcome or self.entry.event).replace(" ", "-")


@dataclass(frozen=True, slots=True)
class Picture:
    """All rows, and the moments at both ends of the axis."""

    rows: list[Row]
    start: datetime
    end: datetime

    @property
    def seconds(self) -> float:
        """How long the axis is."""
        return (self.end - self.start).total_seconds()


def picture_of(job: JobRecord, entries: Sequence[Entry], now: datetime) -> Picture:
    """The picture of a job's life."""
    moments = [m for e in entries if e.event != "due" for m in (e.at, e.until) if m is not None]
    start = min(moments)
    end = max(moments) if job.state in FINISHED else max([*moments, now])
    whole = (end - start).total_seconds()

    def place(moment: datetime) -> int:
        share = (moment - start).total_seconds() / whole if whole > 0 else 0.0
        return min(WIDE, max(0, round(share * WIDE)))

    rows, idle = list[Row](), 0
    for entry in entries:
        if entry.event == "due":
            rows.append(Row(entry, 0, None, 0))
            continue
        at = min(WIDE - _LEAST, place(entry.at))
        if entry.event == "attempt":
            width = max(_LEAST, place(entry.until or end) - at)
            rows.append(Row(entry, min(idle, at), at, width))
            idle = min(WIDE, at + width)
        else:
            rows.append(Row(entry, min(idle, at), at, _LEAST))
    cut = len(rows) - _FIRST - _LAST
    if cut > 0:
        rest = rows[_FIRST + cut :]
        first = rest[0]
        rows = [*rows[:_FIRST], Row(first.entry, first.waited_from, first.at, first.width, cut), *rest[1:]]
    return Picture(rows, start, end)
