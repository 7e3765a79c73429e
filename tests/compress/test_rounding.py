"""Rounders: each on the grid that was asked for, GPTQ below rounding to nearest in output error."""

from __future__ import annotations

import pytest
import torch

from ridgeline.compress.methods.gptq import HessianFactor, factor_of, round_gptq, round_gptq_or_rtn
from ridgeline.compress.methods.hqq import round_hqq
from ridgeline.compress.methods.rtn import round_rtn
from ridgeline.compress.recipe import QuantizeRecipe, check
from ridgeline.compress.statistics import InputStats
from ridgeline.engine.kernels.native_linear import NativeLinear
from ridgeline.engine.quant.grid import Grid, in_order, pack, refusal
from ridgeline.errors import BadInput
from ridgeline.modelspec.format import blocks, format_for

pytestmark = pytest.mark.slow


def by_gptq(weight_OI: torch.Tensor, stats: InputStats, recipe: QuantizeRecipe) -> Grid:
    factor = factor_of(stats, recipe)
    assert isinstance(factor, HessianFactor)
    return round_gptq(weight_OI, stats, factor, recipe)  # type: ignore[return-value]


ROUNDERS = {"rtn": round_rtn, "hqq": round_hqq, "gptq": by_gptq}
RECIPES = [
    QuantizeRecipe(bits=bits, group_size=group, zeros=zeros)
    for bits in (3, 4)
    for group in (32, 128)
    for zeros in (False, True)
] + [QuantizeRecipe(bits=8, group_size=None)]


def inputs(num_in: int, num_rows: int = 400) -> torch.Tensor:
    """Correlated rows with a few loud channels."""
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(num_in, num_in, generator=generator) / num_in**0.5
    x_TI = torch.randn(num_rows, num_in, generator=generator) @ (torch.eye(num_in) + mix)
    x_TI[:, ::17] *= 6
    return x_TI


def stats_of(x_TI: torch.Tensor) -> InputStats:
    stats = InputStats.empty(x_TI.shape[1], True)
    stats.add(x_TI)
    stats.complete()
    return stats


def weight(num_out: int = 48, num_in: int = 200) -> torch.Tensor:
    return torch.randn(num_out, num_in, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r.bits}-{r.group_size}-{r.zeros}")
@pytest.mark.parametrize("method", ROUNDERS)
def test_on_its_grid_and_packed_without_loss(method: str, recipe: QuantizeRecipe) -> None:
    if method == "hqq" and recipe.bits == 8:
        return
    grid = ROUNDERS[method](weight(), stats_of(inputs(200)), recipe)
    assert grid.bits == recipe.bits and int(grid.q_OI.max()) < 2**recipe.bits
    assert (grid.zero_OG is not None) == recipe.zeros
    error = (grid.dense() - weight()).norm() / weight().norm()
    assert error < {3: 0.45, 4: 0.22, 8: 0.02}[recipe.bits]  # gptq's weights stray, its output not
    assert refusal(grid) is None
    rows = NativeLinear(pack(grid)).rows(torch.arange(48))
    assert torch.equal(rows, grid.dense())


@pytest.mark.parametrize("bits", [3, 4])
def test_gptq_beats_nearest_in_output_error(bits: int) -> None:
    x_TI, recipe = inputs(200), QuantizeRecipe(bits=bits, group_size=128)
    stats = stats_of(x_TI)

    def loss(grid: Grid) -> float:
        return float((x_TI @ (grid.dense() - weight()).T).norm())

    nearest = loss(round_rtn(weight(), stats, recipe))
    assert loss(by_gptq(weight(), stats, recipe)) < 0.75 * nearest
    assert loss(round_rtn(weight(), stats, recipe)) < loss(round_rtn(weight(), None, recipe))


def test_gptq_without_a_usable_hessian_rounds_to_nearest_and_says_so() -> None:
    stats, recipe = stats_of(inputs(200)), QuantizeRecipe(bits=4)
    assert stats.moment_II is not None
    stats.moment_II[0, 1] = stats.moment_II[1, 0] = 1e9
    grid, why = round_gptq_or_rtn(weight(), stats, factor_of(stats, recipe), recipe)
    assert why is not None and "not positive definite" in why
    assert torch.equal(grid.q_OI, round_rtn(weight(), stats, recipe).q_OI)


def test_hqq_lowers_what_it_is_after() -> None:
    value = weight(64, 128).pow(3)  # heavy tails
    recipe = QuantizeRecipe(bits=4, group_size=128)
    plain, found = round_rtn(value, None, recipe), round_hqq(value, None, recipe)

    def loss(grid: Grid) -> float:
        return float((grid.dense() - value).abs().pow(0.7).sum())

    assert loss(found) < 0.99 * loss(plain)


def test_act_order_is_sorted_and_gathered() -> None:
    order_I = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    grid = round_rtn(weight(16, 64), None, QuantizeRecipe(bits=4, group_size=32))
    group_I = torch.empty(64, dtype=torch.int32)
    group_I[order_I] = (torch.arange(64) // 32).int()
    scattered = Grid(grid.q_OI, grid.scale_OG, None, 4, 32, group_I)
    sorted_grid, found_I = in_order(scattered)
    assert found_I is not None
    assert torch.equal(sorted_grid.dense(), scattered.dense()[:, found_I])
    plain = Grid(grid.q_OI, grid.scale_OG, None, 4, 32, torch.arange(64) // 32)
    assert in_order(plain)[1] is None and in_order(plain)[0].group_I is None


def test_layouts_without_a_kernel_are_recognised() -> None:
    assert format_for(4, 48, 96, False).kind == "dense"
    assert format_for(8, 128, 256, False) == blocks(8, 128)
    assert format_for(8, 128, 256, True).kind == "dense"
    assert format_for(8, 256, 256, False).kind == "int8"
    assert format_for(2, 96, 192, True).group_size == 32
    grid = round_rtn(weight(), None, QuantizeRecipe(bits=4))
    odd = Grid(grid.q_OI, grid.scale_OG * 1.00001, None, 4, 128)
    assert "fp16" in str(refusal(odd))


@pytest.mark.parametrize(
    "wrong",
    [
        QuantizeRecipe(bits=6),
        QuantizeRecipe(bits=8, group_size=128),
        QuantizeRecipe(bits=4, group_size=48),
        QuantizeRecipe(method="smoothquant", bits=4),
        QuantizeRecipe(method="hqq", bits=8, group_size=None),
    ],
)
def test_contradictory_recipes_are_refused(wrong: QuantizeRecipe) -> None:
    with pytest.raises(BadInput):
        check(wrong)
