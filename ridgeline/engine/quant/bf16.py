"""Weights stored as bfloat16, computed in float32: half of float32's bytes at no cost.

A bfloat16 is the upper half of a float32, so widening is a shift in a register. A checkpoint stored
in bfloat16 loses nothing: products and sums are float32 (fused multiply-adds, inputs in ascending
order).

Invariant: a row's result is bitwise the same in any batch, on any number of threads and every ISA;
torch's fp32 product guarantees none of these.

When it loses: float32 checkpoints, whose weights it would round (refused). Many rows: arithmetic is
float32 and the saved bytes no longer matter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.engine.kernels.native_linear import Packed, pack_lines
from ridgeline.engine.quant.packed import PackedLinear, needs_cpu
from ridgeline.errors import CannotRun
from ridgeline.modelspec.model import LinearSpec

_ROWS = 1024  # compared at once: a large head must not be in memory twice more


class Bf16Linear:
    """Builds `PackedLinear`s of bfloat16 weights."""

    @staticmethod
    def build(
        spec: LinearSpec,
        weight_ON: Tensor,
        bias_O: Tensor | None,
        device: torch.device,
        compute_dtype: torch.dtype,
    ) -> PackedLinear:
        needs_cpu(spec, device)
        weight_OI = weight_ON.to(torch.bfloat16)
        pieces = zip(torch.split(weight_OI, _ROWS), torch.split(weight_ON, _ROWS), strict=True)
        if not all(torch.equal(kept.to(given.dtype), given) for kept, given in pieces):
            raise CannotRun(
                "bf16 weights would round this checkpoint's",
                value=str(weight_ON.dtype),
                fix="leave out --quantization bf16: the checkpoint is not stored as bfloat16",
            )
        num_out, num_in = weight_OI.shape
        packed = Packed("bf16", num_out, num_in, 0, pack_lines("bf16", weight_OI, 0))
        return PackedLinear(packed, bias_O, compute_dtype)

    @staticmethod
    def describe(spec: LinearSpec, device: torch.device) -> str:
        """How this linear will be computed on this machine. Raises CannotRun."""
        needs_cpu(spec, device)
        return "native: bfloat16 weights, float32 arithmetic"
