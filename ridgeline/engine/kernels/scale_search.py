"""Chooses a group's scale and zero-point by the error of the linear's output.

All candidates of a row are multiplied with the group's second moments together, in native code
(native/quantize/scale_search.h). A group has 1 to 128 inputs, a row 1 to 59 candidates.

Invariant: the first of the best candidates wins; where none beats the current error, nothing is
changed.

Shape legend: O rows (outputs), J inputs of the group, P of it in whole panels, C scales, Z zeros.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import ridgeline._native as _native
from ridgeline.engine.kernels.native_linear import PANEL, isa


def search_scales(
    weight_OJ: Tensor,
    error_OJ: Tensor,
    others_OJ: Tensor,
    moment_JJ: Tensor,
    scale_OC: Tensor,
    zero_OZ: Tensor,
    bounds: tuple[int, int],
) -> Tensor:
    """For every row, scale · Z + zero of the candidate with the least loss; -1 where none beats
    `error_OJ`. Where one does, its error replaces `error_OJ`.

    A row with error e loses e H e' + 2 others e', with H = `moment_JJ`. `bounds` are the smallest
    and the largest quantised value.
    """
    num_rows, size = weight_OJ.shape
    moment_JP = F.pad(moment_JJ, (0, -size % PANEL)).contiguous()
    others_OJ, scale_OC, zero_OZ = (x.contiguous() for x in (others_OJ, scale_OC, zero_OZ))
    assert weight_OJ.stride() == error_OJ.stride() and weight_OJ.stride(1) == 1
    chosen_O = torch.empty(num_rows, dtype=torch.int32)
    inputs = (weight_OJ, error_OJ, others_OJ, moment_JP, scale_OC, zero_OZ)
    assert all(tensor.dtype == torch.float32 for tensor in inputs)
    _native.search_scales(
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
