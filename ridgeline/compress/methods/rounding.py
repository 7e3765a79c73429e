"""Rounding the weights of one product, by whatever the recipe says.

Weights of a product (q, k and v; gate and up) read the same inputs: what a method makes of those
(GPTQ's factor, LLM.int8's choice of inputs) is made once for all of them.
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
from ridgeline.compress.methods.outliers import outlying, round_split
from ridgeline.compress.methods.rtn import round_clipped, round_rtn
from ridgeline.compress.recipe import Recipe
from ridgeline.compress.statistics import ProductKey, Stats
from ridgeline.engine.checkpoints.tensor_names import Part
from ridgeline.errors import BadModel


class Product(NamedTuple):
    """The weights of a product, float32, and its key."""

    key: ProductKey
    weights: Mapping[Part, Tensor]


def round_product(
    product: Product, stats: Mapping[ProductKey, Stats], recipe: Recipe, stored_dtype: str
) -> tuple[dict[Part, Rounded], list[str]]:
    """Each weight rounded, and what is worth saying. Raises BadModel for NaN or infinite ones.

    `stats`: of the products that were watched; GPTQ uses up its product's second moments.
    """
    for part, weight_OI in product.weights.items():
        refuse_nonsense(part, weight_OI)
    own = {
        part: recipe.at(part.key, part.layer, weight_OI.shape[1])
        for part, weight_OI in product.weights.items()
    }
    seen = stats.get(product.key)
    if recipe.method == "llm-int8":
        columns_W = outlying(stats, product.key, recipe.threshold)
        return {
            part: round_split(weight_OI, columns_W, own[part], stored_dtype)
            for part, weight_OI in product.weights.items()
        }, []
    if recipe.method in ("gptq", "qat"):  # what training starts from
        assert seen is not None
        return _by_gptq(product, seen, recipe, own)
    return {
        part: _alone(weight_OI, seen, own[part], stored_dtype)
        for part, weight_OI in product.weights.items()
    }, []


def _by_gptq(
    product: Product, seen: Stats, recipe: Recipe, own: Mapping[Part, Recipe]
) -> tuple[dict[Part, Rounded], list[str]]:
    factor = factor_of(seen, recipe)
    seen.moment_II = None
    found, notes = dict[Part, Rounded](), list[str]()
    for part, weight_OI in product.weights.items():
        found[part], note = round_gptq_or_rtn(weight_OI, seen, factor, own[part])
        notes += [f"{part}: {note}"] if note else []
    return found, notes


def _alone(weight_OI: Tensor, seen: Stats | None, recipe: Recipe, stored_dtype: str) -> Rounded:
    if recipe.numbers == "nf4":
        return code_nf4(weight_OI, stored_dtype)
    if recipe.numbers.startswith("fp8"):
        return code_fp8(weight_OI, recipe.numbers)
    if recipe.method == "awq" and seen is not None and recipe.bits < 8:
        return round_clipped(weight_OI, seen, recipe)
    rounder = round_hqq if recipe.method == "hqq" else round_rtn
    return rounder(weight_OI, seen, recipe)


def refuse_nonsense(part: Part, weight: Tensor) -> None:
    """Raises BadModel for NaN and infinite numbers."""
    if not torch.isfinite(weight).all():
        raise BadModel(
            f"the weight {part} holds NaN or infinite numbers",
            fix="fetch the checkpoint again; it cannot be quantised so",
        )
