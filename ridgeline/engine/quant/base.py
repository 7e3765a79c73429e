"""Linear kinds: how y = W x (+ b) is stored and computed. The family's contract.

A kind is built once from a dense weight in its checkpoint dtype, keeps whatever form it likes
(packed, quantised, transposed), and is then only called. Invariants every kind keeps, and its
conformance suite checks:

1. y_TO has the dtype that was asked for (`compute_dtype`) and is freshly allocated: the caller may
   write to it.
2. Row t of y depends on row t of x alone; a call with T rows equals T calls with one row (up to
   rounding).
3. The input is never written to. T = 0 gives an empty result.
4. The weight it was built from may be thrown away afterwards (`nbytes` is what is really kept).

Shape legend: T tokens (rows), I inputs, O outputs.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ridgeline.modelspec.model import LinearSpec


class Linear(Protocol):
    """A ready-made linear map; x_TI and y_TO in the compute dtype."""

    def __call__(self, x_TI: Tensor) -> Tensor: ...

    @property
    def nbytes(self) -> int:
        """Bytes kept in memory for weight, scales and bias."""
        ...


class LinearKind(Protocol):
    """What the registry names: a class whose `build` makes one `Linear`."""

    @staticmethod
    def build(
        spec: LinearSpec,
        weight_ON: Tensor,
        bias_O: Tensor | None,
        device: torch.device,
        compute_dtype: torch.dtype,
    ) -> Linear:
        """Make the map. Raises CannotRun where this device or dtype cannot compute the kind."""
        ...
