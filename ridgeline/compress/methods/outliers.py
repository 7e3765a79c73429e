"""LLM.int8: chooses the inputs that stay in high precision and quantises the rest.

An input channel is an outlier if its magnitude reaches the threshold in any row of the calibration
text (6 in Dettmers et al., NeurIPS 2022, arXiv 2208.07339). Its column is removed from the weight
before each row's scale is chosen, and stored as in the checkpoint, in bfloat16 or float32. A
product without outliers is plain INT8. How it is computed, and when it loses:
`ridgeline.engine.quant.outliers`.

If nearly every input reaches the threshold (inputs of a gated product often do: the paper's number
refers to the scale of the residual stream), the threshold is meaningless; then the largest 1/16 of
the inputs are kept, which cost an eighth of the weight's bytes.

Experts behind a router share a layer's choice: an outlier of one is kept separate in all.

Shape suffixes: O outputs, I inputs, W inputs kept separate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ridgeline.compress.formats.lattice import Rounded
from ridgeline.compress.methods.rtn import round_rtn
from ridgeline.compress.recipe import QuantizeRecipe
from ridgeline.compress.statistics import InputStats, ProductKey
from ridgeline.engine.checkpoints.tensor_names import Part
from ridgeline.engine.dtype import is_exact
from ridgeline.engine.quant.grid import Grid
from ridgeline.engine.quant.outliers import OutlierSplit

MOST = 16  # at most one in this many inputs is an outlier


def outlier_columns(
    stats: Mapping[ProductKey, InputStats], key: ProductKey, threshold: float
) -> Tensor:
    """The inputs of a product that are kept separate, ascending; shared by experts."""
    seen = [each.abs_max_I for other, each in stats.items() if other[0] == key[0]]
    loudest_I = torch.stack(seen).amax(0)
    most = max(1, len(loudest_I) // MOST)
    top = loudest_I.topk(most)
    return top.indices[top.values >= threshold].sort().values


def round_split(
    weight_OI: Tensor, columns_W: Tensor, recipe: QuantizeRecipe, stored_dtype: str
) -> Grid | OutlierSplit:
    """The weight in 8 bits except for `columns_W`; `stored_dtype`: the checkpoint's."""
    rest_OI = weight_OI.index_fill(1, columns_W, 0.0)
    grid = round_rtn(rest_OI, None, recipe)
    assert isinstance(grid, Grid)
    if not len(columns_W):
        return grid
    wide = torch.bfloat16 if stored_dtype == "bfloat16" else torch.float32
    wide_OW = weight_OI.index_select(1, columns_W)
    assert is_exact(wide_OW, wide)
    return OutlierSplit(grid, columns_W, wide_OW.to(wide))


def describe_outliers(rounded: Mapping[Part, Rounded]) -> Iterator[str]:
    """Text: how many inputs of which weights are kept separate."""
    for part, weight in rounded.items():
        if isinstance(weight, OutlierSplit):
            yield f"{part}: {len(weight.columns_W)} of {part.shape[1]} inputs kept apart"
