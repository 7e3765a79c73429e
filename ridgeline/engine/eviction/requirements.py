"""Why a model or a combination of settings cannot evict keys and values."""

from __future__ import annotations

from ridgeline.engine.speculate.config import ResolvedSpeculation
from ridgeline.errors import CannotRun
from ridgeline.modelspec.cost.kv_eviction import why_model_cannot_evict
from ridgeline.modelspec.model import ModelSpec
from ridgeline.records import KvEviction

LOOKUP_DRAFTERS = ("ngram", "suffix", "lookahead")


def why_no_eviction(
    policy: KvEviction,
    spec: ModelSpec,
    speculation: ResolvedSpeculation | None,
    *,
    has_prediction: bool = False,
    has_beams: bool = False,
) -> tuple[str, ...]:
    """Reasons why `policy` cannot run; empty if it can.

    `has_prediction`: a request's predicted output, which is verified like drafts.
    `has_beams`: whether the request is a beam search.
    """
    if not policy.evicts:
        return ()
    reasons = [*why_model_cannot_evict(policy, spec)]
    if has_beams:
        reasons.append("the beams of a beam search share their blocks")
    if speculation is not None and not _drafts_by_lookup(speculation):
        reasons.append(
            f"the drafter of speculation by {speculation.method} reads the blocks that are evicted"
        )
    if policy.method == "h2o" and (speculation is not None or has_prediction):
        reasons.append("queries of rejected drafts would count as attention")
    return tuple(reasons)


def check_kv_eviction(
    policy: KvEviction,
    spec: ModelSpec,
    speculation: ResolvedSpeculation | None,
    *,
    has_prediction: bool = False,
    has_beams: bool = False,
) -> None:
    """Raise CannotRun with the reasons why `policy` cannot run."""
    reasons = why_no_eviction(
        policy, spec, speculation, has_prediction=has_prediction, has_beams=has_beams
    )
    if reasons:
        other = "the prediction" if has_prediction else "beam search" if has_beams else ""
        raise CannotRun(
            f"KV eviction by {policy.method} cannot run here: {'; '.join(reasons)}",
            value=f"{spec.family}, with {other}" if other else spec.family,
            fix=f"leave KV eviction or {other} out" if other else "leave KV eviction out",
        )


def _drafts_by_lookup(speculation: ResolvedSpeculation) -> bool:
    is_lookup = speculation.method in (*LOOKUP_DRAFTERS, "auto")
    return is_lookup and speculation.model is None
