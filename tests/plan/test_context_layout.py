"""Context parallelism in predictions: an equal part of the KV cache on every device."""

from __future__ import annotations

from typing import Any

import pytest

import ridgeline
from ridgeline.errors import CannotRun
from ridgeline.hardware.catalogue import load_catalogue
from ridgeline.plan.step_time.memory import memory_budget
from ridgeline.plan.step_time.predict import OperatingPoint, replica_of


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


def test_context_parallelism_is_not_combined_with_divided_layers() -> None:
    with pytest.raises(CannotRun, match="keeps layers whole"):
        ridgeline.predict(
            "llama-3.1-8b",
            accelerator="h100-sxm",
            tensor_parallel_size=2,
            context_parallel_size=2,
        )
