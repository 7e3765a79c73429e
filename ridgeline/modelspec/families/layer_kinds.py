"""Determines which layers use sliding-window attention, and which have experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ridgeline.errors import BadModel
from ridgeline.modelspec.families.config_fields import ConfigFields

FULL, SLIDING = "full_attention", "sliding_attention"
LINEAR = "linear_attention"
CHUNKED = "chunked_attention"
_LEGACY_KINDS = {"attention": FULL}
# Bounds memory: a corrupt file must not make the loader create millions of layers.
# The deepest published models have 1,000 (DeepNet).
MAX_LAYERS = 4096

LayerKinds = Callable[[ConfigFields], list[str]]


def num_layers(values: ConfigFields) -> int:
    """The number of layers, at most MAX_LAYERS."""
    return values.count("num_hidden_layers", at_most=MAX_LAYERS)


def all_full(values: ConfigFields) -> list[str]:
    """Full attention in every layer."""
    return [FULL] * num_layers(values)


def all_sliding_if_window(values: ConfigFields) -> list[str]:
    """Mistral, Phi-3, Mixtral: a window, if there is one, holds for every layer."""
    kind = FULL if values.raw("sliding_window") is None else SLIDING
    return [kind] * num_layers(values)


def all_sliding_if_used(values: ConfigFields) -> list[str]:
    """Qwen3-MoE in transformers: `use_sliding_window` turns the window on in every layer."""
    if not values.flag("use_sliding_window"):
        return all_full(values)
    if values.raw("max_window_layers") is not None:
        raise values.bad("max_window_layers", "absent where use_sliding_window is true")
    return all_sliding_if_window(values)


def sliding_from_layer(values: ConfigFields) -> list[str]:
    """Qwen2, Qwen3: with `use_sliding_window`, layers from `max_window_layers` on are windowed."""
    if values.raw("layer_types") is not None:
        return explicit(values)
    num = num_layers(values)
    first = num
    if values.flag("use_sliding_window") and values.raw("sliding_window") is not None:
        first = values.whole("max_window_layers")
    return [SLIDING if i >= first else FULL for i in range(num)]


def alternating(values: ConfigFields) -> list[str]:
    """Gemma 2: even layers are windowed, odd ones are not."""
    return explicit(values) if values.raw("layer_types") is not None else _every(values, 2)


def every_nth_full(values: ConfigFields) -> list[str]:
    """Gemma 3: one global layer after each `sliding_window_pattern` - 1 local ones."""
    if values.raw("layer_types") is not None:
        return explicit(values)
    key = "sliding_window_pattern"
    return _every(values, values.count(key if values.raw(key) is not None else f"_{key}"))


def every_nth_full_unless_explicit(values: ConfigFields, n: int) -> list[str]:
    """OLMo 3: every fourth layer is global where `layer_types` does not say otherwise."""
    return explicit(values) if values.raw("layer_types") is not None else _every(values, n)


def one_in_four_full_from_the_first(values: ConfigFields) -> list[str]:
    """CWM: `layer_types`, else layers 0, 4, 8, … are global."""
    if values.raw("layer_types") is not None:
        return explicit(values)
    return [SLIDING if i % 4 else FULL for i in range(num_layers(values))]


def sliding_if_window_unless_explicit(values: ConfigFields) -> list[str]:
    """Ministral: `layer_types`, else a window, if there is one, holds for every layer."""
    if values.raw("layer_types") is not None:
        return explicit(values)
    return all_sliding_if_window(values)


def full_unless_explicit(values: ConfigFields) -> list[str]:
    """Mellum: `layer_types`, else full attention in every layer."""
    return explicit(values) if values.raw("layer_types") is not None else all_full(values)


def sliding_after_first(values: ConfigFields) -> list[str]:
    """dots.llm1: `layer_types`, else a window, if there is one, from `max_window_layers` on."""
    if values.raw("layer_types") is not None:
        return explicit(values)
    if values.raw("sliding_window") is None or values.raw("max_window_layers") is None:
        return all_full(values)
    first = values.whole("max_window_layers")
    return [SLIDING if i >= first else FULL for i in range(num_layers(values))]


def sliding_by_pattern(values: ConfigFields) -> list[str]:
    """EXAONE 4, Cohere 2: `layer_types`, else a global layer per `sliding_window_pattern`."""
    if values.raw("layer_types") is not None:
        return explicit(values)
    if values.raw("sliding_window") is None:
        return all_full(values)
    return _every(values, values.count("sliding_window_pattern"))


def rotated_where_sliding(values: ConfigFields, kinds: list[str]) -> list[bool]:
    """EXAONE 4: global layers have no rotary embedding where the model has windows."""
    windowed = values.raw("sliding_window") is not None
    return [kind == SLIDING or not windowed for kind in kinds]


def rotated_where_sliding_only(values: ConfigFields, kinds: list[str]) -> list[bool]:
    """Cohere 2: global layers have no rotary embedding."""
    return [kind == SLIDING for kind in kinds]


def rotated_layers(values: ConfigFields) -> list[bool]:
    """SmolLM3: `no_rope_layers` (1: rotated), else all but every `no_rope_layer_interval`-th."""
    flags: Any = values.raw("no_rope_layers")
    num = num_layers(values)
    if flags is None or flags == []:
        interval = values.count("no_rope_layer_interval")
        return [(i + 1) % interval != 0 for i in range(num)]
    if not isinstance(flags, list) or len(flags) != num or any(x not in (0, 1) for x in flags):
        raise values.bad("no_rope_layers", f"a list of {num} numbers, each 0 or 1")
    return [bool(flag) for flag in flags]


def sliding_where_not_rotated(values: ConfigFields) -> list[str]:
    """SmolLM3: with `use_sliding_window`, `layer_types`, else the layers that are not rotated."""
    if not values.flag("use_sliding_window") or values.raw("sliding_window") is None:
        return all_full(values)
    if values.raw("layer_types") is not None:
        return explicit(values)
    return [FULL if rotated else SLIDING for rotated in rotated_layers(values)]


def every_nth_not_linear(values: ConfigFields) -> list[str]:
    """Qwen3-Next: `layer_types`, else attention in every `full_attention_interval`-th layer."""
    if values.raw("layer_types") is not None:
        return explicit(values, (FULL, LINEAR))
    interval = values.count("full_attention_interval")
    return [LINEAR if (i + 1) % interval else FULL for i in range(num_layers(values))]


def chunked_where_rotated(values: ConfigFields) -> list[str]:
    """Llama 4: `layer_types`, else the layers that are rotated attend within chunks."""
    if values.raw("layer_types") is not None:
        return explicit(values, (FULL, CHUNKED))
    has_chunks = values.raw("attention_chunk_size") is not None
    return [CHUNKED if on and has_chunks else FULL for on in rotated_layers(values)]


def explicit(values: ConfigFields, known: tuple[str, ...] = (FULL, SLIDING)) -> list[str]:
    """`layer_types`, one name per layer."""
    names: Any = values.raw("layer_types")
    num = num_layers(values)
    if not isinstance(names, list) or len(names) != num:
        raise values.bad("layer_types", f"a list of {num} names, one per layer")
    kinds = [_LEGACY_KINDS.get(str(name), str(name)) for name in names]
    for kind in kinds:
        if kind not in known:
            raise BadModel(
                f"{values.where}: layer_types has an unknown kind of layer",
                value=kind,
                limit=", ".join(known),
            )
    return kinds


def window_of(values: ConfigFields, kind: str) -> int | None:
    """The window W of a layer kind: a query sees W keys, including its own. None: no window."""
    if kind in (FULL, LINEAR, CHUNKED):
        return None
    if values.raw("sliding_window") is None:
        raise values.bad("sliding_window", "a positive integer, because some layers need a window")
    return values.count("sliding_window")


def sparse_layers(values: ConfigFields) -> list[bool]:
    """Qwen3-MoE: which layers are routed, by `decoder_sparse_step` and `mlp_only_layers`."""
    step = values.count("decoder_sparse_step")
    dense = values.raw("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(i, int) for i in dense):
        raise values.bad("mlp_only_layers", "a list of layer numbers")
    num = num_layers(values)
    return [i not in dense and (i + 1) % step == 0 for i in range(num)]


def sparse_by_list_or_step(values: ConfigFields) -> list[bool]:
    """Llama 4: `moe_layers`, else every `interleave_moe_layer_step`-th layer is routed."""
    num, routed = num_layers(values), values.raw("moe_layers")
    if routed is None:
        step = values.count("interleave_moe_layer_step")
        return [(i + 1) % step == 0 for i in range(num)]
    if not isinstance(routed, list) or not all(isinstance(i, int) for i in routed):
        raise values.bad("moe_layers", "a list of layer numbers")
    return [i in routed for i in range(num)]


def sparse_after_first(values: ConfigFields) -> list[bool]:
    """DeepSeek, GLM-4.5: all but the first `first_k_dense_replace` layers have experts."""
    first = values.whole("first_k_dense_replace")
    return [i >= first for i in range(num_layers(values))]


def sparse_by_type(values: ConfigFields) -> list[bool]:
    """GLM-4.7-Flash: `mlp_layer_types`, else all but the first `first_k_dense_replace` layers."""
    types: Any = values.raw("mlp_layer_types")
    num = num_layers(values)
    if types is None:
        return sparse_after_first(values)
    if not isinstance(types, list) or len(types) != num or not {*types} <= {"dense", "sparse"}:
        raise values.bad("mlp_layer_types", f'a list of {num} names, each "dense" or "sparse"')
    return [kind == "sparse" for kind in types]


def sparse_by_type_or_flag(values: ConfigFields) -> list[bool]:
    """K-EXAONE: `mlp_layer_types`, else `is_moe_layer`, one flag per layer."""
    flags: Any = values.raw("is_moe_layer")
    num = num_layers(values)
    if values.raw("mlp_layer_types") is not None or flags is None:
        return sparse_by_type(values)
    if not isinstance(flags, list) or len(flags) != num or any(x not in (0, 1) for x in flags):
        raise values.bad("is_moe_layer", f"a list of {num} flags")
    return [bool(flag) for flag in flags]


def all_full_by_type_list(values: ConfigFields) -> list[str]:
    """MiniMax M2: full attention, which an `attn_type_list` must say throughout (1)."""
    types: Any = values.raw("attn_type_list")
    num = num_layers(values)
    if types is not None and types != [1] * num:
        raise values.bad("attn_type_list", f"{num} times 1, which is full attention")
    return all_full(values)


def _every(values: ConfigFields, n: int) -> list[str]:
    num = num_layers(values)
    return [SLIDING if (i + 1) % n else FULL for i in range(num)]
