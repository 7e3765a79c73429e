"""Each replica in turn."""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.routing.base import FleetLoad, RoutedRequest


class RoundRobin:
    def __init__(self, seed: int = 0) -> None:
        self._turn = 0

    def choose(self, request: RoutedRequest, active: Sequence[int], load: FleetLoad) -> int:
        self._turn += 1
        return active[(self._turn - 1) % len(active)]
