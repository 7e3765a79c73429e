"""Choices of tokens in Triton against those of torch and of the reference sampler."""

from __future__ import annotations

import pytest
import torch

from tests.engine.kernels.triton.interpreter import DEVICE

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [5, 4096, 9000])
def test_first_largest_takes_the_lowest_of_ties(dtype: torch.dtype, width: int) -> None:
    from ridgeline.engine.kernels.triton.sampling import first_largest

    logits = torch.randn(4, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[1, [3, width - 1]] = 9.0
    logits[2] = -3.0
    want = [int(row.float().max(0).indices) for row in logits]
    assert want[1:3] == [3, 0]
    assert first_largest(logits.to(DEVICE)).tolist() == want


def test_rows_without_a_finite_largest_logit_have_no_token() -> None:
    from ridgeline.engine.kernels.triton.sampling import first_largest

    logits = torch.zeros(4, 5000, device=DEVICE)
    logits[0, 4500], logits[1, 1], logits[2] = float("nan"), float("inf"), float("-inf")
    assert first_largest(logits).tolist() == [-1, -1, -1, 0]
