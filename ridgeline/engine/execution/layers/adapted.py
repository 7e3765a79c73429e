"""Layers whose single products adapters can add to, on the CPU in float32.

What. The chain of operators of `torch_ops`, over weights in the order of the native kernels: every
product is bitwise the same in any batch, as in the native layers, and each is a separate call,
between which adapters add their low-rank products. Native segments compute a product together with
what follows it, so there is no place for them.

When it loses. Where no request uses an adapter, the native layers are faster: they run without
returning to Python between operators.
"""

from __future__ import annotations

import torch

from ridgeline.engine.execution.layers.torch_ops import TorchForward
from ridgeline.modelspec.format import FP32, Format
from ridgeline.modelspec.layer_inputs import why_torch_only
from ridgeline.modelspec.model import ModelSpec


class AdaptedForward(TorchForward):
    """Torch operators around native products."""

    @staticmethod
    def why_not(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
        if why := why_torch_only(spec):
            return (f"adapters are not added where {why}",)
        if device.type != "cpu" or dtype != torch.float32:
            return (f"computes in float32 on the CPU only, not in {dtype} on {device.type}",)
        return ()

    @staticmethod
    def storage_format(format: Format) -> Format:
        """Dense weights are stored in the order of the kernels."""
        return FP32 if format.kind == "dense" else format
