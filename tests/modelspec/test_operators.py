"""A step's work by operator: it adds up to the step's, and agrees with a count done by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.modelspec import cost
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.checkpoints.planning import load_planning_spec
from ridgeline.modelspec.cost.operators import (
    PARTS,
    describe_operator,
    operator_work,
    total_work,
    work_of,
)
from ridgeline.modelspec.model import ModelSpec
from ridgeline.modelspec.rewrite import apply_quantization, with_dtype, with_kv_dtype
from tests.modelspec.test_model_cost import tiny

SPECS = {
    "windows": tiny(),
    "sandwich norms": tiny("gemma3_text"),
    "int4": apply_quantization(load_spec("dummy:llama-1b-32k"), "int4"),
    "experts": load_spec("dummy:qwen3-30b-a3b"),
    "shared expert": load_spec("dummy:qwen1.5-moe-a2.7b"),
    "latent attention": load_planning_spec("deepseek-v2-lite"),
}
shapes = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 30)), min_size=1, max_size=6)


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@given(runs=shapes, sampled=st.integers(0, 3))
def test_the_parts_add_up_to_the_step(
    spec: ModelSpec, runs: list[tuple[int, int]], sampled: int
) -> None:
    step, whole = (
        cost.step_work(spec, runs, sampled),
        total_work(operator_work(spec, runs, sampled).values()),
    )
    assert whole.flops == pytest.approx(step.flops)
    assert whole.memory_bytes == pytest.approx(step.bytes)


def test_each_part_of_a_dense_model_by_hand() -> None:
    """llama-3.1-8b in bfloat16: 3 sequences of 100 tokens decode, one prompt of 50 comes in."""
    width, wide, vocab, layers, kv = 4096, 14336, 128_256, 32, 1024
    found = operator_work(load_spec("dummy:llama-3.1-8b"), [(1, 99)] * 3 + [(50, 0)], 4)
    tokens = 53
    linears = {
        "qkv": width * (width + 2 * kv),
        "o": width * width,
        "gate_up": 2 * width * wide,
        "down": width * wide,
    }
    for name, weights in linears.items():
        assert found[name].flops == 2 * tokens * weights * layers
        assert found[name].memory_bytes == 2 * weights * layers
    assert found["lm_head"].flops == 2 * 4 * width * vocab
    pairs = 3 * 100 + sum(range(1, 51))
    assert found["attention"].flops == 2 * 2 * pairs * 32 * 128 * layers
    assert found["attention"].memory_bytes == (3 * 100 + 50) * 2 * kv * 2 * layers
    assert found["kv_write"].memory_bytes == tokens * 2 * kv * 2 * layers
    assert found["norm"].memory_bytes == (2 * layers + 1) * width * 2
    assert found["activation"].row_bytes == tokens * 3 * wide * 2 * layers


def test_the_rate_is_that_of_the_weights_product() -> None:
    dense, int4 = load_spec("dummy:llama-1b-32k"), SPECS["int4"]
    assert operator_work(dense, [(1, 9)], 1)["down"].rate == dense.dtype
    found = operator_work(int4, [(1, 9)], 1)
    assert found["down"].rate == "int4"
    assert found["norm"].rate == ""
    assert found["attention"].rate == int4.dtype
    narrow = operator_work(with_kv_dtype(int4, "int8"), [(1, 9)], 1)
    assert narrow["attention"].rate == "int16"


def test_floats_times_bfloat16_have_a_rate_of_their_own() -> None:
    """What is stored in bfloat16 and computed in float32: weights, or keys and values."""
    spec = apply_quantization(with_dtype(tiny(torch_dtype="bfloat16"), "float32"), "bf16")
    found = operator_work(spec, [(1, 9)], 1)
    assert (found["down"].rate, found["attention"].rate) == ("bf16", "float32")
    found = operator_work(with_kv_dtype(tiny(), "bfloat16"), [(1, 9)], 1)
    assert (found["down"].rate, found["attention"].rate) == ("float32", "bf16_kv")


def test_an_operator_does_all_that_its_name_says() -> None:
    parts = operator_work(tiny(), [(4, 0)], 1)
    both = work_of("rope+kv_write", parts)
    assert both.row_bytes == parts["rope"].row_bytes
    assert both.memory_bytes == parts["kv_write"].memory_bytes
    assert work_of("router+experts", parts).flops == 0
    assert describe_operator("rope+kv_write") == "RoPE, KV write"
    assert set(parts) <= set(PARTS)
