"""The less loaded of two random replicas (Mitzenmacher 2001): several routers that see the same
loads late do not all choose the same replica."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ridgeline.routing.base import FleetLoad, RoutedRequest


class PowerOfTwo:
    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._drawn: list[float] = []

    def choose(self, request: RoutedRequest, active: Sequence[int], load: FleetLoad) -> int:
        if len(self._drawn) < 2:
            self._drawn = self._rng.random(4096).tolist()
        a = active[int(self._drawn.pop() * len(active))]
        b = active[int(self._drawn.pop() * len(active))]
        return a if load.in_flight[a] <= load.in_flight[b] else b
