"""Speculation in predictions: yields against enumerated outcomes, costs against single steps."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import msgspec
import pytest

from ridgeline.config.settings import Speculative
from ridgeline.errors import BadInput
from ridgeline.hardware.catalogue import find_accelerator
from ridgeline.modelspec.checkpoints.planning import load_planning_spec
from ridgeline.plan.step_time.operating_point import OperatingPoint
from ridgeline.plan.step_time.predict import predict
from ridgeline.plan.step_time.replica import Replica, build_replica
from ridgeline.plan.step_time.speculation import WINDOW, SpeculationModel, shortened, speculation_of

ROOT = Path(__file__).resolve().parents[2]
TREE = ((0,), (0, 0), (0, 0, 0), (1,), (1, 0), (2,))


def machine(model: str = "llama-3.1-8b") -> Replica:
    return build_replica(load_planning_spec(model), find_accelerator("l4"))


def walked(tree: tuple[tuple[int, ...], ...], alpha: float) -> float:
    """Tokens of a step, over all outcomes of every candidate: a walk takes the first child that is
    right, as the verifier does."""
    nodes, total = sorted(tree), 0.0
    for outcome in itertools.product((True, False), repeat=len(nodes)):
        right = dict(zip(nodes, outcome, strict=True))
        path: tuple[int, ...] = ()
        while child := next(
            (n for n in nodes if len(n) == len(path) + 1 and n[:-1] == path and right[n]), None
        ):
            path = child
        chance = math.prod(alpha if hit else 1 - alpha for hit in outcome)
        total += chance * (1 + len(path))
    return total


@pytest.mark.parametrize("alpha", [0.0, 0.17, 0.6, 1.0])
@pytest.mark.parametrize("tree", [((0,),), ((0,), (1,)), TREE], ids=len)
def test_a_tree_yields_what_its_walks_do(alpha: float, tree: tuple[tuple[int, ...], ...]) -> None:
    drafts = SpeculationModel(num_tokens=max(map(len, tree)), acceptance=alpha, tree=tree)
    assert drafts.tokens_per_step == pytest.approx(walked(tree, alpha))


def test_a_chain_is_a_tree_of_one_branch() -> None:
    chain = SpeculationModel(num_tokens=3, acceptance=0.7)
    tree = SpeculationModel(num_tokens=3, acceptance=0.7, tree=((0,), (0, 0), (0, 0, 0)))
    assert chain.tokens_per_step == pytest.approx(tree.tokens_per_step)
    assert chain.chain_rows == tree.chain_rows == (4,)


def test_measured_trees_yield_what_the_formula_says() -> None:
    """Rows exactly, tokens per step within 6 %."""
    found = json.loads((ROOT / "benchmarks/results/draft-trees.json").read_text("utf-8"))["rows"]
    trees = {"[(0,), (1,)]": TREE[0:1] + TREE[3:4], "[(0,), (0, 0), (1,)]": TREE[0:2] + TREE[3:4]}
    trees["[(0,), (0, 0), (0, 0, 0), (1,), (1, 0), (2,)]"] = TREE
    for column in (2, 3):
        alpha = float(found[0][column].split(",")[0]) - 1
        for name, rows, *cells in found[1:]:
            tree = trees[name.strip("`")]
            drafts = SpeculationModel(num_tokens=3, acceptance=alpha, tree=tree)
            assert sum(drafts.chain_rows) == int(rows) or tree == TREE, name
            measured = float(cells[column - 2].split(",")[0])
            assert drafts.tokens_per_step == pytest.approx(measured, rel=0.06), (name, alpha)


def test_steps_of_a_share_have_its_mean() -> None:
    drafts = SpeculationModel(num_tokens=4, acceptance=0.5, share=0.3)
    for batch in (1, 3, 10):
        steps = list(drafts.steps(batch, 100))
        assert sum(step.weight for step in steps) == pytest.approx(1)
        mean_rows = sum(s.weight * sum(n * new for n, new, _ in s.groups) for s in steps)
        assert mean_rows == pytest.approx(batch * (1 + 0.3 * 4))
        assert all(step.num_sampled == sum(n * new for n, new, _ in step.groups) for step in steps)


def test_all_or_no_drafts_cost_what_their_steps_do() -> None:
    here = machine()
    whole = SpeculationModel(num_tokens=4, acceptance=0.5)
    none = SpeculationModel(num_tokens=4, acceptance=0.5, share=0.0)
    step = here.uniform(8, 5, 700, sampled=40).seconds
    assert whole.decode_s(here, 8, 700) == pytest.approx(step / whole.tokens_per_step)
    assert none.decode_s(here, 8, 700) == here.uniform(8, 1, 700, sampled=8).seconds


def test_depth_that_pays_is_never_worse_than_any() -> None:
    here = machine()
    drafts = SpeculationModel(num_tokens=8, acceptance=0.4, adaptive=True)
    depths = []
    for batch in (1, 16, 256, 4096):
        chosen = drafts.at(here, batch)
        depths.append(chosen.num_tokens * bool(chosen.share))
        fixed = [SpeculationModel(num_tokens=n, acceptance=0.4) for n in range(1, 9)]
        plain_s = here.uniform(batch, 1, 1024, sampled=batch).seconds
        least_s = min(plain_s, *(each.decode_s(here, batch, 1024) for each in fixed))
        assert chosen.decode_s(here, batch, 1024) == pytest.approx(least_s)
    assert depths == sorted(depths, reverse=True) and depths[0] > depths[-1]


def of(here: Replica, method: str, share: float = 1.0, **keys: object) -> SpeculationModel:
    config = Speculative(method=method, **keys)  # type: ignore[arg-type]
    return speculation_of(config, 0.6, share, here)


def test_what_each_drafter_costs() -> None:
    here, batch, done = machine(), 4, 600
    for method in ("ngram", "suffix", "lookahead"):
        lookup = of(here, method, num_speculative_tokens=6)
        assert lookup.draft_s(here, batch, done) == 0.0
    head = of(here, "eagle", num_speculative_tokens=3)
    one_s = shortened(here, 1).uniform(batch, 1, done, sampled=batch).seconds
    assert head.draft_s(here, batch, done) == pytest.approx(3 * one_s)
    half = of(here, "self", num_speculative_tokens=3)
    assert half.draft is not None and len(half.draft.spec.layers) == 16
    assert 3 * one_s < half.draft_s(here, batch, done)


def test_medusa_heads_pay_the_head_once_and_its_rows() -> None:
    here, batch = machine(), 4
    heads = of(here, "medusa", num_speculative_tokens=3)
    assert here.rates is not None
    table_s = here.head_bytes / here.rates.dense_bytes_s  # bound by bytes at so few rows
    own = 3 * here.spec.hidden_size**2 * 2 / here.rates.dense_bytes_s
    assert heads.draft_s(here, batch, 600) == pytest.approx(table_s + own, rel=1e-6)


def test_last_places_of_a_lookahead_draft_are_never_accepted() -> None:
    here = machine()
    ahead = of(here, "lookahead", num_speculative_tokens=6)
    assert ahead.tokens_per_step == pytest.approx(sum(0.6**i for i in range(6 - WINDOW + 1)))
    assert ahead.chain_rows == (7,)
    with pytest.raises(BadInput, match="places in front"):
        of(here, "lookahead", num_speculative_tokens=3)


def test_a_lookup_spares_the_draft_model_its_steps() -> None:
    here = machine()
    keys = {"model": "llama-3.2-1b", "num_speculative_tokens": 4}
    often, seldom = (of(here, "auto", share, **keys) for share in (0.75, 0.25))
    alone = of(here, "draft_model", **keys)
    costs = [each.draft_s(here, 8, 600) for each in (often, seldom, alone)]
    assert costs == sorted(costs) and often.tokens_per_step == alone.tokens_per_step
    assert of(here, "auto", 1.0, **keys).draft_s(here, 8, 600) == 0.0


def test_drafters_take_their_memory_from_the_cache() -> None:
    plain = OperatingPoint(model="llama-3.1-8b", device="l4", isl=100, osl=10)

    def held(**keys: object) -> int:
        config = Speculative(num_speculative_tokens=3, **keys)  # type: ignore[arg-type]
        point = msgspec.structs.replace(plain, speculative=config, acceptance=0.5)
        return predict(point).kv_tokens_max

    here, whole = machine(), predict(plain).kv_tokens_max
    per_token = here.cost.kv_bytes_per_token
    assert held(method="ngram") == held(method="self") == whole
    layer = 2 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096)
    assert held(method="eagle") == pytest.approx(
        (whole * per_token - layer) / (per_token * 33 / 32), abs=32
    )
    heads = 2 * 3 * 4096**2
    assert held(method="medusa") == pytest.approx(whole - heads / per_token, abs=32)
    small = machine("llama-3.2-1b")
    both = per_token + small.cost.kv_bytes_per_token
    left = (whole * per_token - small.resident_bytes) / both
    assert held(method="draft_model", model="llama-3.2-1b") == pytest.approx(left, abs=64)


def test_incomplete_speculation_is_refused() -> None:
    here = machine()
    with pytest.raises(BadInput, match="acceptance"):
        speculation_of(Speculative(method="ngram"), None, 1.0, here)
    with pytest.raises(BadInput, match="draft model needs its name"):
        of(here, "draft_model")
    with pytest.raises(BadInput, match="with their parents"):
        of(here, "medusa", speculative_token_tree="[(0, 0)]")
    both = OperatingPoint(
        model="llama-3.1-8b",
        device="l4",
        isl=100,
        osl=10,
        speculative=Speculative(method="ngram"),
        acceptance=0.5,
        num_speculative_tokens=3,
    )
    with pytest.raises(BadInput, match="is a key of the speculative config"):
        predict(both)


def test_shares_of_the_layers_are_spread_over_the_model() -> None:
    here = machine()
    assert shortened(here, 1).spec.layers == here.spec.layers[-1:]
    assert shortened(here, 32).spec.layers == here.spec.layers
