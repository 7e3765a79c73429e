"""A KV cache that devices divide, in the simulator and in twins."""

from __future__ import annotations

from typing import Any

import pytest

import ridgeline
from ridgeline.config.server import TwinOptions
from ridgeline.config.settings import settings_from
from ridgeline.errors import BadInput, CannotRun
from ridgeline.twin.build import plan_twin
from ridgeline.workflows.serving.twin_server import twin_config

LOAD: dict[str, Any] = {
    "accelerator": "h100-sxm",
    "num_prompts": 40,
    "request_rate": 2.0,
    "input_len": 4096,
    "output_len": 32,
}


def test_simulated_prompts_are_divided_and_decodes_wait_for_exchanges() -> None:
    one = ridgeline.simulate("llama-3.1-8b", **LOAD)
    two = ridgeline.simulate("llama-3.1-8b", **LOAD, context_parallel_size=2)
    assert one.summary.ttft is not None and two.summary.ttft is not None
    assert two.summary.ttft.p50 < one.summary.ttft.p50


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_tier_memory": "1GB", "enable_prefix_caching": True}, "--kv-tier-memory needs"),
        ({"replicas": 2, "decode_replicas": 1}, "--decode-replicas needs"),
        ({"sequence_parallel": True}, "sequence parallelism"),
    ],
)
def test_simulation_refuses_what_the_engine_refuses(changes: dict[str, Any], words: str) -> None:
    with pytest.raises((BadInput, CannotRun), match=words):
        ridgeline.simulate("llama-3.1-8b", **LOAD, **changes, context_parallel_size=2)


def test_devices_of_a_twin_divide_its_cache() -> None:
    settings: dict[str, Any] = {"model": "llama-3.1-8b", "device": "h100-sxm:2"}
    whole = twin_config(settings_from({**settings, "device": "h100-sxm"}), TwinOptions())
    parted = twin_config(settings_from({**settings, "context_parallel_size": 2}), TwinOptions())
    assert (parted.tp, parted.cp, parted.num_devices) == (1, 2, 2)
    tokens = [plan_twin(config).memory.kv_tokens for config in (whole, parted)]
    assert tokens[1] == pytest.approx(2 * tokens[0], rel=0.01)
    both = twin_config(
        settings_from({**settings, "device": "h100-sxm:4", "context_parallel_size": 2}),
        TwinOptions(),
    )
    assert (both.tp, both.cp, both.num_devices) == (2, 2, 4)
    with pytest.raises(BadInput, match="--device h100-sxm:4"):
        twin_config(settings_from({**settings, "context_parallel_size": 4}), TwinOptions())
