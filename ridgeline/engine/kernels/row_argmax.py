"""The argmax of rows of logits on the CPU, in one pass over memory.

Shape legend: S rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

import ridgeline._native as _native


def first_largest(x_SV: Tensor, num_threads: int = 1, isa: str = "auto") -> list[int]:
    """The lowest index of each row's largest value; -1 where a row has a NaN or its largest value
    is not finite."""
    assert x_SV.dtype == torch.float32 and x_SV.device.type == "cpu" and x_SV.dim() == 2
    x_SV = x_SV if x_SV.stride(1) == 1 else x_SV.contiguous()
    num_rows, width = x_SV.shape
    stride = x_SV.stride(0)
    return _native.first_largest(x_SV.data_ptr(), stride, num_rows, width, num_threads, isa)
