"""The interface of linear kinds: how y = W x (+ b) is stored and computed.

A kind is built once from a dense weight in its checkpoint dtype, stores it in any form (packed,
quantised, transposed), and is then only called. Invariants, checked by the conformance suite:

1. y_TO has the requested `compute_dtype` and is freshly allocated: the caller may write to it. 2.
Row t of y depends on row t of x alone; a call with T rows equals T calls with one row, up to
rounding. 3. The input is never written to. T = 0 gives an empty result. 4. The weight it was built
from may be dropped afterwards (`nbytes`: the bytes that stay in memory).

Shape suffixes: T tokens (rows), I inputs, O outputs.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ridgeline.modelspec.model import LinearSpec


class Linear(Protocol):
    """A linear map ready to be called; x_TI and y_TO in the compute dtype."""

    def __call__(self, x_TI: Tensor) -> Tensor: ...

    @property
    def nbytes(self) -> int:
        """Bytes kept in memory for weight, scales and bias."""
        ...


class LinearKind(Protocol):
    """A class named by the registry, whose `build` makes one `Linear`."""

    @staticmethod
    def build(
        spec: LinearSpec,
        weight_ON: Tensor,
        bias_O: Tensor | None,
        device: torch.device,
        compute_dtype: torch.dtype,
    ) -> Linear:
        """Build the map. Raises CannotRun if this device or dtype cannot compute the kind."""
        ...
