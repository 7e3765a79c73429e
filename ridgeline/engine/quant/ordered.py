"""A packed linear whose weights are in another order of inputs: GPTQ's act-order with one gather.

Groups of an act-order checkpoint are scattered over the inputs. The weight's columns are sorted by
group once, at load, and each row of activations is gathered in that order: one copy of a row,
instead of a scale per weight.

Invariant: that of the inner linear; a gather rounds nothing.

When it loses: always slightly against consecutive groups (the gather), which is why `ridgeline
quantize
--method gptq` uses act-order with consecutive groups.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ridgeline.engine.kernels.native_linear import Packed
from ridgeline.engine.quant.packed import PackedLinear


class OrderedPacked(NamedTuple):
    """A packed weight whose columns are in the order `order_I` of the inputs."""

    packed: Packed
    order_I: Tensor


class OrderedLinear:
    """y_TO = W[:, order] x[:, order]_TI (+ bias)."""

    __slots__ = ("inner", "order_I")

    def __init__(self, inner: PackedLinear, order_I: Tensor) -> None:
        self.inner, self.order_I = inner, order_I

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self.inner(x_TI.index_select(-1, self.order_I))

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes + self.order_I.nbytes
