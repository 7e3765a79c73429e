"""What llama.cpp cannot say of a model is refused before anything is computed.

The header that would be written is read back, as llama.cpp understands it, from memory and without
weights: a model of which any part would be computed otherwise is refused, and the part is named.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from ridgeline.compress.writers.gguf_keys import WRITTEN
from ridgeline.errors import BadModel, CannotRun
from ridgeline.modelspec.checkpoints.gguf_header import parse_gguf
from ridgeline.modelspec.checkpoints.gguf_spec import spec_of_gguf
from ridgeline.modelspec.model import ModelSpec, RopeSpec
from ridgeline.modelspec.rope import attention_factor, inv_freq

_BIASED_OUTPUT = ("apertus", "ernie4_5", "gpt-oss", "granite", "llama")
_BIASED_MLP = ("granite", "gpt-oss", "llama")
_FIX = "use --format ridgeline"


def refuse_unread_biases(spec: ModelSpec) -> None:
    """Raise CannotRun for biases that llama.cpp has no place for in this architecture."""
    name = WRITTEN[spec.family]
    for layer in spec.layers:
        for where, biased, known in (
            ("the attention's output", layer.attention.o.bias, _BIASED_OUTPUT),
            ("feed-forward layers", layer.mlp.up.bias or layer.mlp.down.bias, _BIASED_MLP),
        ):
            if biased and name not in known:
                raise CannotRun(
                    f"llama.cpp reads no bias of {where} of this family", value=name, fix=_FIX
                )


def refuse_unread_layers(spec: ModelSpec) -> None:
    """Raise CannotRun for what llama.cpp takes only in models of other depths."""
    depth, attention = len(spec.layers), spec.layers[0].attention
    if attention.qk_norm_heads and depth < _NORMED_COHERE:
        raise CannotRun(
            "llama.cpp reads norms of q and k of this family only in larger models",
            value=f"{depth} layers",
            limit=f"{_NORMED_COHERE} layers",
            fix=_FIX,
        )
    if attention.latent is not None and attention.latent.q_down is None and depth not in _PLAIN_Q:
        raise CannotRun(
            "llama.cpp takes queries that are not compressed only in the small models",
            value=f"{depth} layers",
            limit=", ".join(f"{n} layers" for n in _PLAIN_Q),
            fix=_FIX,
        )

    delta = next((one.attention.delta for one in spec.layers if one.attention.delta), None)
    if delta is not None and delta.key_dim != delta.value_dim:
        raise CannotRun(
            "llama.cpp takes keys and values of delta nets to be of one size",
            value=f"{delta.key_dim} and {delta.value_dim}",
            fix=_FIX,
        )
    _refuse_unread_heads(spec)


def _refuse_unread_heads(spec: ModelSpec) -> None:
    """Raise CannotRun for sizes of heads, and for shared tables, that llama.cpp takes in other
    architectures only."""
    name, attention = WRITTEN[spec.family], spec.layers[0].attention
    width = attention.num_heads * attention.head_dim
    for where, holds, value in (
        (
            "as many heads of keys as of queries",
            attention.num_kv_heads == attention.num_heads or name not in _EQUAL_HEADS,
            f"{attention.num_kv_heads} and {attention.num_heads}",
        ),
        (
            "heads that together are as wide as the hidden state",
            width == spec.hidden_size or name not in _WHOLE_WIDTH,
            f"{width} and {spec.hidden_size}",
        ),
        (
            "a separate LM head",
            not spec.tied_embeddings or name not in _OWN_HEAD,
            "tied embeddings",
        ),
    ):
        if not holds:
            raise CannotRun(f"llama.cpp needs {where} in models of {name}", value=value, fix=_FIX)


_EQUAL_HEADS, _WHOLE_WIDTH = ("dots1", "olmoe"), ("chatglm", "olmoe")
_OWN_HEAD = ("dots1", "exaone-moe", "mellum", "olmoe")
_NORMED_COHERE = 64
_PLAIN_Q = (26, 27)


def refuse_lost(
    spec: ModelSpec, header: bytes, size: int, lists: Mapping[str, list[float]]
) -> None:
    """Raise CannotRun if the file would be read as another model.

    `header`: all that comes before the weights, which end at `size`; `lists`: the numbers of small
    tensors that belong to the metadata.
    """
    try:
        found = spec_of_gguf(parse_gguf(header, size, lists), spec.name)
    except BadModel as error:
        raise CannotRun(
            f"GGUF cannot say this of a model of the architecture {WRITTEN[spec.family]}: {error}",
            fix=_FIX,
        ) from error
    lost = _difference(_compared(spec), _compared(found))
    if lost is not None:
        where, ours, theirs = lost
        raise CannotRun(
            f"GGUF cannot say this of a model of the architecture {WRITTEN[spec.family]}: {where}",
            value=ours,
            limit=theirs,
            fix=_FIX,
        )


def _compared(spec: ModelSpec) -> dict[str, Any]:
    """What decides a model's answers, as plain values."""
    found: dict[str, Any] = _without_formats(msgspec.to_builtins(spec))
    for name in _NOT_COMPARED:
        found.pop(name, None)
    for own, layer in zip(found["layers"], spec.layers, strict=True):
        rope = layer.attention.rope
        if spec.family == "gpt_oss":  # llama.cpp rounds its limits, in the published files too
            rope = replace(rope, truncate=True)
        own["attention"]["rope"] = _rotation(rope, spec.max_positions)
    return found


def _without_formats(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_formats(v) for key, v in value.items() if key not in _OF_STORAGE}
    if isinstance(value, list | tuple):
        return [_without_formats(one) for one in value]
    return value


_OF_STORAGE = ("format", "table_format", "tiled")
"""How weights are stored; heads of delta nets are reordered on writing."""

_NOT_COMPARED = (
    "name", "family", "dtype", "stored_dtype", "kv_dtype", "embed_format", "rewrites",
    "norm_plus_one", "bos_token_id", "eos_token_ids",
)  # fmt: skip
"""Names and formats; gains are stored with their one, and the tokenizer is compared apart."""


def _rotation(rope: RopeSpec, longest: int) -> dict[str, Any]:
    """The rotation itself, which may be described in several ways."""
    growth = {
        "query_floor": rope.query_floor,
        "query_offset": rope.query_offset,
        "query_scale": rope.query_scale,
    }
    if not rope.dim:
        return {"dim": 0, **growth}
    return {
        "dim": rope.dim,
        **growth,
        "interleaved": rope.interleaved,
        "turned": rope.turned,
        "attention factor": attention_factor(rope),
        "frequencies": inv_freq(rope),
        "frequencies of long texts": inv_freq(rope, longest),
    }


def _difference(ours: Any, theirs: Any, where: str = "") -> tuple[str, Any, Any] | None:
    """The first place where two plain values differ, and the two; None if nowhere."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        keys = dict.fromkeys([*ours, *theirs])
        pairs = [(f"{where}.{key}".lstrip("."), ours.get(key), theirs.get(key)) for key in keys]
    elif isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        if len(ours) != len(theirs):
            return where, len(ours), len(theirs)
        pairs = [(f"{where}.{i}", a, b) for i, (a, b) in enumerate(zip(ours, theirs, strict=True))]
    elif isinstance(ours, float) and isinstance(theirs, int | float):
        return None if math.isclose(ours, theirs, rel_tol=1e-5) else (where, ours, theirs)
    else:
        return None if ours == theirs else (where, ours, theirs)
    found = (_difference(a, b, name) for name, a, b in pairs)
    return next((one for one in found if one is not None), None)
