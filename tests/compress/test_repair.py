"""Ranges by the whole output's error, and weights that make up for what rounding did before."""

from __future__ import annotations

import pytest
import torch

import ridgeline._native as _native
from ridgeline.compress.formats.lattice import Lattice
from ridgeline.compress.formats.range_search import ROUNDS, STEPS, search_ranges
from ridgeline.compress.layer_walk import ObservedInputs
from ridgeline.compress.methods.repair import best_share, repair, steps_to
from ridgeline.compress.methods.rtn import lattice
from ridgeline.compress.recipe import QuantizeRecipe
from ridgeline.compress.statistics import InputStats, WindowPair
from ridgeline.engine.checkpoints.tensor_names import Part
from ridgeline.engine.kernels.scale_search import search_scales
from ridgeline.engine.quant.dense import DenseLinear

pytestmark = pytest.mark.slow


class Source:
    def get(self, part: Part) -> torch.Tensor:
        return weight()

    def packed(self, *_: object) -> None: ...


def rows(num_rows: int = 600, num_in: int = 96) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(num_in, num_in, generator=generator) / num_in**0.5
    return torch.randn(num_rows, num_in, generator=generator) @ (torch.eye(num_in) + mix)


def weight(num_out: int = 24, num_in: int = 96) -> torch.Tensor:
    return torch.randn(num_out, num_in, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits", [3, 4])
def test_settled_ranges_lose_less_of_the_output(bits: int, zeros: bool) -> None:
    """Than those that each group chose for its own inputs; and fp16 holds them."""
    recipe = QuantizeRecipe(bits=bits, group_size=32, zeros=zeros)
    x_TI, weight_OI = rows(), weight()
    weight_OI[3] = 0.0  # nothing to choose
    moment_II = x_TI.T @ x_TI
    before = lattice(weight_OI, recipe, moment_II)
    after = search_ranges(weight_OI, before, moment_II, recipe)

    def loss(on: object) -> float:
        error_OI = on.dense(on.round(weight_OI)) - weight_OI  # type: ignore[attr-defined]
        return float((x_TI @ error_OI.T).square().sum())

    assert loss(after) < 0.9 * loss(before)
    assert torch.equal(after.scale_OG[3], before.scale_OG[3])
    top_O1 = torch.exp2(torch.floor(torch.log2(after.scale_OG.abs().amax(1, keepdim=True))))
    ratio_OG = (after.scale_OG / top_O1)[torch.arange(24) != 3]
    assert torch.equal(ratio_OG.half().float(), ratio_OG)
    assert zeros or torch.equal(after.zero_OG, before.zero_OG)


@pytest.mark.parametrize("isa", sorted({"portable", "avx2", _native.best_isa()}))
@pytest.mark.parametrize("num_zeros", [1, 3])
@pytest.mark.parametrize("size", [8, 23, 32, 64, 100, 128])
def test_a_group_takes_the_first_of_its_best(
    size: int, num_zeros: int, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By each candidate's loss in float64; the errors become those of the chosen candidate."""
    if isa == "avx2" and _native.best_isa() == "portable":
        return
    monkeypatch.setenv("RIDGELINE_NATIVE_ISA", isa)
    num_rows, num_scales = 37, 16
    x_TJ = rows(300, size)
    weight_OI, error_OI = torch.randn(num_rows, size + 5), 0.05 * torch.randn(num_rows, size + 5)
    error_OI[::3] *= 1e-3  # rows that have nothing to win
    weight_OJ, error_OJ = weight_OI[:, 2 : 2 + size], error_OI[:, 2 : 2 + size]
    others_OJ, moment_JJ = torch.randn(num_rows, size), x_TJ.T @ x_TJ / 300
    scale_OC = 0.1 + 0.3 * torch.rand(num_rows, num_scales)
    zero_OZ = torch.randint(5, 11, (num_rows, num_zeros)).float()
    scale_OCZ1 = scale_OC.double()[:, :, None, None]
    zero_OZ1 = zero_OZ.double()[:, None, :, None]
    value_O11J = weight_OJ.double()[:, None, None]
    q_OCZJ = (value_O11J / scale_OCZ1 + zero_OZ1).round().clamp(0, 15)
    error_OKJ = ((q_OCZJ - zero_OZ1) * scale_OCZ1 - value_O11J).flatten(1, 2)
    error_OKJ = torch.cat([error_OJ.double().unsqueeze(1), error_OKJ], 1)
    pull_OKJ = error_OKJ @ moment_JJ.double() + 2 * others_OJ.double().unsqueeze(1)
    loss_OK = (pull_OKJ * error_OKJ).sum(2)
    around_OI = error_OI.clone()
    chosen_O = search_scales(weight_OJ, error_OJ, others_OJ, moment_JJ, scale_OC, zero_OZ, (0, 15))
    assert torch.equal(chosen_O + 1, loss_OK.argmin(1))
    taken_OJ = error_OKJ[torch.arange(num_rows), chosen_O + 1]
    assert torch.allclose(error_OJ.double(), taken_OJ, atol=1e-6)
    around_OI[:, 2 : 2 + size] = error_OJ
    assert torch.equal(error_OI, around_OI)  # nothing outside the group
    assert (chosen_O == -1).any() and (chosen_O >= 0).any()


def settled_slowly(on: Lattice, weight_OI: torch.Tensor, moment_II: torch.Tensor) -> torch.Tensor:
    """Scales by the definition: the loss of the whole row for every candidate, in float64."""
    scale_OG, moment_II = on.scale_OG.clone(), moment_II.double()

    def losses(scale_OG: torch.Tensor) -> torch.Tensor:
        """Of whole rows."""
        at = Lattice(scale_OG, on.zero_OG, on.low, on.high, on.group_size)
        error_OI = (at.dense(at.round(weight_OI)) - weight_OI).double()
        return ((error_OI @ moment_II) * error_OI).sum(1)

    for _ in range(ROUNDS):
        for group in range(scale_OG.shape[1]):
            own_O, least_O = scale_OG[:, group].clone(), losses(scale_OG)
            for step in STEPS:
                some_OG = scale_OG.clone()
                some_OG[:, group] = (own_O * step).half().float()
                loss_O = losses(some_OG)
                better_O = loss_O < least_O
                scale_OG[better_O, group] = some_OG[better_O, group]
                least_O = torch.minimum(least_O, loss_O)
    return scale_OG


def test_groups_take_turns_as_the_definition_says() -> None:
    """Seven groups, the last one short: more than are worked out together, and not a multiple."""
    x_TI, weight_OI = rows(600, 200), weight(24, 200)
    moment_II = x_TI.T @ x_TI / 600
    recipe = QuantizeRecipe(bits=4, group_size=32)
    before = lattice(weight_OI, recipe, moment_II)
    after = search_ranges(weight_OI, before, moment_II, recipe)
    wanted_OG = settled_slowly(before, weight_OI, moment_II)
    moved = (wanted_OG != before.scale_OG).float().mean()
    assert moved > 0.5 and torch.equal(after.scale_OG, wanted_OG)


def test_what_inputs_foretell_is_undone() -> None:
    """Inputs turned by rounding: the whole way answers as the original does."""
    generator = torch.Generator().manual_seed(2)
    clean_TI, turn_II = rows(), torch.eye(96) + 0.03 * torch.randn(96, 96, generator=generator)
    x_TI, weight_OI = clean_TI @ turn_II, weight()
    seen = InputStats.empty(96, True)
    for x, clean in zip(x_TI.split(100), clean_TI.split(100), strict=True):
        seen.add(x, clean)
    seen.complete()
    wanted_TO = clean_TI @ weight_OI.T
    steps = steps_to([weight_OI], seen, 1e-6)
    assert steps is not None
    errors = [
        float((x_TI @ (weight_OI + share * steps[0]).T - wanted_TO).norm())
        for share in (0.0, 0.5, 1.0)
    ]
    assert errors[1] == pytest.approx(errors[0] / 2, rel=1e-3) and errors[2] < 1e-2 * errors[0]


def test_same_inputs_leave_the_weight_as_it_is() -> None:
    x_TI, seen = rows(), InputStats.empty(96, True)
    seen.add(x_TI, x_TI)
    seen.complete()
    steps = steps_to([weight()], seen, 0.01)
    assert steps is not None and not steps[0].any()


def test_indistinguishable_rows_leave_the_weights_unchanged() -> None:
    seen = InputStats.empty(96, True)
    seen.add(torch.full((2, 96), float("nan")), torch.zeros(2, 96))
    seen.complete()
    assert steps_to([weight()], seen, 0.0) is None


def test_rows_held_back_decide_how_far_to_go() -> None:
    """Where what was learnt holds: all of the way that was allowed; where it does not: nothing."""
    generator = torch.Generator().manual_seed(3)
    clean_TI, turn_II = rows(), torch.eye(96) + 0.03 * torch.randn(96, 96, generator=generator)
    weight_OI = weight()
    key = (("o",), None)

    def moved(num_rows: int, noise: float) -> tuple[float, float, list[str]]:
        """The error of fresh rows without and with what `num_rows` rows have taught."""
        noise_TI = noise * torch.randn(600, 96, generator=generator)
        x_TI = clean_TI @ turn_II + noise_TI
        watched = ObservedInputs(
            {key: InputStats.empty(96, True)}, {key: [WindowPair(x_TI[300:350], clean_TI[300:350])]}
        )
        watched.stats[key].add(x_TI[:num_rows], clean_TI[:num_rows])
        watched.stats[key].complete()
        part = Part("o", (24, 96), 0)
        found, notes = repair(Source(), [(part, key)], watched, 0.5, 1e-4)
        fresh_TI, wanted_TO = x_TI[350:], clean_TI[350:] @ weight_OI.T
        errors = [
            float((fresh_TI @ w_OI.T - wanted_TO).norm())
            for w_OI in (weight_OI, found.get(part, weight_OI))
        ]
        assert watched.stats[key].num_rows == num_rows + 50 and not watched.held
        return errors[0], errors[1], notes

    before, after, notes = moved(300, 0.0)
    assert after == pytest.approx(before / 2, rel=1e-3) and not notes
    before, after, notes = moved(20, 1.0)  # few rows, much noise
    assert after <= 1.02 * before


def test_a_step_that_does_not_hold_is_not_taken() -> None:
    x_TI = rows()
    step_OI, turned_TI = weight() * 0.1, x_TI * 1.2
    assert best_share([weight()], [step_OI], [WindowPair(x_TI, turned_TI)]) == pytest.approx(
        2.0, rel=1e-3
    )
    assert best_share([weight()], [-step_OI], [WindowPair(x_TI, turned_TI)]) == 0.0
    assert best_share([weight()], [step_OI], []) == 0.0


def test_experts_are_left_as_they_are() -> None:
    """Their rows have no counterpart in the original, so nothing was recorded for them."""

    key, other = (("expert_down",), 3), (("o",), None)
    stats = {key: InputStats.empty(96, True), other: InputStats.empty(96, True)}
    stats[key].add(rows())
    stats[other].add(rows(), rows() * 1.1)
    for stat in stats.values():
        stat.complete()
    held = {other: [WindowPair(rows(), rows() * 1.1)]}
    half = [(Part("o", (24, 96), 0), other), (Part("expert_down", (24, 96), 0, 3), key)]
    found, _ = repair(Source(), half, ObservedInputs(stats, held), 0.5, 0.01)
    assert list(found) == [half[0][0]] and stats[other].gap_II is None
    assert (found[half[0][0]] / weight()).median() == pytest.approx(1.05, abs=5e-3)


def test_few_outputs_are_summed_up_as_such() -> None:
    """Σ W (x° - x) xᵀ in place of Σ (x° - x) xᵀ: the same steps; and half of Σ x xᵀ is mirrored."""
    clean_TI, weight_OI = rows(300, 2100), weight(8, 2100)
    x_TI = clean_TI * 1.1 + 0.1 * clean_TI.roll(1, 1)
    plain, narrow = InputStats.empty(2100, True), InputStats.empty(2100, True)
    plain.add(x_TI, clean_TI)
    narrow.add(x_TI, clean_TI, DenseLinear(weight_OI, None))
    for each in (plain, narrow):
        each.complete()
        assert each.moment_II is not None
        assert torch.allclose(each.moment_II, x_TI.T @ x_TI, rtol=1e-3, atol=1e-2)
    assert narrow.gap_II is None
    steps, same = steps_to([weight_OI], plain, 0.01), steps_to([weight_OI], narrow, 0.01)
    assert steps is not None and same is not None
    assert (steps[0] - same[0]).norm() < 1e-3 * steps[0].norm()
