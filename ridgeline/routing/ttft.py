"""The replica with the least predicted time to first token.

    predicted = (prompt tokens queued there + those of this prompt that it has not cached) / its
                measured prefill rate

Among the replicas that keep the request's TTFT SLO, those with the most of the prompt in their
cache are candidates, so that prefixes stay together as long as the SLO allows; without an SLO, or
if no replica keeps it, all are. Of the candidates whose prediction is close to the least one, the
replica with the fewest requests in flight is chosen, because those delay each other's tokens, and
measured rates are no more exact than that. Ties go to the lower prediction, then to the emptiest
KV cache. The rates are measured per replica, so unlike devices share the load in proportion. It
loses to `session` where caches are small and conversations long, because it knows only which
prefixes it has sent somewhere, and not what was evicted.
"""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.routing.base import FleetLoad, RoutedRequest
from ridgeline.routing.prefix_index import MAX_BLOCKS, PrefixIndex

_TOLERANCE = 1.5
"""Predictions are equal within this multiple of the time that the rest of the prompt takes where
most of it is cached."""


class LeastTtft:
    """`max_blocks` are remembered per replica."""

    def __init__(self, seed: int = 0, *, max_blocks: int = MAX_BLOCKS) -> None:
        self._index = PrefixIndex(max_blocks)

    def choose(self, request: RoutedRequest, active: Sequence[int], load: FleetLoad) -> int:
        rates = [load.prefill_rate(replica) for replica in active]
        measured = [rate for rate in rates if rate > 0]
        usual = sum(measured) / len(measured) if measured else 0.0
        options: list[tuple[float, int, int]] = []
        num_prompt, queued, otherwise = request.num_prompt, load.queued_tokens, usual or 1.0
        for replica, rate in zip(active, rates, strict=True):
            cached = self.num_cached(request, replica)
            seconds = (queued[replica] + num_prompt - cached) / (rate or otherwise)
            options.append((seconds, cached, replica))
        slo_s = request.ttft_slo_s
        if slo_s is not None and usual > 0 and (kept := [o for o in options if o[0] <= slo_s]):
            most = max(cached for _, cached, _ in kept)
            options = [option for option in kept if option[1] == most]
        num_uncached = request.num_prompt - max(cached for _, cached, _ in options)
        close_s = min(options)[0] + _TOLERANCE * num_uncached / (usual or 1.0)
        in_flight, kv_usage = load.in_flight, load.kv_usage
        best = min(
            (option for option in options if option[0] <= close_s),
            key=lambda option: (in_flight[option[2]], option[0], kv_usage[option[2]]),
        )[2]
        self._index.add(request.prefix, best)
        return best

    def num_cached(self, request: RoutedRequest, replica: int) -> int:
        """Tokens of the prompt that the replica is expected to have cached."""
        blocks = self._index.num_matched(request.prefix, replica)
        return min(blocks * request.prefix_block, request.num_prompt)
