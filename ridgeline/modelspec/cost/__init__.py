"""What a model costs: parameters, bytes and FLOPs, from its spec alone.

Conventions. One multiply-add is 2 FLOPs. Only matrix products and attention are counted: norms,
activations and softmax are below 1 % of any shape here. Attention over `n` keys costs
4·n·heads·head_dim (scores and values). A product whose activations are taken in several digits
(`Format.digits`) counts as often: that many are computed. Bytes are the least that must move: each
weight read once per step, each visible key and value read once per sequence, each new one written
once. Routed layers read the experts that a step's tokens are expected to touch under even routing,
E·(1 - (1 - k/E)^B). The LM head runs for sampled positions only.

`CostModel` holds what is constant for a spec, so that one step costs microseconds to price; the
functions below take a spec or a ready CostModel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from ridgeline.modelspec.format import BYTES_OF_DTYPE, KV_SCALE_BYTES
from ridgeline.modelspec.model import AttentionSpec, LayerSpec, LinearSpec, MlpSpec, ModelSpec

LARGE_PARAMS = 1 << 26
"""Of a model that no cache holds, in whatever format: the fewest bytes are the fastest."""
Shape = tuple[int, int]
"""(new tokens, tokens already computed) of one run."""


class StepWork(msgspec.Struct, frozen=True, kw_only=True):
    """One step's cost. `attention_flops` is the part of `flops` that grows with the context."""

    flops: float
    attention_flops: float
    weight_bytes: float
    kv_read_bytes: float
    kv_write_bytes: float

    @property
    def bytes(self) -> float:
        """Everything that moves."""
        return self.weight_bytes + self.kv_read_bytes + self.kv_write_bytes

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes

    def __add__(self, other: StepWork) -> StepWork:
        return StepWork(
            flops=self.flops + other.flops,
            attention_flops=self.attention_flops + other.attention_flops,
            weight_bytes=self.weight_bytes + other.weight_bytes,
            kv_read_bytes=self.kv_read_bytes + other.kv_read_bytes,
            kv_write_bytes=self.kv_write_bytes + other.kv_write_bytes,
        )


class WindowGroup(msgspec.Struct, frozen=True, kw_only=True):
    """All layers that see the same window, summed: FLOPs per query-key pair, bytes per key."""

    window: int | None
    flops_per_pair: int
    kv_bytes_per_token: int


class ExpertGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Routed layers alike in experts, summed over the layers: bytes of ONE expert of each."""

    num_experts: int
    experts_per_token: int
    expert_bytes: float

    def expected_bytes(self, num_tokens: int) -> float:
        """Bytes of the distinct experts that `num_tokens` tokens are expected to choose."""
        missed = (1 - self.experts_per_token / self.num_experts) ** num_tokens
        return self.expert_bytes * self.num_experts * (1 - missed)


class CostModel(msgspec.Struct, frozen=True, kw_only=True):
    """The constants of a spec that price any step."""

    windows: tuple[WindowGroup, ...]
    experts: tuple[ExpertGroup, ...]
    fixed_weight_bytes: float
    head_weight_bytes: float
    linear_flops_per_token: int
    head_flops: int

    def step(self, shapes: Sequence[Shape], num_sampled: int) -> StepWork:
        """Price one step of runs `shapes`; `num_sampled` positions go through the LM head."""
        num_tokens = sum([new for new, _ in shapes])
        if num_tokens == 0:
            return NO_WORK
        attention_flops = kv_read_bytes = kv_write_bytes = 0
        for group in self.windows:
            pairs, span = visible(shapes, group.window)
            attention_flops += group.flops_per_pair * pairs
            kv_read_bytes += group.kv_bytes_per_token * span
            kv_write_bytes += group.kv_bytes_per_token * num_tokens
        weight_bytes = self.fixed_weight_bytes + (self.head_weight_bytes if num_sampled else 0)
        for experts in self.experts:
            weight_bytes += experts.expected_bytes(num_tokens)
        return StepWork(
            flops=attention_flops
            + self.linear_flops_per_token * num_tokens
            + self.head_flops * num_sampled,
            attention_flops=attention_flops,
            weight_bytes=weight_bytes,
            kv_read_bytes=kv_read_bytes,
            kv_write_bytes=kv_write_bytes,
        )


NO_WORK = StepWork(flops=0, attention_flops=0, weight_bytes=0, kv_read_bytes=0, kv_write_bytes=0)


def visible(shapes: Sequence[Shape], window: int | None) -> tuple[int, int]:
    """(query-key pairs, keys read) of a step under one window."""
    if window is None:
        pairs = sum([new * done + new * (new + 1) // 2 for new, done in shapes])
        return pairs, sum([new + done for new, done in shapes])
    pairs = sum([_windowed_pairs(new, done, window) for new, done in shapes])
    return pairs, sum([min(new + done, new + window - 1) for new, done in shapes])


def _windowed_pairs(new: int, done: int, window: int) -> int:
    """Sum of min(p + 1, window) over positions p = done .. done + new - 1."""
    growing = min(max(window - done, 0), new)
    return growing * done + growing * (growing + 1) // 2 + (new - growing) * window


def cost_model(spec: ModelSpec) -> CostModel:
    """Sum the spec's layers into the constants that price a step."""
    layers = Counter(spec.layers)
    norms = norm_params(spec) * BYTES_OF_DTYPE[spec.dtype]
    fixed = sum(n * _dense_bytes(layer) for layer, n in layers.items())
    return CostModel(
        windows=_window_groups(spec, layers),
        experts=_expert_groups(layers),
        fixed_weight_bytes=fixed + norms,
        head_weight_bytes=spec.lm_head.nbytes,
        linear_flops_per_token=sum(n * _layer_flops(layer) for layer, n in layers.items()),
        head_flops=2 * _products(spec.lm_head),
    )


