"""The measured operators of a model's step on one device of a layout.

Products are fused as engines do: q, k and v in one, gate and up in one. Matrices are split over tp
where engines split them (the down-projections of latent attention and the router are whole on every
device). The cached latent vectors are read by all heads of a device, and the products that absorb
their up-projections are counted as products of the projections' size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from ridgeline.modelspec.cost.parameters import count_layers
from ridgeline.modelspec.cost.step import RunGroup
from ridgeline.modelspec.model import AttentionSpec, LayerSpec, MlpSpec, ModelSpec
from ridgeline.plan.operators.tables import ExpertShape, HeadShape, OperatorTables

PRODUCT_DTYPES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "bfloat16": ("bfloat16",),
        "float16": ("bfloat16",),
        "float8_e4m3": ("fp8", "fp8_block"),
        "float8_block": ("fp8_block", "fp8"),
        "nvfp4": ("nvfp4",),
        "mxfp4": ("w4a16_mxfp4", "w4a8_mxfp4_mxfp8"),
    }
)
"""Our weight format → the tables' names, the first of which that has a shape counts."""
KV_DTYPES: Mapping[str, str] = MappingProxyType(
    {"bfloat16": "bfloat16", "float16": "bfloat16", "float8_e4m3": "fp8"}
)


class MeasuredParts(NamedTuple):
    """Seconds of the parts of a step; None where a shape was not measured."""

    products_s: float | None
    experts_s: float | None
    head_s: float | None
    decode_s: float | None
    prompt_s: float | None
    collectives_s: float | None


class Product(NamedTuple):
    """A matrix on one device."""

    num_out: int
    num_in: int


