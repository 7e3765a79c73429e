"""Adds the low-rank products of adapters to the outputs of a decoder's linears.

What. y = W x + B (A x) for the rows of sequences that use an adapter, and y = W x for all others,
in the same step. The base product is one for all rows; each adapter of the step multiplies its own
rows: A of all linears that read the same input in one product, then B of each.

Source. LoRA (Hu et al. 2021, arXiv 2106.09685); several adapters in a batch: Punica (Chen et al.
2023, arXiv 2310.18547), S-LoRA (Sheng et al. 2023, arXiv 2311.03285).

Invariant. A row depends on its own adapter alone, so batch mixing changes no request's tokens. On
the CPU in float32, the products are bitwise the same in any batch, as the base's are.

When it loses. Two small products per linear and adapter, in separate calls: a step with few rows
takes longer by the number of distinct adapters in it. One adapter for all requests is faster when
it is merged into the weights.

Shape suffixes: T rows of the step, R rows of an adapter, I inputs, O outputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.engine.adapters.modules import SITES, Site
from ridgeline.engine.adapters.stacked import AdapterStack
from ridgeline.engine.adapters.weights import AdapterWeights, LowRank
from ridgeline.engine.kernels.native_linear import packed_bytes
from ridgeline.engine.model.layers import AttentionLayer, Block, GatedMlp, UngatedMlp
from ridgeline.engine.quant import build_linear
from ridgeline.engine.quant.base import Linear
from ridgeline.modelspec.cost.adapters import adapted_linears
from ridgeline.modelspec.format import FP32, dense
from ridgeline.modelspec.model import LinearSpec, ModelSpec


class _Up(NamedTuple):
    """B of one linear: the columns of A x that it reads, and those of y that it adds to."""

    first: int
    end: int
    column: int
    width: int
    linear: Linear


class SiteProduct:
    """What one adapter adds at one site."""

    def __init__(self, down: Linear, ups: Sequence[_Up]) -> None:
        self._down, self._ups = down, ups

    @property
    def nbytes(self) -> int:
        return self._down.nbytes + sum(up.linear.nbytes for up in self._ups)

    def add_to(self, y_TO: Tensor, x_TI: Tensor, rows_R: Tensor | None) -> None:
        """Add to the given rows of y; None: to all of them."""
        low_RR = self._down(x_TI if rows_R is None else x_TI.index_select(0, rows_R))
        for up in self._ups:
            added_RO = up.linear(low_RR[:, up.first : up.end].contiguous())
            part_TO = y_TO[:, up.column : up.column + up.width]
            if rows_R is None:
                part_TO += added_RO
            else:
                part_TO.index_add_(0, rows_R, added_RO)


class LoadedAdapter(NamedTuple):
    """An adapter's products by site, ready to be added."""

    products: dict[Site, SiteProduct]

    @property
    def nbytes(self) -> int:
        return sum(product.nbytes for product in self.products.values())


class StepAdapters:
    """The adapters of the step being computed, each with its rows (None: all); or, where a graph
    is captured, the stack of all adapters and which of them each row uses."""

    def __init__(self) -> None:
        self.groups: Sequence[tuple[LoadedAdapter, Tensor | None]] = ()
        self.stacked: tuple[AdapterStack, Tensor] | None = None


class AdaptedLinear:
    """A linear of the base model, plus what the step's adapters add to its output."""

    __slots__ = ("_base", "_site", "_step")

    def __init__(self, base: Linear, site: Site, step: StepAdapters) -> None:
        self._base, self._site, self._step = base, site, step

    def __call__(self, x_TI: Tensor) -> Tensor:
        y_TO = self._base(x_TI)
        if self._step.stacked is not None:
            stack, mask_TL = self._step.stacked
            stack.add_to(self._site, y_TO, x_TI, mask_TL)
            return y_TO
        for adapter, rows_R in self._step.groups:
            product = adapter.products.get(self._site)
            if product is not None:
                product.add_to(y_TO, x_TI, rows_R)
        return y_TO

    @property
    def nbytes(self) -> int:
        return self._base.nbytes


