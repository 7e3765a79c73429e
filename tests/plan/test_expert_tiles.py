"""Whole tiles of rows in grouped products of experts, and the latency of collectives."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from ridgeline.hardware.catalogue import find_accelerator
from ridgeline.modelspec.checkpoints.planning import load_planning_spec
from ridgeline.modelspec.cost.step import ExpertGroup
from ridgeline.plan.calibration.published_efficiency import efficiency_of
from ridgeline.plan.step_time.parallel_layout import Layout, communication
from ridgeline.plan.step_time.replica import build_replica

GROUP = ExpertGroup(
    num_layers=1, num_experts=64, experts_per_token=4, params=1, outputs=1, expert_bytes=1.0
)
H100 = find_accelerator("h100-sxm")


@pytest.mark.parametrize("num_tokens", [4, 64, 512, 4096])
def test_padded_rows_are_those_of_drawn_routings(num_tokens: int) -> None:
    draw, tile, drawn = random.Random(num_tokens), 64, 0
    for _ in range(8):
        rows = [0] * GROUP.num_experts
        for _ in range(num_tokens):
            for expert in draw.sample(range(GROUP.num_experts), GROUP.experts_per_token):
                rows[expert] += 1
        drawn += sum(-(-count // tile) * tile for count in rows)
    assert GROUP.padded_rows(num_tokens, tile) == pytest.approx(drawn / 8, rel=0.2)


def test_tiles_of_one_row_pad_nothing() -> None:
    assert GROUP.padded_rows(0, 64) == 0
    assert GROUP.padded_rows(100, 1) == pytest.approx(100 * GROUP.experts_per_token)


def test_latency_grows_with_the_devices() -> None:
    spec, eff = load_planning_spec("llama-3.1-8b"), efficiency_of(H100)
    fixed = [
        communication(Layout(tp=tp), spec, H100, eff, act_bytes=2).fixed_s for tp in (1, 2, 4, 8)
    ]
    assert fixed[0] == 0
    assert fixed[3] == pytest.approx(7 * fixed[1])
    assert fixed[2] == pytest.approx(3 * fixed[1])


def test_routed_models_and_pools_have_wider_intervals() -> None:
    dense, routed = (
        build_replica(load_planning_spec(name), H100, Layout(tp=8))
        for name in ("llama-3.1-70b", "gpt-oss-120b")
    )
    assert dense.tpot_error < routed.tpot_error < routed.efficiency.pool_tpot_error
    narrow = replace(routed, efficiency=replace(routed.efficiency, routed_tpot_error=0.0))
    assert narrow.tpot_error == dense.tpot_error
