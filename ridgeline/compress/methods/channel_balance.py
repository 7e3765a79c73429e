"""Function-preserving rescaling before rounding: the mechanism shared by AWQ and SmoothQuant.

  y = W x = (W · diag s)(x / s)        x / s is free if the preceding part can absorb the division

The part before a product is a norm (its gain is divided by s), the v rows (before o: attention is
linear in v) or the up rows (before down: the gated product is linear in up). The methods differ in
how s is chosen:

  AWQ           (Lin et al., MLSys 2024, arXiv 2306.00978): s = mean|x|^a or, considering weights,
                mean|x|^a / mean|w|^(1-a), a in 0..1 for the least output error tr(D H Dᵀ), D
                the rounding error: inputs with large activations get finer steps. Then each group's
                range is clipped where that costs the output least.
  SmoothQuant   (Xiao et al., ICML 2023, arXiv 2211.10438): s = max|x|^a / max|w|^(1-a), a = 1/2:
                outlier channels of the activations move into the weights, which a scale per row
                represents well.

Invariant: the float32 model before rounding computes the same function, up to rounding of floats.

When it loses: products whose input no preceding part can divide (experts behind a router keep gate
and up unchanged, because the router reads the same norm).

Shape suffixes: O outputs, I inputs, K key heads, G query heads per key head, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.compress.methods.rtn import lattice
from ridgeline.compress.recipe import QuantizeRecipe
from ridgeline.compress.statistics import BLOCK, InputStats
from ridgeline.engine.checkpoints.sources import PlainWeights, WeightSource
from ridgeline.engine.checkpoints.tensor_names import Part
from ridgeline.engine.kernels.native_linear import NativeLinear
from ridgeline.modelspec.model import AttentionSpec, LayerSpec, ModelSpec

STEPS = 10  # of AWQ's search
COARSE_RANGES = (1.0, 0.85, 0.7)  # ranges of a group that the search tries
MAX_ROWS = 256  # of a weight that the search looks at
SMOOTHING_EXPONENT = 0.5  # SmoothQuant's exponent


class BalanceSite(NamedTuple):
    """Products (`keys`) and the preceding part that can absorb the division."""

    layer: int
    before: str
    keys: tuple[str, ...]
    expert: int | None = None


def sites(layer: LayerSpec, index: int) -> Iterator[BalanceSite]:
    """Where layer `index` can be balanced."""
    before = layer.norms != "after" and not layer.parallel
    if before:
        yield BalanceSite(index, "attention_norm", ("q", "k", "v"))
    yield BalanceSite(index, "v", ("o",))
    if layer.mlp.router is None:
        if before:
            yield BalanceSite(index, "mlp_norm", ("gate", "up") if layer.mlp.gated else ("up",))
        if layer.mlp.gated:  # else an activation that is not linear lies between up and down
            yield BalanceSite(index, "up", ("down",))
        return
    for expert in range(layer.mlp.num_experts):
        yield BalanceSite(index, "expert_up", ("expert_down",), expert)


class BalancedWeights(PlainWeights):
    """Weights with rescaling merged in; a weight source like any other."""

    def __init__(self, inner: WeightSource, spec: ModelSpec) -> None:
        self._inner, self._spec = inner, spec
        self._columns: dict[tuple[str, int | None, int | None], Tensor] = {}
        self._rows: dict[tuple[str, int | None, int | None], Tensor] = {}

    def apply(self, site: BalanceSite, scale_I: Tensor) -> None:
        """Multiply the columns of the site's products by `scale_I`; divide the preceding part."""
        for key in site.keys:
            self._columns[key, site.layer, site.expert] = scale_I
        before_O = scale_I
        if site.before == "v":
            attention = self._spec.layers[site.layer].attention
            before_O = _by_heads(scale_I, attention)[:, 0].reshape(-1)
        self._rows[site.before, site.layer, site.expert] = before_O

    def edited(self, layer: int) -> list[Part]:
        """The norms of a layer that differ from the checkpoint."""
        size = (self._spec.hidden_size,)
        keys = [key for key, at, _ in self._rows if at == layer and key.endswith("norm")]
        return [Part(key, size, layer) for key in keys]

    def get(self, part: Part) -> Tensor:
        value = self._inner.get(part)
        key, _, bias = part.key.partition(".")
        columns_I = self._columns.get((key, part.layer, part.expert))
        rows_O = self._rows.get((key, part.layer, part.expert))
        if rows_O is not None:
            value = self._divided(value.float(), rows_O, part)
        return value if columns_I is None or bias else value.float() * columns_I

    def _divided(self, value: Tensor, rows_O: Tensor, part: Part) -> Tensor:
        if part.key.endswith("norm") and self._spec.norm_plus_one:
            return (value + 1.0) / rows_O - 1.0
        return value / (rows_O.unsqueeze(1) if value.dim() == 2 else rows_O)


