"""Resolves a speculative config, with the derivation of every value."""

from __future__ import annotations

import msgspec

from ridgeline.config.settings import Settings, Speculative
from ridgeline.engine.speculate.drafters.checkpoint import (
    DrafterConfig,
    check_sizes,
    read_config,
    weight_bytes,
)
from ridgeline.engine.speculate.token_tree import TokenTree, parse_tree
from ridgeline.errors import BadInput, CannotRun
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.cost import (
    has_states,
    kv_bytes_per_token,
    num_params,
    resident_weight_bytes,
)
from ridgeline.modelspec.layer_inputs import refuse_special_layers
from ridgeline.modelspec.model import ModelSpec
from ridgeline.modelspec.rewrite import apply_quantization, with_dtype

MOST_TOKENS = {
    "ngram": 24,
    "suffix": 24,
    "lookahead": 8,
    "draft_model": 6,
    "self": 4,
    "medusa": 4,
    "eagle": 4,
    "auto": 24,
}
LOOKUP_MIN, LOOKUP_MAX = 2, 4
_OWN = {
    "ngram": ("prompt_lookup_min", "prompt_lookup_max"),
    "suffix": (),
    "lookahead": (),
    "auto": ("model", "quantization", "draft_sample_method", "rejection_sample_method"),
    "draft_model": (
        "model",
        "quantization",
        "draft_sample_method",
        "rejection_sample_method",
    ),
    "self": ("draft_sample_method", "rejection_sample_method"),
    "medusa": (
        "model",
        "draft_sample_method",
        "rejection_sample_method",
        "speculative_token_tree",
    ),
    "eagle": ("model", "draft_sample_method", "rejection_sample_method"),
}
_DEPTH = {True: "depth chosen in every step by measured cost", False: "a fixed depth"}
_COMMON = ("method", "num_speculative_tokens")