def adapt_block(block: Block, layer: int, step: StepAdapters) -> None:
    """Let adapters add to the products of a block's plain attention and dense feed-forward."""
    qkv, o, gate_up, down = ((layer, keys) for keys in SITES)
    attention, mlp = block.attention, block.mlp
    if type(attention) is AttentionLayer:
        attention.qkv = AdaptedLinear(attention.qkv, qkv, step)
        attention.o = AdaptedLinear(attention.o, o, step)
    if isinstance(mlp, GatedMlp):
        mlp.gate_up = AdaptedLinear(mlp.gate_up, gate_up, step)
    elif isinstance(mlp, UngatedMlp):
        mlp.up = AdaptedLinear(mlp.up, gate_up, step)
    if isinstance(mlp, GatedMlp | UngatedMlp):
        mlp.down = AdaptedLinear(mlp.down, down, step)


def load_products(
    weights: AdapterWeights, spec: ModelSpec, device: torch.device, dtype: torch.dtype
) -> LoadedAdapter:
    """An adapter's weights as products."""
    products: dict[Site, SiteProduct] = {}
    for layer in sorted({index for index, _ in weights}):
        linears = adapted_linears(spec.layers[layer])
        for keys in SITES:
            present = [key for key in keys if key in linears]
            own = {key: weights[layer, key] for key in present if (layer, key) in weights}
            if own:
                columns = _columns([linears[key] for key in present], present)
                products[layer, keys] = _product(own, columns, device, dtype)
    return LoadedAdapter(products)


def largest_bytes(spec: ModelSpec, rank: int, device: torch.device, dtype: torch.dtype) -> int:
    """Bytes of a loaded adapter of this rank on every linear, padding included.

    No adapter of this or a smaller rank takes more.
    """
    total = 0
    for layer in spec.layers:
        linears = adapted_linears(layer)
        for keys in SITES:
            own = [linears[key] for key in keys if key in linears]
            shapes = [(linear.num_out, rank) for linear in own]
            shapes += [(len(own) * rank, own[0].num_in)] if own else []
            total += sum(_linear_bytes(shape, device, dtype) for shape in shapes)
    return total


def _columns(linears: Sequence[LinearSpec], keys: Sequence[str]) -> dict[str, int]:
    """The first column of each linear's output in that of their product."""
    columns, at = {}, 0
    for key, linear in zip(keys, linears, strict=True):
        columns[key] = at
        at += linear.num_out
    return columns


def _product(
    own: dict[str, LowRank], columns: dict[str, int], device: torch.device, dtype: torch.dtype
) -> SiteProduct:
    downs: list[Tensor] = []
    ups: list[_Up] = []
    firsts: dict[int, int] = {}  # of each distinct A, which fused modules share
    at = 0
    for key, (down_RI, up_OR) in own.items():
        if id(down_RI) not in firsts:
            firsts[id(down_RI)] = at
            downs.append(down_RI)
            at += len(down_RI)
        first = firsts[id(down_RI)]
        up = _linear(up_OR, device, dtype)
        ups.append(_Up(first, first + len(down_RI), columns[key], len(up_OR), up))
    return SiteProduct(_linear(torch.cat(downs), device, dtype), ups)


def _linear(weight_OI: Tensor, device: torch.device, dtype: torch.dtype) -> Linear:
    """The product in the compute dtype; bitwise independent of the batch on the CPU in float32."""
    format = FP32 if _is_native(device, dtype) else dense(str(dtype).removeprefix("torch."))
    spec = LinearSpec(num_out=weight_OI.shape[0], num_in=weight_OI.shape[1], format=format)
    return build_linear(spec, weight_OI, None, device, dtype)


def _linear_bytes(shape_OI: tuple[int, int], device: torch.device, dtype: torch.dtype) -> int:
    """Bytes of what `_linear` builds."""
    if _is_native(device, dtype):
        return packed_bytes("fp32", *shape_OI, 0)
    return math.prod(shape_OI) * dtype.itemsize


def _is_native(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and dtype == torch.float32
