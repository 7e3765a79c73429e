"""FLOPs and bytes of one step, computed from the spec.

Conventions. One multiply-add is 2 FLOPs. Only matrix products and attention are counted: norms,
activations and softmax are below 1 % of any shape here. Attention over n keys costs
4·n·heads·head_dim (scores and values). A product whose activations are split into several digits
(`Format.digits`) counts once per digit. Bytes are the minimum traffic: each weight is read once per
step, each visible key and value once per sequence, and each new one is written once.
Attention within chunks is priced as over the whole context, its upper bound. Routed layers read
the experts that a step's tokens are expected to reach under even routing, E·(1 - (1 - k/E)^B). The
LM head runs for sampled positions only.

Latent attention has two forms of the same product (DeepSeek-V2, arXiv:2405.04434, section 2.1): a
prompt expands the latent vector into keys and values of every head; a decode step absorbs the
expansion into the query and attends over the latent vectors themselves, at more FLOPs per pair and
far fewer bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from ridgeline.modelspec.cost.kv_cache import layer_kv_bytes, state_bytes
from ridgeline.modelspec.cost.kv_layout import KvLayout, kv_layout
from ridgeline.modelspec.cost.parameters import (
    attention_linears,
    count_layers,
    dense_linears,
    mlp_linears,
    norm_params,
    shared_linears,
)
from ridgeline.modelspec.format import BYTES_OF_DTYPE
from ridgeline.modelspec.layer_inputs import model_linears
from ridgeline.modelspec.model import AttentionSpec, DeltaSpec, LayerSpec, LinearSpec, ModelSpec

Shape = tuple[int, int]
"""(new tokens, tokens already computed) of one run."""
RunGroup = tuple[int, int, int]
"""(number of equal runs, new tokens, tokens already computed)."""

LOGPROB_FLOPS = 800
"""FLOPs that take as long as the passes of a log-probability over one entry of the vocabulary: 5 ns
on a core of an AVX-512 Xeon that multiplies 150 GFLOP/s."""


class StepWork(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of one step. `attention_flops` is the part of `flops` that grows with the context."""

    flops: float
    attention_flops: float
    weight_bytes: float
    kv_read_bytes: float
    kv_write_bytes: float

    @property
    def bytes(self) -> float:
        """All bytes that move."""
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


NO_WORK = StepWork(flops=0, attention_flops=0, weight_bytes=0, kv_read_bytes=0, kv_write_bytes=0)


class AttentionWork(msgspec.Struct, frozen=True, kw_only=True):
    """Attention of one step over all layers and heads.

    `decode_*` covers runs of one new token, `prompt_*` the others. What decodes read is a multiple
    of their FLOPs, so the time of both is linear in the tokens they attend to; `written_bytes` is
    what all runs add to the cache. `num_begun` counts prompts with nothing computed yet.
    """

    decode_flops: float = 0
    decode_read_bytes: float = 0
    prompt_flops: float = 0
    prompt_read_bytes: float = 0
    written_bytes: float = 0
    num_begun: int = 0

    @property
    def flops(self) -> float:
        return self.decode_flops + self.prompt_flops

    @property
    def read_bytes(self) -> float:
        return self.decode_read_bytes + self.prompt_read_bytes

    @property
    def kv_bytes(self) -> float:
        """KV cache read and written."""
        return self.decode_read_bytes + self.prompt_read_bytes + self.written_bytes


class WindowGroup(msgspec.Struct, frozen=True, kw_only=True):
    """All layers with the same window, summed.

    `flops_per_pair` and `decode_flops_per_pair`: FLOPs per query-key pair of a prompt and of a
    decode step, which differ under latent attention. `read_bytes_per_token` is read per visible
    key; `kv_bytes_per_token` is cached per token, and is less where layers share a cache.
    """

    window: int | None
    flops_per_pair: int
    decode_flops_per_pair: int
    read_bytes_per_token: int
    kv_bytes_per_token: int


class ExpertGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Routed layers whose experts have the same size.

    `params` and `outputs` (weights, and activations written) are those of ONE expert of one layer;
    `expert_bytes` are the bytes of one expert of every layer together.
    """

    num_layers: int
    num_experts: int
    experts_per_token: int
    params: int
    outputs: int
    expert_bytes: float

    def expected_experts(self, num_tokens: int) -> float:
        """Distinct experts of a layer that `num_tokens` tokens choose, under even routing."""
        missed = (1 - self.experts_per_token / self.num_experts) ** num_tokens
        return self.num_experts * (1 - missed)

    def padded_rows(self, num_tokens: int, tile: int) -> float:
        """Rows that the products of one layer's experts compute for `num_tokens` tokens.

        A grouped product computes whole tiles of `tile` rows for each expert that was chosen: one
        at least, and half a tile more than the rows of an expert with many.
        """
        if not num_tokens:
            return 0.0
        chosen = self.expected_experts(num_tokens)
        rows = num_tokens * self.experts_per_token / chosen
        return chosen * max(float(tile), rows + (tile - 1) / 2)

    def expected_bytes(self, num_tokens: int) -> float:
        """Bytes of those experts over all layers of the group."""
        return self.expert_bytes * self.expected_experts(num_tokens)


class CostModel(msgspec.Struct, frozen=True, kw_only=True):
    """The constants of a spec that price any step; built once by `cost_model`.

    `state_bytes` is what a sequence keeps in recurrent layers: a step reads and writes it once.
    `linear_params` and `linear_outputs` count weights and activations written by the linears that
    every token uses, except the LM head; `fixed_weight_bytes` are their bytes and those of norms.
    `layout` is how the layers share KV cache blocks.
    """

    windows: tuple[WindowGroup, ...]
    experts: tuple[ExpertGroup, ...]
    fixed_weight_bytes: float
    head_weight_bytes: float
    linear_params: int
    linear_outputs: int
    linear_flops_per_token: int
    head_flops: int
    layout: KvLayout
    state_bytes: int = 0

    def step(self, shapes: Sequence[Shape], num_sampled: int) -> StepWork:
        """Price one step of runs `shapes`; `num_sampled` positions go through the LM head."""
        num_tokens = sum([new for new, _ in shapes])
        if num_tokens == 0:
            return NO_WORK
        attention = self.attention(shapes)
        weight_bytes = self.fixed_weight_bytes + (self.head_weight_bytes if num_sampled else 0)
        for experts in self.experts:
            weight_bytes += experts.expected_bytes(num_tokens)
        return StepWork(
            flops=attention.flops
            + self.linear_flops_per_token * num_tokens
            + self.head_flops * num_sampled,
            attention_flops=attention.flops,
            weight_bytes=weight_bytes,
            kv_read_bytes=attention.read_bytes,
            kv_write_bytes=attention.written_bytes,
        )

    def attention(self, shapes: Sequence[Shape]) -> AttentionWork:
        """Attention of a step of runs `shapes`."""
        decodes = [shape for shape in shapes if shape[0] == 1]
        prompts = [shape for shape in shapes if shape[0] != 1] if len(decodes) < len(shapes) else []
        num_tokens = sum([new for new, _ in shapes])
        decode_flops = decode_read = prompt_flops = prompt_read = written = 0
        for group in self.windows:
            pairs, keys = visible(decodes, group.window)
            decode_flops += group.decode_flops_per_pair * pairs
            decode_read += group.read_bytes_per_token * keys
            written += group.kv_bytes_per_token * num_tokens
            if prompts:
                pairs, keys = visible(prompts, group.window)
                prompt_flops += group.flops_per_pair * pairs
                prompt_read += group.read_bytes_per_token * keys
        decode_read += self.state_bytes * len(decodes)
        prompt_read += self.state_bytes * len(prompts)
        written += self.state_bytes * len(shapes)
        return AttentionWork(
            decode_flops=decode_flops,
            decode_read_bytes=decode_read,
            prompt_flops=prompt_flops,
            prompt_read_bytes=prompt_read,
            written_bytes=written,
            num_begun=sum([done == 0 for _, done in prompts]),
        )

    def attention_of_groups(self, groups: Sequence[RunGroup]) -> AttentionWork:
        """`attention` of groups of equal runs, at the cost of one run per group."""
        decode_flops = decode_read = prompt_flops = prompt_read = written = 0
        for group in self.windows:
            for count, new, done in groups:
                pairs, keys = visible(((new, done),), group.window)
                written += count * group.kv_bytes_per_token * new
                if new == 1:
                    decode_flops += count * group.decode_flops_per_pair * pairs
                    decode_read += count * group.read_bytes_per_token * keys
                else:
                    prompt_flops += count * group.flops_per_pair * pairs
                    prompt_read += count * group.read_bytes_per_token * keys
        for count, new, _ in groups if self.state_bytes else ():
            written += count * self.state_bytes
            decode_read += count * self.state_bytes if new == 1 else 0
            prompt_read += count * self.state_bytes if new != 1 else 0
        return AttentionWork(
            decode_flops=decode_flops,
            decode_read_bytes=decode_read,
            prompt_flops=prompt_flops,
            prompt_read_bytes=prompt_read,
            written_bytes=written,
            num_begun=sum([count for count, new, done in groups if done == 0 and new != 1]),
        )

    def attention_of_decodes(self, batch: int, computed: int) -> AttentionWork:
        """`attention` of a decode step of `batch` sequences that hold `computed` tokens in all.

        Only for models without windows, where the sum is all that matters.
        """
        keys = computed + batch  # each new token attends to itself too
        return AttentionWork(
            decode_flops=sum([group.decode_flops_per_pair * keys for group in self.windows]),
            decode_read_bytes=self.state_bytes * batch
            + sum([group.read_bytes_per_token * keys for group in self.windows]),
            written_bytes=self.state_bytes * batch
            + sum([group.kv_bytes_per_token * batch for group in self.windows]),
        )

    @property
    def expert_flops_per_token(self) -> int:
        """The part of `linear_flops_per_token` that routed experts do."""
        return sum([2 * g.num_layers * g.experts_per_token * g.params for g in self.experts])

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache that one more token needs, while windows are not full."""
        return sum([group.kv_bytes_per_token for group in self.windows])

    def kv_bytes(self, context: int) -> int:
        """Bytes of KV cache and of states that one sequence of `context` tokens holds."""
        return self.state_bytes + self.layout.held_bytes(context)

    def kv_tokens(self, context: int) -> float:
        """`kv_bytes` in tokens that every layer keeps: what a cache is counted in."""
        padded = self.layout.position_bytes * self.layout.num_groups
        return self.kv_bytes(context) / padded


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
    """Sum the spec's layers into the constants that price a step, in the spec's own formats."""
    layers = count_layers(spec)
    norms = norm_params(spec) * BYTES_OF_DTYPE[spec.dtype]
    dense = [(linear, n) for layer, n in layers.items() for linear in dense_linears(layer)]
    around = model_linears(spec).values()
    dense += [(linear, 1) for linear in around]
    return CostModel(
        windows=_window_groups(spec, layers),
        experts=_expert_groups(layers),
        fixed_weight_bytes=sum(n * linear.nbytes for linear, n in dense) + norms,
        head_weight_bytes=spec.lm_head.nbytes,
        linear_params=sum(n * linear.num_weights for linear, n in dense),
        linear_outputs=sum(n * linear.num_out for linear, n in dense),
        linear_flops_per_token=sum(n * _layer_flops(layer) for layer, n in layers.items())
        + sum(2 * _products(linear) for linear in around),
        head_flops=2 * _products(spec.lm_head),
        layout=kv_layout(spec),
        state_bytes=state_bytes(spec),
    )


