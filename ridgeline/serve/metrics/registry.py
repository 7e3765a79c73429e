"""`/metrics`: Prometheus text under vLLM's names, so that its dashboards and autoscalers work.

There are two sources. A `RequestTimer` sees every event of a request and feeds the histograms; the
engine's counters are read at scrape time. Semantics are vLLM's: queue = arrival to the request's
first scheduled step; ttft = arrival to first token; one itl sample per later output event; tpot =
(e2e - ttft) / (tokens - 1) once per choice (0 for a single token). All times are in seconds; all
metrics are labelled `model_name`.

Every app has its own registry: two servers in one process never mix their metrics.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, Protocol

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ridgeline.records import FinishReason, Sampling, Slo
from ridgeline.records.price import HOUR_S, dollars_per_million
from ridgeline.roofline import Peaks
from ridgeline.serve.engine_protocol import ServedEngine
from ridgeline.serve.metrics.engine_collector import EngineCollector
from ridgeline.serve.metrics.histogram import HistogramBuckets, HistogramCollector
from ridgeline.serve.metrics.loop_lag import LAG_BOUNDS
from ridgeline.serve.metrics.request_timer import RequestTimer

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_PER_TOKEN = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_E2E = (
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0,
    60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_PUBLISH = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0)
_COUNTS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000
)  # fmt: skip

_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("Arrival to first token.", _TTFT),
    "inter_token_latency_seconds": ("Gap between two output events of a choice.", _PER_TOKEN),
    "request_time_per_output_token_seconds": (
        "Mean gap between the tokens of a choice.",
        _PER_TOKEN,
    ),
    "e2e_request_latency_seconds": ("Arrival to the end of the choice.", _E2E),
    "request_queue_time_seconds": ("Arrival to the request's first scheduled step.", _E2E),
    "request_prefill_time_seconds": ("First scheduled step to first token.", _E2E),
    "request_decode_time_seconds": ("First to last token.", _E2E),
    "request_inference_time_seconds": ("First scheduled step to last token.", _E2E),
    "request_prompt_tokens": ("Prompt tokens of a request.", _COUNTS),
    "request_generation_tokens": ("Output tokens of a choice.", _COUNTS),
    "request_params_n": ("n of a request.", (1, 2, 5, 10, 20)),
    "request_params_max_tokens": ("max_tokens of a request.", _COUNTS),
}

REFUSAL_REASONS = ("key", "forbidden", "rate_limit", "headers", "draining", "other")
"""Why a request is refused before any work is done for it."""

_SLO_COUNTERS = {
    "requests": ("Finished requests of an SLO class.", ("model_name", "slo_class")),
    "met": ("Requests that met their SLO.", ("model_name", "slo_class")),
    "missed": (
        "Missed objectives: ttft, tpot, e2e, failed.",
        ("model_name", "slo_class", "why"),
    ),
}


class CalibratedThreshold(Protocol):
    """From which similarity on questions share an answer, and how often that is wrong at most."""

    @property
    def threshold(self) -> float: ...

    @property
    def false_hit_bound(self) -> float: ...


class CountedCache(Protocol):
    """A cache of answers that counts. `calibration`: of its answers to similar questions."""

    num_hits: int
    num_semantic_hits: int
    num_misses: int
    num_bytes: int

    @property
    def calibration(self) -> CalibratedThreshold | None: ...


class _ResponseCacheCollector(Collector):
    def __init__(self, cache: CountedCache, model_name: str) -> None:
        self._cache, self._model_name = cache, model_name

    def collect(self) -> Iterable[Metric]:
        text = "Requests that the cache of answers could have answered, by whether it did."
        labels = ["model_name", "result"]
        counter = CounterMetricFamily("ridgeline_response_cache", text, labels=labels)
        counter.add_metric([self._model_name, "hit"], self._cache.num_hits)
        if self._cache.calibration is not None:
            counter.add_metric([self._model_name, "semantic_hit"], self._cache.num_semantic_hits)
        counter.add_metric([self._model_name, "miss"], self._cache.num_misses)
        yield counter
        text = "Size of the cache of answers."
        gauge = GaugeMetricFamily("ridgeline_response_cache_bytes", text, labels=["model_name"])
        gauge.add_metric([self._model_name], self._cache.num_bytes)
        yield gauge
        if (calibration := self._cache.calibration) is not None:
            text = "Similarity from which on a question gets the answer of another one."
            name = "ridgeline_semantic_cache_threshold"
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([self._model_name], calibration.threshold)
            yield gauge
            text = "Upper bound (95 %) of the rate of false hits on the calibration's pairs."
            name = "ridgeline_semantic_cache_false_hit_bound"
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([self._model_name], calibration.false_hit_bound)
            yield gauge


class Metrics:
    """The metrics of one app. `now`: the clock of its timers, in seconds."""

    def __init__(
        self,
        engine: ServedEngine,
        model_name: str,
        *,
        now: Callable[[], float] = time.perf_counter,
        price_per_hour: float | None = None,
        peaks: Peaks | None = None,
        slo_classes: Mapping[str, Slo] | None = None,
    ) -> None:
        self.now, self.model_name = now, model_name
        self.num_output_tokens = 0
        self.registry = CollectorRegistry()
        self._other_output_tokens: list[Callable[[], int]] = []
        self._histograms = {
            name: HistogramBuckets(bounds) for name, (_, bounds) in _HISTOGRAMS.items()
        }
        self._itl = self._histograms["inter_token_latency_seconds"]
        self._publish = HistogramBuckets(_PUBLISH)
        self._loop_lag = HistogramBuckets(LAG_BOUNDS)
        ProcessCollector(registry=self.registry)  # CPU seconds, memory, open files
        self._register_histograms()
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of started requests.")
        text = "Prompt tokens that came from the prefix cache."
        self._cached_tokens = self._counter("prompt_tokens_cached", text)
        cancelled = Counter(
            "ridgeline_cancelled",
            "Choices that were cancelled, by whether they had started.",
            ["model_name", "phase"],
            registry=self.registry,
        )
        self._cancelled = {
            phase: cancelled.labels(model_name, phase) for phase in ("queued", "running")
        }
        self.registry.register(_OutputTokens(self))
        success = Counter(
            "vllm:request_success",
            "Finished choices, by reason.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        reasons: tuple[FinishReason, ...] = ("stop", "length", "abort")
        self._finished = {reason: success.labels(model_name, reason) for reason in reasons}
        self._slo = {
            name: Counter(f"ridgeline_slo_{name}", text, [*labels], registry=self.registry)
            for name, (text, labels) in _SLO_COUNTERS.items()
        }
        self._refused = Counter(
            "ridgeline_requests_refused",
            "Requests refused before any work, by reason.",
            ["model_name", "reason"],
            registry=self.registry,
        )
        self._register_context()
        self._start_at_zero(slo_classes or {})
        self.registry.register(EngineCollector(engine, model_name, peaks, slo_classes))
        if price_per_hour is not None:
            self._register_cost(price_per_hour)

    def register_response_cache(self, cache: CountedCache) -> None:
        """Report the hits, misses and size of the cache of answers."""
        self.registry.register(_ResponseCacheCollector(cache, self.model_name))

    def _start_at_zero(self, slo_classes: Mapping[str, Slo]) -> None:
        """Create every labelled series: a rate over a series that does not exist yet is empty,
        and an alert on it would stay silent while every request fails."""
        for reason in REFUSAL_REASONS:
            self._refused.labels(self.model_name, reason)
        for name, slo in slo_classes.items():
            for counter in ("requests", "met"):
                self._slo[counter].labels(self.model_name, name)
            for objective in (*slo.objectives, "failed"):
                self._slo["missed"].labels(self.model_name, name, objective)

    def _register_histograms(self) -> None:
        families = {
            f"vllm:{name}": (text, self._histograms[name])
            for name, (text, _) in _HISTOGRAMS.items()
        }
        text = "End of the step that sampled a token to its response stream."
        families["ridgeline_time_to_publish_seconds"] = (text, self._publish)
        text = "Time by which timers of the event loop were late, ten times a second."
        families["ridgeline_event_loop_lag_seconds"] = (text, self._loop_lag)
        self.registry.register(HistogramCollector(self.model_name, families))

    def _register_cost(self, price_per_hour: float) -> None:
        started_s = self.now()

        def cost_per_million() -> float:
            elapsed_s = self.now() - started_s
            num_tokens = self.num_output_tokens + sum(n() for n in self._other_output_tokens)
            tok_s = num_tokens / elapsed_s if elapsed_s > 0 else 0.0
            cost = dollars_per_million(price_per_hour, tok_s)
            return float("nan") if cost is None else cost

        text = "Price of the time since the server started (--price-per-hour), idle time included."
        spent = Gauge("ridgeline_cost_spent", text, ["model_name"], registry=self.registry)
        spent.labels(self.model_name).set_function(
            lambda: (self.now() - started_s) / HOUR_S * price_per_hour
        )
        per_million = Gauge(
            "ridgeline_cost_per_million_tokens",
            "That price per million output tokens, batch requests included.",
            ["model_name"],
            registry=self.registry,
        )
        per_million.labels(self.model_name).set_function(cost_per_million)

    def include_output_tokens(self, num_tokens: Callable[[], int]) -> None:
        """Include the output tokens of another app of this server in the cost per token."""
        self._other_output_tokens.append(num_tokens)

    def _counter(self, name: str, text: str) -> Counter:
        family = Counter(f"vllm:{name}", text, ["model_name"], registry=self.registry)
        return family.labels(self.model_name)

    def _register_context(self) -> None:
        text = "Documents that context reduction left out."
        name, labels = "ridgeline_context_documents_dropped", ["model_name"]
        dropped = Counter(name, text, labels, registry=self.registry)
        text = "Tokens of documents that context reduction left out."
        saved = Counter("ridgeline_context_tokens_saved", text, labels, registry=self.registry)
        self._dropped_documents = dropped.labels(self.model_name)
        self._saved_tokens = saved.labels(self.model_name)

    def time_request(
        self,
        num_prompt_tokens: int,
        num_choices: int,
        slo_class: str = "",
        slo: Slo | None = None,
        *,
        score_only: bool = False,
    ) -> RequestTimer:
        """A timer for an engine request that arrives now."""
        return RequestTimer(
            self, num_prompt_tokens, num_choices, slo_class, slo, score_only=score_only
        )

    def count_submitted(self, sampling: Sampling) -> None:
        """The engine has accepted a request."""
        self.observe("request_params_n", sampling.n)
        if sampling.max_tokens is not None:
            self.observe("request_params_max_tokens", sampling.max_tokens)

    def observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def observe_loop_lag(self, lag_s: float) -> None:
        self._loop_lag.observe(lag_s)

    def observe_token(self, publish_s: float, gap_s: float | None) -> None:
        self._publish.observe(publish_s)
        if gap_s is not None:
            self._itl.observe(gap_s)

    def count_output(self, num_tokens: int) -> None:
        self.num_output_tokens += num_tokens

    def count_prompt(self, num_tokens: int) -> None:
        self._prompt_tokens.inc(num_tokens)
        self.observe("request_prompt_tokens", num_tokens)

    def count_cached(self, num_tokens: int) -> None:
        self._cached_tokens.inc(num_tokens)

    def count_cancelled(self, phase: Literal["queued", "running"]) -> None:
        self._cancelled[phase].inc()

    def count_slo(self, slo_class: str, missed: Sequence[str]) -> None:
        """A request of a class finished, and missed these objectives."""
        labels = (self.model_name, slo_class)
        self._slo["requests"].labels(*labels).inc()
        if not missed:
            self._slo["met"].labels(*labels).inc()
        for objective in missed:
            self._slo["missed"].labels(*labels, objective).inc()

    def count_reduced(self, num_documents: int, num_tokens: int) -> None:
        """Count what a context reduction left out."""
        self._dropped_documents.inc(num_documents)
        self._saved_tokens.inc(max(0, num_tokens))

    def count_refused(self, reason: str) -> None:
        self._refused.labels(self.model_name, reason).inc()

    def count_finished(self, reason: FinishReason) -> None:
        self._finished[reason].inc()

    def render(self) -> bytes:
        """The page that a scraper reads."""
        return generate_latest(self.registry)


class _OutputTokens(Collector):
    """Read at scrape time: prometheus_client's counter would take a lock per token."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        counter = CounterMetricFamily(
            "vllm:generation_tokens", "Output tokens.", labels=["model_name"]
        )
        counter.add_metric([self._metrics.model_name], float(self._metrics.num_output_tokens))
        yield counter
