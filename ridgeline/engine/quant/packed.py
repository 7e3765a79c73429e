"""A linear over packed weights, in the caller's dtype: what INT4, INT8 and bf16 weights share.

`group` and `of_quantised` let a fused operator quantise a row once for several linears:
`ridgeline.engine.kernels.native_linear.quantise_rows(x, linear.group)` gives what they take.

Shape legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

import ridgeline._native as _native
from ridgeline.engine.kernels.native_linear import NativeLinear, Packed
from ridgeline.errors import CannotRun
from ridgeline.spec.model import LinearSpec


class PackedLinear:
    """y_TO = W x_TI (+ bias_O) on the CPU, bitwise the same in any batch."""

    __slots__ = ("_dtype", "native")

    def __init__(self, packed: Packed, bias_O: Tensor | None, compute_dtype: torch.dtype) -> None:
        self.native = NativeLinear(packed, bias_O)
        self._dtype = compute_dtype

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self.native(x_TI.float()).to(self._dtype)

    def of_quantised(self, rows: _native.QuantRows) -> Tensor:
        """The same product of rows that were quantised with this linear's `group`."""
        return self.native.of_quantised(rows).to(self._dtype)

    @property
    def group(self) -> int:
        """Inputs that share one activation scale."""
        return self.native.group

    @property
    def nbytes(self) -> int:
        return self.native.nbytes


def needs_cpu(spec: LinearSpec, device: torch.device) -> None:
    """CannotRun where the kernels do not reach."""
    if device.type != "cpu":
        raise CannotRun(
            f"{spec.format.kind} weights are computed on the CPU only",
            value=str(device),
            limit="cpu",
            fix="use --device cpu",
        )
