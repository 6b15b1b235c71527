"""Figures as text: Prometheus's format, or OpenMetrics where the scraper asks for it. Needs prometheus_client."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector

from .catalogue import METRICS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.metrics_core import Metric as Family

    from .catalogue import Metric
    from .figures import Figures


class _Once(Collector):
    """The figures of one scrape. In a registry of its own: whatever the program exports of its own stays apart."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures

    def describe(self) -> Iterable[Family]:
        """Nothing: the names need no check, because nothing else is in the registry."""
        return []

    def collect(self) -> Iterable[Family]:
        """Every metric; one without values has its help all the same."""
        return [_family(metric, self._figures) for metric in METRICS]


def render(figures: Figures, accept: str) -> tuple[bytes, str]:
    """The text, and its content type. `accept` is the request's header."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Once(figures))
    try:
        encode, content_type = choose_encoder(accept)
    except (TypeError, ValueError):
        # It compares a version that is no number with one that is. An unreadable header asks for nothing.
        encode, content_type = choose_encoder("")
    return encode(registry), content_type


def _family(metric: Metric, figures: Figures) -> Family:
    if metric.type == "histogram":
        family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        for labels, histogram in sorted(figures.histograms.get(metric.name, {}).items()):
            buckets: list[tuple[str, float]] = []
            total = 0
            for bound, count in zip([*histogram.bounds, "+Inf"], histogram.counts, strict=True):
                total += count
                buckets.append((str(bound), total))
            family.add_metric(labels, buckets, histogram.sum)
        return family
    made = (CounterMetricFamily if metric.type == "counter" else GaugeMetricFamily)(
        metric.name, metric.help, labels=metric.labels
    )
    for labels, value in sorted(figures.values.get(metric.name, {}).items()):
        made.add_metric(labels, value)
    return made
