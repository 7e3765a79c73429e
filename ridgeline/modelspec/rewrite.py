"""Techniques as rewrites of the spec, so that predictions and runs always agree.

Paths of linears: `layers.N.attention.q|k|v|o`, `layers.N.mlp.gate|up|down` (of every expert),
`layers.N.mlp.shared_gate|shared_up|shared_down`, `layers.N.router`, `layers.N.shared_router`,
`lm_head`; with latent attention also `layers.N.attention.q_down|kv_down`, and `layers.N.kv_up.k|v`
in place of k and v, which stay plain. Routers are not under `mlp` because rounding them changes
*which* experts run: a pattern for the MLP must not match them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType

import msgspec
from msgspec.structs import replace

from ridgeline.errors import BadInput, CannotRun
from ridgeline.modelspec.cost.kv_cache import why_not_int4_kv
from ridgeline.modelspec.format import (
    BF16,
    CODED_KV,
    DIGITS,
    FP8,
    INT4,
    INT8,
    NVFP4_WEIGHTS,
    SPARSE24,
    SPARSE24_INT8,
    WHOLE_KINDS,
    Format,
    dense,
)
from ridgeline.modelspec.model import (
    AttentionSpec,
    LayerSpec,
    LinearSpec,
    MlpSpec,
    ModelSpec,
    SharedExpertSpec,
)

OnLinear = Callable[[str, LinearSpec], LinearSpec]
_DTYPES = ("float32", "bfloat16", "float16")


class Quantization(msgspec.Struct, frozen=True, kw_only=True):
    """A named way to store weights: path globs of the linears, their format, and the purpose."""

    patterns: tuple[str, ...]
    format: Format
    why: str


QUANTIZATIONS: Mapping[str, Quantization] = MappingProxyType(
    {
        "int8": Quantization(
            patterns=("layers.*.attention.*", "layers.*.mlp.*"),
            format=INT8,
            why="one byte per weight, one scale per row, integer products",
        ),
        "int4": Quantization(
            patterns=("layers.*.attention.*", "layers.*.mlp.*"),
            format=INT4,
            why="half a byte per weight in groups of 128, integer products",
        ),
        "fp8": Quantization(
            patterns=("layers.*.attention.*", "layers.*.mlp.*"),
            format=FP8,
            why="8-bit floats (E4M3) with one scale per row, for FP8 tensor cores",
        ),
        "nvfp4": Quantization(
            patterns=("layers.*.attention.*", "layers.*.mlp.*"),
            format=NVFP4_WEIGHTS,
            why="4-bit floats (E2M1) with an E4M3 scale per 16, for GPUs; activations as they are",
        ),
        "sparse-24": Quantization(
            patterns=("layers.*.attention.*", "layers.*.mlp.*"),
            format=SPARSE24,
            why="two of four weights that are 2:4 sparse already, for sparse tensor cores",
        ),
        "sparse-24-int8": Quantization(
            patterns=("layers.*.attention.*", "layers.*.mlp.*"),
            format=SPARSE24_INT8,
            why="two of four weights that are 2:4 sparse already, in INT8, for CPUs with VBMI2",
        ),
        "bf16": Quantization(
            patterns=("*",),
            format=BF16,
            why="weights as the checkpoint stores them, float32 arithmetic, lossless",
        ),
    }
)


def rewrite_linears(spec: ModelSpec, pattern: str, format: Format, why: str) -> ModelSpec:
    """Store every linear whose path matches the glob `pattern` in `format`.

    Raises CannotRun if no linear matches: a rewrite that changes nothing is a mistake.
    """
    matched: list[str] = []

    def on_linear(path: str, linear: LinearSpec) -> LinearSpec:
        if not fnmatchcase(path, pattern):
            return linear
        matched.append(path)
        return replace(linear, format=format)

    out = map_linears(spec, on_linear)
    if not matched:
        raise CannotRun(
            f"no weight of {spec.name} matches the pattern",
            value=pattern,
            limit="layers.N.attention.q|k|v|o, layers.N.mlp.gate|up|down, layers.N.router, lm_head",
        )
    return _recorded(out, f"{pattern} -> {format.kind}: {why}")


def apply_formats(spec: ModelSpec, formats: Mapping[str, Format], why: str) -> ModelSpec:
    """`rewrite_linears` for several patterns. Raises CannotRun if weights are already quantised."""
    packed = [path for path, linear in linears(spec).items() if linear.format.kind != "dense"]
    if packed:
        raise CannotRun(
            f"{spec.name} is quantised already",
            value=packed[0],
            fix="use the unquantised checkpoint, or keep the format of this one",
        )
    for pattern, format in formats.items():
        spec = rewrite_linears(spec, pattern, format, why)
    return spec


def apply_quantization(spec: ModelSpec, name: str) -> ModelSpec:
    """Apply a named quantisation (`QUANTIZATIONS`). LM head and embeddings keep their format unless
    the quantisation's patterns match them."""
    if name not in QUANTIZATIONS:
        raise BadInput(
            "unknown quantisation", value=name, limit=f"known: {', '.join(QUANTIZATIONS)}"
        )
    chosen = QUANTIZATIONS[name]
    _check_stored(spec, chosen.format)
    return apply_formats(spec, dict.fromkeys(chosen.patterns, chosen.format), chosen.why)