def _window_groups(spec: ModelSpec, layers: Counter[LayerSpec]) -> tuple[WindowGroup, ...]:
    flops: Counter[int | None] = Counter()
    decode_flops: Counter[int | None] = Counter()
    read: Counter[int | None] = Counter()
    cached: Counter[int | None] = Counter()
    for layer, n in layers.items():
        attention = layer.attention
        window, row = attention.window, layer_kv_bytes(attention, spec.kv_dtype)
        prompt, decode = flops_per_pair(attention)
        flops[window] += n * prompt
        decode_flops[window] += n * decode
        read[window] += n * row
        cached[window] += 0 if attention.shares_kv else n * row
    return tuple(
        WindowGroup(
            window=window,
            flops_per_pair=flops[window],
            decode_flops_per_pair=decode_flops[window],
            read_bytes_per_token=read[window],
            kv_bytes_per_token=cached[window],
        )
        for window in flops
    )


def flops_per_pair(attention: AttentionSpec) -> tuple[int, int]:
    """FLOPs per query-key pair of one layer: in a prompt, and in a decode step."""
    if attention.delta is not None:
        return 0, 0
    heads, latent = attention.num_heads, attention.latent
    if latent is None:
        per_pair = 4 * heads * attention.head_dim
        return per_pair, per_pair
    value_dim = attention.v.num_out // heads
    return (
        2 * heads * (attention.head_dim + value_dim),
        2 * heads * (2 * latent.rank + latent.rope_dim),
    )


