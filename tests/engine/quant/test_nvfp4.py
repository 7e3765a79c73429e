"""NVFP4 weights: the published code and scales, products, and checkpoints found again exactly."""

from __future__ import annotations

import pytest
import torch

from ridgeline.engine.checkpoints.codecs.fp4 import fp4_grid
from ridgeline.engine.quant.nvfp4 import (
    MAGNITUDES,
    STREAMED_ROWS,
    Nvfp4Linear,
    Nvfp4Weights,
    codes_of,
    quantise,
    values_of,
)
from ridgeline.modelspec.format import NVFP4_WEIGHTS
from ridgeline.modelspec.model import LinearSpec


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_codes_are_the_nearest_numbers_with_ties_to_even() -> None:
    numbers = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)])
    x = torch.linspace(-7, 7, 5601)
    distance = (x.unsqueeze(1) - numbers).abs()
    got = values_of(codes_of(x))
    assert torch.equal((x - got).abs(), distance.amin(1))
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert values_of(codes_of(ties)).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert values_of(codes_of(-ties)).tolist() == [-0.0, -1.0, -1.0, -2.0, -2.0, -4.0, -4.0]


@pytest.mark.parametrize("seed", [0, 7])
def test_values_are_those_of_the_checkpoint_reader(seed: int) -> None:
    weights = quantise(random(6, 64, seed=seed))
    packed = weights.code_OI[:, ::2] | (weights.code_OI[:, 1::2] << 4)
    read = fp4_grid(packed, weights.scale_OG.float() * weights.global_1, 16)
    assert torch.equal(read.dense(), weights.dense())


@pytest.mark.parametrize("num_in", [64, 80, 100])
def test_largest_scale_fills_e4m3_and_errors_are_bounded(num_in: int) -> None:
    weight = random(8, num_in, seed=num_in) * 0.03
    weights = quantise(weight)
    assert float(weights.scale_OG.float().max()) == 448.0
    groups = torch.nn.functional.pad(weight, (0, -num_in % 16)).view(8, -1, 16)
    error = torch.nn.functional.pad(weights.dense() - weight, (0, -num_in % 16)).view(8, -1, 16)
    assert bool((error.abs().amax(2) <= groups.abs().amax(2) * (1 / 6 + 1 / 16)).all())
    assert float(quantise(torch.zeros(2, 32)).dense().abs().max()) == 0.0


@pytest.mark.parametrize("seed", [0, 7])
def test_nvfp4_weights_are_found_again_exactly(seed: int) -> None:
    first = quantise(random(24, 256, seed=seed))
    again = quantise(first.dense())
    assert torch.equal(again.dense(), first.dense())


@pytest.mark.parametrize("seed", [0, 7])
def test_product_is_that_of_the_widened_weights_and_takes_its_bytes(seed: int) -> None:
    spec = LinearSpec(num_in=256, num_out=24, format=NVFP4_WEIGHTS, bias=True)
    weight, bias, x = (
        random(24, 256, seed=seed), random(24, seed=seed + 1), random(5, 256, seed=seed + 2)
    )  # fmt: skip
    linear = Nvfp4Linear.build(spec, weight, bias, torch.device("cpu"), torch.float32)
    expected = torch.nn.functional.linear(x, quantise(weight).dense(), bias)
    assert torch.equal(linear(x), expected)
    assert linear.nbytes == 24 * 256 // 2 + 24 * 16 + 4 + 4 * 24
    assert "slow" in Nvfp4Linear.describe(spec, torch.device("cpu"))


def test_description_says_why_the_product_of_the_card_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ridgeline.engine.quant import nvfp4

    spec = LinearSpec(num_in=256, num_out=24, format=NVFP4_WEIGHTS)
    monkeypatch.setattr(nvfp4, "why_not", lambda _: ())
    for capability, reason in (((9, 0), "needs compute capability 10"), ((10, 0), "would round")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, c=capability: c)
        assert reason in Nvfp4Linear.describe(spec, torch.device("cuda"))
    streams, gpu = Nvfp4Linear.streams, torch.device("cuda")
    assert [streams(rows, gpu) for rows in (0, 1, STREAMED_ROWS + 1)] == [False, True, False]
    assert isinstance(quantise(random(2, 16)), Nvfp4Weights)