def apply_lm_head(spec: ModelSpec, name: str) -> ModelSpec:
    """Store the LM head in the format of a named quantisation; tied embeddings keep their format.

    Raises CannotRun if the head is already quantised.
    """
    if name not in QUANTIZATIONS:
        raise BadInput(
            "unknown quantisation", value=name, limit=f"known: {', '.join(QUANTIZATIONS)}"
        )
    chosen = QUANTIZATIONS[name].format
    _check_stored(spec, chosen)
    if spec.lm_head.format.kind not in ("dense", chosen.kind):
        raise CannotRun(
            "the LM head is quantised already",
            value=spec.lm_head.format.kind,
            fix="leave out --lm-head-quantization",
        )
    return rewrite_linears(spec, "lm_head", chosen, "the head alone")


def with_activations(spec: ModelSpec, name: str) -> ModelSpec:
    """Multiply integer weights with activations of the precision `name` (a key of `DIGITS`).

    Raises CannotRun if no weight is an integer format: the others do not quantise activations.
    """
    if name not in DIGITS:
        raise BadInput("unknown activations", value=name, limit=f"known: {', '.join(DIGITS)}")
    matched: list[str] = []

    def on_linear(path: str, linear: LinearSpec) -> LinearSpec:
        if linear.format.kind not in WHOLE_KINDS:
            return linear
        matched.append(path)
        return replace(linear, format=replace(linear.format, digits=DIGITS[name]))

    out = map_linears(spec, on_linear)
    if not matched:
        raise CannotRun(
            "--activations needs integer weights, and this model has none",
            value=f"--activations {name}",
            fix="leave it out, or quantise the weights (--quantization int8, int4)",
        )
    return _recorded(out, f"activations -> {name}: asked for")


def _check_stored(spec: ModelSpec, format: Format) -> None:
    if format.kind == "bf16" and spec.stored_dtype != "bfloat16":
        raise CannotRun(
            "bf16 needs a bfloat16 checkpoint",
            value=spec.stored_dtype,
            limit="bfloat16",
            fix="leave out bf16, or use a bfloat16 checkpoint",
        )


def with_blocks_decoded(spec: ModelSpec) -> ModelSpec:
    """Decode weights in block formats to float32, for machines without kernels for them."""
    fmt = dense("float32")

    def on_linear(path: str, linear: LinearSpec) -> LinearSpec:
        return replace(linear, format=fmt) if linear.format.kind == "blocks" else linear

    table = spec.embed_format
    kept = None if table is not None and table.kind == "blocks" else table
    return replace(map_linears(spec, on_linear), embed_format=kept)


