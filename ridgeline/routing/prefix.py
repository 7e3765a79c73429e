"""The replica that has seen the longest prefix of the prompt.

A replica that is much busier than the least loaded one is passed over: without this guard, one
popular prefix keeps a single replica busy while the others idle. For an unseen prefix the least
loaded replica is chosen, and among equals the one that has seen the fewest blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.routing.base import FleetLoad, RoutedRequest
from ridgeline.routing.load_guard import BALANCE_ABS, BALANCE_REL, is_much_busier
from ridgeline.routing.prefix_index import MAX_BLOCKS, PrefixIndex


class PrefixAware:
    """`max_blocks` are remembered per replica; `balance_abs` and `balance_rel` guard the load."""

    def __init__(
        self,
        seed: int = 0,
        *,
        max_blocks: int = MAX_BLOCKS,
        balance_abs: int = BALANCE_ABS,
        balance_rel: float = BALANCE_REL,
    ) -> None:
        self._index, self._guard = PrefixIndex(max_blocks), (balance_abs, balance_rel)

    def choose(self, request: RoutedRequest, active: Sequence[int], load: FleetLoad) -> int:
        in_flight, index = load.in_flight, self._index
        least = min(active, key=lambda replica: (in_flight[replica], index.num_blocks(replica)))
        chosen = index.longest(request.prefix, set(active))
        if chosen is None or is_much_busier(in_flight[chosen], in_flight[least], *self._guard):
            chosen = least
        index.add(request.prefix, chosen)
        return chosen
