"""NVFP4 linears (W4A16): 4-bit floats (E2M1) with scales of two levels, for GPUs.

    w[o, i] = e2m1[o, i] · (e4m3[o, i // 16] · global)

What. A code has a sign and the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6. Each 16 inputs of an output
share a scale in E4M3, and the tensor has one in float32, set so that the largest scale becomes 448,
the largest number of E4M3. That is 4.5 bits per weight. Rows of activations keep the compute dtype:
a product of few rows streams the packed weights through Ridgeline's Triton kernel, which widens
them in registers; for many rows they are widened once, for the device's own product.

`torch._scaled_mm` multiplies NVFP4 by NVFP4 on cards of compute capability 10 and up. It is not
taken: it would round the activations to 4 bits as well.

Source. NVIDIA, "Introducing NVFP4" (2025); the choice between a largest code of 6 and of 4 for each
group is "Four Over Six" (Cook et al. 2025, arXiv 2512.02010).

Invariant. Weights that are NVFP4 already, with one global scale, are found again exactly, wherever
a group's largest code is 6 or 4. Activations are not rounded.

When it loses. E2M1 has one bit of mantissa: see the cost in quality before choosing it. Widening
takes more instructions than INT4's. On a CPU this is the reference, and slow.

Shape legend: T rows, I inputs, O outputs, G groups of 16 inputs, J bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.engine.kernels.triton import load, why_not
from ridgeline.engine.quant.int4.quantise import in_groups
from ridgeline.engine.quant.int4.unpacked import STREAMED_ROWS, pack_halves, unpack_halves
from ridgeline.modelspec.model import LinearSpec

GROUP = 16
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGEST_SCALE = 448.0
_TO_LOWER, _TO_UPPER = (0.25, 1.25, 2.5, 5.0), (0.75, 1.75, 3.5)
"""Midpoints of magnitudes that round down and up: to the even code."""


class Nvfp4Weights(NamedTuple):
    """code_OI (uint8: bit 3 is the sign), scale_OG (float8_e4m3fn), global_1 (float32)."""

    code_OI: Tensor
    scale_OG: Tensor
    global_1: Tensor

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weights [O, I], exact up to one rounding each."""
        scale_OG = self.scale_OG.float()
        scale_OI = scale_OG.repeat_interleave(GROUP, 1)[:, : self.code_OI.shape[1]]
        return (values_of(self.code_OI) * (scale_OI * self.global_1)).to(dtype)


def values_of(code: Tensor) -> Tensor:
    """The numbers of E2M1 codes, float32."""
    table = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], device=code.device)
    return table[code.long()]


def codes_of(x: Tensor) -> Tensor:
    """The codes of the nearest E2M1 numbers, ties to even; larger magnitudes become 6."""
    size = x.abs()
    code = torch.zeros_like(size, dtype=torch.uint8)
    for middle in _TO_LOWER:
        code += size > middle
    for middle in _TO_UPPER:
        code += size >= middle
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def quantise(weight_OI: Tensor) -> Nvfp4Weights:
    """Round to nearest; each group's largest code is 6 or 4, whichever has the smaller error."""
    num_in = weight_OI.shape[1]
    weight_OGJ = in_groups(weight_OI.float(), GROUP)
    overall = weight_OGJ.abs().amax() / (MAGNITUDES[-1] * LARGEST_SCALE)
    overall = torch.where(overall > 0, overall, 1.0)
    scaled_OGJ = weight_OGJ / overall
    top_OG = scaled_OGJ.abs().amax(2)
    best_OG = torch.full_like(top_OG, torch.inf)
    code_OGJ = torch.zeros_like(scaled_OGJ, dtype=torch.uint8)
    scale_OG = torch.zeros_like(top_OG)
    for largest in (6.0, 4.0):
        some_OG = (top_OG / largest).clamp(max=LARGEST_SCALE).to(torch.float8_e4m3fn).float()
        inverse_OG = torch.where(some_OG > 0, 1 / some_OG, 0.0)
        some_OGJ = codes_of(scaled_OGJ * inverse_OG.unsqueeze(2))
        wide_OGJ = values_of(some_OGJ) * some_OG.unsqueeze(2)
        error_OG = (wide_OGJ - scaled_OGJ).square().sum(2)
        better_OG = error_OG < best_OG
        best_OG = torch.where(better_OG, error_OG, best_OG)
        scale_OG = torch.where(better_OG, some_OG, scale_OG)
        code_OGJ = torch.where(better_OG.unsqueeze(2), some_OGJ, code_OGJ)
    code_OI = code_OGJ.flatten(1)[:, :num_in].contiguous()
    return Nvfp4Weights(code_OI, scale_OG.to(torch.float8_e4m3fn), overall.reshape(1))


class Nvfp4Linear:
    """y_TO = W x_TI (+ bias_O) of NVFP4 weights on any device."""

    __slots__ = ("bias_O", "dtype", "global_1", "num_in", "packed_OJ", "scale_OG")

    def __init__(self, weights: Nvfp4Weights, bias_O: Tensor | None, dtype: torch.dtype) -> None:
        self.num_in, self.dtype, self.bias_O = weights.code_OI.shape[1], dtype, bias_O
        self.packed_OJ = pack_halves(weights.code_OI)
        self.scale_OG, self.global_1 = weights.scale_OG.contiguous(), weights.global_1

    @staticmethod
    def build(
        spec: LinearSpec,
        weight_ON: Tensor,
        bias_O: Tensor | None,
        device: torch.device,
        compute_dtype: torch.dtype,
    ) -> Nvfp4Linear:
        bias = None if bias_O is None else bias_O.to(device=device, dtype=compute_dtype)
        return Nvfp4Linear(quantise(weight_ON.to(device)), bias, compute_dtype)

    @staticmethod
    def describe(spec: LinearSpec, device: torch.device) -> str:
        """How this linear will be computed on this machine, and why."""
        weights = (
            "NVFP4 weights (an E4M3 scale per 16, a float32 one per tensor), float activations"
        )
        if device.type != "cuda" or why_not(device):
            return f"{weights}, widened for each product: slow without a GPU and Triton"
        rows = f"read packed by up to {STREAMED_ROWS} rows, widened for more"
        if torch.cuda.get_device_capability(device) < (10, 0):
            return f"{weights}, {rows}; torch._scaled_mm needs compute capability 10.0"
        return f"{weights}, {rows}; torch._scaled_mm would round the activations to 4 bits"

    def widen(self) -> Tensor:
        """The weights in the compute dtype, [O, I]."""
        code_OI = unpack_halves(self.packed_OJ)[:, : self.num_in]
        return Nvfp4Weights(code_OI, self.scale_OG, self.global_1).dense(self.dtype)

    @staticmethod
    def streams(num_rows: int, device: torch.device) -> bool:
        """Whether a product of this many rows reads the packed weights, instead of widened ones."""
        return device.type == "cuda" and 0 < num_rows <= STREAMED_ROWS and not why_not(device)

    def __call__(self, x_TI: Tensor) -> Tensor:
        if self.streams(len(x_TI), x_TI.device):
            kernel = load("linear").w4a16_nvfp4
            streamed_TO: Tensor = kernel(
                x_TI, self.packed_OJ, self.scale_OG, self.global_1, self.bias_O
            )
            return streamed_TO
        return F.linear(x_TI, self.widen(), self.bias_O)

    @property
    def nbytes(self) -> int:
        kept = (self.packed_OJ, self.scale_OG, self.global_1, self.bias_O)
        return sum(tensor.nbytes for tensor in kept if tensor is not None)