def _expert_groups(layers: Counter[LayerSpec]) -> tuple[ExpertGroup, ...]:
    num_layers: Counter[tuple[int, int, int, int]] = Counter()
    nbytes: Counter[tuple[int, int, int, int]] = Counter()
    for layer, n in layers.items():
        mlp = layer.mlp
        if mlp.num_experts:
            expert = mlp_linears(mlp)
            params = sum(linear.num_weights for linear in expert)
            outputs = sum(linear.num_out for linear in expert)
            key = (mlp.num_experts, mlp.experts_per_token, params, outputs)
            num_layers[key] += n
            nbytes[key] += n * sum(linear.nbytes for linear in expert)
    return tuple(
        ExpertGroup(
            num_layers=num_layers[key],
            num_experts=key[0],
            experts_per_token=key[1],
            params=key[2],
            outputs=key[3],
            expert_bytes=nbytes[key],
        )
        for key in num_layers
    )


def _products(linear: LinearSpec) -> int:
    return linear.num_weights * linear.format.digits


def _layer_flops(layer: LayerSpec) -> int:
    """FLOPs per token of a layer's linears."""
    mlp = layer.mlp
    times = mlp.experts_per_token if mlp.num_experts else 1
    products = sum(map(_products, attention_linears(layer.attention)))
    products += times * sum(map(_products, mlp_linears(mlp)))
    products += sum(map(_products, shared_linears(mlp)))
    products += mlp.router.num_weights if mlp.router else 0
    delta = layer.attention.delta
    return 2 * products + (0 if delta is None else delta_flops(delta))


def delta_flops(delta: DeltaSpec) -> int:
    """FLOPs per token of a gated delta net, without its linears.

    A token decays, reads, corrects and queries each matrix, and convolves its inputs.
    """
    matrices = delta.num_value_heads * delta.key_dim * delta.value_dim
    return 8 * matrices + 2 * delta.conv_width * delta.conv_size


def prompt_logprob_tokens(spec: ModelSpec) -> float:
    """What the log-probabilities of one prompt position cost, as a number of prompt tokens.

    They take a row of the LM head, and passes over the vocabulary for the logarithm of the sum, the
    token's rank and the largest few.
    """
    model = cost_model(spec)
    passes = LOGPROB_FLOPS * spec.vocab_size
    return (model.head_flops + passes) / model.linear_flops_per_token


def step_work(spec: ModelSpec | CostModel, shapes: Sequence[Shape], num_sampled: int) -> StepWork:
    """Price a step. To price many steps, pass a `cost_model(spec)`: 20 times faster."""
    model = spec if isinstance(spec, CostModel) else cost_model(spec)
    return model.step(shapes, num_sampled)


def prefill_work(spec: ModelSpec | CostModel, num_tokens: int, *, computed: int = 0) -> StepWork:
    """One sequence's prompt of `num_tokens`, `computed` of them already cached, in one step."""
    return step_work(spec, [(num_tokens - computed, computed)], 1)


def decode_work(spec: ModelSpec | CostModel, batch: int, context: int) -> StepWork:
    """One token for each of `batch` sequences that each hold `context` tokens already."""
    return step_work(spec, [(1, context)] * batch, batch)