class ResolvedSpeculation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Speculation as used; field names follow `ridgeline.config.settings.Speculative`.

    Fields that do not belong to the method are None. `weight_bytes` and `kv_bytes_per_token`: what
    a draft model adds to the target's. `automatic`: the controller chooses depths up to
    `num_speculative_tokens`; otherwise exactly that many are drafted.
    """

    method: str
    num_speculative_tokens: int
    automatic: bool
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    model: str | None = None
    quantization: str | None = None
    draft_sample_method: str | None = None
    rejection_sample_method: str | None = None
    speculative_token_tree: str | None = None
    weight_bytes: int = 0
    kv_bytes_per_token: int = 0


def resolve_speculation(
    settings: Settings, target: ModelSpec, max_model_len: int, why: dict[str, str]
) -> ResolvedSpeculation | None:
    """Resolve every value of the config. Raises BadInput, BadModel or CannotRun."""
    asked = settings.speculative_config
    if asked is None:
        why["speculative_config"] = "default: one token per sequence and step"
        return None
    if asked.method == "self":
        refuse_special_layers(target, "speculation by self", "use another method")
    if has_states(target):
        raise CannotRun(
            "speculation needs to take back rejected drafts, and the states of recurrent layers "
            "cannot go back",
            value=target.family,
            fix="leave out --speculative-config",
        )
    _check_own(asked)
    _check_model_named(asked)
    depth = _depth(asked, max_model_len)
    if asked.method == "self":
        return _self(asked, depth, target, why)
    if asked.method in ("medusa", "eagle"):
        return _trained(asked, depth, target, why)
    if asked.method == "draft_model" or asked.model is not None:
        return _draft_model(asked, depth, target, max_model_len, why)
    depth_source = _DEPTH[asked.num_speculative_tokens is None]
    why["speculative_config"] = (
        f"as requested: {asked.method}, {depth_source}; tokens stay as without it"
    )
    low, high = _lengths(asked) if asked.method == "ngram" else (None, None)
    return ResolvedSpeculation(
        method=asked.method,
        num_speculative_tokens=depth,
        automatic=asked.num_speculative_tokens is None,
        prompt_lookup_min=low,
        prompt_lookup_max=high,
    )


def _depth(asked: Speculative, max_model_len: int) -> int:
    """Drafts per step, as requested or as many as may pay.

    Raises BadInput if no sequence has room.
    """
    most = max_model_len - 2
    if most < 1:
        raise BadInput(
            "--max-model-len leaves no room for a draft",
            value=max_model_len,
            limit=">= 3: a token of a prompt, a draft and a token of output",
            fix="raise --max-model-len, or leave out --speculative-config",
        )
    depth = asked.num_speculative_tokens
    if depth is None:
        return min(MOST_TOKENS[asked.method], most)
    if depth > most:
        raise BadInput(
            "num_speculative_tokens does not fit in a sequence",
            value=depth,
            limit=f"{most}: max_model_len {max_model_len} less a prompt and a token",
            fix="lower num_speculative_tokens",
        )
    return depth


def _check_own(asked: Speculative) -> None:
    """Reject keys that the method does not use."""
    known = {*_COMMON, *_OWN[asked.method]}
    for name, value in msgspec.structs.asdict(asked).items():
        if value is not None and name not in known:
            raise BadInput(
                f"{name} means nothing to speculation by {asked.method}",
                value=value,
                limit=", ".join(sorted(known)),
                fix=f"leave {name} out",
            )


def _check_model_named(asked: Speculative) -> None:
    """Reject draft-model keys without a draft model, of methods that take one."""
    if "model" not in _OWN[asked.method]:
        return
    alone = ("quantization", "draft_sample_method", "rejection_sample_method")
    idle = [name for name in alone if getattr(asked, name) is not None]
    if asked.model is None and (idle or asked.method == "draft_model"):
        raise BadInput(
            f"speculation by {asked.method} needs a model" + (f" for {idle[0]}" if idle else ""),
            fix=f'name it: {{"method": "{asked.method}", "model": "DIR"}}',
        )


def draft_spec(used: ResolvedSpeculation | Speculative, dtype: str) -> ModelSpec:
    """The draft model's spec as run: the target's dtype, its own quantisation."""
    assert used.model is not None
    spec = with_dtype(load_spec(used.model), dtype)
    return apply_quantization(spec, used.quantization) if used.quantization else spec


def _draft_model(
    asked: Speculative, depth: int, target: ModelSpec, max_model_len: int, why: dict[str, str]
) -> ResolvedSpeculation:
    assert asked.model is not None
    spec = draft_spec(asked, target.dtype)
    _check_size(spec, target)
    if spec.max_positions < max_model_len:
        raise CannotRun(
            "the draft model's context is shorter than the target's",
            value=spec.max_positions,
            limit=max_model_len,
            fix=f"use --max-model-len {spec.max_positions}, or another draft model",
        )
    sampling = asked.draft_sample_method or "probabilistic"
    why["speculative_config"] = (
        f"as requested: {num_params(spec):,} parameters draft for {num_params(target):,}, "
        f"{_DEPTH[asked.num_speculative_tokens is None]}; greedy and seeded answers stay as "
        "without it, the others keep their distribution"
    )
    return ResolvedSpeculation(
        method=asked.method,
        num_speculative_tokens=depth,
        automatic=asked.num_speculative_tokens is None,
        model=asked.model,
        quantization=asked.quantization,
        draft_sample_method=sampling,
        rejection_sample_method=asked.rejection_sample_method or "block",
        weight_bytes=int(resident_weight_bytes(spec)),
        kv_bytes_per_token=kv_bytes_per_token(spec),
    )


def _self(
    asked: Speculative, depth: int, target: ModelSpec, why: dict[str, str]
) -> ResolvedSpeculation:
    if len(target.layers) < 2:
        raise CannotRun(
            "a model of one layer has none to leave out",
            value=len(target.layers),
            fix='choose another method, such as {"method": "ngram"}',
        )
    why["speculative_config"] = (
        f"as requested: the model's own layers, some left out by a measurement at the start, "
        f"{_DEPTH[asked.num_speculative_tokens is None]}; greedy and seeded answers stay as "
        "without it, the others keep their distribution"
    )
    return ResolvedSpeculation(
        method="self",
        num_speculative_tokens=depth,
        automatic=asked.num_speculative_tokens is None,
        draft_sample_method=asked.draft_sample_method or "probabilistic",
        rejection_sample_method=asked.rejection_sample_method or "block",
    )


def _trained(
    asked: Speculative, depth: int, target: ModelSpec, why: dict[str, str]
) -> ResolvedSpeculation:
    """A drafter that was trained for this model."""
    if asked.model is None:
        raise BadInput(
            f"speculation by {asked.method} needs a trained drafter",
            fix=f'name its folder: {{"method": "{asked.method}", "model": "DIR"}}',
        )
    config = read_config(asked.model, asked.method)
    check_sizes(config, target, asked.model)
    num = asked.num_speculative_tokens
    if config.num_heads and num is not None and num > config.num_heads:
        raise BadInput(
            "the drafter has fewer heads than tokens are asked for",
            value=num,
            limit=config.num_heads,
            fix=f"use num_speculative_tokens of {config.num_heads} or less",
        )
    tree = None if asked.speculative_token_tree is None else _tree(asked, config, depth)
    how = _DEPTH[num is None] if tree is None else f"a tree of {len(tree.leaves)} leaves"
    why["speculative_config"] = (
        f"as requested: {asked.method} {asked.model}, {how}; greedy and seeded "
        "answers stay as without it, the others keep their distribution"
    )
    return ResolvedSpeculation(
        method=asked.method,
        num_speculative_tokens=tree.depth if tree else min(depth, config.num_heads or depth),
        automatic=num is None and tree is None,
        speculative_token_tree=asked.speculative_token_tree,
        model=asked.model,
        draft_sample_method=asked.draft_sample_method or "probabilistic",
        rejection_sample_method=asked.rejection_sample_method or "block",
        weight_bytes=weight_bytes(asked.model, asked.method, target.dtype),
        kv_bytes_per_token=_layer_kv_bytes(config, target, asked.model),
    )


def _tree(asked: Speculative, config: DrafterConfig, most: int) -> TokenTree:
    """The tree, no deeper than the number of heads."""
    assert asked.speculative_token_tree is not None
    tree, num = parse_tree(asked.speculative_token_tree), asked.num_speculative_tokens
    limit = min(config.num_heads, most)
    if tree.depth > limit or num not in (None, tree.depth):
        raise BadInput(
            "the depth of speculative_token_tree does not fit",
            value=tree.depth,
            limit=f"{config.num_heads} heads, num_speculative_tokens {num or limit}",
            fix="leave num_speculative_tokens out, or cut the tree",
        )
    return tree


def _layer_kv_bytes(config: DrafterConfig, target: ModelSpec, name: str) -> int:
    """KV bytes per token of the drafter's own layer, if it has one."""
    if not config.layer:
        return 0
    from ridgeline.engine.speculate.drafters.eagle import shape_of

    return kv_bytes_per_token(shape_of(config, name).spec(target))


def _check_size(spec: ModelSpec, target: ModelSpec) -> None:
    if num_params(spec) >= num_params(target):
        raise CannotRun(
            "the draft model is not smaller than its target: it cannot win",
            value=f"{num_params(spec):,} parameters",
            limit=f"< {num_params(target):,}",
            fix="name a smaller model of the same family",
        )


def _lengths(asked: Speculative) -> tuple[int, int]:
    """Shortest and longest n-gram; giving only one bounds the other's default."""
    low, high = asked.prompt_lookup_min, asked.prompt_lookup_max
    low = min(LOOKUP_MIN, high or LOOKUP_MIN) if low is None else low
    high = max(LOOKUP_MAX, low) if high is None else high
    if low > high:
        raise BadInput(
            "prompt_lookup_min exceeds prompt_lookup_max",
            value=low,
            limit=high,
            fix="name a prompt_lookup_max that is not smaller",
        )
    return low, high
