"""Why a model or a combination of settings cannot evict keys and values."""

from __future__ import annotations

from ridgeline.engine.speculate.config import ResolvedSpeculation
from ridgeline.errors import CannotRun
from ridgeline.modelspec.cost.kv_cache import has_states
from ridgeline.modelspec.model import ModelSpec
from ridgeline.records import KvEviction

LOOKUP_DRAFTERS = ("ngram", "suffix", "lookahead")
KV_FORMATS = ("float32", "bfloat16", "float16", "int8")
"""Formats in which the bytes of a token depend on that token alone."""


def why_no_eviction(
    policy: KvEviction,
    spec: ModelSpec,
    speculation: ResolvedSpeculation | None,
    has_prediction: bool = False,
) -> tuple[str, ...]:
    """Reasons why `policy` cannot run; empty if it can.

    `has_prediction`: a request's predicted output, which is verified like drafts.
    """
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
    if speculation is not None and not _drafts_by_lookup(speculation):
        reasons.append(
            f"the drafter of speculation by {speculation.method} reads the blocks that are evicted"
        )
    if policy.needs_scores:
        reasons += _why_no_scores(spec)
    if policy.method == "h2o" and (speculation is not None or has_prediction):
        reasons.append("queries of rejected drafts would count as attention")
    return tuple(reasons)


def _why_no_scores(spec: ModelSpec) -> list[str]:
    """Reasons why no attention scores can choose what is kept."""
    attentions = [layer.attention for layer in spec.layers]
    reasons = []
    if any(a.softcap is not None or a.sinks for a in attentions):
        reasons.append("scores with a soft cap or sinks are not computed again to choose tokens")
    if any(a.shares_kv for a in attentions):
        reasons.append("layers that share keys would have to choose the same tokens")
    if spec.kv_dtype not in KV_FORMATS:
        reasons.append(f"tokens of a KV cache in {spec.kv_dtype} cannot be moved one by one")
    return reasons


def check_kv_eviction(
    policy: KvEviction,
    spec: ModelSpec,
    speculation: ResolvedSpeculation | None,
    has_prediction: bool = False,
) -> None:
    """Raise CannotRun with the reasons why `policy` cannot run."""
    if reasons := why_no_eviction(policy, spec, speculation, has_prediction):
        raise CannotRun(
            f"KV eviction by {policy.method} cannot run here: {'; '.join(reasons)}",
            value=spec.family,
            fix="leave KV eviction out",
        )


def _drafts_by_lookup(speculation: ResolvedSpeculation) -> bool:
    is_lookup = speculation.method in (*LOOKUP_DRAFTERS, "auto")
    return is_lookup and speculation.model is None
