"""Checks the settings of adapters, and derives their memory and the layers that they need."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ridgeline.config.settings import Settings
from ridgeline.engine.adapters.products import largest_bytes
from ridgeline.engine.adapters.stacked import AdapterStack
from ridgeline.engine.execution.layers import layer_backend_of
from ridgeline.engine.parallel.resolve import parallel_sizes
from ridgeline.engine.scheduler.kv.kv_budget import size
from ridgeline.errors import BadInput, CannotRun
from ridgeline.modelspec.model import ModelSpec


def parse_lora_modules(entries: Sequence[str]) -> dict[str, str]:
    """Directories by name, of entries `NAME=PATH`. Raises BadInput."""
    modules: dict[str, str] = {}
    for entry in entries:
        name, equals, path = entry.partition("=")
        if not (name and equals and path) or name in modules:
            fix = "write --lora-modules NAME=PATH, each name once"
            raise BadInput("--lora-modules cannot be read", value=entry, fix=fix)
        modules[name] = path
    return modules


def adapter_memory(
    settings: Settings,
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    why: dict[str, str],
) -> int:
    """Memory reserved for adapters. Raises BadInput, CannotRun."""
    named = parse_lora_modules(settings.lora_modules)
    if not settings.enable_lora:
        if named:
            raise BadInput("--lora-modules needs --enable-lora", fix="add --enable-lora")
        return 0
    if len(named) > settings.max_loras:
        raise BadInput(
            "--lora-modules names more adapters than --max-loras allows",
            value=len(named),
            limit=settings.max_loras,
            fix=f"use --max-loras {len(named)}",
        )
    speculative = settings.speculative_config
    if speculative is not None and speculative.method == "self":
        raise CannotRun(
            "speculation by self drafts with the layers of the model, to which adapters are added"
            " only in the step itself",
            value=speculative.method,
            fix="use another method with --enable-lora, such as ngram",
        )
    if parallel_sizes(settings).num_ranks > 1:
        raise CannotRun(
            "adapters are added in one process only",
            value=str(parallel_sizes(settings)),
            fix="leave out --enable-lora, or use one process",
        )
    total = settings.max_loras * largest_bytes(spec, settings.max_lora_rank, device, dtype)
    if device.type == "cuda":  # the stack that CUDA graphs read, padded to the largest rank
        sizes = settings.max_loras, settings.max_lora_rank, torch.device("meta"), dtype
        total += AdapterStack(spec, *sizes).nbytes
    why["max_loras"] = (
        f"{size(total)} reserved: {settings.max_loras} adapters of rank {settings.max_lora_rank}"
        " on every linear"
    )
    return total


def adapted_layers(
    asked: str, spec: ModelSpec, device: torch.device, dtype: torch.dtype
) -> tuple[str, str]:
    """The layer backend with adapters, and why."""
    reasons = layer_backend_of("adapted").why_not(spec, device, dtype)
    name = "torch" if reasons else "adapted"
    if asked not in ("auto", name):
        raise CannotRun(
            f"layer backend {asked!r} has no place for adapters between its products",
            value=asked,
            fix=f"use --layer-backend {name}, or leave out --enable-lora",
        )
    fused = "not native or triton: they fuse products with what follows, adapters need each alone"
    return name, "; ".join([fused, *reasons])
