"""Which models can evict keys and values, by their spec alone."""

from __future__ import annotations

from ridgeline.errors import CannotRun
from ridgeline.modelspec.cost.kv_cache import has_states
from ridgeline.modelspec.model import ModelSpec
from ridgeline.records.kv_eviction import KvEviction


def why_model_cannot_evict(policy: KvEviction, spec: ModelSpec) -> tuple[str, ...]:
    """Reasons why a model cannot run under `policy`; empty if it can."""
    if not policy.evicts:
        return ()
    attentions = [layer.attention for layer in spec.layers]
    reasons = []
    if any(a.window is not None or a.chunk is not None for a in attentions):
        reasons.append("layers with a window drop what they do not see by themselves")
    if spec.kv_dtype == "int4":
        reasons.append("a KV cache in INT4 codes keys in groups, which cannot be broken up")
    if has_states(spec):
        reasons.append("recurrent layers keep a state in place of keys and values")
    if any(a.latent is not None for a in attentions):
        reasons.append("latent attention has one row per token in place of keys and values")
    if not policy.needs_scores:
        return tuple(reasons)
    if any(a.softcap is not None or a.sinks for a in attentions):
        reasons.append("scores with a soft cap or sinks are not computed again to choose tokens")
    if any(a.shares_kv for a in attentions):
        reasons.append("layers that share keys would have to choose the same tokens")
    return tuple(reasons)


def check_model_evicts(policy: KvEviction | None, spec: ModelSpec) -> None:
    """Raise CannotRun with the reasons why a model cannot run under `policy`."""
    if policy is not None and (reasons := why_model_cannot_evict(policy, spec)):
        raise CannotRun(
            f"KV eviction by {policy.method} cannot run: {'; '.join(reasons)}",
            value=spec.name,
            fix="leave KV eviction out",
        )
