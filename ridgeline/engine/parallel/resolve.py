"""Checks the layout over processes that settings ask for."""

from __future__ import annotations

import torch

from ridgeline.config.settings import PlainSettings, Settings
from ridgeline.engine.execution.layers import choose
from ridgeline.errors import CannotRun
from ridgeline.modelspec.model import ModelSpec
from ridgeline.modelspec.shard import ParallelSizes, check_sizes
from ridgeline.records import KvEviction


def parallel_sizes(settings: PlainSettings) -> ParallelSizes:
    """The degrees of parallelism that the settings name."""
    return ParallelSizes(
        tensor=settings.tensor_parallel_size,
        pipeline=settings.pipeline_parallel_size,
        expert=settings.expert_parallel_size,
    )


def check_parallelism(
    settings: Settings, spec: ModelSpec, device: torch.device, why: dict[str, str]
) -> None:
    """Check the layout, and state it in `why`. Raises CannotRun."""
    sizes = parallel_sizes(settings)
    if settings.context_parallel_size > 1:
        raise CannotRun(
            "the positions of a prompt are not divided over processes",
            value=f"--context-parallel-size {settings.context_parallel_size}",
            limit="1",
            fix="use --tensor-parallel-size, which divides the heads and their cache",
        )
    if sizes.num_ranks == 1:
        return
    if device.type != "cpu":
        raise CannotRun(
            "several processes compute one model on the CPU only",
            value=f"{sizes} on {device}",
            fix="use --device cpu, or one process",
        )
    if settings.enable_lora:
        raise CannotRun(
            "--enable-lora works with one process, which holds whole layers",
            value=str(sizes),
            fix="leave one of them out",
        )
    check_eviction(settings.kv_eviction_config, sizes)
    check_sizes(spec, sizes)
    for name in ("tensor", "pipeline", "expert"):
        if getattr(sizes, name) > 1:
            why[f"{name}_parallel_size"] = f"as requested: {sizes.num_ranks} processes"


def check_eviction(policy: KvEviction | None, sizes: ParallelSizes) -> None:
    """Raise CannotRun if `policy` evicts keys and values that several ranks hold."""
    if sizes.num_ranks > 1 and policy is not None and policy.evicts:
        raise CannotRun(
            "KV eviction works with one process, which holds the whole KV cache",
            value=f"{policy.method} on {sizes}",
            fix="leave KV eviction out, or use one process",
        )


def choose_rank_layers(
    requested: str, spec: ModelSpec, sizes: ParallelSizes, dtype: torch.dtype
) -> tuple[str, tuple[str, ...]]:
    """The layer backend of every rank, and the reasons. Raises CannotRun."""
    if requested not in ("auto", "native", "torch"):
        raise CannotRun(
            "ranks run the layers as native segments or torch operators",
            value=f"--layer-backend {requested}",
            fix="use --layer-backend auto",
        )
    why_not = why_not_native(spec, sizes)
    if requested == "native" and why_not:
        raise CannotRun(
            f"ranks cannot run native layers here: {'; '.join(why_not)}",
            value=str(sizes),
            fix="use --layer-backend auto",
        )
    if requested == "auto" and why_not:
        return "torch", (f"not native: {'; '.join(why_not)}", "torch: runs on every rank")
    return choose(requested, spec, torch.device("cpu"), dtype)


def why_not_native(spec: ModelSpec, sizes: ParallelSizes) -> tuple[str, ...]:
    """Reasons why ranks cannot run native segments, beyond those of one process."""
    reasons = []
    if any(layer.mlp.num_experts for layer in spec.layers):
        reasons.append("experts are exchanged within a layer")
    summed = [linear for layer in spec.layers for linear in (layer.attention.o, layer.mlp.down)]
    if sizes.tensor > 1 and any(linear.format.kind == "int8" for linear in summed):
        reasons.append("int8 rows are rounded with a scale that the ranks agree on")
    return tuple(reasons)
