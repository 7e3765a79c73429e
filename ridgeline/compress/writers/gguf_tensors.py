"""Which tensors a GGUF file of a model holds, as llama.cpp's converter names and arranges them.

Most parts are one tensor each. The experts of a layer are one; some families have q, k and v, or
gate and up, in one; latent attention has the up-projection of keys transposed, head by head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor

from ridgeline.compress.writers.gguf_keys import WRITTEN, full_rope
from ridgeline.engine.checkpoints.family_layouts import XIELU_PARTS
from ridgeline.engine.checkpoints.gguf.weights import name_of
from ridgeline.engine.checkpoints.tensor_names import Part, parts
from ridgeline.modelspec.checkpoints.gguf_architectures.rows import ARCHITECTURES, Architecture
from ridgeline.modelspec.model import ModelSpec
from ridgeline.modelspec.rope import inv_freq

_DELTA = ("delta_q", "delta_k", "delta_v")
_FUSED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "phi3": {"attn_qkv": ("q", "k", "v"), "ffn_up": ("gate", "up")},
    "chatglm": {"ffn_up": ("gate", "up")},
    "glm4": {"ffn_up": ("gate", "up")},
    "qwen35": {"attn_qkv": _DELTA},
    "qwen35moe": {"attn_qkv": _DELTA},
    "qwen3next": {"attn_qkv": _DELTA, "ssm_ba": ("delta_b", "delta_a")},
}
"""Architectures with the rows of several parts in one tensor, in this order."""


class GgufEntry(NamedTuple):
    """A tensor of the file: one part, the parts of all experts in order, or rows of several parts.

    `half` is "k_up" or "v_up" for the tensors that hold the up-projection of latent attention.
    `values`: those of a tensor that is computed from the spec and holds no part.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    parts: tuple[Part, ...] = ()
    half: str = ""
    values: Tensor | None = None


def architecture(spec: ModelSpec) -> Architecture:
    """How llama.cpp stores the family."""
    return ARCHITECTURES[WRITTEN[spec.family]]


def tensor_entries(spec: ModelSpec, kind_of: Callable[[Part], str]) -> list[GgufEntry]:
    """The tensors of a model in the file's order; `kind_of` gives the type of a part's tensor."""
    entries, by_name = [], dict[str, list[Part]]()
    for part in parts(spec):
        if part.key in XIELU_PARTS:  # stands in the metadata
            continue
        if part.key == "kv_up":
            entries += _up_projections(spec, part, kind_of(part))
        else:
            by_name.setdefault(_name(spec, part), []).append(part)
    for name, inside in by_name.items():
        entries.append(GgufEntry(name, _shape(inside), kind_of(inside[0]), tuple(inside)))
    return entries + _frequency_factors(spec)


def _name(spec: ModelSpec, part: Part) -> str:
    fused = _FUSED.get(WRITTEN[spec.family], {})
    whole = next((name for name, keys in fused.items() if part.key in keys), None)
    if part.key == "q" and _compresses_queries(spec, part):
        whole = "attn_q_b"
    if whole is None or part.expert is not None:
        return name_of(part, architecture(spec))
    return f"blk.{part.layer}.{whole}.weight"


def alternated(values: list[Tensor], spec: ModelSpec, entry: GgufEntry) -> Tensor:
    """b and a of the delta nets of Qwen3-Next, whose rows alternate by key head."""
    layer = entry.parts[0].layer
    delta = None if layer is None else spec.layers[layer].attention.delta
    assert delta is not None
    groups = [value.unflatten(0, (delta.num_key_heads, -1)) for value in values]
    return torch.cat(groups, dim=1).flatten(0, 1)


def _compresses_queries(spec: ModelSpec, part: Part) -> bool:
    latent = None if part.layer is None else spec.layers[part.layer].attention.latent
    return latent is not None and latent.q_down is not None


def _shape(inside: list[Part]) -> tuple[int, ...]:
    first = inside[0]
    if first.expert is not None:
        return (len(inside), *first.shape)
    if first.key == "delta_conv":
        return first.shape[::2]
    return (sum(part.shape[0] for part in inside), *first.shape[1:])


