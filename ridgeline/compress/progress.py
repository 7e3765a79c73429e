"""Progress of a quantisation."""

from __future__ import annotations

from collections.abc import Callable

import msgspec


class QuantizeProgress(msgspec.Struct, frozen=True, kw_only=True):
    """A layer (or another `unit`) is finished. `left_s`: estimated seconds left, from this run's
    layers.
    """

    layer: int
    num_layers: int
    took_s: float
    left_s: float
    note: str = ""
    unit: str = "layer"


ProgressCallback = Callable[[QuantizeProgress], None]
