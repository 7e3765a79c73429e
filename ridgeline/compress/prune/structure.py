"""Removes whole layers, feed-forward channels and attention heads: the result is a dense model.

  layers      those whose output is nearest to their input by angle: arccos(cos(x, y)) / π, the mean
              over tokens (ShortGPT, Men et al. 2024, arXiv 2403.03853; the distance of Gromov et
              al. 2024, arXiv 2403.17887)
  channels    of the feed-forward: ‖W_down[:, j]‖ · ‖x_j‖ (Wanda's score by column), by magnitude
              alone, or by Taylor
  heads       groups: a KV head with the query heads that read it, scored by their columns of W_o

Every layer loses the same number: the config of a model has one width for all. What remains can
take over a part of the removed: with H = Σ x xᵀ over the calibration inputs of W_down or W_o, the
best weights on the kept inputs K are W' = W H[:, K] (H[K, K])⁻¹ (the optimal brain surgeon for a
whole set).

Invariant: without compensation the result computes what the original computes with the removed
channels and heads set to zero, and with the removed layers skipped.

When it loses: against 8-bit weights of the whole model, which take fewer bytes and lose less
(SmolLM2: perplexity 13.32, in INT8 13.65, without a quarter of the channels 18.21).

Shape suffixes: O outputs, I inputs, K kept inputs, G KV heads, T tokens, C hidden_size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import Tensor

from ridgeline.compress.prune.recipe import CHANNEL_STEP, PruneRecipe
from ridgeline.compress.statistics import InputStats
from ridgeline.errors import BadInput, CannotRun
from ridgeline.modelspec.model import AttentionSpec, LinearSpec, MlpSpec, ModelSpec


class PrunedShape(NamedTuple):
    """Sizes of the pruned model: old indices of its layers, channels and KV heads of each."""

    layers: tuple[int, ...]
    num_channels: int
    num_kv_heads: int


class PrunedSpecs(NamedTuple):
    """`wide`: the kept layers as they were; `middle`: with fewer heads; `narrow`: the result."""

    wide: ModelSpec
    middle: ModelSpec
    narrow: ModelSpec


def angular_distance(x_TC: Tensor, y_TC: Tensor) -> Tensor:
    """The angle between rows of x and y as a share of π, per token."""
    cosine_T = F.cosine_similarity(x_TC.double(), y_TC.double(), dim=-1).clamp(-1, 1)
    return torch.arccos(cosine_T) / math.pi


def choose_layers(distances: Sequence[float], num_dropped: int) -> tuple[int, ...]:
    """The layers that remain once the `num_dropped` nearest to the identity are gone, in order."""
    order = sorted(range(len(distances)), key=lambda index: (distances[index], index))
    return tuple(sorted(order[num_dropped:]))


def pruned_sizes(spec: ModelSpec, recipe: PruneRecipe) -> tuple[int, int]:
    """(channels, KV heads) of every layer of the result. Raises BadInput, CannotRun."""
    if not 0 <= recipe.drop_layers < len(spec.layers):
        raise BadInput(
            "a model needs a layer",
            value=f"--drop-layers {recipe.drop_layers}",
            limit=f"less than its {len(spec.layers)} layers",
        )
    if recipe.drop_layers and any(layer.attention.shares_kv for layer in spec.layers):
        raise CannotRun("layers that share a KV cache cannot be dropped", value=spec.family)
    channels = {layer.mlp.up.num_out for layer in spec.layers}
    heads = {layer.attention.num_kv_heads for layer in spec.layers}
    if recipe.drop_channels and (
        len(channels) > 1 or any(layer.mlp.router is not None for layer in spec.layers)
    ):
        raise CannotRun(
            "channels are removed from dense feed-forward layers of one size",
            value=spec.family,
            fix="leave --drop-channels out",
        )
    if recipe.drop_kv_heads:
        _check_heads(spec, recipe.drop_kv_heads, heads)
    num_channels = min(channels)
    if recipe.drop_channels:
        wanted = num_channels * (1 - recipe.drop_channels)
        num_channels = max(CHANNEL_STEP, round(wanted / CHANNEL_STEP) * CHANNEL_STEP)
    return num_channels, min(heads) - recipe.drop_kv_heads


def _check_heads(spec: ModelSpec, num_dropped: int, heads: set[int]) -> None:
    plain = all(
        attention.latent is None
        and attention.delta is None
        and not (attention.gated or attention.sinks or attention.shares_kv)
        and not (attention.qk_norm_rows or attention.qk_norm_heads)
        for attention in (layer.attention for layer in spec.layers)
    )
    if not plain or len(heads) > 1:
        raise CannotRun(
            "heads are removed from plain grouped attention of one size",
            value=spec.family,
            fix="leave --drop-kv-heads out",
        )
    if num_dropped >= min(heads):
        raise BadInput(
            "a layer needs a KV head",
            value=f"--drop-kv-heads {num_dropped}",
            limit=f"less than its {min(heads)} KV heads",
        )


def pruned_specs(spec: ModelSpec, shape: PrunedShape) -> PrunedSpecs:
    """The specs of the model with fewer layers, then fewer heads, then fewer channels."""
    layers = [spec.layers[index] for index in shape.layers]
    middle = [
        replace(layer, attention=_fewer_heads(layer.attention, shape.num_kv_heads))
        for layer in layers
    ]
    narrow = [
        replace(layer, mlp=_fewer_channels(layer.mlp, shape.num_channels)) for layer in middle
    ]
    return PrunedSpecs(*(replace(spec, layers=tuple(part)) for part in (layers, middle, narrow)))


def _fewer_heads(attention: AttentionSpec, num_kv_heads: int) -> AttentionSpec:
    if num_kv_heads == attention.num_kv_heads:
        return attention
    num_heads = num_kv_heads * (attention.num_heads // attention.num_kv_heads)
    size = attention.head_dim
    return replace(
        attention,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        q=replace(attention.q, num_out=num_heads * size),
        k=replace(attention.k, num_out=num_kv_heads * size),
        v=replace(attention.v, num_out=num_kv_heads * size),
        o=replace(attention.o, num_in=num_heads * size),
    )


def _fewer_channels(mlp: MlpSpec, num_channels: int) -> MlpSpec:
    def narrow(linear: LinearSpec) -> LinearSpec:
        return replace(linear, num_out=num_channels)

    if mlp.router is not None or num_channels == mlp.up.num_out:
        return mlp
    down = replace(mlp.down, num_in=num_channels)
    return replace(mlp, gate=narrow(mlp.gate), up=narrow(mlp.up), down=down)


def column_scores(weight_OI: Tensor, seen: InputStats, recipe: PruneRecipe) -> Tensor:
    """The importance of each input of W_down or W_o, by Wanda or by magnitude."""
    size_I = weight_OI.square().sum(0).sqrt()
    return size_I if recipe.importance == "magnitude" else size_I * seen.square_I.sqrt()


def group_scores(score_I: Tensor, attention: AttentionSpec) -> Tensor:
    """The importance of each KV head, from those of W_o's inputs."""
    return score_I.square().view(attention.num_kv_heads, -1).sum(-1).sqrt()


