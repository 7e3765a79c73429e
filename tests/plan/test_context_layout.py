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
from ridgeline.plan.step_time.operating_point import OperatingPoint
from ridgeline.plan.step_time.parallel_layout import Layout
from ridgeline.plan.step_time.predict import replica_of
from ridgeline.plan.step_time.replica import build_replica
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


def test_decode_context_groups_divide_what_each_would_store() -> None:
    """Four KV heads on eight devices: every key is stored twice without it."""
    spec, catalogue = load_planning_spec("qwen3-30b-a3b"), load_catalogue()
    device = catalogue["h100-sxm"]
    twice, once = (
        build_replica(spec, device, layout, weight_dtype="bfloat16", kv_dtype="bfloat16")
        for layout in (Layout(tp=8), Layout(tp=8, dcp=2))
    )
    assert (twice.kv_copies, once.kv_copies) == (2, 1)
    assert memory_budget(once).kv_bytes_per_token == memory_budget(twice).kv_bytes_per_token / 2
    plain, divided = (own.decode_sum(1, 32000) for own in (twice, once))
    assert divided.kv_bytes == plain.kv_bytes / 2
    assert divided.weight_bytes == plain.weight_bytes
    assert divided.communication_s > plain.communication_s
    for layout in (Layout(tp=8, dcp=4), Layout(tp=4, dcp=2), Layout(tp=4, dcp=2, cp=2)):
        with pytest.raises(CannotRun, match="decode context parallelism"):
            build_replica(spec, device, layout, weight_dtype="bfloat16", kv_dtype="bfloat16")


def test_plans_for_long_contexts_rank_layouts_beyond_the_kv_heads() -> None:
    spec = load_planning_spec("qwen3-30b-a3b")
    demand = Demand(rate=1, isl=32_000, osl=256, isl_p95=32_000, longest=32_256)
    space = SearchSpace(
        devices=("h100-sxm",),
        weight_dtypes=("bfloat16",),
        kv_dtypes=("bfloat16",),
        token_budgets=(8192,),
    )
    fleets = search(spec, demand, Slo.parse("ttft:20000 tpot:30"), space, load_catalogue()).fleets
    ranks = {fleet.layout: rank for rank, fleet in enumerate(fleets)}
    assert ranks[Layout(tp=8, dcp=2)] < ranks[Layout(tp=8)]
    assert all(layout.cp == 1 for layout in ranks)
    prices = [fleet.dollars_per_hour for fleet in fleets]
    assert prices == sorted(prices, key=float)  # type: ignore[arg-type]


def test_context_layouts_are_searched_only_where_tensor_parallelism_repeats_keys() -> None:
    names = ("llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3")
    eight, four, latent = (load_planning_spec(name) for name in names)
    assert all(layout.dcp == 1 for layout in enumerate_layouts(four, 16, 4096))
    assert all(layout.dcp == 1 for layout in enumerate_layouts(eight, 16, 32_768))
    found = [layout for layout in enumerate_layouts(four, 16, 32_768) if layout.dcp > 1]
    assert found == [Layout(tp=8, dcp=2), Layout(tp=8, dcp=2, ep=8)]
    assert Layout(tp=8, dcp=8, ep=8) in list(enumerate_layouts(latent, 16, 32_768))
