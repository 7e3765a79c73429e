"""The engine's own numbers, read at scrape time, under vLLM's names and ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ridgeline.serve.contract import ServedEngine

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
