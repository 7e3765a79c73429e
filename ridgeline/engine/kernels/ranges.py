"""A group's scale and zero-point by the error of a linear's output: the turn of one group.

What and how: native/quantize/scale_search.h. All candidates of a row are multiplied with the group's second
moments together.

Invariant: the first of the best; where none is better than what is there, nothing is touched.

When it loses: nowhere that it runs; a group has 1 to 128 inputs, a row 1 to 59 candidates.

Shape legend: O rows (outputs), J inputs of the group, P of it in whole panels, C scales, Z zeros.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import ridgeline._native as _native
from ridgeline.engine.kernels.native_linear import PANEL, isa


def choose_ranges(
    weight_OJ: Tensor,
    error_OJ: Tensor,
    others_OJ: Tensor,
    moment_JJ: Tensor,
    scale_OC: Tensor,
    zero_OZ: Tensor,
    bounds: tuple[int, int],
) -> Tensor:
    """Of every row: which scale · Z + zero loses least, -1 where none beats the errors that are
    there (native/quantize/scale_search.h). Where one is, `error_OJ` becomes what it leaves.
    """
    num_rows, size = weight_OJ.shape
    moment_JP = F.pad(moment_JJ, (0, -size % PANEL)).contiguous()
    others_OJ, scale_OC, zero_OZ = (x.contiguous() for x in (others_OJ, scale_OC, zero_OZ))
    assert weight_OJ.stride() == error_OJ.stride() and weight_OJ.stride(1) == 1
    chosen_O = torch.empty(num_rows, dtype=torch.int32)
    read = (weight_OJ, error_OJ, others_OJ, moment_JP, scale_OC, zero_OZ)
    assert all(tensor.dtype == torch.float32 for tensor in read)
    _native.choose_ranges(
        weight_OJ.data_ptr(),
        error_OJ.data_ptr(),
        others_OJ.data_ptr(),
        moment_JP.data_ptr(),
        scale_OC.data_ptr(),
        zero_OZ.data_ptr(),
        chosen_O.data_ptr(),
        weight_OJ.stride(0),
        num_rows,
        size,
        scale_OC.shape[1],
        zero_OZ.shape[1],
        *bounds,
        torch.get_num_threads(),
        isa(),
    )
    return chosen_O.long()
