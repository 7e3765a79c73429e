"""A step's work by operator: FLOPs and bytes of each, from the model's spec alone.

The conventions are those of `ridgeline.modelspec.cost.step`, and the parts add up to its totals:
matrix products and attention have FLOPs (a multiply-add is 2); weights are read once per step,
visible keys and values once per sequence. Row operators (norms, activation, rotation) have
negligible FLOPs; they read and write rows that the previous operator has just produced. `row_bytes`
counts those, each row once in and once out. In small steps they stay in cache, so the totals of
`step` leave them out.

A profile names a fused operator by its parts, joined by "+".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from types import MappingProxyType

import msgspec

from ridgeline.modelspec.cost import Shape, layer_kv_bytes, norm_params, visible
from ridgeline.modelspec.cost.parameters import (
    attention_linears,
    mlp_linears,
    num_norms,
    shared_linears,
    side_linears,
)
from ridgeline.modelspec.cost.step import delta_flops, flops_per_pair
from ridgeline.modelspec.format import BYTES_OF_DTYPE
from ridgeline.modelspec.layer_inputs import model_linears
from ridgeline.modelspec.model import AttentionSpec, DeltaSpec, LinearSpec, MlpSpec, ModelSpec

PARTS = MappingProxyType(
    {
        "embed": "embedding",
        "norm": "norms",
        "residual": "residual adds",
        "quantise": "quantising of rows",
        "qkv": "q, k, v linears",
        "rope": "RoPE",
        "kv_write": "KV write",
        "attention": "attention",
        "delta": "delta rule",
        "o": "output linear",
        "gate_up": "gate and up linears",
        "activation": "activation",
        "down": "down linear",
        "router": "router",
        "experts": "experts",
        "shared_expert": "shared expert",
        "lm_head": "LM head",
        "layer_inputs": "layer inputs",
        "sampling": "sampling",
    }
)
"""Part of a step → its display name."""


class OperatorWork(msgspec.Struct, frozen=True, kw_only=True):
    """FLOPs and bytes of one operator.

    `flops` counts every digit of the activations (`Format.digits`). `memory_bytes`: weights, keys
    and values. `row_bytes`: activations. `rate`: the key of the arithmetic peak that bounds the
    operator (`ridgeline.hardware.ceilings`), "" if its FLOPs are negligible.
    """

    flops: float = 0.0
    memory_bytes: float = 0.0
    row_bytes: float = 0.0
    rate: str = ""

    def __add__(self, other: OperatorWork) -> OperatorWork:
        return OperatorWork(
            flops=self.flops + other.flops,
            memory_bytes=self.memory_bytes + other.memory_bytes,
            row_bytes=self.row_bytes + other.row_bytes,
            rate=self.rate if self.flops >= other.flops else other.rate,
        )

    def scaled(self, factor: float) -> OperatorWork:
        return OperatorWork(
            flops=factor * self.flops,
            memory_bytes=factor * self.memory_bytes,
            row_bytes=factor * self.row_bytes,
            rate=self.rate,
        )


NO_WORK = OperatorWork()


def describe_operator(name: str) -> str:
    """The display name of a profile's operator."""
    return ", ".join(PARTS.get(part, part) for part in name.split("+"))


def work_of(name: str, parts: dict[str, OperatorWork]) -> OperatorWork:
    """Total work of a profile's operator; parts that the model does not have count as zero."""
    return total_work(parts.get(part, NO_WORK) for part in name.split("+"))


def total_work(works: Iterable[OperatorWork]) -> OperatorWork:
    total = NO_WORK
    for work in works:
        total = total + work
    return total


def operator_work(
    spec: ModelSpec, shapes: Sequence[Shape], num_sampled: int
) -> dict[str, OperatorWork]:
    """Work of each part in one step of runs `shapes`; `num_sampled` positions are sampled."""
    num_tokens = sum(new for new, _ in shapes)
    by_part: dict[str, OperatorWork] = _ends(spec, num_tokens, num_sampled)
    for layer, count in Counter(spec.layers).items():
        rows = _Rows(spec, num_tokens)
        parts = {**_attention(rows, layer.attention, shapes), **_mlp(rows, layer.mlp)}
        parts["layer_inputs"] = rows.linears(*side_linears(layer))
        parts["norm"] = rows.through(spec.hidden_size, num_norms(layer))
        parts["residual"] = rows.moved(3 * 2 * spec.hidden_size)
        for name, work in parts.items():
            by_part[name] = by_part.get(name, NO_WORK) + work.scaled(count)
    gains = norm_params(spec) * BYTES_OF_DTYPE[spec.dtype]
    by_part["norm"] += OperatorWork(memory_bytes=gains)
    return {name: work for name, work in by_part.items() if work != NO_WORK}


def _ends(spec: ModelSpec, num_tokens: int, num_sampled: int) -> dict[str, OperatorWork]:
    """Work before the first layer and after the last one."""
    head, rows = spec.lm_head, _Rows(spec, num_tokens)
    return {
        "embed": rows.moved(2 * spec.hidden_size),
        "layer_inputs": rows.linears(*model_linears(spec).values()),
        "norm": rows.through(spec.hidden_size, 1),
        "lm_head": rows.linear(head, num_sampled) if num_sampled else NO_WORK,
        "sampling": OperatorWork(row_bytes=4.0 * num_sampled * spec.vocab_size),
    }


