"""Context parallelism in predictions: an equal part of the KV cache on every device."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

import ridgeline
from ridgeline.errors import CannotRun
from ridgeline.hardware.catalogue import load_catalogue
from ridgeline.modelspec.checkpoints.planning import load_planning_spec
from ridgeline.plan.fleet.demand import Demand
from ridgeline.plan.fleet.search import SearchSpace, enumerate_layouts, search
from ridgeline.plan.step_time.memory import memory_budget
from ridgeline.plan.step_time.parallel_layout import Layout
from ridgeline.plan.step_time.predict import OperatingPoint, replica_of
from ridgeline.records import Slo

TP2_CP2 = {"tp": 2, "cp": 2}


def point(**changes: Any) -> OperatingPoint:
    return OperatingPoint(model="llama-3.1-8b", device="h100-sxm", isl=32000, osl=64, **changes)


def test_devices_divide_the_cache_and_hold_all_weights() -> None:
    catalogue = load_catalogue()
    one, two = (replica_of(point(cp=cp), catalogue) for cp in (1, 2))
    budget, divided = memory_budget(one), memory_budget(two)
    assert divided.weight_bytes == budget.weight_bytes
    assert divided.kv_bytes_per_token == budget.kv_bytes_per_token / 2
    assert divided.kv_tokens == pytest.approx(2 * budget.kv_tokens, rel=1e-3)
    decode, shared = (own.decode_sum(1, 32000) for own in (one, two))
    assert shared.kv_bytes == decode.kv_bytes / 2
    assert shared.weight_bytes == decode.weight_bytes
    assert shared.communication_s > 0


def test_context_groups_of_split_layers_divide_both() -> None:
    one, four = (replica_of(point(**sizes), load_catalogue()) for sizes in ({}, TP2_CP2))
    assert four.layout.num_devices == 4
    budget, divided = memory_budget(one), memory_budget(four)
    assert divided.weight_bytes == budget.weight_bytes / 2
    assert divided.kv_bytes_per_token == budget.kv_bytes_per_token / 4


def test_experts_on_all_devices_of_the_context_groups() -> None:
    expert = {"model": "mixtral-8x7b", "weight_dtype": "fp8"}
    cut, whole = (
        replica_of(msgspec.structs.replace(point(**TP2_CP2, ep=ep), **expert), load_catalogue())
        for ep in (1, 4)
    )
    assert (cut.layout.num_devices, whole.layout.num_devices) == (4, 4)
    assert whole.resident_bytes < cut.resident_bytes
    with pytest.raises(CannotRun, match="ep 1 or 4"):
        replica_of(msgspec.structs.replace(point(**TP2_CP2, ep=2), **expert), load_catalogue())


def test_norms_of_a_part_of_the_rows_cost_messages_and_no_bytes() -> None:
    plain, split = (replica_of(point(tp=4, sp=sp), load_catalogue()).wires for sp in (False, True))
    assert split.per_token_s == plain.per_token_s
    assert split.fixed_s == 2 * plain.fixed_s
    with pytest.raises(CannotRun, match="sequence parallelism"):
        ridgeline.predict("llama-3.1-8b", accelerator="h100-sxm", sequence_parallel=True)


def test_plans_for_long_contexts_rank_layouts_beyond_the_kv_heads() -> None:
    """Four KV heads: more tensor parallelism would hold every key twice."""
    spec = load_planning_spec("qwen2.5-7b")
    demand = Demand(rate=1, isl=100_000, osl=256, isl_p95=100_000, longest=100_256)
    space = SearchSpace(
        devices=("h100-sxm",),
        weight_dtypes=("bfloat16",),
        kv_dtypes=("bfloat16",),
        token_budgets=(8192,),
    )
    fleets = search(spec, demand, Slo.parse("ttft:20000 tpot:30"), space, load_catalogue()).fleets
    ranks = {fleet.layout: rank for rank, fleet in enumerate(fleets)}
    assert ranks[Layout(tp=2, cp=4)] < ranks[Layout(tp=4)] and Layout(tp=4, cp=2) in ranks
    prices = [fleet.dollars_per_hour for fleet in fleets]
    assert prices == sorted(prices, key=float)  # type: ignore[arg-type]


def test_context_layouts_are_searched_only_where_tensor_parallelism_repeats_keys() -> None:
    dense, routed = load_planning_spec("llama-3.1-8b"), load_planning_spec("mixtral-8x7b")
    assert all(layout.cp == 1 for layout in enumerate_layouts(dense, 16, 4096))
    found = [layout for layout in enumerate_layouts(dense, 16, 32_768) if layout.cp > 1]
    assert found == [Layout(tp=2, cp=8), Layout(tp=4, cp=4), Layout(tp=8, cp=2)]
    assert Layout(tp=8, cp=2, ep=16) in list(enumerate_layouts(routed, 16, 32_768))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slo", "note"),
    [
        ("ttft:8000 tpot:30", "the cheapest fleet without it: "),
        ("ttft:20000 tpot:9", "no fleet without it meets the SLO"),
    ],
)
def test_plan_with_context_parallelism_names_the_fleet_without(slo: str, note: str) -> None:
    found = ridgeline.plan(
        "qwen2.5-7b",
        input_len=100_000,
        output_len=256,
        slo=slo,
        accelerator="h100-sxm",
        quantization="bf16",
        kv_cache_dtype="bf16",
        price_per_hour=4.5,
    )
    assert found.fleets[0].layout.cp > 1
    [said] = [text for text in found.notes if "context parallelism" in text]
    assert note in said and ("$" in said) == ("cheapest" in note)
