"""INT4 weights widened in one pass equal those of their grid."""

from __future__ import annotations

import pytest
import torch

from ridgeline.engine.kernels.triton.linear import pack_int4
from ridgeline.engine.kernels.triton.widen import widen_int4
from ridgeline.engine.quant.int4.quantise import quantise
from ridgeline.engine.quant.int4.unpacked import pack_halves
from tests.engine.kernels.triton.interpreter import DEVICE

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("size", "group"), [((48, 256), 128), ((7, 100), 32), ((33, 192), 64)])
def test_widened_weights_are_the_dequantised_ones(
    size: tuple[int, int], group: int, zeros: bool
) -> None:
    weights = quantise(torch.randn(size) * 0.02, group, zeros=zeros)
    scale_OG = weights.scale_OG.float() * weights.factor_O.float().unsqueeze(1)
    packed_OJ = pack_halves(weights.q_OI)
    assert torch.equal(packed_OJ, pack_int4(weights.q_OI))
    found = widen_int4(
        packed_OJ.to(DEVICE),
        scale_OG.to(DEVICE),
        None if weights.zero_OG is None else weights.zero_OG.to(DEVICE),
        group_size=group,
        num_in=size[1],
        dtype=torch.float32,
    )
    assert torch.equal(found.cpu(), weights.dense(group))
