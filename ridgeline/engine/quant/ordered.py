"""A packed linear whose weights lie in another order of inputs: GPTQ's act-order, gathered once.

What: groups of an act-order checkpoint are scattered over the inputs. The weight's columns are
sorted by group once, at load, and each row of activations is gathered in that order on the way in:
one copy of a row, against a scale per weight.

Invariant: that of the linear inside; a gather moves whole numbers of bytes and rounds nothing.

When it loses: always a little against consecutive groups (the gather), which is why `ridgeline
quantize --method gptq` takes act-order with groups that stay consecutive.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ridgeline.engine.kernels.native_linear import Packed
from ridgeline.engine.quant.packed import PackedLinear


class OrderedPacked(NamedTuple):
    """A packed weight whose columns lie in the order `order_I` of the inputs."""

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
