"""LoRA adapters in predictions: their memory, and what a step reads and computes besides."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

import ridgeline
from ridgeline.errors import BadInput, CannotRun, DoesNotFit
from ridgeline.hardware.catalogue import load_catalogue
from ridgeline.modelspec.cost.adapters import adapted_linears, adapter_params
from ridgeline.modelspec.cost.inspect import LORA_RANK, inspect_table
from ridgeline.plan.step_time.memory import memory_budget
from ridgeline.plan.step_time.operating_point import OperatingPoint
from ridgeline.plan.step_time.predict import predict, replica_of

POINT = OperatingPoint(model="llama-3.1-8b", device="h100-sxm", isl=512, osl=64, batch=8)


def test_adapter_has_two_matrices_for_each_of_its_linears() -> None:
    spec = replica_of(POINT, load_catalogue()).spec
    by_hand = 0
    for layer in spec.layers:
        for linear in adapted_linears(layer).values():
            by_hand += 8 * linear.num_in + linear.num_out * 8
    assert adapter_params(spec, 8) == by_hand
    # Llama 3.1 8B: 4096 to 4096, 1024, 1024, 4096, and 14336 there and back, in 32 layers
    widths = 2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336)
    assert by_hand == 8 * 32 * widths
    [row] = [row for row in inspect_table(spec) if row.name == "each LoRA adapter"]
    assert row.value == 2 * adapter_params(spec, LORA_RANK)


@pytest.mark.parametrize("tp", [1, 2])
def test_loaded_adapters_take_memory_and_time(tp: int) -> None:
    rows, plain = load_catalogue(), replace(POINT, tp=tp)
    adapted = replace(plain, max_loras=4, max_lora_rank=8)
    before, after = replica_of(plain, rows), replica_of(adapted, rows)
    nbytes = 4 * 2 * adapter_params(before.spec, 8) / tp
    assert after.resident_bytes - before.resident_bytes == pytest.approx(nbytes)
    step = [machine.uniform(8, 1, 512, sampled=8) for machine in (before, after)]
    assert step[1].weight_bytes - step[0].weight_bytes == pytest.approx(nbytes)
    flops = 8 * 2 * adapter_params(before.spec, 8) / tp
    assert step[1].flops - step[0].flops == pytest.approx(flops)
    assert memory_budget(after).kv_tokens < memory_budget(before).kv_tokens
    assert predict(adapted).tpot_ms > predict(plain).tpot_ms


def test_adapters_that_do_not_fit_are_refused() -> None:
    with pytest.raises(DoesNotFit):
        predict(replace(POINT, max_loras=2000, max_lora_rank=64))
    with pytest.raises(BadInput, match="max_loras"):
        predict(replace(POINT, max_loras=0))


def test_plan_counts_adapters_in_memory_and_steps() -> None:
    options = {"accelerator": "h100-sxm", "max_devices": 1, "quantization": "bfloat16"}
    plain = ridgeline.plan("llama-3.1-8b", **options)
    adapted = ridgeline.plan("llama-3.1-8b", **options, max_loras=32, max_lora_rank=64)
    assert adapted.memory.kv_tokens < plain.memory.kv_tokens
    assert adapted.fleets[0].rate < plain.fleets[0].rate
    [note] = [note for note in adapted.notes if "32 LoRA adapters of rank 64" in note]
    assert "GB of each device" in note


def test_plan_leaves_out_layouts_whose_memory_adapters_fill() -> None:
    with pytest.raises(CannotRun):
        ridgeline.plan("llama-3.1-8b", accelerator="h100-sxm", max_devices=1, max_loras=2000)