def _window_groups(spec: ModelSpec, layers: Counter[LayerSpec]) -> tuple[WindowGroup, ...]:
    flops: Counter[int | None] = Counter()
    kv: Counter[int | None] = Counter()
    for layer, n in layers.items():
        attention = layer.attention
        flops[attention.window] += n * 4 * attention.num_heads * attention.head_dim
        kv[attention.window] += n * layer_kv_bytes(attention, spec.kv_dtype)
    return tuple(
        WindowGroup(window=w, flops_per_pair=flops[w], kv_bytes_per_token=kv[w]) for w in flops
    )


def _expert_groups(layers: Counter[LayerSpec]) -> tuple[ExpertGroup, ...]:
    sizes: Counter[tuple[int, int]] = Counter()
    for layer, n in layers.items():
        if layer.mlp.num_experts:
            key = (layer.mlp.num_experts, layer.mlp.experts_per_token)
            sizes[key] += n * _one_mlp_bytes(layer.mlp)
    return tuple(
        ExpertGroup(num_experts=e, experts_per_token=k, expert_bytes=size)
        for (e, k), size in sizes.items()
    )


def layer_kv_bytes(attention: AttentionSpec, kv_dtype: str) -> int:
    row = attention.head_dim * BYTES_OF_DTYPE[kv_dtype] + KV_SCALE_BYTES.get(kv_dtype, 0)
    return 2 * attention.num_kv_heads * row


def attention_linears(attention: AttentionSpec) -> tuple[LinearSpec, ...]:
    return (attention.q, attention.k, attention.v, attention.o)


def _one_mlp(mlp: MlpSpec) -> tuple[LinearSpec, ...]:
    return (mlp.gate, mlp.up, mlp.down)


def _one_mlp_bytes(mlp: MlpSpec) -> int:
    return sum(linear.nbytes for linear in _one_mlp(mlp))


def _dense_bytes(layer: LayerSpec) -> int:
    """Bytes of a layer's weights that every token uses."""
    attention = sum(linear.nbytes for linear in attention_linears(layer.attention))
    if layer.mlp.num_experts:
        return attention + (layer.mlp.router.nbytes if layer.mlp.router else 0)
    return attention + _one_mlp_bytes(layer.mlp)


def _products(linear: LinearSpec) -> int:
    return linear.num_out * linear.num_in * linear.format.digits


def _layer_flops(layer: LayerSpec) -> int:
    """FLOPs per token of a layer's linears."""
    mlp = layer.mlp
    times = mlp.experts_per_token if mlp.num_experts else 1
    weights = sum(map(_products, attention_linears(layer.attention)))
    weights += times * sum(map(_products, _one_mlp(mlp)))
    weights += mlp.router.num_out * mlp.router.num_in if mlp.router else 0
    return 2 * weights


def norm_params(spec: ModelSpec) -> int:
    """Gains of every RMSNorm: two or four per layer, one for each of q and k, and the last."""
    total = spec.hidden_size
    for layer, n in Counter(spec.layers).items():
        per_layer = spec.hidden_size * (4 if layer.sandwich_norms else 2)
        total += n * (per_layer + (2 * layer.attention.head_dim if layer.attention.qk_norm else 0))
    return total


