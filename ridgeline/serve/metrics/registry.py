"""`/metrics`: Prometheus text under vLLM's names: its dashboards and autoscalers work unchanged.

Two sources. Requests: a `Meter` sees every event that goes to a client and feeds the histograms.
Engine: a collector reads `engine.counters()` at scrape time. Semantics are vLLM's: queue =
arrival to first share of a step; ttft = arrival to first token; one itl sample per later output
event; tpot = (e2e - ttft) / (tokens - 1) once per choice (0 for a single token); all in seconds,
all labelled `model_name`.

Every app owns its registry: two servers in one process never mix their numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from ridgeline.records import FinishReason, Sampling, Slo
from ridgeline.records.price import HOUR_S, dollars_per_million
from ridgeline.roofline import Peaks
from ridgeline.serve.engine_protocol import ServedEngine
from ridgeline.serve.http.native_writer import Couriers
from ridgeline.serve.metrics.engine_collector import EngineCollector
from ridgeline.serve.metrics.histogram import Buckets, HistogramCollector
from ridgeline.serve.metrics.request_timer import Meter

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_PER_TOKEN = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_WHOLE = (
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
    "request_time_per_output_token_seconds": ("Mean gap of a choice, first token out.", _PER_TOKEN),
    "e2e_request_latency_seconds": ("Arrival to the end of the choice.", _WHOLE),
    "request_queue_time_seconds": ("Arrival to the first share of a step.", _WHOLE),
    "request_prefill_time_seconds": ("First share of a step to first token.", _WHOLE),
    "request_decode_time_seconds": ("First to last token.", _WHOLE),
    "request_inference_time_seconds": ("First share of a step to last token.", _WHOLE),
    "request_prompt_tokens": ("Tokens of the prompt.", _COUNTS),
    "request_generation_tokens": ("Tokens of the answer.", _COUNTS),
    "request_params_n": ("n as asked.", (1, 2, 5, 10, 20)),
    "request_params_max_tokens": ("max_tokens as asked.", _COUNTS),
}

_GAPS = "inter_token_latency_seconds"
_SLO = {
    "requests": ("Requests of an SLO class that ended.", ("model_name", "slo_class")),
    "met": ("Requests that got all that their class promises.", ("model_name", "slo_class")),
    "missed": ("Promises broken: ttft, tpot, e2e, failed.", ("model_name", "slo_class", "why")),
}


class Metrics:
    """The numbers of one app."""

    def __init__(
        self,
        engine: ServedEngine,
        model_name: str,
        *,
        now: Callable[[], float] = time.perf_counter,
        price_per_hour: float | None = None,
        peaks: Peaks | None = None,
    ) -> None:
        self.now = now
        self.model_name = model_name
        self.num_tokens = 0  # sent to clients: counted by meters
        self._beside: list[Callable[[], int]] = []
        self.registry = CollectorRegistry()
        self._histograms = {name: Buckets(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self.publish, self.gaps = Buckets(_PUBLISH), self._histograms[_GAPS]
        self.couriers = Couriers(self.publish, self.gaps, self._count_sent)
        ProcessCollector(registry=self.registry)  # CPU seconds, memory, open files
        self.registry.register(HistogramCollector(model_name, self._families()))
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of started requests.")
        text = "Prompt tokens that came from the prefix cache."
        self._cached_tokens = self._counter("prompt_tokens_cached", text)
        cancelled = Counter(
            "ridgeline_cancelled",
            "Choices that ended before their answer did, by how far they were.",
            ["model_name", "phase"],
            registry=self.registry,
        )
        self._cancelled = {
            phase: cancelled.labels(model_name, phase) for phase in ("queued", "running")
        }
        self.registry.register(_SentTokens(self))
        success = Counter(
            "vllm:request_success",
            "Choices that ended, by reason.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        reasons: tuple[FinishReason, ...] = ("stop", "length", "abort")
        self._success = {reason: success.labels(model_name, reason) for reason in reasons}
        self._slo = {
            what: Counter(f"ridgeline_slo_{what}", text, [*labels], registry=self.registry)
            for what, (text, labels) in _SLO.items()
        }
        self.refused = Counter(
            "ridgeline_requests_refused",
            "Requests refused before any work, by reason.",
            ["model_name", "reason"],
            registry=self.registry,
        )
        self.registry.register(EngineCollector(engine, model_name, peaks))
        if price_per_hour is not None:
            self._tell_cost(price_per_hour)

    def _families(self) -> dict[str, tuple[str, Buckets]]:
        found = {
            f"vllm:{name}": (text, self._histograms[name])
            for name, (text, _) in _HISTOGRAMS.items()
        }
        text = "From the end of the step that made a token to the hand-over to its connection."
        return found | {"ridgeline_time_to_publish_seconds": (text, self.publish)}

    def _tell_cost(self, price_per_hour: float) -> None:
        """What the time since this app was made has cost, idle time and all."""
        began_s = self.now()
        text = "Price of the time since the server began (--price-per-hour), idle or not."
        spent = Gauge("ridgeline_cost_spent", text, ["model_name"], registry=self.registry)
        spent.labels(self.model_name).set_function(
            lambda: (self.now() - began_s) / HOUR_S * price_per_hour
        )
        per_million = Gauge(
            "ridgeline_cost_per_million_tokens",
            "That, over all tokens of answers, batch lines' too, times a million.",
            ["model_name"],
            registry=self.registry,
        )
        per_million.labels(self.model_name).set_function(
            lambda: self._cost_per_million(price_per_hour, self.now() - began_s)
        )

    def _cost_per_million(self, price_per_hour: float, elapsed_s: float) -> float:
        num_tokens = self.num_tokens + sum(count() for count in self._beside)
        tok_s = num_tokens / elapsed_s if elapsed_s > 0 else 0.0
        cost = dollars_per_million(price_per_hour, tok_s)
        return float("nan") if cost is None else cost

    def count_beside(self, num_tokens: Callable[[], int]) -> None:
        """Answers that another app of this server gives share the machine, and so its price."""
        self._beside.append(num_tokens)

    def _counter(self, name: str, text: str) -> Counter:
        family = Counter(f"vllm:{name}", text, ["model_name"], registry=self.registry)
        return family.labels(self.model_name)

    def meter(
        self,
        num_prompt_tokens: int,
        sampling: Sampling,
        slo_class: str = "",
        slo: Slo | None = None,
        *,
        scores_only: bool = False,
    ) -> Meter:
        """A meter for one request that arrives now, promised `slo` as one of `slo_class`."""
        return Meter(self, num_prompt_tokens, sampling.n, slo_class, slo, scores_only=scores_only)

    def count_submitted(self, sampling: Sampling) -> None:
        """The engine has taken a request."""
        self.observe("request_params_n", sampling.n)
        if sampling.max_tokens is not None:
            self.observe("request_params_max_tokens", sampling.max_tokens)

    def observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def _count_sent(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens

    def count_prompt(self, num_tokens: int) -> None:
        self._prompt_tokens.inc(num_tokens)
        self.observe("request_prompt_tokens", num_tokens)

    def count_cached(self, num_tokens: int) -> None:
        self._cached_tokens.inc(num_tokens)

    def count_cancelled(self, phase: Literal["queued", "running"]) -> None:
        self._cancelled[phase].inc()

    def count_promise(self, slo_class: str, missed: tuple[str, ...]) -> None:
        """One request of a class came to its end, and which of its promises were broken."""
        labels = (self.model_name, slo_class)
        self._slo["requests"].labels(*labels).inc()
        if not missed:
            self._slo["met"].labels(*labels).inc()
        for why in missed:
            self._slo["missed"].labels(*labels, why).inc()

    def count_refused(self, reason: str) -> None:
        self.refused.labels(self.model_name, reason).inc()

    def count_end(self, reason: FinishReason) -> None:
        self._success[reason].inc()

    def render(self) -> bytes:
        """The page a scraper reads."""
        self.couriers.drain()
        return generate_latest(self.registry)


class _SentTokens(Collector):
    """Read at scrape time: prometheus_client's own counter takes a lock per token."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        name, text = "vllm:generation_tokens", "Tokens sent to clients."
        counter = CounterMetricFamily(name, text, labels=["model_name"])
        counter.add_metric([self._metrics.model_name], float(self._metrics.num_tokens))
        yield counter
