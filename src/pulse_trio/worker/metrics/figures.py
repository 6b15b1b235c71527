"""The values of metrics: counters, gauges and histograms by label, as plain numbers that can be sent and added.

prometheus_client's own counters take a lock for each change, 0.5 us; these are changed in one thread, once for each batch where
they can be.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Any

from .catalogue import BY_NAME

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Labels = tuple[str, ...]
_FEW = 8
"""Values up to this number are put into their buckets one by one."""


class Histogram:
    """Counts by bucket (the last one has no upper bound), and the sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Adds a value."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def observe_between(self, most: float, least: float, times: int, *, near: float) -> bool:
        """Adds so many values between two, as their mean, if all fall into one bucket and the two differ by no more than the
        share `near`, or a millisecond. Returns whether it did. One value, or two, are added in any case."""
        if times <= 2:
            self.observe(most)
            if times == 2:
                self.observe(least)
            return True
        bucket = bisect_left(self.bounds, most)
        if most - least > max(near * most, 0.001) or bucket != bisect_left(self.bounds, least):
            return False
        self.counts[bucket] += times
        self.sum += (most + least) / 2 * times
        return True

    def observe_all(self, values: list[float]) -> None:
        """Adds values; may sort them. Many cost a fraction of what they cost one by one."""
        if len(values) < _FEW:
            for value in values:
                self.observe(value)
            return
        if max(values) <= self.bounds[0]:
            # As of most jobs that do not wait for anything.
            self.counts[0] += len(values)
            self.sum += sum(values)
            return
        values.sort()
        self.sum += sum(values)
        below = 0
        for place, bound in enumerate(self.bounds):
            upto = bisect_right(values, bound, below)
            self.counts[place] += upto - below
            below = upto
            if below == len(values):
                return
        self.counts[-1] += len(values) - below

    @property
    def count(self) -> int:
        """How many values."""
        return sum(self.counts)


class Figures:
    """Values of metrics at one moment, or from the start of a process."""

    def __init__(self) -> None:
        self.values: dict[str, dict[Labels, float]] = {}
        """Of counters and gauges, by metric."""
        self.histograms: dict[str, dict[Labels, Histogram]] = {}

    def count(self, name: str, labels: Labels = (), more: float = 1) -> None:
        """Adds to a counter (or a gauge)."""
        of_metric = self.values.setdefault(name, {})
        of_metric[labels] = of_metric.get(labels, 0) + more

    def set(self, name: str, value: float, labels: Labels = ()) -> None:
        """Sets a gauge."""
        self.values.setdefault(name, {})[labels] = value

    def histogram(self, name: str, labels: Labels = ()) -> Histogram:
        """The histogram, empty if it is new."""
        of_metric = self.histograms.setdefault(name, {})
        found = of_metric.get(labels)
        if found is None:
            found = of_metric[labels] = Histogram(BY_NAME[name].bounds)
        return found

    def add(self, other: Figures, *, only_totals: bool = False) -> None:
        """Adds another process's. `only_totals`: what stays of a process that has ended, which is no gauge."""
        for name, of_metric in other.values.items():
            metric = BY_NAME[name]
            if only_totals and metric.type == "gauge":
                continue
            mine = self.values.setdefault(name, {})
            for labels, value in of_metric.items():
                if labels not in mine:
                    mine[labels] = value
                elif metric.together == "sum":
                    mine[labels] += value
                else:
                    mine[labels] = (max if metric.together == "max" else min)(mine[labels], value)
        for name, of_histogram in other.histograms.items():
            for labels, theirs in of_histogram.items():
                mine_too = self.histogram(name, labels)
                mine_too.counts = [a + b for a, b in zip(mine_too.counts, theirs.counts, strict=True)]
                mine_too.sum += theirs.sum

    # Between processes

    def encoded(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "values": [[name, labels, value] for name, labels, value in _flat(self.values)],
            "histograms": [[name, labels, h.counts, h.sum] for name, labels, h in _flat(self.histograms)],
        }

    @classmethod
    def decoded(cls, encoded: Mapping[str, Any]) -> Figures:
        """From `encoded`. Leaves out what this version does not know: the other process may be of another."""
        made = cls()
        for name, labels, value in encoded["values"]:
            if (metric := BY_NAME.get(name)) and metric.type != "histogram" and len(labels) == len(metric.labels):
                made.values.setdefault(name, {})[tuple(labels)] = value
        for name, labels, counts, total in encoded["histograms"]:
            metric = BY_NAME.get(name)
            if metric is None or metric.type != "histogram" or len(labels) != len(metric.labels):
                continue
            if len(counts) == len(metric.bounds) + 1:
                histogram = made.histogram(name, tuple(labels))
                histogram.counts, histogram.sum = counts, total
        return made


def _flat(by_name: dict[str, dict[Labels, Any]]) -> Iterable[tuple[str, Labels, Any]]:
    return ((name, labels, value) for name, of_metric in by_name.items() for labels, value in of_metric.items())
