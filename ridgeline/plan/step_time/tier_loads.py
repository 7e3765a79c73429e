"""The cost of prompt tokens that are found in tiers of the KV cache, by the engine's own rule.

    loaded, if    bytes / bandwidth of the tier  <  tokens · seconds per prompt token
    computed      otherwise

Tokens of the memory tier are copied before the step's runs and add to its time. Tokens of files are
read while the request waits, which adds to its time to first token only, and are then copied like
those of the memory tier.
"""

from __future__ import annotations

import msgspec

from ridgeline.engine.scheduler.kv.tiers import GUESSED_DISK, GUESSED_MEMORY_BYTES_S
from ridgeline.errors import BadInput
from ridgeline.plan.step_time.replica import Replica


class TierHits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prompt tokens found in each tier, behind those in the prefix cache. Bandwidths in bytes per
    second, of one device: by default the engine's guesses before it has measured."""

    memory_tokens: int = 0
    file_tokens: int = 0
    memory_bytes_s: float = GUESSED_MEMORY_BYTES_S
    file_bytes_s: float = GUESSED_DISK[0]

    @property
    def tokens(self) -> int:
        """Tokens found in any tier."""
        return self.memory_tokens + self.file_tokens

    def check(self) -> None:
        """Raise BadInput for a number out of range."""
        if min(self.memory_tokens, self.file_tokens) < 0:
            raise BadInput("tokens in a tier must not be negative", value=str(self), limit=">= 0")
        if min(self.memory_bytes_s, self.file_bytes_s) <= 0:
            raise BadInput("the bandwidth of a tier must be positive", value=str(self), limit="> 0")


Rates = tuple[float | None, float | None]
"""Bandwidths of memory and files in bytes per second; None where unknown."""


def tier_hits(memory_tokens: int, file_tokens: int, rates: Rates) -> TierHits:
    """Hits at the bandwidths given."""
    memory_bytes_s, file_bytes_s = rates
    return TierHits(
        memory_tokens=memory_tokens,
        file_tokens=file_tokens,
        memory_bytes_s=memory_bytes_s or GUESSED_MEMORY_BYTES_S,
        file_bytes_s=file_bytes_s or GUESSED_DISK[0],
    )


def require_no_rates(rates: Rates, needed: str) -> None:
    """BadInput if a bandwidth was given where nothing is loaded; `needed`: the options to add."""
    flags = ("--kv-tier-memory-bandwidth", "--kv-tier-file-bandwidth")
    for flag, rate in zip(flags, rates, strict=True):
        if rate is not None:
            raise BadInput(f"{flag} has no effect without {needed}", value=rate)


class TierLoads(msgspec.Struct, frozen=True, kw_only=True):
    """What is loaded for one prompt. `copy_s`: seconds that its copies add to a step; `wait_s`:
    seconds that it waits for files; `compute_s`: seconds that computing the tokens would take."""

    tokens: int = 0
    declined_tokens: int = 0
    copy_s: float = 0.0
    wait_s: float = 0.0
    compute_s: float = 0.0


def tier_loads(machine: Replica, hits: TierHits | None, cached: int, max_step: int) -> TierLoads:
    """Decide what to load. `cached`: tokens before them that are in the prefix cache; `max_step`:
    the token budget of a step."""
    if hits is None or not hits.tokens:
        return TierLoads()
    new = min(max_step, hits.tokens)
    token_s = machine.uniform(1, new, cached, sampled=1).seconds / new
    # All devices of a replica copy their parts at the same time; files are read by one process.
    token_bytes = machine.cost.kv_bytes_per_token
    copy_token_s = token_bytes / (hits.memory_bytes_s * machine.layout.num_devices)
    read_token_s = token_bytes / hits.file_bytes_s
    tokens, wait_s = hits.memory_tokens, 0.0
    if hits.file_tokens:
        read_s = GUESSED_DISK[1] + hits.file_tokens * read_token_s
        if read_s + hits.file_tokens * copy_token_s < hits.file_tokens * token_s:
            tokens, wait_s = tokens + hits.file_tokens, read_s
    if copy_token_s >= token_s:
        tokens = 0
    return TierLoads(
        tokens=tokens,
        declined_tokens=hits.tokens - tokens,
        copy_s=tokens * copy_token_s,
        wait_s=wait_s if tokens else 0.0,
        compute_s=tokens * token_s,
    )
