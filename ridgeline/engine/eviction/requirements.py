"""Why a model or a combination of settings cannot evict keys and values."""

from __future__ import annotations

from ridgeline.engine.speculate.config import ResolvedSpeculation
from ridgeline.errors import CannotRun
from ridgeline.modelspec.cost.kv_cache import has_states
from ridgeline.modelspec.model import ModelSpec
from ridgeline.records import KvEviction

LOOKUP_DRAFTERS = ("ngram", "suffix", "lookahead")
METHODS = ("streaming",)
"""What this engine runs."""


def why_no_eviction(
    policy: KvEviction, spec: ModelSpec, speculation: ResolvedSpeculation | None
) -> tuple[str, ...]:
    """Reasons why `policy` cannot run; empty if it can."""
    if not policy.evicts:
        return ()
    attentions = [layer.attention for layer in spec.layers]
    reasons = []
    if policy.method not in METHODS:
        reasons.append(f"{policy.method} is not implemented")
    if any(a.window is not None or a.chunk is not None for a in attentions):
        reasons.append("layers with a window drop what they do not see by themselves")
    if has_states(spec):
        reasons.append("recurrent layers keep a state in place of keys and values")
    if any(a.latent is not None for a in attentions):
        reasons.append("latent attention has one row per token in place of keys and values")
    if speculation is not None and not _drafts_by_lookup(speculation):
        reasons.append(
            f"the drafter of speculation by {speculation.method} reads the blocks that are evicted"
        )
    return tuple(reasons)


def check_kv_eviction(
    policy: KvEviction | None, spec: ModelSpec, speculation: ResolvedSpeculation | None
) -> None:
    """Raise CannotRun with the reasons why `policy` cannot run."""
    reasons = () if policy is None else why_no_eviction(policy, spec, speculation)
    if reasons:
        assert policy is not None
        raise CannotRun(
            f"KV eviction by {policy.method} cannot run here: {'; '.join(reasons)}",
            value=spec.family,
            fix="leave KV eviction out",
        )


def _drafts_by_lookup(speculation: ResolvedSpeculation) -> bool:
    is_lookup = speculation.method in (*LOOKUP_DRAFTERS, "auto")
    return is_lookup and speculation.model is None
