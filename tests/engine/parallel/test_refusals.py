"""What several processes cannot do is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from ridgeline.config.settings import settings_from
from ridgeline.engine.config import resolve
from ridgeline.errors import CannotRun


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"context_parallel_size": 2, "tensor_parallel_size": 8}, "exceeds its 4 heads"),
        ({"sequence_parallel": True}, "--tensor-parallel-size"),
        ({"context_parallel_size": 2, "max_model_len": 512}, "one chunk"),
        ({"context_parallel_size": 2, "block_size": 16}, "a chunk of every rank"),
        ({"context_parallel_size": 2, "attention_backend": "torch"}, "is not native"),
        ({"context_parallel_size": 2, "kv_cache_dtype": "int4"}, "native attention"),
        ({"tensor_parallel_size": 2, "enable_lora": True}, "--enable-lora works with one process"),
        (
            {"context_parallel_size": 2, "kv_tier_memory": 1 << 20},
            "--kv-tier-memory works",
        ),
        (
            {"context_parallel_size": 2, "disaggregation_mode": "decode"},
            "--disaggregation-mode decode works with one process",
        ),
        (
            {
                "pipeline_parallel_size": 2,
                "kv_eviction_config": {"method": "streaming", "budget": 128},
            },
            "KV eviction works with one process",
        ),
        ({"expert_parallel_size": 2}, "no experts"),
        ({"tensor_parallel_size": 2, "layer_backend": "compiled"}, "native segments or torch"),
        ({"tensor_parallel_size": 2, "quantization": "int8", "layer_backend": "native"}, "agree"),
        ({"tensor_parallel_size": 64}, "heads"),
        ({"node_rank": 1, "nnodes": 2, "master_addr": "a:1"}, "computes for node 0"),
        ({"nnodes": 2, "master_addr": "127.0.0.1:7000"}, "at least one rank"),
        (
            {
                "tensor_parallel_size": 2,
                "nnodes": 2,
                "master_addr": "127.0.0.1:7000",
                "collectives": "shm",
            },
            "on several nodes",
        ),
    ],
)
def test_combination_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CannotRun, match=words):
        resolve(settings_from({"model": "demo", **changes}))


def test_ranks_share_the_threads_and_hold_the_same_blocks() -> None:
    settings: dict[str, Any] = {"model": "demo", "kv_cache_memory_bytes": 16 << 20}
    one = resolve(settings_from(settings))
    two = resolve(settings_from({**settings, "tensor_parallel_size": 2}))
    assert two.num_threads == max(1, one.num_threads // 2)
    assert two.num_blocks == one.num_blocks