def best(score_N: Tensor, count: int) -> Tensor:
    """The indices of the `count` largest scores, ascending; the first of equals."""
    return torch.argsort(score_N, descending=True, stable=True)[:count].sort().values


def head_rows(kept_G: Tensor, rows_per_head: int) -> Tensor:
    """The rows that the heads `kept_G` occupy, `rows_per_head` each."""
    return (kept_G.unsqueeze(1) * rows_per_head + torch.arange(rows_per_head)).flatten()


def compensate(weight_OI: Tensor, moment_II: Tensor, kept_K: Tensor, damping: float) -> Tensor:
    """Weights on the kept inputs that best reproduce the outputs; the plain columns if the inputs
    cannot be distinguished."""
    among_KK = moment_II[kept_K.unsqueeze(1), kept_K].double()
    among_KK.diagonal().add_(damping * among_KK.diagonal().mean())
    lower_KK, info = torch.linalg.cholesky_ex(among_KK)
    if int(info):
        return weight_OI[:, kept_K].clone()
    # as a correction to the plain columns, which damping would otherwise shrink
    gone_I = torch.ones(len(moment_II), dtype=torch.bool).index_fill_(0, kept_K, False)
    gone_D = gone_I.nonzero().flatten()
    cross_DK = moment_II[gone_D.unsqueeze(1), kept_K].double()
    share_KD = torch.cholesky_solve(cross_DK.T, lower_KK)
    return weight_OI[:, kept_K] + (weight_OI[:, gone_D].double() @ share_KD.T).float()


def slice_heads(
    tensors: Mapping[str, Tensor], attention: AttentionSpec, kept_G: Tensor
) -> dict[str, Tensor]:
    """The tensors of an attention (by key: "q", "q.bias", …) without the other heads; not W_o."""
    group = attention.num_heads // attention.num_kv_heads
    rows = {
        "q": head_rows(kept_G, group * attention.head_dim),
        "k": head_rows(kept_G, attention.head_dim),
        "v": head_rows(kept_G, attention.head_dim),
    }
    return {key: tensor[rows[key.partition(".")[0]]] for key, tensor in tensors.items()}