class StepOperators(msgspec.Struct, frozen=True, kw_only=True):
    """A model on the devices of a layout: `tp`, `ep` and `num_attention` groups of sequences.

    `dense_dtype` is the weight format of the linears that every token uses, `expert_dtype` that of
    routed experts, `head_dtype` that of the LM head.
    """

    tables: OperatorTables
    spec: ModelSpec
    tp: int
    ep: int
    num_attention: int
    dense_dtype: str
    expert_dtype: str
    head_dtype: str
    kv_dtype: str

    def parts(self, groups: Sequence[RunGroup], num_sampled: int) -> MeasuredParts:
        """The measured parts of a step of one attention group: groups of (number of runs, new
        tokens, tokens computed before)."""
        num_tokens = sum(count * new for count, new, _ in groups)
        layers = count_layers(self.spec)
        return MeasuredParts(
            products_s=self._products_s(layers, num_tokens),
            experts_s=self._experts_s(layers, num_tokens),
            head_s=self._head_s(num_sampled),
            decode_s=self._attention_s(layers, [g for g in groups if g[1] == 1 and g[2] > 0]),
            prompt_s=self._attention_s(layers, [g for g in groups if not (g[1] == 1 and g[2] > 0)]),
            collectives_s=self._collectives_s(num_tokens),
        )

    def _product_s(self, dtype: str, rows: int, num_out: int, num_in: int) -> float | None:
        for name in PRODUCT_DTYPES.get(dtype, ()):
            seconds = self.tables.product_s(name, rows, num_out, num_in)
            if seconds is not None:
                return seconds
        return None

    def _products_s(self, layers: Mapping[LayerSpec, int], num_tokens: int) -> float | None:
        total = 0.0
        for layer, count in layers.items():
            for product in (*_attention_products(layer.attention, self.tp), *self._mlp(layer.mlp)):
                seconds = self._product_s(
                    self.dense_dtype, num_tokens, product.num_out, product.num_in
                )
                if seconds is None:
                    return None
                total += count * seconds
        return total

    def _mlp(self, mlp: MlpSpec) -> list[Product]:
        if mlp.num_experts:
            router = [] if mlp.router is None else [Product(mlp.router.num_out, mlp.router.num_in)]
            shared = mlp.shared
            if shared is None:
                return router
            up, down = shared.gate.num_out + shared.up.num_out, shared.down
        else:
            router = []
            up = mlp.up.num_out + (mlp.gate.num_out if mlp.gated else 0)
            down = mlp.down
        return [
            *router,
            Product(up // self.tp, self.spec.hidden_size),
            Product(down.num_out, down.num_in // self.tp),
        ]

    def _experts_s(self, layers: Mapping[LayerSpec, int], num_tokens: int) -> float | None:
        total = 0.0
        for layer, count in layers.items():
            mlp = layer.mlp
            if not mlp.num_experts:
                continue
            shape = ExpertShape(
                hidden_size=self.spec.hidden_size,
                intermediate_size=mlp.up.num_out,
                experts_per_token=mlp.experts_per_token,
                num_experts=mlp.num_experts,
                tp=self.tp * self.num_attention // self.ep,
                ep=self.ep,
            )
            times = (
                self.tables.experts_s(name, num_tokens * self.num_attention, shape)
                for name in PRODUCT_DTYPES.get(self.expert_dtype, ())
            )
            seconds = next((time for time in times if time is not None), None)
            if seconds is None:
                return None
            total += count * seconds
        return total

    def _head_s(self, num_sampled: int) -> float | None:
        if not num_sampled:
            return 0.0
        spec = self.spec
        return self._product_s(
            self.head_dtype, num_sampled, spec.vocab_size // self.tp, spec.hidden_size
        )

    def _attention_s(
        self, layers: Mapping[LayerSpec, int], groups: Sequence[RunGroup]
    ) -> float | None:
        kv_dtype = KV_DTYPES.get(self.kv_dtype)
        if kv_dtype is None:
            return None
        total = 0.0
        for layer, count in layers.items():
            shape = _head_shape(layer.attention, self.tp)
            for runs, new, done in groups:
                if not runs:
                    continue
                if new == 1 and done > 0:
                    seconds = self.tables.decode_attention_s(kv_dtype, shape, runs, done + 1)
                else:
                    seconds = self.tables.prompt_attention_s(kv_dtype, shape, new, done)
                    seconds = None if seconds is None else seconds * runs
                if seconds is None:
                    return None
                total += count * seconds
        return total

    def _collectives_s(self, num_tokens: int) -> float | None:
        """An all-reduce over tp after attention and one over the experts' devices after the MLP,
        in every layer."""
        total, row_bytes = 0.0, 2 * self.spec.hidden_size
        for number, tokens in (
            (self.tp, num_tokens),
            (self.tp * self.num_attention, num_tokens * self.num_attention),
        ):
            if number > 1:
                seconds = self.tables.all_reduce_s(number, row_bytes * tokens)
                if seconds is None:
                    return None
                total += len(self.spec.layers) * seconds
        return total


def _attention_products(attention: AttentionSpec, tp: int) -> list[Product]:
    output = Product(attention.o.num_out, attention.o.num_in // tp)
    latent = attention.latent
    if latent is None:
        kv_parts = min(tp, max(1, attention.num_kv_heads))
        keys = 0 if attention.shares_kv else attention.k.num_out + attention.v.num_out
        fused = attention.q.num_out // tp + keys // kv_parts
        return [Product(fused, attention.q.num_in), output]
    down = latent.kv_down.num_out + (0 if latent.q_down is None else latent.q_down.num_out)
    return [
        Product(down, latent.kv_down.num_in),
        *(Product(up.num_out // tp, up.num_in) for up in (attention.q, attention.k, attention.v)),
        output,
    ]


def _head_shape(attention: AttentionSpec, tp: int) -> HeadShape:
    if attention.latent is not None:
        return HeadShape(max(1, attention.num_heads // tp), 0, 0, 0)
    return HeadShape(
        num_heads=max(1, attention.num_heads // tp),
        num_kv_heads=max(1, attention.num_kv_heads // tp),
        head_dim=attention.head_dim,
        window=attention.window or 0,
    )
