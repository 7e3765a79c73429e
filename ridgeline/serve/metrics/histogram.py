"""Histograms without locks.

prometheus_client takes a lock per bucket and per sum, which at one observation per token costs more
than writing the token to its socket. All observations are made on the event loop, and so is the
scrape: a list and a bisection are enough.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class HistogramBuckets:
    """Counts per bucket, whose upper bounds are inclusive, and the sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.total = bounds, 0.0
        self.counts = [0] * (len(bounds) + 1)

    def observe(self, value: float) -> None:
        """Count a value; a negative one, which a clock step can cause, counts as zero."""
        if value > 0.0:
            self.counts[bisect_left(self.bounds, value)] += 1
            self.total += value
        else:
            self.counts[0] += 1

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, number of values up to it), ending with +Inf."""
        buckets, so_far = [], 0
        names = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        for name, count in zip(names, self.counts, strict=True):
            so_far += count
            buckets.append((name, float(so_far)))
        return buckets


class HistogramCollector(Collector):
    """`families`: name → (help, buckets); all labelled with the model's name."""

    def __init__(
        self, model_name: str, families: Mapping[str, tuple[str, HistogramBuckets]]
    ) -> None:
        self._model_name, self._families = model_name, families

    def collect(self) -> Iterable[Metric]:
        for name, (text, buckets) in self._families.items():
            family = HistogramMetricFamily(name, text, labels=["model_name"])
            family.add_metric([self._model_name], buckets.cumulative(), buckets.total)
            yield family
