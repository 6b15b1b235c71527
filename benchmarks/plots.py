"""Plots of results. matplotlib is imported only here, and only when something is drawn."""

# matplotlib is installed for the pictures alone.
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

INK = "#2b2b2b"
COLOURS = ("#0b6e99", "#d9730d", "#448361", "#9065b0", "#c14c8a", "#6b6b6b", "#cb912f", "#5b97bd")


def _axes(title: str, x: str, y: str, *, width: float = 8, height: float = 4.5) -> tuple[Any, Any]:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(width, height), layout="constrained")
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.grid(axis="y", alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def bars(path: Path, rows: Sequence[Mapping[str, Any]], key: str, *, title: str, x: str) -> None:
    """Horizontal bars, one a way, with its rounds as dots."""
    figure, axes = _axes(title, x, "", height=1.2 + 0.38 * len(rows))
    names = [row["way"] for row in rows]
    axes.barh(names, [row[key] or 0 for row in rows], color=COLOURS[0], height=0.62)
    for place, row in enumerate(rows):
        axes.plot(row["rounds"], [place] * len(row["rounds"]), "o", color=INK, markersize=3, alpha=0.6)
        axes.text(row[key] or 0, place, f"  {row[key]:,.0f}" if row[key] else "  -", va="center", fontsize=8, color=INK)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", alpha=0.25)
    axes.margins(x=0.12)
    _save(figure, path)


def lines(
    path: Path,
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    title: str,
    x: str,
    y: str,
    logarithmic: str = "",
) -> None:
    """Lines by name, each (xs, ys); `logarithmic` names the axes that are: "x", "y" or "xy"."""
    figure, axes = _axes(title, x, y)
    for place, (name, (xs, ys)) in enumerate(series.items()):
        axes.plot(xs, ys, marker="o", markersize=3, color=COLOURS[place % len(COLOURS)], label=name)
    if "x" in logarithmic:
        axes.set_xscale("log")
    if "y" in logarithmic:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    if len(series) > 1:
        axes.legend(frameon=False, fontsize=8)
    _save(figure, path)


def panels(path: Path, shown: Sequence[tuple[str, str, Mapping[str, tuple[Sequence[float], Sequence[float]]]]]) -> None:
    """Small plots beside one another, each with its own x: (heading, what x is, series by name)."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, all_axes = pyplot.subplots(
        1, len(shown), figsize=(3.1 * len(shown), 3), layout="constrained", squeeze=False
    )
    for axes, (heading, x, series) in zip(all_axes[0], shown, strict=True):
        axes.set_title(heading, loc="left", fontsize=10, color=INK)
        axes.set_xlabel(x, color=INK, fontsize=9)
        for place, (name, (xs, ys)) in enumerate(series.items()):
            axes.plot(xs, ys, marker="o", markersize=3, color=COLOURS[place % len(COLOURS)], label=name)
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.grid(axis="y", alpha=0.25)
        axes.legend(frameon=False, fontsize=8)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    _save(figure, path)


def distribution(path: Path, samples: Mapping[str, Sequence[float]], *, title: str, x: str) -> None:
    """The cumulative distribution of each series, up to its 99.9th percentile on a logarithmic scale."""
    figure, axes = _axes(title, x, "share of jobs not later")
    for place, (name, values) in enumerate(samples.items()):
        ordered = sorted(max(value, 0.01) for value in values)
        shares = [(i + 1) / len(ordered) for i in range(len(ordered))]
        axes.step(ordered, shares, where="post", color=COLOURS[place % len(COLOURS)], label=name)
    axes.set_xscale("log")
    axes.set_ylim(0, 1.01)
    axes.legend(frameon=False, fontsize=8)
    _save(figure, path)


def stacked(
    path: Path, panels: Sequence[tuple[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]]], *, x: str
) -> None:
    """Several plots under one another over the same x: (heading, series by name)."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, all_axes = pyplot.subplots(
        len(panels), 1, figsize=(9, 2.4 * len(panels)), sharex=True, layout="constrained", squeeze=False
    )
    for axes, (heading, series) in zip(all_axes[:, 0], panels, strict=True):
        axes.set_title(heading, loc="left", fontsize=10, color=INK)
        for place, (name, (xs, ys)) in enumerate(series.items()):
            axes.plot(xs, ys, color=COLOURS[place % len(COLOURS)], label=name, linewidth=1.4)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=8)
    all_axes[-1, 0].set_xlabel(x, color=INK)
    _save(figure, path)
