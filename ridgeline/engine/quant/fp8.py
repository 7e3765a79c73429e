"""FP8 linears (W8A8, E4M3): 8-bit floats with a scale per output row and per input row.

What. A weight is stored as float8_e4m3 times a float32 scale per output, set so that the row's
largest value becomes 448, the largest that the format has. Rows of activations are rounded the same
way at run time. A step reads half of BF16's bytes, and cards with FP8 tensor cores (compute
capability 8.9 and up) multiply at twice BF16's rate.

Paper. Micikevicius et al., "FP8 formats for deep learning" (2022, arXiv 2209.05433).

Invariant. Row t of the result depends on row t of the input alone. The rounded numbers are the same
on every device: the result differs between devices by the rounding of float32 sums.

When it loses. E4M3 has 3 bits of mantissa: rows without outliers lose more than in INT8. On a CPU
this is the reference of the GPU's arithmetic, computed in float32 after widening, and slow.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.engine.quant.scaled import ScaledLinear
from ridgeline.modelspec.model import LinearSpec


class Fp8Linear:
    """Builds `ScaledLinear`s of E4M3."""

    @staticmethod
    def build(
        spec: LinearSpec,
        weight_ON: Tensor,
        bias_O: Tensor | None,
        device: torch.device,
        compute_dtype: torch.dtype,
    ) -> ScaledLinear:
        return ScaledLinear(weight_ON.to(device), bias_O, compute_dtype, "fp8")

    @staticmethod
    def describe(spec: LinearSpec, device: torch.device) -> str:
        """How this linear will be computed on this machine."""
        if device.type == "cpu":
            return "E4M3 weights and activations, widened to float32: slow on a CPU"
        if torch.cuda.get_device_capability(device) < (8, 9):
            return "E4M3 weights and activations, widened: this card has no FP8 tensor cores"
        return "E4M3 weights and activations on FP8 tensor cores"