def _up_projections(spec: ModelSpec, part: Part, kind: str) -> list[GgufEntry]:
    """Keys [heads, rank, size] and values [heads, size, rank]."""
    assert part.layer is not None
    attention, rank = spec.layers[part.layer].attention, part.shape[1]
    heads = attention.num_heads
    k_shape = heads, rank, attention.k.num_out // heads
    v_shape = heads, attention.v.num_out // heads, rank
    return [
        GgufEntry(name_of(Part(half, shape, part.layer), architecture(spec)), shape, kind,
                    (part,), half)
        for half, shape in (("k_up", k_shape), ("v_up", v_shape))
    ]  # fmt: skip


def _frequency_factors(spec: ModelSpec) -> list[GgufEntry]:
    """What llama.cpp divides rotary frequencies by."""
    rope = full_rope(spec)
    if rope.kind == "proportional":
        turned = int(rope.dim * rope.turned / 2)
        still = rope.dim // 2 - turned
        factors = {"rope_freqs.weight": torch.tensor([1.0] * turned + [_STILL] * still)}
    elif rope.kind == "longrope":
        lists = {"long": rope.long_factor, "short": rope.short_factor}
        factors = {f"rope_factors_{name}.weight": torch.tensor(own) for name, own in lists.items()}
    elif rope.kind == "llama3":
        plain, scaled = inv_freq(replace(rope, kind="default")), inv_freq(rope)
        own = torch.tensor(plain, dtype=torch.float64) / torch.tensor(scaled)
        factors = {"rope_freqs.weight": own.float()}
    else:
        return []
    return [
        GgufEntry(name, tuple(values.shape), "F32", values=values)
        for name, values in factors.items()
    ]


_STILL = 1e30
"""What frequencies of numbers that do not turn are divided by."""


def arranged_rows(value: Tensor, spec: ModelSpec, part: Part) -> Tensor:
    """Rows in llama.cpp's order. `value`: the numbers of a part, or the bytes of its rows.

    Its rotary embedding may want the halves of a head of q and k interleaved; value heads of the
    delta nets of Qwen3.5 are tiled: the first one of every key head, then the second.
    """
    key = part.key.partition(".")[0]
    if key.startswith("delta_") and part.layer is not None:
        return _tiled_heads(value, spec, part)
    if not architecture(spec).paired_rows or key not in ("q", "k") or part.layer is None:
        return value
    size = spec.layers[part.layer].attention.head_dim
    halves = value.view(-1, 2, size // 2, *value.shape[1:])
    return halves.transpose(1, 2).reshape(value.shape)


def _tiled_heads(value: Tensor, spec: ModelSpec, part: Part) -> Tensor:
    assert part.layer is not None
    delta = spec.layers[part.layer].attention.delta
    assert delta is not None
    if spec.family == "qwen3_next" or part.key in ("delta_q", "delta_k", "delta_gain"):
        return value
    start = 2 * delta.num_key_heads * delta.key_dim if part.key == "delta_conv" else 0

    def tiled(rows: Tensor) -> Tensor:
        groups = rows.reshape(delta.num_key_heads, delta.num_value_heads // delta.num_key_heads, -1)
        return groups.transpose(0, 1).reshape(rows.shape)

    if part.key == "delta_o":  # the heads are its inputs, in whole blocks
        times = delta.num_value_heads // delta.num_key_heads
        groups = value.view(len(value), delta.num_key_heads, times, -1)
        return groups.transpose(1, 2).reshape(value.shape)
    return torch.cat((value[:start], tiled(value[start:])))


def stored_values(value: Tensor, spec: ModelSpec, entry: GgufEntry, part: Part) -> Tensor:
    """The numbers of an unquantised part as the file has them."""
    if part.key.endswith("norm") and architecture(spec).gain_includes_one and spec.norm_plus_one:
        return value + 1
    if part.key == "delta_a_log":
        value = -value.exp()
    if part.key == "delta_conv":
        value = value[:, 0]
    if not entry.half:
        return arranged_rows(value, spec, part)
    heads, rank = entry.shape[0], part.shape[1]
    by_head = value.view(heads, -1, rank)
    if entry.half == "k_up":
        return by_head[:, : entry.shape[2]].transpose(1, 2)
    return by_head[:, -entry.shape[1] :]
