"""Numbers and times as people read them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from ..text import ago, duration

if TYPE_CHECKING:
    from collections.abc import Callable

NONE = "\N{EN DASH}"
"""What stands where there is nothing."""


def now() -> datetime:
    """Now, by this machine's clock: for display only."""
    return datetime.now(UTC)


def when(moment: datetime | None, at: datetime | None = None, empty: str = NONE) -> Markup | str:
    """A `<time>` element: relative, with the exact time on hover."""
    if moment is None:
        return empty
    exact = moment.astimezone(UTC)
    return Markup('<time datetime="{}" title="{}">{}</time>').format(
        exact.isoformat(timespec="milliseconds"),
        exact.strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + " UTC",
        ago(moment, at or now()),
    )


def span(seconds: float | None, empty: str = NONE) -> str:
    """A length of time, short: `850 ms`, `3.4 s`, `12 min`; a dash for None."""
    if seconds is None:
        return empty
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return duration(round(seconds, 1))


def number(value: float | None, empty: str = NONE) -> str:
    """A number with its thousands apart; a dash for None."""
    return empty if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


FILTERS: dict[str, Callable[..., Any]] = {"when": when, "span": span, "number": number}
