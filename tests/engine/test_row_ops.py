"""Native row functions against torch: odd sizes, ties, extreme values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ridgeline._native as _native
from ridgeline.engine.kernels.row_argmax import first_largest

ISAS = sorted({"portable", _native.best_isa()})


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("width", [1, 3, 8, 17, 100, 32_003])
def test_first_of_equal_maxima_wins(width: int, isa: str) -> None:
    x_SV = torch.randint(-3, 4, (7, width)).float()
    found = first_largest(x_SV, isa=isa)
    assert found == [row.tolist().index(max(row.tolist())) for row in x_SV]


@pytest.mark.parametrize("isa", ISAS)
def test_infinities_and_nan_are_handled_as_in_torch(isa: str) -> None:
    inf, nan = float("inf"), float("nan")
    rows = [[-inf] * 40, [0.0] * 39 + [inf], [1.0] * 39 + [nan], [nan] + [2.0] * 39]
    rows += [[-inf] * 39 + [-1e30], [-inf, 3e38] + [-3e38] * 38]
    assert first_largest(torch.tensor(rows), isa=isa) == [-1, -1, -1, -1, 39, 1]


def test_strided_rows_and_threads_give_the_same_result() -> None:
    wide: Tensor = torch.randn(9, 200_001)
    assert first_largest(wide[:, 5:-7], num_threads=3) == wide[:, 5:-7].max(1).indices.tolist()
    assert first_largest(wide[:0]) == []
