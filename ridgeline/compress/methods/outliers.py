"""LLM.int8: which inputs are kept apart, and the weight without them.

What: an input channel is an outlier where its magnitude, in any row of the calibration's text,
reaches the threshold (6 in the paper: Dettmers et al., NeurIPS 2022, arXiv 2208.07339). Its column
is taken out of the weight before each row's scale is chosen, and stored as the checkpoint has it,
in bfloat16 or else in float32. A product without outliers is plain INT8. How it is computed, and
when it loses: `ridgeline.engine.quant.outliers`.

Where nearly every input reaches the threshold (a gated product's often do: the paper's number is
about the residual stream's scale), loudness tells nothing apart; then the loudest one in sixteen
are kept, which cost an eighth of the weight's bytes.

Experts behind a router share a layer's choice: what is an outlier for one is kept apart in all.

Shape legend: O outputs, I inputs, W inputs kept apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ridgeline.compress.formats.lattice import Rounded
from ridgeline.compress.methods.rtn import round_rtn
from ridgeline.compress.recipe import Recipe
from ridgeline.compress.statistics import ProductKey, Stats
from ridgeline.engine.checkpoints.tensor_names import Part
from ridgeline.engine.dtype import is_exact
from ridgeline.engine.quant.grid import Grid
from ridgeline.engine.quant.outliers import Split

MOST = 16  # one in so many inputs is kept apart, at most


def outlying(stats: Mapping[ProductKey, Stats], key: ProductKey, threshold: float) -> Tensor:
    """The inputs of a product that are kept apart, ascending; experts' together."""
    seen = [each.abs_max_I for other, each in stats.items() if other[0] == key[0]]
    loudest_I = torch.stack(seen).amax(0)
    most = max(1, len(loudest_I) // MOST)
    top = loudest_I.topk(most)
    return top.indices[top.values >= threshold].sort().values


def round_split(
    weight_OI: Tensor, columns_W: Tensor, recipe: Recipe, stored_dtype: str
) -> Grid | Split:
    """The weight in 8 bits but for `columns_W`; `stored_dtype`: the checkpoint's."""
    rest_OI = weight_OI.index_fill(1, columns_W, 0.0)
    grid = round_rtn(rest_OI, None, recipe)
    assert isinstance(grid, Grid)
    if not len(columns_W):
        return grid
    wide = torch.bfloat16 if stored_dtype == "bfloat16" else torch.float32
    wide_OW = weight_OI.index_select(1, columns_W)
    assert is_exact(wide_OW, wide)
    return Split(grid, columns_W, wide_OW.to(wide))


def told_apart(rounded: Mapping[Part, Rounded]) -> Iterator[str]:
    """In words: how many inputs of which weights are kept apart."""
    for part, weight in rounded.items():
        if isinstance(weight, Split):
            yield f"{part}: {len(weight.columns_W)} of {part.shape[1]} inputs kept apart"
