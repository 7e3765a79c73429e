"""`ridgeline_batch_*`: read from the store at scrape time, so that a restart loses no count."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ridgeline.serve.batch.records import STATUSES, BatchJob
from ridgeline.serve.batch.store import BatchStore
from ridgeline.serve.batch.worker import BatchWorker


class BatchCollector(Collector):
    """Metrics of the batches of a store, and of the worker that runs them."""

    def __init__(self, store: BatchStore, worker: BatchWorker) -> None:
        self._store, self._worker = store, worker

    def collect(self) -> Iterable[Metric]:
        batches = self._store.with_status(*STATUSES)
        levels = GaugeMetricFamily("ridgeline_batches", "Batches by status.", labels=["status"])
        for status in STATUSES:
            levels.add_metric([status], sum(batch.status == status for batch in batches))
        yield levels
        num_open = sum(b.total - b.completed - b.failed for b in batches)
        yield _gauge(
            "requests_running", "Batch requests that are running.", self._worker.num_running
        )
        yield _gauge("store_bytes", "Size of the batch store.", self._store.used_bytes())
        yield _gauge(
            "wanted_servers",
            "Servers like this one that the open batch requests need to end by their deadlines.",
            self._worker.wanted_servers,
        )
        yield _gauge("requests_open", "Batch requests without a result.", num_open)
        settled = CounterMetricFamily(
            "ridgeline_batch_requests", "Batch requests with a result.", labels=["result"]
        )
        settled.add_metric(["succeeded"], sum(batch.completed for batch in batches))
        settled.add_metric(["failed"], sum(batch.failed for batch in batches))
        yield settled
        yield from _token_counters(batches)


def _token_counters(batches: Sequence[BatchJob]) -> Iterable[Metric]:
    used = CounterMetricFamily(
        "ridgeline_batch_tokens", "Tokens of batch requests.", labels=["kind"]
    )
    charged = CounterMetricFamily(
        "ridgeline_batch_charged_tokens",
        "Tokens of batch requests, at the price of online ones.",
        labels=["kind"],
    )
    for kind in ("prompt", "completion"):
        counts = [(getattr(batch, f"{kind}_tokens"), batch.price_factor) for batch in batches]
        used.add_metric([kind], sum(count for count, _ in counts))
        charged.add_metric([kind], sum(count * factor for count, factor in counts))
    yield used
    yield charged


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"ridgeline_batch_{name}", text, value=value)
