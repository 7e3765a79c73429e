"""How far a quantisation is, for whoever watches."""

from __future__ import annotations

from collections.abc import Callable

import msgspec


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """A layer (or what `unit` says) is done. `left_s`: the time that the others will take, from
    those of this run."""

    layer: int
    num_layers: int
    took_s: float
    left_s: float
    note: str = ""
    unit: str = "layer"


Tell = Callable[[Progress], None]