def with_dtype(spec: ModelSpec, dtype: str) -> ModelSpec:
    """Run in `dtype`: embeddings, norms, activations, dense weights, and the KV cache with them.

    Quantised weights keep their format. A KV cache whose dtype already differs from the spec's was
    configured explicitly and is kept.
    """
    _check_dtype(dtype, "dtype")
    fmt = dense(dtype)

    def on_linear(path: str, linear: LinearSpec) -> LinearSpec:
        return replace(linear, format=fmt) if linear.format.kind == "dense" else linear

    kv_dtype = dtype if spec.kv_dtype == spec.dtype else spec.kv_dtype
    out = replace(map_linears(spec, on_linear), dtype=dtype, kv_dtype=kv_dtype)
    changed = dtype != spec.dtype
    return _recorded(out, f"* -> {dtype}: stored as {spec.stored_dtype}") if changed else out


def extended(spec: ModelSpec, num_tokens: int) -> ModelSpec:
    """The spec of sequences of `num_tokens`, if its rotary embedding reaches beyond its context.

    Linear scaling by a factor reaches that many times the context: all positions are divided by it,
    however long the sequence is. Dynamic scaling does not: it rotates every key again whenever the
    sequence grows, and a key in the cache stays as it was computed. The spec is unchanged where the
    context does not need to grow, or cannot.
    """
    ropes = [layer.attention.rope for layer in dict.fromkeys(spec.layers)]
    if any(rope.kind != "linear" for rope in ropes):
        return spec
    reach = int(min(rope.factor for rope in ropes) * spec.max_positions)
    is_reached = spec.max_positions < num_tokens <= reach
    return replace(spec, max_positions=num_tokens) if is_reached else spec


def within_context(spec: ModelSpec, num_tokens: int) -> ModelSpec:
    """The spec of sequences of at most `num_tokens`: queries whose factor is 1 at all of their
    positions are not scaled."""

    def unscaled(layer: LayerSpec) -> LayerSpec:
        rope = layer.attention.rope
        if rope.query_floor is None or num_tokens - 1 + rope.query_offset >= rope.query_floor:
            return layer
        rope = replace(rope, query_floor=None, query_offset=0, query_scale=0.0)
        return replace(layer, attention=replace(layer.attention, rope=rope))

    new = {layer: unscaled(layer) for layer in dict.fromkeys(spec.layers)}
    return replace(spec, layers=tuple(new[layer] for layer in spec.layers))


def with_kv_dtype(spec: ModelSpec, dtype: str) -> ModelSpec:
    """Store keys and values in `dtype`: a float, or a format of `CODED_KV`.

    Raises CannotRun if the model's layers cannot be stored in INT4.
    """
    if dtype not in CODED_KV:
        _check_dtype(dtype, "KV cache dtype")
    if dtype == "int4" and (reason := why_not_int4_kv(spec)):
        raise CannotRun(
            f"a KV cache in INT4 cannot hold {spec.name}: {reason}",
            value="int4",
            fix=f"use --kv-cache-dtype {'bfloat16' if has_latent(spec) else 'int8'}",
        )
    return _recorded(replace(spec, kv_dtype=dtype), f"kv -> {dtype}: asked for")


def has_latent(spec: ModelSpec) -> bool:
    """Whether a layer keeps latent rows, which no coded format of the cache holds."""
    return any(layer.attention.latent is not None for layer in spec.layers)


def _check_dtype(dtype: str, what: str) -> None:
    if dtype not in _DTYPES:
        raise BadInput(f"unknown {what}", value=dtype, limit=", ".join(_DTYPES))


def _recorded(spec: ModelSpec, line: str) -> ModelSpec:
    return replace(spec, rewrites=(*spec.rewrites, line))


