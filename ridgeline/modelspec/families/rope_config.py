"""Builds a RopeSpec from the rotary fields of a config.json.

Old configs have `rope_theta` at the top level and a `rope_scaling` object; transformers 5 writes
one `rope_parameters`, nested per kind of layer for Gemma 3. Both are read with transformers'
precedence: a value inside the object, then one at the top level, then the family's default. `KINDS`
lists the keys that each kind understands; any other key is an error that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import msgspec

from ridgeline.errors import BadModel
from ridgeline.modelspec.families.config_fields import ConfigFields, bad_field
from ridgeline.modelspec.model import RopeKind, RopeSpec

TOP_LEVEL = (
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "rope_local_base_freq",
    "partial_rotary_factor",
    "original_max_position_embeddings",
)
_ALWAYS = frozenset({"type", "rope_type", "rope_theta", "partial_rotary_factor"})
_ALIASES = {"su": "longrope"}  # the first Phi-3 checkpoints
_LAYER_KINDS = ("full_attention", "sliding_attention", "chunked_attention")
_MROPE = frozenset({"mrope_section", "mrope_interleaved"})
_BETA = "llama_4_scaling_beta"
# the context is written here again, and transformers does not read it
_OF_QUERIES = frozenset({_BETA, "max_position_embeddings"})


class _RopeKeys(msgspec.Struct, frozen=True):
    required: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()


_ORIGINAL = "original_max_position_embeddings"
KINDS: dict[str, _RopeKeys] = {
    "default": _RopeKeys(),
    "linear": _RopeKeys(frozenset({"factor"})),
    "dynamic": _RopeKeys(frozenset({"factor"})),
    "llama3": _RopeKeys(
        frozenset({"factor", "low_freq_factor", "high_freq_factor"}), frozenset({_ORIGINAL})
    ),
    "yarn": _RopeKeys(
        frozenset({"factor"}),
        frozenset({_ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale"})
        | {"mscale_all_dim", "truncate"},
    ),
    "longrope": _RopeKeys(
        frozenset({"short_factor", "long_factor"}),
        frozenset({_ORIGINAL, "factor", "attention_factor"}),
    ),
    "proportional": _RopeKeys(optional=frozenset({"factor"})),
}


class RopeFields(msgspec.Struct, frozen=True, kw_only=True):
    """What a family's row says about its rotary fields.

    `mrope`: fields of a multi-dimensional rotary embedding are read as the plain one, to which it
    is equal on text. `scaling`: the dictionary of a config that has none. `scales_full_only`:
    windowed layers have no scaling (OLMo 3). `default_partial` is the rotated part of a head where
    neither `partial_rotary_factor` nor `rotary_dim` says so. `scales_queries`: the field
    `llama_4_scaling_beta` says how queries grow with their position. `ignored`: further keys that
    repeat other fields.
    """

    default_theta: float = 10_000.0
    local_theta: float | None = None
    partial: bool = False
    default_partial: float | None = None
    yarn_means_longrope: bool = False
    mrope: bool = False
    interleaved: bool = False
    scales_full_only: bool = False
    scaling: dict[str, Any] | None = None
    scales_queries: bool = False
    ignored: frozenset[str] = frozenset()


def rope_by_layer_kind(
    values: ConfigFields, fields: RopeFields, head_dim: int
) -> dict[str, RopeSpec]:
    """The rotary embedding of each kind of layer ("full_attention", "sliding_attention")."""
    given = _given(values) or dict(fields.scaling or {})
    if fields.scales_full_only:
        full, local = _nested(values, given)
        theta = _theta(values, fields.default_theta)
        return {
            "full_attention": _rope(values, fields, head_dim, full, theta),
            "sliding_attention": _rope(values, fields, head_dim, local, theta),
        }
    if fields.local_theta is None:
        rope = _rope(values, fields, head_dim, given, _theta(values, fields.default_theta))
        return dict.fromkeys(_LAYER_KINDS, rope)
    full, local = _nested(values, given)
    local_theta = values.opt_number("rope_local_base_freq") or fields.local_theta
    full_theta = _theta(values, fields.default_theta)
    return {
        "full_attention": _rope(values, fields, head_dim, full, full_theta),
        "sliding_attention": _rope(values, fields, head_dim, local, local_theta),
    }


def _given(values: ConfigFields) -> dict[str, Any]:
    old, new = values.raw("rope_scaling"), values.raw("rope_parameters")
    for key, value in (("rope_scaling", old), ("rope_parameters", new)):
        if value is not None and not isinstance(value, dict):
            raise values.bad(key, "an object, or null")
    if old and new and old != new:
        raise BadModel(
            f"{values.where}: rope_scaling and rope_parameters contradict each other",
            value=old,
            limit=new,
            fix="keep the one that the model was trained with",
        )
    return dict(old or new or {})


def _nested(values: ConfigFields, given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    kinds = ("full_attention", "sliding_attention")
    if not any(kind in given for kind in kinds):
        return given, {}
    unknown = sorted(set(given) - set(kinds))
    if unknown:
        raise BadModel(f"{values.where}: rope_parameters has the unknown part {unknown[0]}")
    parts = [given.get(kind) or {} for kind in kinds]
    if not all(isinstance(part, dict) for part in parts):
        raise values.bad("rope_parameters", "one object per kind of layer")
    return dict(parts[0]), dict(parts[1])


def _theta(values: ConfigFields, default: float) -> float:
    return values.opt_number("rope_theta") or default


def _rope(
    values: ConfigFields, fields: RopeFields, head_dim: int, given: Mapping[str, Any], theta: float
) -> RopeSpec:
    kind = _kind(values, fields, given)
    ignored = fields.ignored | (_MROPE if fields.mrope else frozenset())
    ignored |= _OF_QUERIES if fields.scales_queries else frozenset()
    beta = given.get(_BETA)
    given = {key: value for key, value in given.items() if key not in ignored}
    _check_keys(values, kind, given)
    inner = ConfigFields(
        {key: value for key, value in given.items() if value is not None},
        {"rope_theta": theta, "partial_rotary_factor": _partial(values, fields, head_dim)},
        where=f"{values.where}: rope",
    )
    partial = inner.opt_number("partial_rotary_factor") or 1.0
    if partial != 1.0 and (not fields.partial or partial > 1.0):
        raise inner.bad("partial_rotary_factor", "(0, 1]" if fields.partial else "1.0")
    dim = head_dim if kind == "proportional" else int(head_dim * partial)
    if dim < 2 or dim % 2:
        raise BadModel(f"{values.where}: the rotated part of a head must be even", value=dim)
    rope = RopeSpec(
        dim=dim, theta=inner.number("rope_theta"), kind=kind, interleaved=fields.interleaved
    )
    if kind == "proportional":
        factor = inner.opt_number("factor") or 1.0
        return msgspec.structs.replace(rope, factor=factor, turned=partial)
    rope = _FILL[kind](rope, inner, values)
    return _with_scaled_queries(rope, beta, values) if fields.scales_queries else rope


def _with_scaled_queries(rope: RopeSpec, beta: Any, values: ConfigFields) -> RopeSpec:
    """The rope with queries that grow where they see more than the trained context."""
    if isinstance(beta, bool) or not isinstance(beta, int | float) or not 0 <= beta < 1e300:
        raise bad_field(f"{values.where}: rope", _BETA, beta, "a number from 0 on")
    if not beta:
        return rope
    if rope.original_max_positions is None:
        raise BadModel(
            f"{values.where}: queries that grow with their position need a rope type with the "
            f"field {_ORIGINAL}",
            value=rope.kind,
            limit=", ".join(kind for kind, row in KINDS.items() if _ORIGINAL in row.optional),
        )
    return msgspec.structs.replace(
        rope, query_floor=rope.original_max_positions, query_scale=float(beta)
    )


def _partial(values: ConfigFields, fields: RopeFields, head_dim: int) -> float | None:
    """The rotated part of a head as fields at the top level say it (MiniMax: `rotary_dim`)."""
    if values.raw("partial_rotary_factor") is not None:
        return values.number("partial_rotary_factor")
    if values.raw("rotary_dim") is not None:
        return values.count("rotary_dim", at_most=head_dim) / head_dim
    return fields.default_partial


def _kind(values: ConfigFields, fields: RopeFields, given: Mapping[str, Any]) -> RopeKind:
    name = given.get("rope_type", given.get("type", "default"))
    name = _ALIASES.get(name, name) if isinstance(name, str) else name
    if name == "mrope" and fields.mrope:
        name = "default"
    if name == "yarn" and fields.yarn_means_longrope:
        name = "longrope"
    if not isinstance(name, str) or name not in KINDS:
        raise BadModel(
            f"{values.where}: the rope type is not supported", value=name, limit=", ".join(KINDS)
        )
    return cast(RopeKind, name)


def _check_keys(values: ConfigFields, kind: str, given: Mapping[str, Any]) -> None:
    row = KINDS[kind]
    missing = sorted(row.required - given.keys())
    if missing:
        raise BadModel(f"{values.where}: rope type {kind} needs the field {missing[0]}")
    unknown = sorted(given.keys() - row.required - row.optional - _ALWAYS)
    if unknown:
        raise BadModel(
            f"{values.where}: rope type {kind} does not understand the field {unknown[0]}",
            value=given[unknown[0]],
        )


def _original(inner: ConfigFields, values: ConfigFields) -> int:
    # transformers prefers the top-level field (Phi-3 writes it there).
    outside = values.opt_count(_ORIGINAL)
    inside = inner.opt_count(_ORIGINAL)
    return outside or inside or values.count("max_position_embeddings")


def _default(rope: RopeSpec, inner: ConfigFields, values: ConfigFields) -> RopeSpec:
    return rope


def _linear(rope: RopeSpec, inner: ConfigFields, values: ConfigFields) -> RopeSpec:
    return msgspec.structs.replace(rope, factor=inner.number("factor"))


def _dynamic(rope: RopeSpec, inner: ConfigFields, values: ConfigFields) -> RopeSpec:
    return msgspec.structs.replace(
        rope,
        factor=inner.number("factor"),
        original_max_positions=values.count("max_position_embeddings"),
    )


def _llama3(rope: RopeSpec, inner: ConfigFields, values: ConfigFields) -> RopeSpec:
    return msgspec.structs.replace(
        rope,
        factor=inner.number("factor"),
        low_freq_factor=inner.number("low_freq_factor"),
        high_freq_factor=inner.number("high_freq_factor"),
        original_max_positions=_original(inner, values),
    )


def _yarn(rope: RopeSpec, inner: ConfigFields, values: ConfigFields) -> RopeSpec:
    original = _original(inner, values)
    factor = inner.opt_number("factor") or values.count("max_position_embeddings") / original
    return msgspec.structs.replace(
        rope,
        factor=factor,
        original_max_positions=original,
        beta_fast=inner.opt_number("beta_fast") or 32.0,
        beta_slow=inner.opt_number("beta_slow") or 1.0,
        attention_factor=inner.opt_number("attention_factor"),
        mscale=inner.opt_number("mscale"),
        mscale_all_dim=inner.opt_number("mscale_all_dim"),
        truncate=inner.flag("truncate") if "truncate" in inner else True,
    )


def _longrope(rope: RopeSpec, inner: ConfigFields, values: ConfigFields) -> RopeSpec:
    original = _original(inner, values)
    factor = inner.opt_number("factor") or values.count("max_position_embeddings") / original
    return msgspec.structs.replace(
        rope,
        factor=factor,
        original_max_positions=original,
        attention_factor=inner.opt_number("attention_factor"),
        short_factor=_factors(inner, "short_factor", rope.dim // 2),
        long_factor=_factors(inner, "long_factor", rope.dim // 2),
    )


def _factors(inner: ConfigFields, key: str, num: int) -> tuple[float, ...]:
    value = inner.raw(key)
    good = isinstance(value, list) and all(isinstance(f, int | float) and f > 0 for f in value)
    if not good or len(value) != num:
        raise inner.bad(key, f"{num} positive numbers, half of the rotated part of a head")
    return tuple(float(factor) for factor in value)


_FILL = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
