"""The same replica for the same session, by rendezvous hashing: when a replica comes or goes, only
its own sessions move. A replica that is much busier than the least loaded one is passed over."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from ridgeline.routing.base import FleetLoad, RoutedRequest
from ridgeline.routing.load_guard import BALANCE_ABS, BALANCE_REL, is_much_busier


class SessionAffinity:
    """`balance_abs`, `balance_rel`: thresholds of the load guard."""

    def __init__(
        self, seed: int = 0, balance_abs: int = BALANCE_ABS, balance_rel: float = BALANCE_REL
    ) -> None:
        self._salt = seed.to_bytes(8, "little")
        self._guard = balance_abs, balance_rel

    def choose(self, request: RoutedRequest, active: Sequence[int], load: FleetLoad) -> int:
        name = self._salt + request.session.encode()
        least = min([load.in_flight[replica] for replica in active])
        return max(
            [r for r in active if not is_much_busier(load.in_flight[r], least, *self._guard)],
            key=lambda replica: blake2b(name + replica.to_bytes(4, "little")).digest(),
        )