def layer_params(layer: LayerSpec, *, active: bool = False) -> int:
    """Parameters of one layer's linears; `active`: only the experts that one token uses."""
    mlp = layer.mlp
    times = max(1, mlp.experts_per_token if active else mlp.num_experts)
    total = sum(linear.num_params for linear in attention_linears(layer.attention))
    total += times * sum(linear.num_params for linear in _one_mlp(mlp))
    return total + (mlp.router.num_params if mlp.router else 0)


def _params(spec: ModelSpec, *, active: bool) -> int:
    layers = Counter(spec.layers)
    total = sum(n * layer_params(layer, active=active) for layer, n in layers.items())
    tables = 1 if spec.tied_embeddings else 2
    bias = spec.lm_head.num_out if spec.lm_head.bias else 0
    return total + norm_params(spec) + tables * spec.vocab_size * spec.hidden_size + bias


def num_params(spec: ModelSpec) -> int:
    """Every stored parameter; tied embeddings count once."""
    return _params(spec, active=False)


def num_active_params(spec: ModelSpec) -> int:
    """Parameters that one token uses: of routed experts, only the chosen ones."""
    return _params(spec, active=True)


def weight_bytes(spec: ModelSpec, num_tokens: int | None = None) -> float:
    """Bytes of weights read by a decode step: all but the rows of an untied embedding table.

    `num_tokens`: tokens in the step, which decides how many experts are touched (None: all of
    them).
    """
    model = cost_model(spec)
    total = model.fixed_weight_bytes + model.head_weight_bytes
    for group in model.experts:
        everything = group.num_experts * group.expert_bytes
        total += everything if num_tokens is None else group.expected_bytes(num_tokens)
    return total


def resident_weight_bytes(spec: ModelSpec) -> float:
    """Bytes of weights kept in memory.

    The embedding table counts beside the LM head unless both are one table.
    """
    return weight_bytes(spec) + (0 if shares_table(spec) else table_bytes(spec))


def shares_table(spec: ModelSpec) -> bool:
    """Are embedding and LM head one table in memory: both dense, or packed alike?"""
    head = spec.lm_head.format
    alike = head.kind == "dense" if spec.embed_format is None else head.stored == spec.embed_format
    return spec.tied_embeddings and alike


def table_bytes(spec: ModelSpec) -> float:
    """Bytes of the embedding table in memory."""
    if spec.embed_format is not None:
        return spec.embed_format.nbytes(spec.vocab_size, spec.hidden_size)
    return spec.vocab_size * spec.hidden_size * BYTES_OF_DTYPE[table_dtype(spec)]


def table_dtype(spec: ModelSpec) -> str:
    """In what a plain embedding table is kept: bfloat16 where it is stored so (exact: rows are
    widened as they are read), unless a dense LM head shares it."""
    kept = spec.stored_dtype == "bfloat16" and not shares_table(spec)
    return spec.stored_dtype if kept else spec.dtype


def kv_bytes_per_token(spec: ModelSpec) -> int:
    """Bytes of KV cache that one more token needs, all layers together, windows not yet full."""
    return sum(layer_kv_bytes(layer.attention, spec.kv_dtype) for layer in spec.layers)


def kv_bytes(spec: ModelSpec, context: int) -> int:
    """Bytes of KV cache of one sequence of `context` tokens; a window W keeps min(context, W)."""
    total = 0
    for layer in spec.layers:
        kept = min(context, layer.attention.window or context)
        total += kept * layer_kv_bytes(layer.attention, spec.kv_dtype)
    return total


def _model_of(spec: ModelSpec | CostModel) -> CostModel:
    return spec if isinstance(spec, CostModel) else cost_model(spec)


def step_work(spec: ModelSpec | CostModel, shapes: Sequence[Shape], num_sampled: int) -> StepWork:
    """Price a step. Pass a `cost_model(spec)` where many steps are priced (20 times faster)."""
    return _model_of(spec).step(shapes, num_sampled)


def prefill_work(spec: ModelSpec | CostModel, num_tokens: int, *, computed: int = 0) -> StepWork:
    """One sequence's prompt of `num_tokens`, `computed` of them already cached, in one step."""
    return step_work(spec, [(num_tokens - computed, computed)], 1)


def decode_work(spec: ModelSpec | CostModel, batch: int, context: int) -> StepWork:
    """One token for each of `batch` sequences that each hold `context` tokens already."""
    return step_work(spec, [(1, context)] * batch, batch)
