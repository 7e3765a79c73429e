"""INT4 weights as a GPU keeps them equal those of the CPU's packed layout."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ridgeline.engine.quant.int4.quantise import quantise
from ridgeline.engine.quant.int4.unpacked import UnpackedInt4


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("size", "group"), [((48, 256), 128), ((7, 100), 32), ((33, 64), 64)])
def test_widened_weights_are_the_dequantised_ones(
    size: tuple[int, int], group: int, zeros: bool
) -> None:
    weights = quantise(torch.randn(size) * 0.02, group, zeros=zeros)
    linear = UnpackedInt4(weights, group, None, torch.float32)
    assert torch.equal(linear.widen(), weights.dense(group))


def test_the_product_is_that_of_the_dequantised_weights() -> None:
    weight_OI, bias_O, x_TI = torch.randn(24, 128), torch.randn(24), torch.randn(5, 128)
    weights = quantise(weight_OI, 64, zeros=False)
    linear = UnpackedInt4(weights, 64, bias_O, torch.float32)
    assert torch.allclose(linear(x_TI), F.linear(x_TI, weights.dense(64), bias_O), atol=1e-5)


def test_two_weights_take_a_byte() -> None:
    weights = quantise(torch.randn(64, 256), 128, zeros=False)
    linear = UnpackedInt4(weights, 128, None, torch.bfloat16)
    assert linear.nbytes == 64 * 128 + 64 * 2 * 4
