"""Data on a terminal: control characters are displayed, never sent."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime, timedelta

# C0, DEL and C1 but for newline and tab; line and paragraph separators, which some programs take for new lines; the marks
# that reorder text on the screen; lone surrogates.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def shown(text: str) -> str:
    """`text` with control characters written as escapes. Newlines and tabs are kept."""
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode(), text.replace("\r\n", "\n"))


def one_line(text: str) -> str:
    """The same on one line."""
    return shown(" ".join(text.split()))


def headline(text: str | None) -> str:
    """The first line of an error."""
    return shown((text or "").partition("\n")[0])


def duration(seconds: float) -> str:
    """`0.12 s`, `3.4 s`, `2 min 5 s`, `3 h 4 min`, `12 d 5 h`; `inf s` for what lies at no moment."""
    if seconds < 60 or not math.isfinite(seconds):
        return f"{seconds:.3g} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def spelled(seconds: float) -> str:
    """`3 days`, `2 hours`, `1 minute` where it is a whole number of them; else as `duration`."""
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size and seconds % size == 0:
            return count_of(int(seconds // size), unit)
    return duration(seconds)


def ago(moment: datetime | None, now: datetime) -> str:
    """`12 s ago`, `in 5 min`; empty for None."""
    if moment is None:
        return ""
    seconds = (now - moment).total_seconds()
    return f"{_coarse(seconds)} ago" if seconds >= 0 else f"in {_coarse(-seconds)}"


def _coarse(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def local_time(moment: datetime | None) -> str:
    """The local time with its offset, to the millisecond; empty for None."""
    return moment.astimezone().isoformat(" ", "milliseconds") if moment is not None else ""


def utc_now() -> datetime:
    """Now, by this machine's clock: for display only."""
    return datetime.now(UTC)


_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def parse_duration(text: str) -> timedelta:
    """`90s`, `15min`, `2h`, `3d`, `1w`; a number alone is seconds. Raises `ValueError`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(s|m|min|h|d|w)?", text.strip())
    if found is None:
        raise ValueError(f"a length of time is a number with s, min, h, d or w, as in 15min, not {text!r}")
    try:
        return timedelta(seconds=float(found[1]) * _UNITS[found[2] or "s"])
    except OverflowError:
        raise ValueError(f"{text!r} is longer than anything lasts") from None


def parse_moment(text: str) -> datetime | timedelta:
    """A duration before now, or a date or time in ISO 8601, local unless it has an offset. Raises `ValueError`."""
    try:
        return parse_duration(text)
    except ValueError:
        pass
    try:
        return datetime.fromisoformat(text.strip()).astimezone()
    except (ValueError, OverflowError):
        raise ValueError(f"a moment is 2h (ago), 2026-11-21 or 2026-11-21T09:30+01:00, not {text!r}") from None


def count_of(number: int, what: str) -> str:
    """`1 job`, `12 jobs`."""
    return f"{number} {what}" if number == 1 else f"{number:,} {what}s"
