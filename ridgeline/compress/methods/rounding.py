"""Rounds the weights of one product as the recipe says.

Weights of a product (q, k and v; gate and up) read the same inputs, so what a method derives from
them (GPTQ's factor, LLM.int8's choice of inputs) is computed once for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.compress.formats.floats import code_fp8, code_nf4
from ridgeline.compress.formats.lattice import Rounded
from ridgeline.compress.methods.gptq import factor_of, round_gptq_or_rtn
from ridgeline.compress.methods.hqq import round_hqq
from ridgeline.compress.methods.outliers import outlier_columns, round_split
from ridgeline.compress.methods.rtn import round_clipped, round_rtn
from ridgeline.compress.recipe import QuantizeRecipe
from ridgeline.compress.statistics import InputStats, ProductKey
from ridgeline.engine.checkpoints.tensor_names import Part
from ridgeline.errors import BadModel


class ProductWeights(NamedTuple):
    """The float32 weights of a product, and its key."""

    key: ProductKey
    weights: Mapping[Part, Tensor]


def round_product(
    product: ProductWeights,
    stats: Mapping[ProductKey, InputStats],
    recipe: QuantizeRecipe,
    stored_dtype: str,
) -> tuple[dict[Part, Rounded], list[str]]:
    """Round each weight; returns the weights and notes. Raises BadModel for NaN or infinity.

    `stats` covers the observed products; GPTQ consumes its product's second moments.
    """
    for part, weight_OI in product.weights.items():
        check_finite(part, weight_OI)
    own = {
        part: recipe.at(part.key, part.layer, weight_OI.shape[1])
        for part, weight_OI in product.weights.items()
    }
    seen = stats.get(product.key)
    if recipe.method == "llm-int8":
        columns_W = outlier_columns(stats, product.key, recipe.threshold)
        return {
            part: round_split(weight_OI, columns_W, own[part], stored_dtype)
            for part, weight_OI in product.weights.items()
        }, []
    if recipe.method in ("gptq", "qat"):  # what training starts from
        assert seen is not None
        return _by_gptq(product, seen, recipe, own)
    return {
        part: _round_weight(weight_OI, seen, own[part], stored_dtype)
        for part, weight_OI in product.weights.items()
    }, []


def _by_gptq(
    product: ProductWeights,
    seen: InputStats,
    recipe: QuantizeRecipe,
    own: Mapping[Part, QuantizeRecipe],
) -> tuple[dict[Part, Rounded], list[str]]:
    factor = factor_of(seen, recipe)
    seen.moment_II = None
    found, notes = dict[Part, Rounded](), list[str]()
    for part, weight_OI in product.weights.items():
        found[part], note = round_gptq_or_rtn(weight_OI, seen, factor, own[part])
        notes += [f"{part}: {note}"] if note else []
    return found, notes


def _round_weight(
    weight_OI: Tensor, seen: InputStats | None, recipe: QuantizeRecipe, stored_dtype: str
) -> Rounded:
    if recipe.numbers == "nf4":
        return code_nf4(weight_OI, stored_dtype)
    if recipe.numbers.startswith("fp8"):
        return code_fp8(weight_OI, recipe.numbers)
    if recipe.method == "awq" and seen is not None and recipe.bits < 8:
        return round_clipped(weight_OI, seen, recipe)
    rounder = round_hqq if recipe.method == "hqq" else round_rtn
    return rounder(weight_OI, seen, recipe)


def check_finite(part: Part, weight: Tensor) -> None:
    """Raise BadModel for NaN and infinity."""
    if not torch.isfinite(weight).all():
        raise BadModel(
            f"the weight {part} holds NaN or infinite numbers",
            fix="fetch the checkpoint again; it cannot be quantised so",
        )
