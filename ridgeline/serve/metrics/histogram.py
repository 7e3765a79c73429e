"""Histograms that one thread fills and the same thread scrapes.

prometheus_client takes a lock per bucket and per sum, which at one observation per token costs more
than writing the token to its socket. All of the server's observations are made on the event loop,
and so is the scrape: a list and a bisection are enough.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class Buckets:
    """Counts by upper bound (as Prometheus has it: at most the bound), and the sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.total = bounds, 0.0
        self.counts = [0] * (len(bounds) + 1)

    def observe(self, value: float) -> None:
        """Count a value; what a clock's step made negative counts as nothing."""
        if value > 0.0:
            self.counts[bisect_left(self.bounds, value)] += 1
            self.total += value
        else:
            self.counts[0] += 1

    def cumulative(self) -> list[tuple[str, float]]:
        """(bound, how many at most so large), up to +Inf."""
        found, so_far = [], 0
        names = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        for name, count in zip(names, self.counts, strict=True):
            so_far += count
            found.append((name, float(so_far)))
        return found


class HistogramCollector(Collector):
    """`families`: name → (help, buckets); all labelled with the model's name."""

    def __init__(self, model_name: str, families: Mapping[str, tuple[str, Buckets]]) -> None:
        self._model_name, self._families = model_name, families

    def collect(self) -> Iterable[Metric]:
        for name, (text, buckets) in self._families.items():
            family = HistogramMetricFamily(name, text, labels=["model_name"])
            family.add_metric([self._model_name], buckets.cumulative(), buckets.total)
            yield family
