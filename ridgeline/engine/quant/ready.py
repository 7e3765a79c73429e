"""Weights that a source provides already packed, and the linear that each becomes."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.engine.kernels.native_linear import Packed
from ridgeline.engine.quant.base import Linear
from ridgeline.engine.quant.ordered import OrderedLinear, OrderedPacked
from ridgeline.engine.quant.outlier_rows import OutlierRowsLinear
from ridgeline.engine.quant.outliers import OutlierLinear, OutlierPacked
from ridgeline.engine.quant.packed import PackedLinear

Ready = Packed | OrderedPacked | OutlierPacked


def linear_of(
    ready: Ready, bias_O: Tensor | None, compute_dtype: torch.dtype, threshold: float = 0.0
) -> Linear:
    """The linear of a packed weight; `threshold`: its format's outlier threshold."""
    if isinstance(ready, Packed):
        plain = PackedLinear(ready, bias_O, compute_dtype)
        return OutlierRowsLinear(plain, threshold) if threshold else plain
    assert not threshold, "outliers found as they come, in weights that are not plain int8"
    inner = PackedLinear(ready.packed, bias_O, compute_dtype)
    if isinstance(ready, OrderedPacked):
        return OrderedLinear(inner, ready.order_I)
    return OutlierLinear(inner, ready)
