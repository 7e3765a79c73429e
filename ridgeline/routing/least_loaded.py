"""The replica with the fewest requests in flight."""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.routing.base import FleetLoad, RoutedRequest


class LeastLoaded:
    def __init__(self, seed: int = 0) -> None:
        pass

    def choose(self, request: RoutedRequest, active: Sequence[int], load: FleetLoad) -> int:
        return min(active, key=load.in_flight.__getitem__)
