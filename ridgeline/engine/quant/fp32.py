"""Weights stored as float32 in the kernels' panels: a dense linear inside native layers.

The same numbers in another order, so that one row streams them and a tile of rows multiplies them
without a copy. Products and sums are float32 (fused multiply-adds, inputs in ascending order),
equal bit for bit to bf16 weights of the same values.

Invariant: a row's result is bitwise the same in any batch, on any number of threads and every ISA;
torch's fp32 product guarantees none of these.

When it loses: checkpoints stored in bfloat16, of which `bf16` reads half the bytes. The weights
must be read once at load to be reordered.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.engine.kernels.native_linear import Packed, pack_lines
from ridgeline.engine.quant.packed import PackedLinear, needs_cpu
from ridgeline.modelspec.model import LinearSpec


class Fp32Linear:
    """Builds `PackedLinear`s of float32 weights."""

    @staticmethod
    def build(
        spec: LinearSpec,
        weight_ON: Tensor,
        bias_O: Tensor | None,
        device: torch.device,
        compute_dtype: torch.dtype,
    ) -> PackedLinear:
        needs_cpu(spec, device)
        num_out, num_in = weight_ON.shape
        lines = pack_lines("fp32", weight_ON.to(torch.float32), 0)
        return PackedLinear(Packed("fp32", num_out, num_in, 0, lines), bias_O, compute_dtype)

    @staticmethod
    def describe(spec: LinearSpec, device: torch.device) -> str:
        """How this linear will be computed on this machine. Raises CannotRun."""
        needs_cpu(spec, device)
        return "native: float32 weights and arithmetic"
