"""Masks and structural choices against slow references, on random matrices."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch
from torch import Tensor

from ridgeline.compress.methods.gptq import HessianFactor, factor_of
from ridgeline.compress.prune import structure
from ridgeline.compress.prune.masks import mask_weights, sparsegpt
from ridgeline.compress.prune.recipe import PruneRecipe, check, parse_sparsity
from ridgeline.compress.recipe import QuantizeRecipe
from ridgeline.compress.statistics import InputStats
from ridgeline.errors import BadInput


def inputs(num_in: int, seed: int, num_rows: int = 400) -> tuple[Tensor, InputStats]:
    """Correlated rows, and their statistics."""
    random = torch.Generator().manual_seed(seed)
    mix_II = torch.randn(num_in, num_in, generator=random)
    x_TI = torch.randn(num_rows, num_in, generator=random) @ mix_II
    stats = InputStats.empty(num_in, True)
    stats.add(x_TI)
    stats.complete()
    return x_TI, stats


def weight(num_out: int, num_in: int, seed: int) -> Tensor:
    return torch.randn(num_out, num_in, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("seed", range(3))
def test_wanda_zeroes_the_lowest_products_of_weight_and_input_norm(seed: int) -> None:
    x_TI, stats = inputs(24, seed)
    w_OI = weight(5, 24, seed)
    recipe = PruneRecipe(sparsity=0.5, method="wanda")
    ([masked_OI], note) = mask_weights([w_OI], stats, recipe)
    assert not note
    for o in range(5):
        norms = [math.sqrt(sum(float(x) ** 2 for x in x_TI[:, i])) for i in range(24)]
        score = sorted((abs(float(w_OI[o, i])) * norms[i], i) for i in range(24))
        gone = {i for _, i in score[:12]}
        for i in range(24):
            assert float(masked_OI[o, i]) == (0.0 if i in gone else float(w_OI[o, i]))


@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
def test_two_of_every_four_weights_remain(method: str) -> None:
    _, stats = inputs(32, 5)
    w_OI = weight(6, 32, 6)
    recipe = PruneRecipe(sparsity=0.5, pattern="2:4", method=method)  # type: ignore[arg-type]
    ([masked_OI], _) = mask_weights([w_OI], stats, recipe)
    assert bool(((masked_OI.view(6, 8, 4) != 0).sum(-1) == 2).all())
    if method == "magnitude":
        for group, left in zip(w_OI.view(-1, 4), masked_OI.view(-1, 4), strict=True):
            expected = sorted(range(4), key=lambda i: -abs(float(group[i])))[:2]
            assert {i for i in range(4) if float(left[i]) != 0} == set(expected)


def naive_sparsegpt(w_OI: Tensor, hessian_II: Tensor, recipe: PruneRecipe) -> Tensor:
    """One row and one input at a time, with the inverse of the rest's Hessian made afresh."""
    w, num_in = w_OI.double().clone(), w_OI.shape[1]
    gone = torch.zeros_like(w, dtype=torch.bool)

    def rest(i: int) -> Tensor:
        return hessian_II.double()[i:, i:].inverse()

    for i in range(num_in):
        inverse = rest(i)
        if recipe.pattern == "2:4" and i % 4 == 0:
            score = torch.stack([w[:, j] ** 2 / rest(j)[0, 0] for j in range(i, i + 4)], 1)
            gone[:, i : i + 4] = score.argsort(1).argsort(1) < 2
        if recipe.pattern == "unstructured" and i == 0:
            score = torch.stack([w[:, j] ** 2 / rest(j)[0, 0] for j in range(num_in)], 1)
            limit = score.flatten().sort().values[round(recipe.sparsity * w.numel()) - 1]
            gone = score <= limit
        for o in range(len(w)):
            if gone[o, i]:
                w[o, i:] -= w[o, i] / inverse[0, 0] * inverse[0]
                w[o, i] = 0.0
    return w


