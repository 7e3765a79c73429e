"""The figures that `ridgeline inspect` prints, as plain data."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import msgspec

from ridgeline.modelspec import cost
from ridgeline.modelspec.cost.adapters import adapter_params
from ridgeline.modelspec.format import Format
from ridgeline.modelspec.model import LayerSpec, ModelSpec
from ridgeline.modelspec.rewrite import linears

CONTEXTS = (1024, 8192)
LORA_RANK = 16


class InspectRow(msgspec.Struct, frozen=True):
    """One quantity, its exact value in `unit` (B, FLOP, params, tokens, FLOP/B), and a note."""

    section: str
    name: str
    value: float | int | str
    unit: str = ""
    note: str = ""


class LayerGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Equal layers: their count, and the cost of each."""

    num_layers: int
    numbers: str
    attention: str
    mlp: str
    params: int
    weight_bytes: int
    linear_flops_per_token: int
    attention_flops_per_key: int
    kv_bytes_per_token: int


def inspect_table(spec: ModelSpec) -> list[InspectRow]:
    """Parameters, FLOPs per token, weight and KV bytes, and arithmetic intensity."""
    return [
        *_shape(spec),
        *_params(spec),
        *_weights(spec),
        *_flops(spec),
        *_kv(spec),
        *_intensity(spec),
    ]


def layer_groups(spec: ModelSpec) -> list[LayerGroup]:
    """One row per kind of layer."""
    numbers: dict[LayerSpec, list[int]] = {}
    for i, layer in enumerate(spec.layers):
        numbers.setdefault(layer, []).append(i)
    return [_group(spec, layer, found) for layer, found in numbers.items()]


def _group(spec: ModelSpec, layer: LayerSpec, numbers: list[int]) -> LayerGroup:
    one = cost.cost_model(msgspec.structs.replace(spec, layers=(layer,)))
    none = cost.cost_model(msgspec.structs.replace(spec, layers=()))
    experts = sum(group.num_experts * group.expert_bytes for group in one.experts)
    return LayerGroup(
        num_layers=len(numbers),
        numbers=_ranges(numbers),
        attention=_attention_words(layer),
        mlp=_mlp_words(layer),
        params=cost.layer_params(layer),
        weight_bytes=int(one.fixed_weight_bytes - none.fixed_weight_bytes + experts),
        linear_flops_per_token=one.linear_flops_per_token,
        attention_flops_per_key=one.windows[0].flops_per_pair,
        kv_bytes_per_token=one.windows[0].kv_bytes_per_token,
    )


def _attention_words(layer: LayerSpec) -> str:
    a = layer.attention
    if a.delta is not None:
        sizes = f"{a.delta.key_dim}x{a.delta.value_dim}"
        return f"gated delta net, {a.delta.num_value_heads} states of {sizes}"
    shared = f"{a.num_kv_heads} KV"
    if a.latent is not None:
        shared = f"one latent of {a.latent.rank} + {a.latent.rope_dim}"
    parts = [f"{a.num_heads} heads of {a.head_dim}, {shared}"]
    parts += ["parallel to the MLP"] if layer.parallel else []
    parts += [f"window {a.window}"] if a.window else []
    parts += [f"chunks of {a.chunk}"] if a.chunk else []
    parts += [f"qk-norm{' over all heads' if a.qk_norm_rows else ''}"] if a.qk_norm else []
    parts += [f"softcap {a.softcap:g}"] if a.softcap else []
    parts += ["no rope"] if not a.rope.dim else []
    parts += [f"rope {a.rope.kind}"] if a.rope.dim and a.rope.kind != "default" else []
    return ", ".join(parts)


def _mlp_words(layer: LayerSpec) -> str:
    m = layer.mlp
    size = f"{m.up.num_out} {m.activation}{'' if m.gated else ', no gate'}"
    if not m.num_experts:
        return size
    shared = "" if m.shared is None else f", shared {m.shared.up.num_out}"
    return f"{m.experts_per_token} of {m.num_experts} experts of {size}{shared}"


def _ranges(numbers: list[int]) -> str:
    """Layer numbers in compact form: "0-3, 5", or "0-24 by 2" for a regular stride."""
    steps = {b - a for a, b in pairwise(numbers)}
    if len(numbers) == 1:
        return str(numbers[0])
    if len(steps) == 1:
        step = steps.pop()
        return f"{numbers[0]}-{numbers[-1]}" + (f" by {step}" if step > 1 else "")
    parts: list[list[int]] = []
    for n in numbers:
        if parts and parts[-1][-1] == n - 1:
            parts[-1].append(n)
        else:
            parts.append([n])
    words = [str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts]
    return ", ".join(words[:4]) + (", …" if len(words) > 4 else "")


