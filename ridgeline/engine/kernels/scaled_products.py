"""Products of 8-bit rows and 8-bit weights with a scale each: INT8 and FP8 on a GPU.

    y[t, o] = (Σ_i p[t, i] · q[o, i]) · scale_T[t] · scale_O[o] + bias[o]

Rows are rounded to the weights' kind first, one scale per row. With few rows a product is bound by
reading the weights, and Ridgeline's Triton kernel streams them; with many it is bound by
arithmetic, and goes to `torch._int_mm` (cuBLASLt) or `torch._scaled_mm` (cuBLASLt, or CUTLASS with
scales per row). The sums of INT8 are exact in every one of them, those of FP8 are float32.

`torch._scaled_mm` and our kernels need compute capability 8.9 or more for FP8; elsewhere it is
multiplied as the numbers that it stands for, in float32.

Shape legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import functools
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.engine.kernels.triton import load, why_no_fp8, why_not

Kind = Literal["int8", "fp8"]
LARGEST: dict[Kind, float] = {"int8": 127.0, "fp8": 448.0}
STORED: dict[Kind, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
FEW_ROWS: dict[Kind, int] = {"int8": 64, "fp8": 64}
"""Up to this many rows, the kernel that streams the weights is used."""
ONE_SCALE_ROWS = 128
"""Up to this many rows, cuBLASLt's FP8 product without scales, and a pass that multiplies them,
take less time than CUTLASS's product with scales per row (H200, 128 rows, a [4096, 14336] weight:
23.0 us without that pass, 38.7 us)."""
_TINY = 1e-30  # the scale of a row of zeros
_INT_MM_MIN_ROWS = 32
_MULTIPLE = 16


def quantise_rows(x_TI: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """Rows as 8-bit numbers p_TI and their float32 scale_T1, with x ≈ p · scale."""
    if _has_triton(x_TI, kind):
        p_TI, scale_T1 = load("norm").quantise_rows(x_TI, kind)
        return p_TI, scale_T1
    x_TI = x_TI.float()
    scale_T1 = x_TI.abs().amax(-1, keepdim=True).clamp_(min=_TINY).div_(LARGEST[kind])
    p_TI = x_TI / scale_T1
    return (p_TI.round_() if kind == "int8" else p_TI).to(STORED[kind]), scale_T1


def quantise_weight(weight_OI: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """8-bit q_OI and float32 scale_O of a weight."""
    q_OI, scale_O1 = quantise_rows(weight_OI, kind)
    return q_OI.contiguous(), scale_O1.squeeze(1)


def multiply(
    p_TI: Tensor,
    scale_T1: Tensor,
    q_OI: Tensor,
    scale_O: Tensor,
    bias_O: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """y_TO in `dtype` of rows and weights of one kind."""
    kind: Kind = "int8" if q_OI.dtype == torch.int8 else "fp8"
    if len(p_TI) <= FEW_ROWS[kind] and _has_triton(q_OI, kind):
        kernel = load("linear").w8a8
        streamed_TO: Tensor = kernel(p_TI, scale_T1, q_OI, scale_O, bias_O, out_dtype=dtype)
        return streamed_TO
    if kind == "int8":
        sums_TO = _sums_int8(p_TI, q_OI)
    elif not _has_scaled_mm(q_OI, dtype):
        sums_TO = F.linear(p_TI.float(), q_OI.float())
    elif len(p_TI) > ONE_SCALE_ROWS or not _has_triton(q_OI, kind):
        y_TO = torch._scaled_mm(
            p_TI, q_OI.t(), scale_a=scale_T1, scale_b=scale_O.unsqueeze(0), out_dtype=dtype
        )
        return y_TO if bias_O is None else y_TO.add_(bias_O)
    else:
        one = _one(q_OI.device)
        sums_TO = torch._scaled_mm(
            p_TI, q_OI.t(), scale_a=one, scale_b=one, out_dtype=torch.float32
        )
    if _has_triton(q_OI, kind):
        scaled_TO: Tensor = load("norm").scaled_rows(sums_TO, scale_T1, scale_O, bias_O, dtype)
        return scaled_TO
    y_TO = sums_TO * scale_O * scale_T1
    return (y_TO if bias_O is None else y_TO.add_(bias_O)).to(dtype)


@functools.cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), dtype=torch.float32, device=device)


def lacks_instructions(device: torch.device, kind: Kind) -> bool:
    """Whether a device is a GPU whose instructions do not convert numbers of a kind."""
    return device.type == "cuda" and kind == "fp8" and bool(why_no_fp8(device))


def _has_triton(like: Tensor, kind: Kind) -> bool:
    """Whether our kernels run where a tensor is, on numbers of a kind."""
    return like.is_cuda and not why_not(like.device) and not lacks_instructions(like.device, kind)


def _sums_int8(p_TI: Tensor, q_OI: Tensor) -> Tensor:
    if not q_OI.is_cuda:  # scalar on most CPUs; float64 holds every sum exactly
        return F.linear(p_TI.double(), q_OI.double()).float()
    missing = _INT_MM_MIN_ROWS - len(p_TI)
    padded_TI = F.pad(p_TI, (0, 0, 0, missing)) if missing > 0 else p_TI
    return torch._int_mm(padded_TI, q_OI.t())[: len(p_TI)]


def _has_scaled_mm(q_OI: Tensor, dtype: torch.dtype) -> bool:
    if not q_OI.is_cuda or dtype != torch.bfloat16:
        return False
    fits = all(size % _MULTIPLE == 0 for size in q_OI.shape)
    return fits and not why_no_fp8(q_OI.device)
