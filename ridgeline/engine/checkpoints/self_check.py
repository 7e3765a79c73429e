"""Checks a quantised checkpoint layer by layer, with one weight in memory at a time.

For every quantised weight: scales are finite, integers and zero-points are within their bits, and
the decoded weights are finite. With the original model, also their distance ‖ŵ - w‖ / ‖w‖, the
largest per layer. A rotated or rebalanced model (AWQ, SmoothQuant) has other weights for the same
function; its distance is large and means nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import torch
from torch import Tensor

from ridgeline.engine.checkpoints.load import open_weights, whole_of
from ridgeline.engine.checkpoints.tensor_names import Part
from ridgeline.engine.checkpoints.write_packed import LinearProduct, layer_products
from ridgeline.engine.kernels.native_linear import NativeLinear, Packed
from ridgeline.engine.quant.grid import Grid
from ridgeline.engine.quant.outliers import OutlierPacked
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.model import ModelSpec
from ridgeline.modelspec.rewrite import with_dtype


class LayerCheck(msgspec.Struct, frozen=True, kw_only=True):
    """The faults of a layer as text, empty if it is sound; `error`: None without an original."""

    layer: int
    num_weights: int
    faults: tuple[str, ...]
    error: float | None = None


def check_layers(model: str, original: str | None = None) -> Iterator[LayerCheck]:
    """Check every layer of `model` in order.

    Raises BadModel, also if the two models do not match.
    """
    spec = with_dtype(load_spec(model), "float32")
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        weights = stack.enter_context(open_weights(model, spec, 0))
        truth = None
        if original is not None:
            plain = with_dtype(load_spec(original), "float32")
            truth = stack.enter_context(open_weights(original, plain, 0))
        for index, layer in enumerate(spec.layers):
            faults: list[str] = []
            errors: list[float] = []
            count = 0
            for product in layer_products(layer, index):
                for part, value in _weights_of(spec, weights, product, faults):
                    count += 1
                    if not torch.isfinite(value).all():
                        faults.append(f"{part}: the weights are not finite")
                    if truth is not None:
                        exact = truth.get(part).float()
                        errors.append(float((value - exact).norm() / exact.norm()))
            worst = max(errors) if errors else None
            yield LayerCheck(layer=index, num_weights=count, faults=tuple(faults), error=worst)


def _weights_of(
    spec: ModelSpec, weights: Any, product: LinearProduct, faults: list[str]
) -> Iterator[tuple[Part, Tensor]]:
    """Each weight of a product, dense; problems of its grid are appended to `faults`."""
    named = [
        Part(key, (linear.num_out, linear.num_in), product.layer, product.expert)
        for key, linear in zip(product.keys, product.specs, strict=True)
    ]
    if not hasattr(weights, "grid"):
        yield from _unpacked(weights, product, named, faults)
        return
    for part in named:
        grid = weights.grid(part)
        if grid is not None:
            faults += [f"{part}: {fault}" for fault in _faults(grid)]
        yield part, weights.get(part).float() if grid is None else grid.dense()


def _unpacked(
    weights: Any, product: LinearProduct, named: list[Part], faults: list[str]
) -> Iterator[tuple[Part, Tensor]]:
    """The same for our own packed form, product by product."""
    packed = weights.packed(whole_of(product.specs), product.keys, product.layer, product.expert)
    if packed is None:
        yield from ((part, weights.get(part).float()) for part in named)
        return
    inner = packed if isinstance(packed, Packed) else packed.packed
    faults += [f"{'+'.join(product.keys)}: {fault}" for fault in _packed_faults(inner)]
    begin, linear = 0, NativeLinear(inner)
    for part in named:
        rows = torch.arange(begin, begin + part.shape[0])
        value = linear.rows(rows)
        if isinstance(packed, OutlierPacked):
            value.index_copy_(1, packed.columns_W, NativeLinear(packed.wide).rows(rows))
        yield part, value
        begin += part.shape[0]


def _faults(grid: Grid) -> list[str]:
    found = []
    if not torch.isfinite(grid.scale_OG).all():
        found.append("scales are not finite")
    if int(grid.q_OI.max()) >= 2**grid.bits:
        found.append(f"whole numbers beyond {grid.bits} bits")
    if grid.zero_OG is not None and int(grid.zero_OG.max()) > 2**grid.bits:
        found.append(f"zero-points beyond {grid.bits} bits")
    return found


def _packed_faults(packed: Packed) -> list[str]:
    found = []
    for name, table in (("scales", packed.scales), ("factors", packed.factors)):
        if table is not None and not torch.isfinite(table.float()).all():
            found.append(f"{name} are not finite")
    if packed.zeros is not None and int(packed.zeros.max()) > 15:
        found.append("zero-points beyond 4 bits")
    return found
