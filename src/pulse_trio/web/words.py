"""Numbers and times as people read them."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from ..text import ago, count_of, duration, one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..store.batches import BatchStatus
    from ..store.watching import Figures, Minute

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
    return Markup('<time datetime="{}" title="{}" data-ago>{}</time>').format(
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
    return empty if value is None else f"{value:,.0f}" if value == round(value) or value >= 100 else f"{value:,.1f}"


def limits(queue: Any) -> list[str]:
    """A queue's limits in words."""
    parts = (
        (queue.limit, " at once"),
        (queue.rate, ""),
        (queue.key_limit, " at once each key"),
        (queue.key_rate, " each key"),
    )
    return [
        f"{value:,}{what}" if isinstance(value, int) else f"{value}{what}" for value, what in parts if value is not None
    ]


def batch_state(batch: BatchStatus) -> str:
    """`open`: takes jobs; `closed`: waits for its jobs; `finished`."""
    return "finished" if batch.finished_at is not None else "open" if batch.closed_at is None else "closed"


def last_line(error: str | None) -> str:
    """What a traceback ends with."""
    lines = [line for line in (error or "").strip().splitlines() if line.strip()]
    return one_line(lines[-1]) if lines else ""


def lately(minutes: Sequence[Minute]) -> float | None:
    """Jobs a minute over the last five whole minutes; over fewer where there are fewer."""
    whole = [minute.jobs for minute in minutes if 1 <= minute.ago <= 5] or [minute.jobs for minute in minutes]
    return round(sum(whole) / len(whole), 1) if whole else None


def amount(figures: Figures, jobs: float) -> str:
    """A count of the sample: with "about" when it is an estimate."""
    if figures.exact:
        return count_of(round(jobs), "job")
    digits = max(0, len(str(round(jobs))) - 2)
    return f"about {round(jobs, -digits):,.0f} jobs"


# Charts: paths in a box of 600 by 100


def highest(first: Sequence[float | None], second: Sequence[float | None] | None = None) -> float:
    """The value at the top of a chart."""
    return max((value for value in (*first, *(second or ())) if value is not None), default=0.0) or 1.0


def _points(values: Sequence[float | None], top: float) -> list[list[tuple[float, float]]]:
    """The runs of points without a gap."""
    step = 600 / max(1, len(values) - 1)
    runs: list[list[tuple[float, float]]] = [[]]
    for place, value in enumerate(values):
        if value is None:
            runs.append([])
        else:
            runs[-1].append((place * step, 100 - 96 * min(1.0, value / top)))
    return [run for run in runs if run]


def line(values: Sequence[float | None], top: float) -> str:
    """The line of a chart, as an SVG path; a value without neighbours is a short stroke."""
    return "".join(
        "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in (run if len(run) > 1 else [(run[0][0] - 2, run[0][1]), run[0]]))
        for run in _points(values, top)
    )


def area(values: Sequence[float | None], top: float) -> str:
    """What is below the line."""
    return "".join(
        f"M{run[0][0]:.1f} 100L" + "L".join(f"{x:.1f} {y:.1f}" for x, y in run) + f"L{run[-1][0]:.1f} 100Z"
        for run in _points(values, top)
        if len(run) > 1
    )


def chart_of_jobs(figures: Figures) -> str:
    """The throughput for charts.js."""
    jobs = [minute.jobs for minute in figures.minutes]
    return _chart(figures, [jobs], [[f"{amount(figures, each)} finished"] for each in jobs])


def chart_of_times(figures: Figures, which: str) -> str:
    """The waits or the run times (`wait`, `run`) for charts.js."""
    median = [getattr(minute, which) for minute in figures.minutes]
    most = [getattr(minute, f"{which}_p95") for minute in figures.minutes]
    told = [
        ["no job finished"] if half is None else [f"median {span(half)}", f"95 of 100 within {span(high)}"]
        for half, high in zip(median, most, strict=True)
    ]
    return _chart(figures, [median, most], told)


def _chart(figures: Figures, lines: list[list[float | None]] | list[list[float]], values: list[list[str]]) -> str:
    """JSON: each line's values, the value at the top, and the time and the values of each minute in words."""
    ends = [figures.at - timedelta(minutes=minute.ago) for minute in figures.minutes]
    told = [
        # With the seconds: these minutes are counted back from now, and begin at no full one.
        [f"{end - timedelta(minutes=1):%H:%M:%S}\N{EN DASH}{end:%H:%M:%S} UTC", *texts]
        for end, texts in zip(ends, values, strict=True)
    ]
    return json.dumps({"top": highest(*lines), "lines": lines, "told": told}, ensure_ascii=False, allow_nan=False)


FILTERS: dict[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (
        when,
        span,
        number,
        limits,
        batch_state,
        last_line,
        lately,
        amount,
        highest,
        line,
        area,
        chart_of_jobs,
        chart_of_times,
    )
}
