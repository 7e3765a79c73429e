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
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ridgeline.records import Event, Finished, FinishReason, Sampling, Started, Token
from ridgeline.serve.contract import ServedEngine

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

ENGINE_GAUGES = {
    "num_requests_running": "Sequences that hold KV blocks.",
    "num_requests_waiting": "Sequences that wait for admission.",
    "kv_cache_usage_perc": "KV blocks in use, 0 to 1.",
}
ENGINE_COUNTERS = {
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "num_preemptions": "Sequences that lost their blocks and were recomputed.",
    "spec_decode_num_drafts": "Drafts that were verified.",
    "spec_decode_num_draft_tokens": "Draft tokens that were verified.",
    "spec_decode_num_accepted_tokens": "Draft tokens that were accepted.",
}
PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"


class Metrics:
    """The numbers of one app."""

    def __init__(
        self,
        engine: ServedEngine,
        model_name: str,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.now = now
        self.model_name = model_name
        self.registry = CollectorRegistry()
        self._histograms = {
            name: Histogram(
                f"vllm:{name}", text, ["model_name"], buckets=buckets, registry=self.registry
            ).labels(model_name)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of started requests.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens sent to clients.")
        success = Counter(
            "vllm:request_success",
            "Choices that ended, by reason.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        reasons: tuple[FinishReason, ...] = ("stop", "length", "abort")
        self._success = {reason: success.labels(model_name, reason) for reason in reasons}
        self.registry.register(EngineCollector(engine, model_name))

    def _counter(self, name: str, text: str) -> Counter:
        family = Counter(f"vllm:{name}", text, ["model_name"], registry=self.registry)
        return family.labels(self.model_name)

    def meter(self, num_prompt_tokens: int, sampling: Sampling) -> Meter:
        """A meter for one ask that arrives now."""
        self.observe("request_params_n", sampling.n)
        if sampling.max_tokens is not None:
            self.observe("request_params_max_tokens", sampling.max_tokens)
        return Meter(self, num_prompt_tokens, sampling.n)

    def observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(max(0.0, value))

    def count_prompt(self, num_tokens: int) -> None:
        self._prompt_tokens.inc(num_tokens)
        self.observe("request_prompt_tokens", num_tokens)

    def count_token(self) -> None:
        self._generation_tokens.inc()

    def count_end(self, reason: FinishReason) -> None:
        self._success[reason].inc()

    def render(self) -> bytes:
        """The page a scraper reads."""
        return generate_latest(self.registry)


class _Choice:
    """What the meter remembers of one choice: when its first and last token came, and how many."""

    def __init__(self) -> None:
        self.first_s = self.last_s = 0.0
        self.num_tokens = 0


class Meter:
    """Turns the events of one ask into observations. Instants are on the server's own clock."""

    def __init__(self, metrics: Metrics, num_prompt_tokens: int, num_choices: int) -> None:
        self._metrics = metrics
        self._num_prompt_tokens = num_prompt_tokens
        self._arrival_s = metrics.now()
        self._started_s: float | None = None
        self._choices = {index: _Choice() for index in range(num_choices)}

    def saw(self, event: Event) -> None:
        """Account for one event that is on its way to the client."""
        now = self._metrics.now()
        if isinstance(event, Started):
            self._start(now)
        elif isinstance(event, Token):
            self._token(event, now)
        elif isinstance(event, Finished):
            self._finish(event, now)

    def left(self) -> None:
        """The client went away or the ask failed: the open choices count as aborted."""
        for _ in self._choices:
            self._metrics.count_end("abort")
        self._choices.clear()

    def _start(self, now: float) -> None:
        if self._started_s is None:
            self._started_s = now
            self._metrics.observe("request_queue_time_seconds", now - self._arrival_s)
            self._metrics.count_prompt(self._num_prompt_tokens)

    def _token(self, event: Token, now: float) -> None:
        self._start(now)
        choice = self._choices[event.index]
        if choice.num_tokens == 0:
            choice.first_s = now
            self._metrics.observe("time_to_first_token_seconds", now - self._arrival_s)
        else:
            self._metrics.observe("inter_token_latency_seconds", now - choice.last_s)
        choice.last_s = now
        choice.num_tokens += 1
        self._metrics.count_token()

    def _finish(self, event: Finished, now: float) -> None:
        choice = self._choices.pop(event.index)
        metrics, started_s = self._metrics, self._started_s
        metrics.count_end(event.reason)
        metrics.observe("e2e_request_latency_seconds", now - self._arrival_s)
        metrics.observe("request_generation_tokens", choice.num_tokens)
        if choice.num_tokens == 0 or started_s is None:
            return
        decode_s = choice.last_s - choice.first_s
        metrics.observe("request_prefill_time_seconds", choice.first_s - started_s)
        metrics.observe("request_decode_time_seconds", decode_s)
        metrics.observe("request_inference_time_seconds", choice.last_s - started_s)
        tpot_s = decode_s / (choice.num_tokens - 1) if choice.num_tokens > 1 else 0.0
        metrics.observe("request_time_per_output_token_seconds", tpot_s)


class EngineCollector(Collector):
    """Reads the engine's own numbers at scrape time. A counter never falls, nor goes below zero."""

    def __init__(self, engine: ServedEngine, model_name: str) -> None:
        self._engine, self._model_name = engine, model_name
        self._highest = dict.fromkeys(ENGINE_COUNTERS, 0.0)

    def collect(self) -> Iterable[Metric]:
        values = self._engine.counters()
        for name, text in ENGINE_GAUGES.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name"])
            gauge.add_metric([self._model_name], float(values.get(name, 0.0)))
            yield gauge
        for name, text in ENGINE_COUNTERS.items():
            self._highest[name] = max(self._highest[name], float(values.get(name, 0.0)))
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=["model_name"])
            counter.add_metric([self._model_name], self._highest[name])
            yield counter
        yield self._accepted_by_position(values)
        yield self._cache_config()

    def _accepted_by_position(self, values: Mapping[str, float]) -> CounterMetricFamily:
        """One sample per place in a draft that was accepted at least once."""
        text = "Draft tokens that were accepted, by their place in the draft."
        labels = ["model_name", "position"]
        family = CounterMetricFamily(f"vllm:{PER_POSITION}", text, labels=labels)
        for name, value in values.items():
            base, _, place = name.partition("/")
            if base == PER_POSITION:
                family.add_metric([self._model_name, place], float(value))
        return family

    def _cache_config(self) -> GaugeMetricFamily:
        info = self._engine.info
        labels = {
            "model_name": self._model_name,
            "block_size": str(info.block_size),
            "num_gpu_blocks": str(info.num_blocks),
            "cache_dtype": info.compute_dtype,
            "enable_prefix_caching": str(info.settings.get("enable_prefix_caching", "")),
        }
        gauge = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV cache as configured.", labels=list(labels)
        )
        gauge.add_metric(list(labels.values()), 1.0)
        return gauge