def linears(spec: ModelSpec) -> dict[str, LinearSpec]:
    """Every linear by its path (one expert stands for all of its layer)."""
    by_path: dict[str, LinearSpec] = {}

    def collect(path: str, linear: LinearSpec) -> LinearSpec:
        by_path[path] = linear
        return linear

    map_linears(spec, collect)
    return by_path


def map_linears(spec: ModelSpec, on_linear: OnLinear) -> ModelSpec:
    """The spec with each linear replaced by `on_linear(path, linear)`; equal layers stay shared."""
    same: dict[LayerSpec, LayerSpec] = {}
    layers = []
    for i, layer in enumerate(spec.layers):
        new = _map_layer(layer, f"layers.{i}", on_linear)
        layers.append(same.setdefault(new, new))
    return replace(spec, layers=tuple(layers), lm_head=on_linear("lm_head", spec.lm_head))


def _map_layer(layer: LayerSpec, path: str, on_linear: OnLinear) -> LayerSpec:
    return replace(
        layer,
        attention=_map_attention(layer.attention, f"{path}.attention", on_linear),
        mlp=_map_mlp(layer.mlp, path, on_linear),
    )


def _map_attention(attention: AttentionSpec, path: str, on_linear: OnLinear) -> AttentionSpec:
    latent = attention.latent
    if latent is not None:
        q_down = latent.q_down
        latent = replace(
            latent,
            kv_down=on_linear(f"{path}.kv_down", latent.kv_down),
            q_down=None if q_down is None else on_linear(f"{path}.q_down", q_down),
        )
        up = f"{path.removesuffix('.attention')}.kv_up"
        attention = replace(
            attention,
            k=_kept_plain(attention.k, on_linear(f"{up}.k", attention.k)),
            v=_kept_plain(attention.v, on_linear(f"{up}.v", attention.v)),
        )
        return replace(
            attention,
            latent=latent,
            q=on_linear(f"{path}.q", attention.q),
            o=on_linear(f"{path}.o", attention.o),
        )
    delta = attention.delta
    if delta is not None:  # b and a are small and decide like a router: no pattern rounds them
        parent = path.removesuffix(".attention")
        delta = replace(
            delta,
            z=on_linear(f"{path}.z", delta.z),
            b=on_linear(f"{parent}.delta_b", delta.b),
            a=on_linear(f"{parent}.delta_a", delta.a),
        )
    return replace(
        attention,
        latent=latent,
        delta=delta,
        q=on_linear(f"{path}.q", attention.q),
        k=on_linear(f"{path}.k", attention.k),
        v=on_linear(f"{path}.v", attention.v),
        o=on_linear(f"{path}.o", attention.o),
    )


def _kept_plain(old: LinearSpec, new: LinearSpec) -> LinearSpec:
    """`new` unless it is packed: latent attention multiplies these weights as plain numbers."""
    packed = ("int4", "int8", "int8_sparse24", "blocks", "float8_e4m3", "nvfp4", "sparse24")
    return old if new.format.kind in (*packed, "bf16", "fp32") else new


def _map_mlp(mlp: MlpSpec, path: str, on_linear: OnLinear) -> MlpSpec:
    up = on_linear(f"{path}.mlp.up", mlp.up)
    return replace(
        mlp,
        gate=on_linear(f"{path}.mlp.gate", mlp.gate) if mlp.gated else up,
        up=up,
        down=on_linear(f"{path}.mlp.down", mlp.down),
        router=on_linear(f"{path}.router", mlp.router) if mlp.router else None,
        shared=None if mlp.shared is None else _map_shared(mlp.shared, path, on_linear),
    )


def _map_shared(shared: SharedExpertSpec, path: str, on_linear: OnLinear) -> SharedExpertSpec:
    router = shared.router
    return SharedExpertSpec(
        gate=on_linear(f"{path}.mlp.shared_gate", shared.gate),
        up=on_linear(f"{path}.mlp.shared_up", shared.up),
        down=on_linear(f"{path}.mlp.shared_down", shared.down),
        router=None if router is None else on_linear(f"{path}.shared_router", router),
    )
