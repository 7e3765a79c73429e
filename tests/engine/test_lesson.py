"""Every stage of the tutorial kernel computes the same operator."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import ridgeline._native as _native

LEVELS = ("plain", "vectorised", "parallel", "tiled", "fused")


@pytest.mark.parametrize("isa", sorted({"portable", _native.best_isa()}))
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 37, 5), (4, 64, 6), (41, 130, 9)])
def test_each_stage_computes_the_operator(
    level: str, sizes: tuple[int, int, int], isa: str
) -> None:
    num_rows, num_in, num_out = sizes
    x_MK, g_NK, u_NK = (torch.randn(n, num_in) for n in (num_rows, num_out, num_out))
    h_MN = torch.empty(num_rows, num_out)
    where = (each.data_ptr() for each in (x_MK, g_NK, u_NK, h_MN))
    _native.lesson(level, *where, num_rows, num_in, num_out, 2, isa)
    expected = F.silu(F.linear(x_MK, g_NK)) * F.linear(x_MK, u_NK)
    assert torch.allclose(h_MN, expected, rtol=1e-4, atol=1e-4)
