"""The history of one job as a picture for people (store/life.py has it as values).

Each attempt is a bar on one axis from the enqueue to the end (or to now): dots while the job waited, blocks while it ran.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ..states import FINISHED
from ..text import ago, count_of, duration, headline
from .output import terminal

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from rich.text import Text

    from ..records import JobRecord
    from ..store.life import Entry

STYLES = {
    "completed": "green",
    "running": "cyan",
    "failed": "red",
    "timeout": "red",
    "discarded": "red",
    "dead": "red",
    "rescued": "magenta",
    "cancelled": "yellow",
    "snoozed": "blue",
    "released": "blue",
    "retryable": "yellow",
    "cancel asked": "yellow",
    "cancel delivered": "yellow",
    "clean-up begins": "yellow",
}
"""Of states and of outcomes."""
_FIRST, _LAST = 10, 90
"""How many attempts are shown; a job that snoozes may have any number."""
_MIN_WIDTH, _MAX_WIDTH = 12, 48
_BESIDE = 100
"""The width of a line without its bar."""


# Drawing


def picture(job: JobRecord, entries: Sequence[Entry], now: datetime) -> list[Text]:
    """The lines to print."""
    from rich.text import Text

    left_out = max(0, len(entries) - _FIRST - _LAST - 2)
    shown = [*entries[: _FIRST + 1], *entries[_FIRST + 1 + left_out :]] if left_out else list(entries)
    axis = _Axis(job, entries, now)
    names = [_name(entry) for entry in shown]
    wide = max(map(len, names))
    workers = [_worker(entry) for entry in shown]
    widest = max(map(len, workers))
    lines: list[Text] = []
    said = ""
    for place, (entry, name, worker) in enumerate(zip(shown, names, workers, strict=True)):
        if left_out and place == _FIRST + 1:
            lines.append(Text(f"{'':23}  ... {count_of(left_out, 'attempt')} more, which --json shows", "dim"))
        day, _, time = entry.at.astimezone().isoformat(" ", "milliseconds")[:23].partition(" ")
        style = STYLES.get(entry.outcome or entry.event, "")
        line = Text()
        line.append(f"{day if day != said else '':10} {time}  ", "dim")
        line.append(f"{name:<{wide}}  ", style)
        line.append_text(axis.bar(entry, style))
        line.append(f"  {_took(entry, now):>9}  {worker:<{widest}}")
        line.append(f"  {headline(entry.detail)}" if entry.detail else "")
        line.rstrip()
        lines.append(line)
        said = day
    return lines


class _Axis:
    """Maps moments to cells of a line, from the enqueue to the end."""

    def __init__(self, job: JobRecord, entries: Sequence[Entry], now: datetime) -> None:
        finished = job.state in FINISHED
        moments = [m for e in entries if e.event != "due" for m in (e.at, e.until) if m is not None]
        self._start = min(moments)
        self._end = max(moments) if finished else max([*moments, now])
        self._now = self._end
        self._idle_since = self._start
        self._width = min(_MAX_WIDTH, max(_MIN_WIDTH, terminal().width - _BESIDE))
        plain = (getattr(sys.stdout, "encoding", None) or "ascii").lower().replace("-", "") != "utf8"
        self._run, self._wait, self._mark = "#.|" if plain else "█·◆"

    def bar(self, entry: Entry, style: str) -> Text:
        """The wait since the last attempt's end, then the entry itself."""
        from rich.text import Text

        if entry.event == "due":
            # The due time may be far in the future.
            return Text(" " * self._width)
        at = self._cell(entry.at)
        # A cancellation may be requested while an attempt runs.
        since = min(at, self._cell(self._idle_since))
        text = Text(" " * since)
        text.append(self._wait * (at - since), "dim")
        if entry.event == "attempt":
            until = entry.until or self._now
            text.append(self._run * max(1, self._edge(until) - at), style)
            self._idle_since = max(until, self._idle_since)
        else:
            text.append(self._mark, style)
        text.truncate(self._width, pad=True)
        return text

    def _cell(self, moment: datetime) -> int:
        """The cell that a moment lies in."""
        return min(self._width - 1, self._edge(moment))

    def _edge(self, moment: datetime) -> int:
        """The cell that follows it."""
        whole = (self._end - self._start).total_seconds()
        share = (moment - self._start).total_seconds() / whole if whole > 0 else 0.0
        return min(self._width, max(0, int(share * self._width)))


def _name(entry: Entry) -> str:
    return entry.event if entry.attempt is None else f"attempt {entry.attempt}  {entry.outcome}"


def _took(entry: Entry, now: datetime) -> str:
    if entry.event == "due":
        return ago(entry.at, now)
    if entry.event == "attempt" and entry.until is None:
        return f"{duration(max(0.0, (now - entry.at).total_seconds()))}…"
    return duration(entry.seconds) if entry.seconds is not None else ""


def _worker(entry: Entry) -> str:
    if entry.attempt is None:
        return ""
    # A worker's login chooses its host name, so escape it.
    return f"{headline(entry.host)}:{entry.pid}" if entry.host is not None else f"worker {entry.worker}"
