"""The replica with the least predicted time to first token.

    predicted = (prompt tokens queued there + those of this prompt that it has not cached) / its
                measured prefill rate

Among the replicas that keep the request's TTFT SLO, the one with the most of the prompt in its
cache is chosen, so that prefixes stay together as long as the SLO allows; without an SLO, or if no
replica keeps it, the least prediction wins. Ties go to the fewest requests in flight, then to the
emptiest KV cache. The rates are measured per replica, so unlike devices share the load in
proportion. It loses to `session` where caches are small and conversations long, because it knows
only which prefixes it has sent somewhere, and not what was evicted.
"""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.routing.base import FleetLoad, RoutedRequest
from ridgeline.routing.prefix_index import MAX_BLOCKS, PrefixIndex


class LeastTtft:
    """`max_blocks` are remembered per replica."""

    def __init__(self, seed: int = 0, *, max_blocks: int = MAX_BLOCKS) -> None:
        self._index = PrefixIndex(max_blocks)

    def choose(self, request: RoutedRequest, active: Sequence[int], load: FleetLoad) -> int:
        prefix, index = request.prefix, self._index
        rates = [load.prefill_rate(replica) for replica in active]
        measured = [rate for rate in rates if rate > 0]
        usual = sum(measured) / len(measured) if measured else 0.0
        best_key, best = None, active[0]
        for replica, rate in zip(active, rates, strict=True):
            cached = min(
                index.num_matched(prefix, replica) * request.prefix_block, request.num_prompt
            )
            tokens = load.queued_tokens[replica] + request.num_prompt - cached
            predicted_s = tokens / (rate or usual or 1.0)
            keeps_slo = (
                request.ttft_slo_s is not None and usual > 0 and predicted_s <= request.ttft_slo_s
            )
            key = (
                not keeps_slo,
                -cached if keeps_slo else 0,
                predicted_s,
                load.in_flight[replica],
                load.kv_usage[replica],
            )
            if best_key is None or key < best_key:
                best_key, best = key, replica
        index.add(prefix, best)
        return best

    def num_cached(self, request: RoutedRequest, replica: int) -> int:
        """Tokens of the prompt that the replica is expected to have cached."""
        blocks = self._index.num_matched(request.prefix, replica)
        return min(blocks * request.prefix_block, request.num_prompt)