@pytest.mark.parametrize("pattern", ["unstructured", "2:4"])
def test_sparsegpt_solves_each_row_as_optimal_brain_surgeon_does(pattern: str) -> None:
    _, stats = inputs(16, 3)
    assert stats.moment_II is not None
    hessian_II = stats.moment_II / stats.num_rows
    hessian_II = hessian_II + 0.01 * hessian_II.diagonal().mean() * torch.eye(16)
    factor = factor_of(stats, QuantizeRecipe(act_order=False, damping=0.01))
    assert isinstance(factor, HessianFactor)
    w_OI = weight(4, 16, 9)
    recipe = PruneRecipe(sparsity=0.5, pattern=pattern, method="sparsegpt")  # type: ignore[arg-type]
    found_OI = sparsegpt(w_OI, factor.upper_II, recipe)
    expected_OI = naive_sparsegpt(w_OI, hessian_II, recipe)
    assert torch.equal(found_OI == 0, expected_OI == 0)
    assert torch.allclose(found_OI.double(), expected_OI, rtol=1e-3, atol=1e-3)


def test_sparsegpt_loses_less_than_wanda_and_wanda_less_than_magnitude() -> None:
    x_TI, _ = inputs(64, 7)
    x_TI *= torch.linspace(0.1, 3, 64)
    w_OI = weight(32, 64, 8)
    errors = []
    for method in ("sparsegpt", "wanda", "magnitude"):
        stats = InputStats.empty(64, True)
        stats.add(x_TI)
        stats.complete()
        recipe = PruneRecipe(sparsity=0.5, method=method)
        ([masked_OI], _) = mask_weights([w_OI], stats, recipe)
        errors.append(float((x_TI @ (w_OI - masked_OI).T).norm()))
    assert errors[0] < errors[1] < errors[2]


def test_unseen_inputs_are_masked_by_magnitude_and_reported() -> None:
    w_OI = weight(4, 8, 1)
    plain, _ = mask_weights([w_OI], None, PruneRecipe(sparsity=0.5, method="magnitude"))
    empty = InputStats.empty(8, False)
    masked, note = mask_weights([w_OI], empty, PruneRecipe(sparsity=0.5, method="wanda"))
    assert torch.equal(plain[0], masked[0]) and "no text" in note


def test_the_dropped_layers_have_the_least_total_distance() -> None:
    distances = torch.rand(8, generator=torch.Generator().manual_seed(2)).tolist()
    for count in range(4):
        kept = structure.choose_layers(distances, count)
        dropped = set(range(8)) - set(kept)
        least = min(combinations(range(8), count), key=lambda s: sum(distances[i] for i in s))
        assert dropped == set(least) and list(kept) == sorted(kept)


def test_angular_distance_is_the_angle_as_a_share_of_pi() -> None:
    x_TC = torch.tensor([[1.0, 0.0], [1.0, 0.0], [2.0, 0.0], [1.0, 1.0]])
    y_TC = torch.tensor([[3.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [1.0, 0.0]])
    found = structure.angular_distance(x_TC, y_TC)
    assert torch.allclose(found, torch.tensor([0.0, 0.5, 1.0, 0.25]).double(), atol=1e-6)


def test_compensation_is_the_least_squares_solution() -> None:
    x_TI, stats = inputs(12, 11)
    w_OI, kept_K = weight(3, 12, 12), torch.tensor([0, 2, 3, 7, 8, 10])
    assert stats.moment_II is not None
    found_OK = structure.compensate(w_OI, stats.moment_II, kept_K, 0.0)
    expected_KO = torch.linalg.lstsq(x_TI[:, kept_K].double(), (x_TI @ w_OI.T).double()).solution
    assert torch.allclose(found_OK.double(), expected_KO.T, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "nothing to remove"),
        ({"drop_channels": 1.0}, "share of all weights"),
        ({"sparsity": 0.3, "pattern": "2:4"}, "half of the weights"),
        ({"sparsity": 0.3, "window_tokens": 4}, "too little"),
    ],
)
def test_contradicting_recipes_are_refused(fields: dict[str, object], reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        check(PruneRecipe(**fields))  # type: ignore[arg-type]


def test_sparsity_is_a_share_or_two_of_four() -> None:
    assert parse_sparsity("2:4") == (0.5, "2:4") and parse_sparsity("0.25") == (
        0.25,
        "unstructured",
    )
    for text in ("4:8", "1", "0", "nan", "half"):
        with pytest.raises(BadInput, match="unknown sparsity"):
            parse_sparsity(text)
