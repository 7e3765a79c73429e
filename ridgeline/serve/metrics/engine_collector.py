"""The engine's counters, read at scrape time, under vLLM's names and ours.

Utilisation is over the latest 128 steps: batch fill is sequences per slot; MFU and MBU compare the
model's arithmetic and memory traffic over busy time with the peaks measured on this machine. A
counter never decreases.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ridgeline.records import Slo
from ridgeline.records.kv_transfer import TRANSFER_FALLBACKS
from ridgeline.roofline import Peaks, Work, bound
from ridgeline.serve.engine_protocol import ServedEngine

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
OWN_GAUGES = {
    "num_queued": ("queued_requests", "Requests that have not started."),
    "queue_age_s": ("queue_age_seconds", "Time that the oldest queued request has waited."),
    "predicted_ttft_s": (
        "predicted_ttft_seconds",
        "Predicted time to first token of a request that arrived now.",
    ),
    "num_queued_tokens": ("queued_tokens", "Prompt tokens of requests that have not started."),
    "engine_alive": ("engine_alive", "1 while the engine thread runs, else 0."),
    "engine_stalled_s": (
        "engine_stalled_seconds",
        "Time for which work has waited for the engine thread without a finished step.",
    ),
}
ENGINE_LIMITS = {
    "max_num_seqs": "Slots: sequences that may hold KV blocks at once.",
    "max_num_batched_tokens": "Token budget of a step.",
}
OWN_COUNTERS = {
    "num_steps": ("steps", "Steps that computed tokens."),
    "step_tokens": ("step_tokens", "Tokens computed, prompt and output."),
    "step_busy_s": ("step_busy_seconds", "Time spent planning and running steps."),
    "step_plan_s": ("step_plan_seconds", "The part of it spent planning."),
    "step_waiting_s": ("waiting_seconds", "Step time, times the number of waiting sequences."),
    "step_full_waiting_s": ("waiting_full_seconds", "The part of it with no slot free."),
    "step_spent_waiting_s": (
        "waiting_spent_seconds",
        "The part of it with a slot free, but the token budget used up.",
    ),
    "step_slot_s": ("slot_seconds", "Step time, times the number of slots."),
    "step_wasted_slot_s": (
        "wasted_slot_seconds",
        "The part of it in which a slot was empty while sequences waited.",
    ),
    "step_flops": ("step_flops", "FLOPs of the steps, by the model's spec."),
    "step_bytes": ("step_bytes", "Bytes that the steps had to move, by the model's spec."),
    "speculation_saved_s": (
        "speculation_saved_seconds",
        "Time saved by steps with drafts, compared with plain steps for the same tokens.",
    ),
    "speculation_lost_s": (
        "speculation_lost_seconds",
        "Time that drafts took in excess of what they saved, and of deciding against drafts.",
    ),
    "speculation_drafting_s": ("speculation_seconds", "Time of steps with drafts."),
    "num_failed_steps": ("failed_steps", "Steps that failed and were retried by request."),
    "num_nan_logits": ("nan_logits", "Requests that failed because the model computed NaN."),
    "num_graphs": ("cuda_graphs", "CUDA graphs captured; each serves steps of up to its rows."),
    "num_graph_replays": ("cuda_graph_replays", "Steps computed from CUDA graphs."),
    "graph_capture_s": (
        "cuda_graph_capture_seconds",
        "Time spent capturing CUDA graphs, compiling kernels included.",
    ),
    "kv_tier_declined_tokens": (
        "kv_tier_declined_tokens",
        "Tokens that a tier had, but that were computed because loading would have taken longer.",
    ),
    "kv_tier_waits": ("kv_tier_waits", "Requests that waited for KV blocks to be read."),
    "kv_tier_dropped_blocks": (
        "kv_tier_dropped_blocks",
        "KV blocks that were not stored or loaded because a tier was busy.",
    ),
    "kv_transfer_leases": (
        "kv_transfer_leases",
        "Prompts that were computed for another server.",
    ),
    "kv_transfer_expired_leases": (
        "kv_transfer_expired_leases",
        "Those whose KV blocks were not fetched in time.",
    ),
    "kv_transfer_sent_bytes": (
        "kv_transfer_sent_bytes",
        "Bytes of KV blocks handed to other servers.",
    ),
    "kv_transfer_fetches": (
        "kv_transfer_fetches",
        "Requests whose prompt was fetched from the server that computed it.",
    ),
    "kv_transfer_fetched_bytes": (
        "kv_transfer_fetched_bytes",
        "Bytes of KV blocks fetched from other servers.",
    ),
    "kv_transfer_shared_bytes": (
        "kv_transfer_shared_bytes",
        "Those of them that came through shared memory.",
    ),
    "kv_transfer_fetch_s": (
        "kv_transfer_seconds",
        "Time spent receiving KV blocks, without waiting for them to be computed.",
    ),
    "request_failed": ("requests_failed", "Requests that failed in the engine."),
}
TIER_COUNTERS = {
    "hit_tokens": "Prompt tokens that were loaded from a tier below the KV cache, not computed.",
    "stores": "KV blocks written to a tier.",
    "store_bytes": "Bytes of KV blocks written to a tier.",
    "loads": "KV blocks read from a tier.",
    "load_bytes": "Bytes of KV blocks read from a tier.",
    "errors": "Reads and writes of a tier that failed, damaged files included.",
}
TIER_GAUGES = {
    "bytes": ("bytes", "Size of a tier's content."),
    "bandwidth": ("bandwidth_bytes_per_second", "Measured bandwidth of loads from a tier."),
}
TIERS = ("memory", "disk", "remote", "peer")
REJECTIONS = {
    "refused_requests": "max_num_queued_reqs",
    "refused_tokens": "max_num_queued_tokens",
    "refused_slo": "slo_throttle",
    "refused_account": "key_share",
}


class EngineCollector(Collector):
    """Collects `engine.counters()`. Without `peaks` there is no MFU and no MBU."""

    def __init__(
        self,
        engine: ServedEngine,
        model_name: str,
        peaks: Peaks | None = None,
        slo_classes: Mapping[str, Slo] | None = None,
    ) -> None:
        self._engine, self._model_name, self._peaks = engine, model_name, peaks
        self._slo_classes = slo_classes or {}
        self._highest: dict[str, float] = {}

    def collect(self) -> Iterable[Metric]:
        values = self._engine.counters()
        for name, text in ENGINE_GAUGES.items():
            yield self._gauge(f"vllm:{name}", text, values.get(name, 0.0))
        for name, (ours, text) in OWN_GAUGES.items():
            yield self._gauge(f"ridgeline_{ours}", text, values.get(name, 0.0))
        for name, text in ENGINE_COUNTERS.items():
            yield self._counter(f"vllm:{name}", text, name, values)
        for name, (ours, text) in OWN_COUNTERS.items():
            yield self._counter(f"ridgeline_{ours}", text, name, values)
        yield from self._limits()
        yield self._saturation(values)
        yield self._rejections(values)
        yield self._step_tokens(values)
        yield from self._tiers(values)
        yield self._transfer_fallbacks(values)
        yield from self._utilisation(values)
        yield self._accepted_by_position(values)
        yield self._cache_config()

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(name, text, labels=["model_name"])
        gauge.add_metric([self._model_name], float(value))
        return gauge

    def _counter(self, name: str, text: str, key: str, values: Mapping[str, float]) -> Metric:
        counter = CounterMetricFamily(name, text, labels=["model_name"])
        counter.add_metric([self._model_name], self._monotonic(key, values))
        return counter

    def _monotonic(self, key: str, values: Mapping[str, float]) -> float:
        highest = max(self._highest.get(key, 0.0), float(values.get(key, 0.0)))
        self._highest[key] = highest
        return highest

    def _limits(self) -> Iterable[Metric]:
        for name, text in ENGINE_LIMITS.items():
            value = self._engine.info.settings.get(name)
            if isinstance(value, int):
                yield self._gauge(f"ridgeline_{name}", text, value)

    def _saturation(self, values: Mapping[str, float]) -> Metric:
        text = "Predicted TTFT of a request that arrived now, relative to its class's SLO."
        gauge = GaugeMetricFamily(
            "ridgeline_saturation_ratio", text, labels=["model_name", "slo_class"]
        )
        for name, slo in self._slo_classes.items():
            if slo.ttft_s is not None:
                ratio = values.get("predicted_ttft_s", 0.0) / slo.ttft_s
                gauge.add_metric([self._model_name, name], ratio)
        return gauge

    def _rejections(self, values: Mapping[str, float]) -> Metric:
        text = "Requests refused by the queue limits or the SLO throttle."
        counter = CounterMetricFamily(
            "vllm:admission_rejections", text, labels=["model_name", "reason"]
        )
        for key, reason in REJECTIONS.items():
            counter.add_metric([self._model_name, reason], self._monotonic(key, values))
        return counter

    def _tiers(self, values: Mapping[str, float]) -> Iterable[Metric]:
        """What each tier of the KV cache holds and did; zeros where it does not exist."""
        labels = ["model_name", "tier"]
        for name, text in TIER_COUNTERS.items():
            counter = CounterMetricFamily(f"ridgeline_kv_tier_{name}", text, labels=labels)
            for tier in TIERS:
                value = self._monotonic(f"kv_tier_{name}/{tier}", values)
                counter.add_metric([self._model_name, tier], value)
            yield counter
        for name, (ours, text) in TIER_GAUGES.items():
            gauge = GaugeMetricFamily(f"ridgeline_kv_tier_{ours}", text, labels=labels)
            for tier in TIERS:
                value = values.get(f"kv_tier_{name}/{tier}", 0.0)
                gauge.add_metric([self._model_name, tier], value)
            yield gauge

    def _transfer_fallbacks(self, values: Mapping[str, float]) -> Metric:
        text = "Requests that computed a prompt which another server was to hand over, by reason."
        counter = CounterMetricFamily(
            "ridgeline_kv_transfer_fallbacks", text, labels=["model_name", "reason"]
        )
        for reason in TRANSFER_FALLBACKS:
            value = self._monotonic(f"kv_transfer_fallbacks/{reason}", values)
            counter.add_metric([self._model_name, reason], value)
        return counter

    def _step_tokens(self, values: Mapping[str, float]) -> Metric:
        """vLLM's iteration_tokens_total, from the engine's own buckets."""
        prefix = "step_tokens_le_"
        names = [key.removeprefix(prefix) for key in values if key.startswith(prefix)]
        buckets = [
            ("+Inf" if name == "inf" else f"{name}.0", self._monotonic(prefix + name, values))
            for name in names or ["inf"]
        ]
        text = "Tokens computed per step."
        family = HistogramMetricFamily("vllm:iteration_tokens_total", text, labels=["model_name"])
        family.add_metric([self._model_name], buckets, self._monotonic("step_tokens", values))
        return family

    def _utilisation(self, values: Mapping[str, float]) -> Iterable[Metric]:
        slots, busy_s = values.get("recent_slots", 0.0), values.get("recent_busy_s", 0.0)
        fill = values.get("recent_seqs", 0.0) / slots if slots else 0.0
        yield self._gauge("ridgeline_batch_fill_ratio", "Running sequences per slot, 0 to 1.", fill)
        if self._peaks is None:
            return
        work = Work(values.get("recent_flops", 0.0), values.get("recent_bytes", 0.0))
        least = bound(work, self._peaks)
        for name, ratio in (("mfu", least.mfu(busy_s)), ("mbu", least.mbu(busy_s))):
            text = f"{name.upper()} of busy time, relative to the measured peak of this machine."
            yield self._gauge(f"ridgeline_{name}_ratio", text, ratio)

    def _accepted_by_position(self, values: Mapping[str, float]) -> CounterMetricFamily:
        """One sample per draft position with an accepted token."""
        text = "Accepted draft tokens, by position in the draft."
        labels = ["model_name", "position"]
        family = CounterMetricFamily(f"vllm:{PER_POSITION}", text, labels=labels)
        for name, value in values.items():
            base, _, position = name.partition("/")
            if base == PER_POSITION:
                family.add_metric([self._model_name, position], float(value))
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
