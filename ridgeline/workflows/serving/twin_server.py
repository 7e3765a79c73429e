"""Serve a twin: the server over a modelled device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ridgeline.config.server import ServerOptions, TwinOptions
from ridgeline.config.settings import Settings
from ridgeline.errors import BadInput
from ridgeline.roofline import Peaks
from ridgeline.twin.config import TwinConfig, parse_devices

if TYPE_CHECKING:
    from fastapi import FastAPI

    from ridgeline.serve.metrics.registry import Metrics
    from ridgeline.twin.build import TwinModel
    from ridgeline.twin.replicated_engine import ReplicatedEngine

NOT_MODELLED = {
    "lm_head_quantization": "its LM head is in the weights' format",
    "kv_cache_memory_bytes": "its cache is what the device's memory leaves",
    "kv_tier_dir": "only --kv-tier-memory is modelled; simulate --kv-tier-size models files",
    "kv_tier_size": "only --kv-tier-memory is modelled; simulate --kv-tier-size models files",
    "kv_tier_url": "only --kv-tier-memory is modelled",
    "slo_throttle": "simulate --slo-throttle models it",
    "tensor_parallel_size": "--device NAME:COUNT says how many devices share the weights",
    "pipeline_parallel_size": "simulate --pipeline-parallel-size models it",
    "expert_parallel_size": "simulate --expert-parallel-size models it",
    "enable_lora": "simulate --max-loras models adapters",
    "nnodes": "a twin is one process",
}
"""Settings that change the figures of a server and not those of its twin, with the reasons."""
DRAFTS = 4  # of speculation without num_speculative_tokens


def twin_config(settings: Settings, options: TwinOptions) -> TwinConfig:
    """The twin that engine settings describe; several devices share the weights (tp), or with
    --context-parallel-size the KV cache.

    Raises BadInput.
    """
    if settings.device == "auto":
        raise BadInput(
            "--twin needs the device to imitate",
            fix="add --device NAME[:COUNT], for example --device h100-sxm",
        )
    if settings.disaggregation_mode != "none":
        raise BadInput(
            "--twin has no KV blocks to hand over",
            value=f"--disaggregation-mode {settings.disaggregation_mode}",
            fix="leave one of them out; simulate --decode-replicas models such a fleet",
        )
    _refuse_unmodelled(settings)
    device, count = parse_devices(settings.device)
    context = settings.context_parallel_size
    if count % context:
        raise BadInput(
            "a twin with a divided KV cache has a multiple of its parts as devices",
            value=f"--context-parallel-size {context}",
            limit=f"a divisor of {count} (--device {settings.device})",
            fix=f"use --device {device}:{context}",
        )
    drafts = settings.speculative_config
    return TwinConfig(
        model=settings.model,
        device=device,
        tp=count // context,
        cp=context,
        sp=settings.sequence_parallel,
        weight_dtype=settings.quantization,
        kv_dtype=None if settings.kv_cache_dtype == "auto" else settings.kv_cache_dtype,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=settings.max_model_len,
        block_size=settings.block_size or 16,
        batching=settings.batching,
        batch_wait_ms=_modelled(settings.batch_wait_ms, 1 / options.speed),
        enable_prefix_caching=settings.enable_prefix_caching,
        prefix_cache_ttl_s=_modelled(settings.prefix_cache_ttl_s, 1 / options.speed),
        prefix_pin_share=settings.prefix_pin_share,
        background_tokens=settings.background_tokens,
        kv_eviction=settings.kv_eviction_config,
        offload_bytes=settings.kv_tier_memory or 0,
        enable_chunked_prefill=settings.enable_chunked_prefill,
        max_num_queued_reqs=settings.max_num_queued_reqs,
        max_num_queued_tokens=settings.max_num_queued_tokens,
        num_speculative_tokens=0 if drafts is None else drafts.num_speculative_tokens or DRAFTS,
        acceptance=options.acceptance,
        speed=options.speed,
        seed=settings.seed,
    )


def _refuse_unmodelled(settings: Settings) -> None:
    """Raise BadInput for settings that would change nothing on a twin."""
    defaults = Settings(model=settings.model)
    for name, reason in NOT_MODELLED.items():
        if getattr(settings, name) != getattr(defaults, name):
            raise BadInput(
                f"--{name.replace('_', '-')} has no effect on a twin: {reason}",
                value=getattr(settings, name),
            )
    if settings.kv_eviction_config is not None and settings.kv_eviction_config.needs_scores:
        raise BadInput(
            "a twin has no attention weights to evict by",
            value=f"--kv-eviction-config, method {settings.kv_eviction_config.method}",
            fix="use the method streaming",
        )


def _modelled(value: float | None, scale: float) -> float | None:
    """A time of the imitated server on the twin's clock; None stays None."""
    return None if value is None else value * scale


def create_twin_app(
    config: TwinConfig,
    options: ServerOptions,
    *,
    model: TwinModel | None = None,
    pages_of: Callable[[Metrics], Mapping[str, Callable[[], bytes]]] | None = None,
    hidden: Sequence[str] = (),
) -> tuple[FastAPI, ReplicatedEngine]:
    """The app over a twin, which says in headers and metrics that it is one.

    `model`: the configuration's plan, if it is already known. `pages_of` returns pages (path →
    body) that take the place of Ridgeline's own; `hidden` are paths that the server does not
    have. Raises UserError if the model cannot run on the
    device or does not fit.
    """
    from ridgeline.serve.app import create_app
    from ridgeline.twin.build import open_engine, plan_twin
    from ridgeline.twin.marks import TwinHeader, register
    from ridgeline.twin.replicated_engine import ReplicatedEngine
    from ridgeline.twin.servers.pages import ServerPages

    model = model or plan_twin(config)
    engine = ReplicatedEngine([open_engine(config, model) for _ in range(config.dp)])
    app = create_app(engine, options, peaks=_peaks(config, model))
    metrics = app.state.service.metrics
    register(metrics.registry, config.description, engine.late_s)
    if pages_of is not None:
        app.add_middleware(ServerPages, pages=pages_of(metrics), hidden=hidden)
    app.add_middleware(TwinHeader, description=config.description)  # the outermost
    return app, engine


def _peaks(config: TwinConfig, model: TwinModel) -> Peaks:
    """Peaks of all devices of a replica, in real time: modelled steps are `speed` times as fast."""
    peaks, scale = model.replica.peaks, model.replica.layout.num_devices * config.speed
    return peaks.scaled(scale, "catalogue")
