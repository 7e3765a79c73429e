"""What a demand holds in the KV cache of a replica: pinned prefixes, and requests behind them.

A request shares the blocks of its pinned prefix that it still needs. Groups of layers with a window
give blocks behind it back, so of a long prefix such a group shares only what lies in the window.
The prefix itself stays in all groups, and each attention group of a replica has its own cache.
"""

from __future__ import annotations

import msgspec

from ridgeline.engine.scheduler.kv.prefix_pins import MAX_ACCOUNT_SHARE
from ridgeline.errors import BadInput
from ridgeline.modelspec.cost.kv_cache import has_states
from ridgeline.modelspec.model import ModelSpec
from ridgeline.plan.fleet.demand import Demand
from ridgeline.plan.step_time.replica import Replica

PIN_SHARE = 0.5
"""Of the cache, what all accounts may pin, as the engine's default says."""
MAX_PINNED = PIN_SHARE * MAX_ACCOUNT_SHARE
"""Of the cache, what one account may pin: all prefixes of a plan are of one."""


class CacheNeeds(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of the cache: of all pinned prefixes, and of a mean and of the longest request, as far
    as they do not share the blocks of a prefix."""

    pinned: int
    per_request: float
    longest: float

    def room(self, kv_tokens: int) -> int:
        """Tokens that the pinned prefixes leave of a cache; 0 where they are too many to pin."""
        return kv_tokens - self.pinned if self.pinned <= MAX_PINNED * kv_tokens else 0


def check_pins(spec: ModelSpec, num_tokens: int) -> None:
    """Raise BadInput for pinned prefixes of a model that has no prefix cache."""
    if num_tokens and has_states(spec):
        raise BadInput(
            "--pinned-len needs a prefix cache, and recurrent layers keep one state per sequence",
            value=num_tokens,
            fix="leave it out, or choose a model without recurrent layers",
        )


def cache_needs(machine: Replica, demand: Demand) -> CacheNeeds:
    """The needs of a demand on a replica of that kind."""
    layout, pinned = machine.cost.layout, demand.pinned
    size = layout.block_tokens

    def own_tokens(context: int) -> float:
        shared = layout.shared_blocks(context, pinned.tokens, size)
        return machine.cost.kv_tokens(context) - shared * size / layout.num_groups

    return CacheNeeds(
        pinned=pinned.count * (pinned.tokens // size * size) * machine.layout.num_attention,
        per_request=own_tokens(demand.isl + demand.osl),
        longest=own_tokens(demand.longest),
    )