def _by_heads(values_I: Tensor, attention: AttentionSpec) -> Tensor:
    """Inputs of o as [K, G, D]."""
    return values_I.view(attention.num_kv_heads, -1, attention.head_dim)


def shared_by_heads(values_I: Tensor, attention: AttentionSpec) -> Tensor:
    """The mean over query heads that read the same key head, which must share their scale."""
    values_KGD = _by_heads(values_I, attention)
    return values_KGD.mean(1, keepdim=True).expand_as(values_KGD).reshape(-1)


def choose_awq(
    weights: Sequence[Tensor],
    stats: InputStats,
    shared: AttentionSpec | None,
    recipe: QuantizeRecipe,
) -> Tensor:
    """The scale of least output error; all ones if nothing improves on it."""
    x_I, w_I = stats.abs_mean(), torch.cat(list(weights)).abs().mean(0)
    sample = [weight[:: -(-len(weight) // MAX_ROWS)] for weight in weights]
    if shared is not None:
        x_I, w_I = shared_by_heads(x_I, shared), shared_by_heads(w_I, shared)
    x_I, w_I = (v.clamp(min=float(v.max()) * 1e-4 + 1e-12) for v in (x_I, w_I))
    scales = list[Tensor]()  # all ones first
    for share in (step / STEPS for step in range(STEPS)):
        scales += [_centred(x_I.pow(share)), _centred(x_I.pow(share) / w_I.pow(1 - share))]
    num_rows = sum(len(weight) for weight in sample)
    error_SRI = torch.empty(len(scales), num_rows, len(x_I))
    for scale_I, error_RI in zip(scales, error_SRI, strict=True):
        torch.cat([_errors(weight, scale_I, stats, recipe) for weight in sample], out=error_RI)
    assert stats.moment_II is not None
    loss_S = _output_losses(error_SRI.flatten(0, 1), stats.moment_II).view(len(scales), -1).sum(1)
    return scales[int(loss_S.argmin())]


def _centred(scale_I: Tensor) -> Tensor:
    return scale_I / (scale_I.max() * scale_I.min()).sqrt()


def _errors(
    weight_OI: Tensor, scale_I: Tensor, stats: InputStats, recipe: QuantizeRecipe
) -> Tensor:
    """The rounding error of the scaled weight."""
    importance_I = stats.importance() / scale_I.square()
    on = lattice(weight_OI * scale_I, recipe, importance_I, COARSE_RANGES)
    rounded = on.dense(on.round(weight_OI * scale_I))
    return rounded / scale_I - weight_OI


def _output_losses(error_TI: Tensor, moment_II: Tensor) -> Tensor:
    """e H eᵀ of each row e. H is symmetric: entries right of its diagonal's blocks count twice."""
    loss_T = torch.zeros(len(error_TI), dtype=torch.float64)
    for begin in range(0, len(moment_II), BLOCK):
        own_TB = error_TI[:, begin : begin + BLOCK]
        rows_BI = moment_II[begin : begin + BLOCK, begin:].clone()
        rows_BI[:, BLOCK:] *= 2
        pull_TB = NativeLinear.from_floats(rows_BI)(error_TI[:, begin:])
        loss_T += pull_TB.mul_(own_TB).sum(1)
    return loss_T


def choose_smooth(
    weights: Sequence[Tensor],
    stats: InputStats,
    shared: AttentionSpec | None,
    recipe: QuantizeRecipe,
) -> Tensor:
    """Balance activations and weights equally."""
    activation_I = stats.abs_max_I
    weight_I = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0)
    if shared is not None:
        activation_I, weight_I = (shared_by_heads(v, shared) for v in (activation_I, weight_I))
    usable = (activation_I > 0) & (weight_I > 0)
    scale_I = activation_I.pow(SMOOTHING_EXPONENT) / weight_I.clamp(min=1e-12).pow(
        1 - SMOOTHING_EXPONENT
    )
    scale_I = torch.where(usable, scale_I, 1.0)
    return scale_I.clamp(min=1e-5, max=1e5)
