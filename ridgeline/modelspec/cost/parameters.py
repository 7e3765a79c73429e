"""Parameter counts of a spec, independent of the formats that hold them."""

from __future__ import annotations

import math
from collections import Counter

from ridgeline.modelspec.layer_inputs import input_table_params, model_linears
from ridgeline.modelspec.model import AttentionSpec, LayerSpec, LinearSpec, MlpSpec, ModelSpec

LARGE_PARAMS = 1 << 26
"""A model of at least this size fits no CPU cache in any format, so the smallest format is fastest.
"""


def count_layers(spec: ModelSpec) -> Counter[LayerSpec]:
    """Number of occurrences of each distinct layer, in order of first occurrence.

    Equal layers are usually one shared object, so counting by identity first avoids hashing every
    layer of the model.
    """
    by_identity = Counter(map(id, spec.layers))
    counts: Counter[LayerSpec] = Counter()
    for layer in {id(layer): layer for layer in spec.layers}.values():
        counts[layer] += by_identity[id(layer)]
    return counts


def attention_linears(attention: AttentionSpec) -> tuple[LinearSpec, ...]:
    """The projections that the layer holds."""
    latent = attention.latent
    down: tuple[LinearSpec, ...] = () if latent is None else (latent.kv_down,)
    if latent is not None and latent.q_down is not None:
        down = (latent.q_down, *down)
    if attention.shares_kv:
        return (*down, attention.q, attention.o)
    if attention.v_is_k:
        return (attention.q, attention.k, attention.o)
    if attention.delta is not None:
        down = (attention.delta.z, attention.delta.b, attention.delta.a)
    return (*down, attention.q, attention.k, attention.v, attention.o)


def mlp_linears(mlp: MlpSpec) -> tuple[LinearSpec, ...]:
    """The linears of a dense MLP, or of one expert."""
    return (mlp.gate, mlp.up, mlp.down) if mlp.gated else (mlp.up, mlp.down)


def shared_linears(mlp: MlpSpec) -> tuple[LinearSpec, ...]:
    """The linears of the expert that every token passes through; empty if there is none."""
    shared = mlp.shared
    if shared is None:
        return ()
    router = () if shared.router is None else (shared.router,)
    return (*router, shared.gate, shared.up, shared.down)


def dense_linears(layer: LayerSpec) -> tuple[LinearSpec, ...]:
    """The linears of a layer that every token uses: all of them except routed experts."""
    attention, mlp = attention_linears(layer.attention), layer.mlp
    attention = (*side_linears(layer), *attention)
    if not mlp.num_experts:
        return (*attention, *mlp_linears(mlp))
    router = () if mlp.router is None else (mlp.router,)
    return (*attention, *router, *shared_linears(mlp))


def side_linears(layer: LayerSpec) -> tuple[LinearSpec, ...]:
    """A layer's linears outside attention and MLP: of its input and of a low-rank branch."""
    inputs, altup = layer.layer_input, layer.altup
    return (() if inputs is None else (inputs.gate, inputs.up)) + (
        () if altup is None else (altup.laurel_down, altup.laurel_up)
    )


def norm_params(spec: ModelSpec) -> int:
    """Gains (and biases) of every norm: around branches, within attention, and the last."""
    total = spec.hidden_size
    inputs = spec.layers[0].layer_input if spec.layers else None
    if inputs is not None:
        total += inputs.size
    for layer, count in count_layers(spec).items():
        attention = layer.attention
        per_layer = spec.hidden_size * num_norms(layer)
        per_layer += sum(map(math.prod, qk_norm_shapes(attention)))
        if attention.latent is not None:
            q_down = attention.latent.q_down
            per_layer += attention.latent.rank + (0 if q_down is None else q_down.num_out)
        total += count * per_layer
    return 2 * total if spec.norm_bias else total


def num_norms(layer: LayerSpec) -> int:
    """Norms around the layer's branches."""
    if layer.parallel:
        return 1
    extra = (layer.layer_input is not None) + 2 * (layer.altup is not None)
    extra += 4 * layer.mlp.own_norms  # the router's, two of inputs and outputs of the experts
    return (4 if layer.norms == "both" else 2) + extra


def qk_norm_shapes(attention: AttentionSpec) -> tuple[tuple[int, ...], ...]:
    """Shapes of the gains of the norms of q and of k; empty where they are not normalised."""
    if not attention.qk_norm or attention.qk_norm_plain:
        return ()
    size, heads = attention.head_dim, (attention.num_heads, attention.num_kv_heads)
    if attention.shares_kv:
        return ((size,),)
    if attention.qk_norm_heads:
        return (heads[0], size), (heads[1], size)
    return (
        ((heads[0] * size,), (heads[1] * size,)) if attention.qk_norm_rows else ((size,), (size,))
    )


def layer_params(layer: LayerSpec, *, active: bool = False) -> int:
    """Parameters of one layer without norms; `active`: only the experts that one token uses."""
    mlp = layer.mlp
    experts = mlp.experts_per_token if active else mlp.num_experts
    total = sum(linear.num_params for linear in dense_linears(layer))
    total += experts * sum(linear.num_params for linear in mlp_linears(mlp))
    total += 2 if mlp.activation == "xielu" else 0
    total += int(layer.output_scale)
    if (altup := layer.altup) is not None:
        size, streams = altup.laurel_up.num_out, altup.num_streams
        total += streams**2 + streams**3 + streams * size + altup.scales_active * size
    total += mlp.num_experts * (mlp.routing.correction + mlp.own_norms)
    if (delta := layer.attention.delta) is not None:
        total += delta.conv_width * delta.conv_size + 2 * delta.num_value_heads + delta.value_dim
    return total + (layer.attention.num_heads if layer.attention.sinks else 0)


def num_params(spec: ModelSpec) -> int:
    """Every stored parameter; tied embeddings count once."""
    return _params(spec, active=False)


def num_active_params(spec: ModelSpec) -> int:
    """Parameters that one token uses: of routed experts, only the chosen ones."""
    return _params(spec, active=True)


def _params(spec: ModelSpec, *, active: bool) -> int:
    total = sum(n * layer_params(layer, active=active) for layer, n in count_layers(spec).items())
    total += spec.lm_head.num_out if spec.lm_head.bias else 0
    return total + norm_params(spec) + table_params(spec)


def table_params(spec: ModelSpec) -> int:
    """Entries of the tables of embeddings, positions and layer inputs, of an untied LM head, and of
    the linears around the layers."""
    tables = 1 if spec.tied_embeddings else 2
    around = sum(linear.num_params for linear in model_linears(spec).values())
    rows = tables * spec.vocab_size + spec.learned_positions
    return rows * spec.hidden_size + around + input_table_params(spec)


def num_kv_heads(spec: ModelSpec) -> int:
    """Number of devices over which the KV cache can be split without storing anything twice."""
    return min(
        layer.attention.num_kv_heads
        for layer in count_layers(spec)
        if layer.attention.delta is None
    )


def largest_mlp(spec: ModelSpec) -> int:
    """Activations per token between up and down projection, of the widest layer."""
    return max(_mlp_width(layer.mlp) for layer in count_layers(spec))


def _mlp_width(mlp: MlpSpec) -> int:
    shared = 0 if mlp.shared is None else mlp.shared.up.num_out
    return mlp.up.num_out * (mlp.experts_per_token or 1) + shared
