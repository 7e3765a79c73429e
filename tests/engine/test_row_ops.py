"""Native functions on rows against torch: odd sizes, ties, extreme values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ridgeline._native as _native
from ridgeline.engine.kernels.rows import first_largest

ISAS = sorted({"portable", _native.best_isa()})


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("width", [1, 3, 8, 17, 100, 32_003])
def test_the_first_of_equal_maxima(width: int, isa: str) -> None:
    x_SV = torch.randint(-3, 4, (7, width)).float()
    index_S, value_S = first_largest(x_SV, isa=isa)
    expected = x_SV.max(1)
    assert torch.equal(value_S, expected.values)
    assert index_S.tolist() == [row.tolist().index(max(row.tolist())) for row in x_SV]


@pytest.mark.parametrize("isa", ISAS)
def test_infinities_and_nan(isa: str) -> None:
    inf, nan = float("inf"), float("nan")
    rows = [[-inf] * 40, [0.0] * 20 + [inf] * 20, [1.0] * 39 + [nan], [nan] + [2.0] * 39]
    index_S, value_S = first_largest(torch.tensor(rows), isa=isa)
    assert index_S.tolist() == [0, 20, -1, -1]
    assert value_S[0] == -inf and value_S[1] == inf


def test_rows_with_gaps_and_threads() -> None:
    wide: Tensor = torch.randn(9, 200_001)
    assert first_largest(wide[:, 5:-7], num_threads=3)[0].equal(wide[:, 5:-7].max(1).indices)
    assert first_largest(wide[:0])[0].shape == (0,)