def _shape(spec: ModelSpec) -> list[InspectRow]:
    tied = "one table for both" if spec.tied_embeddings else "two tables"
    rows = [
        InspectRow("shape", "family", spec.family),
        InspectRow("shape", "layers", len(spec.layers)),
        InspectRow("shape", "hidden size", spec.hidden_size),
        InspectRow(
            "shape", "vocabulary", spec.vocab_size, "tokens", f"embedding and LM head: {tied}"
        ),
        InspectRow("shape", "context", spec.max_positions, "tokens"),
        InspectRow("shape", "stored as", spec.stored_dtype),
        InspectRow("shape", "run as", spec.dtype, "", f"KV cache {spec.kv_dtype}"),
    ]
    return rows + [InspectRow("shape", "rewrite", line) for line in spec.rewrites]


def _params(spec: ModelSpec) -> list[InspectRow]:
    total, active = cost.num_params(spec), cost.num_active_params(spec)
    rows = [InspectRow("parameters", "all", total, "params")]
    if active != total:
        rows.append(
            InspectRow("parameters", "used by one token", active, "params", "chosen experts only")
        )
    return rows


def _weights(spec: ModelSpec) -> list[InspectRow]:
    by_format: Counter[str] = Counter()
    found = linears(spec)
    for path, linear in found.items():
        times = _num_experts(spec, path) if ".mlp." in path else 1
        by_format[_format_name(linear.format)] += times * linear.nbytes
    rows = [
        InspectRow("weights", f"linears as {name}", size, "B") for name, size in by_format.items()
    ]
    read = cost.weight_bytes(spec, 1)
    if params := adapter_params(spec, LORA_RANK):
        note = f"rank {LORA_RANK} on every linear, bfloat16"
        rows.append(InspectRow("weights", "each LoRA adapter", 2 * params, "B", note))
    return [
        *rows,
        InspectRow("weights", "resident in memory", cost.resident_weight_bytes(spec), "B"),
        InspectRow("weights", "read per decode step", read, "B", "one sequence"),
    ]


def _num_experts(spec: ModelSpec, path: str) -> int:
    if ".mlp.shared_" in path:
        return 1
    return max(1, spec.layers[int(path.split(".")[1])].mlp.num_experts)


def _format_name(format: Format) -> str:
    if format.kind == "blocks":
        return f"int{format.bits:g} g{format.group_size}"
    return format.activations if format.kind == "dense" else format.kind


def _flops(spec: ModelSpec) -> list[InspectRow]:
    model = cost.cost_model(spec)
    pair = sum(group.flops_per_pair for group in model.windows)
    return [
        InspectRow(
            "work per token", "linears", model.linear_flops_per_token, "FLOP", "every token"
        ),
        InspectRow("work per token", "LM head", model.head_flops, "FLOP", "sampled tokens only"),
        InspectRow("work per token", "attention", pair, "FLOP", "per visible key"),
        *[_prefill_row(spec, model, n) for n in _contexts(spec)],
        *[_decode_row(spec, model, n) for n in _contexts(spec)],
    ]


def _prefill_row(spec: ModelSpec, model: cost.CostModel, length: int) -> InspectRow:
    work = cost.prefill_work(model, length)
    share = work.attention_flops / work.flops
    name = f"prefill of {length:,}"
    return InspectRow("work per token", name, work.flops / length, "FLOP", f"attention {share:.0%}")


def _decode_row(spec: ModelSpec, model: cost.CostModel, length: int) -> InspectRow:
    work = cost.decode_work(model, 1, length - 1)
    share = work.attention_flops / work.flops
    return InspectRow(
        "work per token", f"decode at {length:,}", work.flops, "FLOP", f"attention {share:.0%}"
    )


def _contexts(spec: ModelSpec) -> list[int]:
    return [*[n for n in CONTEXTS if n < spec.max_positions], spec.max_positions]


def _kv(spec: ModelSpec) -> list[InspectRow]:
    rows = [InspectRow("KV cache", "per token", cost.kv_bytes_per_token(spec), "B", spec.kv_dtype)]
    for n in _contexts(spec):
        held, readable = cost.held_kv_bytes(spec, n), cost.kv_bytes(spec, n)
        inside = "" if held == readable else f", {readable:,} B of it within windows"
        rows.append(InspectRow("KV cache", f"at {n:,} tokens", held, "B", f"one sequence{inside}"))
    return rows


def _intensity(spec: ModelSpec) -> list[InspectRow]:
    model = cost.cost_model(spec)
    length = min(1024, spec.max_positions)
    rows = [
        InspectRow(
            "intensity",
            f"prefill of {length:,}",
            cost.prefill_work(model, length).intensity,
            "FLOP/B",
        )
    ]
    for batch in (1, 8, 64):
        work = cost.decode_work(model, batch, length - 1)
        rows.append(
            InspectRow("intensity", f"decode, {batch} at {length:,}", work.intensity, "FLOP/B")
        )
    return rows
