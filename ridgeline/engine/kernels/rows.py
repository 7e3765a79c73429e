"""Rows of logits on the CPU: their first largest, in one pass over memory.

Shape legend: S rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

import ridgeline._native as _native


def first_largest(x_SV: Tensor, num_threads: int = 1, isa: str = "auto") -> tuple[Tensor, Tensor]:
    """(lowest index of each row's largest, int64; its value). A row with a NaN has index -1."""
    assert x_SV.dtype == torch.float32 and x_SV.device.type == "cpu" and x_SV.dim() == 2
    x_SV = x_SV if x_SV.stride(1) == 1 else x_SV.contiguous()
    num_rows, width = x_SV.shape
    index_S, value_S = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows)
    _native.first_largest(
        x_SV.data_ptr(),
        x_SV.stride(0),
        num_rows,
        width,
        index_S.data_ptr(),
        value_S.data_ptr(),
        num_threads,
        isa,
    )
    return index_S, value_S