class _Rows:
    """Work on a step's rows."""

    def __init__(self, spec: ModelSpec, num_tokens: int) -> None:
        self.spec, self.num_tokens = spec, num_tokens
        self.width = BYTES_OF_DTYPE[spec.dtype]

    def moved(self, numbers: float) -> OperatorWork:
        """Read or write `numbers` values of each row."""
        return OperatorWork(row_bytes=self.num_tokens * numbers * self.width)

    def through(self, size: int, times: int) -> OperatorWork:
        """Read and write a row of `size` values, `times` times."""
        return self.moved(2 * times * size)

    def linear(self, linear: LinearSpec, num_rows: float) -> OperatorWork:
        return OperatorWork(
            flops=2.0 * num_rows * linear.num_out * linear.num_in * linear.format.digits,
            memory_bytes=linear.nbytes,
            rate=rate_of(linear),
        )

    def linears(self, *linears: LinearSpec) -> OperatorWork:
        return total_work(self.linear(linear, self.num_tokens) for linear in linears)


def rate_of(linear: LinearSpec) -> str:
    """The key of the arithmetic peak that bounds a product.

    4-bit weights use different instructions from 8-bit ones; 8-bit products are widened to 16 bits
    on CPUs without a byte dot product, hence "int16".
    """
    kind, dtype = linear.format.kind, linear.format.activations
    if kind == "bf16" and dtype == "float32":
        return "bf16"
    if kind == "int4" or (kind == "blocks" and linear.format.bits == 4):
        return "int4"
    return "int16" if dtype == "int8" else dtype


def _attention(
    rows: _Rows, attention: AttentionSpec, shapes: Sequence[Shape]
) -> dict[str, OperatorWork]:
    if attention.delta is not None:
        return _delta(rows, attention, attention.delta, len(shapes))
    _, span = visible(shapes, attention.window)
    decodes = [shape for shape in shapes if shape[0] == 1]
    prompts = [shape for shape in shapes if shape[0] != 1]
    in_prompt, in_decode = flops_per_pair(attention)
    flops = in_prompt * visible(prompts, attention.window)[0]
    flops += in_decode * visible(decodes, attention.window)[0]
    per_token = layer_kv_bytes(attention, rows.spec.kv_dtype)
    turned = attention.num_heads + attention.num_kv_heads
    return {
        "qkv": rows.linears(*attention_linears(attention)[:-1]),
        "rope": rows.moved(2 * turned * attention.rope.dim),
        "kv_write": OperatorWork(memory_bytes=per_token * rows.num_tokens),
        "attention": OperatorWork(
            flops=flops,
            memory_bytes=per_token * span,
            rate=_attention_rate(rows.spec),
        ),
        "quantise": rows.through(attention.o.num_in, 1),
        "o": rows.linears(attention.o),
    }


def _delta(
    rows: _Rows, attention: AttentionSpec, delta: DeltaSpec, num_runs: int
) -> dict[str, OperatorWork]:
    """A gated delta net: each run reads and writes its state once."""
    return {
        "qkv": rows.linears(attention.q, attention.k, attention.v, delta.z, delta.b, delta.a),
        "delta": OperatorWork(
            flops=float(delta_flops(delta) * rows.num_tokens),
            memory_bytes=2.0 * 4 * delta.state_size * num_runs,
            rate="float32",
        ),
        "o": rows.linears(attention.o),
    }


def _attention_rate(spec: ModelSpec) -> str:
    """The key of the arithmetic peak that bounds attention, by the dtypes of model and KV cache."""
    if spec.kv_dtype == "int8":
        return "int16"
    return "bf16_kv" if (spec.dtype, spec.kv_dtype) == ("float32", "bfloat16") else spec.dtype


def _mlp(rows: _Rows, mlp: MlpSpec) -> dict[str, OperatorWork]:
    if mlp.num_experts:
        return _routed(rows, mlp)
    return {
        "gate_up": rows.linears(*mlp_linears(mlp)[:-1]),
        "activation": rows.moved((3 if mlp.gated else 2) * mlp.up.num_out),
        "down": rows.linears(mlp.down),
    }


def _routed(rows: _Rows, mlp: MlpSpec) -> dict[str, OperatorWork]:
    """Router and experts; bytes are those of the distinct experts expected to be read."""
    one = rows.linears(*mlp_linears(mlp))
    missed = (1 - mlp.experts_per_token / mlp.num_experts) ** rows.num_tokens
    experts = OperatorWork(
        flops=mlp.experts_per_token * one.flops,
        memory_bytes=one.memory_bytes * mlp.num_experts * (1 - missed),
        rate=one.rate,
    )
    router = NO_WORK if mlp.router is None else rows.linears(mlp.router)
    return {
        "router": router,
        "experts": experts,
        "shared_expert": rows.linears(*shared_linears(mlp)),
    }
