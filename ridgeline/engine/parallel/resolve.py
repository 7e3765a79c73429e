"""Checks the layout over processes that settings ask for."""

from __future__ import annotations

import torch

from ridgeline.config.settings import PlainSettings
from ridgeline.errors import CannotRun
from ridgeline.modelspec.model import ModelSpec
from ridgeline.modelspec.shard import ParallelSizes, check_sizes


def parallel_sizes(settings: PlainSettings) -> ParallelSizes:
    """The degrees of parallelism that the settings name."""
    return ParallelSizes(
        tensor=settings.tensor_parallel_size,
        pipeline=settings.pipeline_parallel_size,
        expert=settings.expert_parallel_size,
    )


def check_parallelism(
    settings: PlainSettings, spec: ModelSpec, device: torch.device, why: dict[str, str]
) -> None:
    """Check the layout, and state it in `why`. Raises CannotRun."""
    sizes = parallel_sizes(settings)
    if sizes.num_ranks == 1:
        return
    if device.type != "cpu":
        raise CannotRun(
            "several processes compute one model on the CPU only",
            value=f"{sizes} on {device}",
            fix="use --device cpu, or one process",
        )
    check_sizes(spec, sizes)
    for name in ("tensor", "pipeline", "expert"):
        if getattr(sizes, name) > 1:
            why[f"{name}_parallel_size"] = f"as requested: {sizes.num_ranks} processes"
