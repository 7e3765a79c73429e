"""Parameters, bytes and FLOPs: published numbers, and a slow count of every query-key pair."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.scheduler.kv.kv_budget import KvBudgetInputs
from ridgeline.modelspec import cost
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.checkpoints.planning import load_planning_spec
from ridgeline.modelspec.cost.inspect import inspect_table
from ridgeline.modelspec.families.registry import spec_from_config
from ridgeline.modelspec.format import INT8
from ridgeline.modelspec.model import ModelSpec
from ridgeline.modelspec.rewrite import apply_quantization, rewrite_linears, with_dtype
from tests.engine.scheduler.helpers import make_request, step
from tests.engine.scheduler.helpers import scheduler as make_scheduler


@pytest.mark.parametrize(
    ("shape", "bytes_per_token"),
    [
        ("llama-3.1-8b", 131_072),
        ("llama-3.1-70b", 327_680),
        ("llama-2-70b", 327_680),
        ("qwen3-32b", 262_144),
    ],
)
def test_kv_bytes_per_token(shape: str, bytes_per_token: int) -> None:
    assert cost.kv_bytes_per_token(load_spec(f"dummy:{shape}")) == bytes_per_token


PUBLISHED_PARAMS = {  # exact counts of the published weight files, text model only
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "tinyllama-1.1b": 1_100_048_384,
    "smollm2-135m": 134_515_008,
    "mistral-7b-v0.1": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-1b": 999_885_952,
    "phi-3-mini": 3_821_079_552,
    "phi-4-mini": 3_836_021_760,
}


@pytest.mark.parametrize("shape", PUBLISHED_PARAMS)
def test_parameters_of_published_shapes(shape: str) -> None:
    assert cost.num_params(load_spec(f"dummy:{shape}")) == PUBLISHED_PARAMS[shape]


@pytest.mark.parametrize(
    ("shape", "all_b", "active_b"),
    [
        ("mixtral-8x7b", 46.7, 12.9),
        ("qwen3-30b-a3b", 30.5, 3.35),
        ("llama-1b-32k", 1.04, 1.04),
        ("gemma-3-27b", 27.0, 27.0),
        ("gemma-4-26b-a4b", 25.2, 3.82),
    ],
)
def test_active_parameters(shape: str, all_b: float, active_b: float) -> None:
    spec = load_spec(f"dummy:{shape}")
    assert cost.num_params(spec) / 1e9 == pytest.approx(all_b, rel=0.003)
    assert cost.num_active_params(spec) / 1e9 == pytest.approx(active_b, rel=0.003)


def tiny(family: str = "gemma2", **change: Any) -> ModelSpec:
    fields: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 5,
        "max_position_embeddings": 64,
    }
    return spec_from_config({"model_type": family, **fields, **change}, name="tiny")


shapes = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 30)), min_size=1, max_size=6)


def slow_attention(spec: ModelSpec, runs: list[tuple[int, int]]) -> tuple[int, int, int]:
    """(FLOPs, KV bytes read, KV bytes written), by looking at every query and key."""
    flops = read = written = 0
    for layer in spec.layers:
        a = layer.attention
        token_bytes = 2 * a.num_kv_heads * a.head_dim * 4
        for new, done in runs:
            seen = set()
            for query in range(done, done + new):
                first = 0 if a.window is None else max(0, query - a.window + 1)
                keys = range(first, query + 1)
                seen |= set(keys)
                flops += 4 * a.num_heads * a.head_dim * len(keys)
            read += len(seen) * token_bytes
            written += new * token_bytes
    return flops, read, written


@given(runs=shapes)
def test_attention_against_a_count_of_every_pair(runs: list[tuple[int, int]]) -> None:
    spec = tiny()
    work = cost.step_work(spec, runs, 0)
    flops, read, written = slow_attention(spec, runs)
    assert work.attention_flops == flops
    assert (work.kv_read_bytes, work.kv_write_bytes) == (read, written)


@given(runs=shapes, cut=st.integers(1, 19))
def test_chunking_a_prompt_changes_no_flops(runs: list[tuple[int, int]], cut: int) -> None:
    model = cost.cost_model(tiny())
    whole = model.step(runs, 0)
    chunks = [(min(cut, n), c) for n, c in runs] + [(n - cut, c + cut) for n, c in runs if n > cut]
    assert model.step(chunks, 0).flops == whole.flops


def test_linear_flops_are_two_per_parameter() -> None:
    spec = load_spec("dummy:llama-3.1-8b")
    model = cost.cost_model(spec)
    norms = (2 * 32 + 1) * 4096
    tables = 2 * 128_256 * 4096
    assert model.linear_flops_per_token == 2 * (cost.num_params(spec) - tables - norms)
    assert model.head_flops == tables


def test_the_head_costs_only_for_sampled_rows() -> None:
    model = cost.cost_model(tiny())
    none, one, two = (model.step([(8, 0)], sampled) for sampled in (0, 1, 2))
    assert two.flops - one.flops == one.flops - none.flops == 2 * 96 * 32
    assert one.weight_bytes - none.weight_bytes == 96 * 32 * 4
    assert two.weight_bytes == one.weight_bytes


def test_a_windowed_layer_keeps_only_its_window() -> None:
    spec = tiny()  # layers 0 and 2 see 5 keys, layer 1 all
    per_layer = 2 * 2 * 8 * 4
    assert cost.kv_bytes(spec, 3) == 9 * per_layer
    assert cost.kv_bytes(spec, 100) == (100 + 5 + 5) * per_layer
    assert cost.kv_bytes_per_token(spec) == 3 * per_layer


def test_experts_are_read_as_expected_under_even_routing() -> None:
    spec = load_spec("dummy:mixtral-8x7b")
    model = cost.cost_model(spec)
    expert = 3 * 4096 * 14336 * 2 * 32
    shared = model.fixed_weight_bytes + model.head_weight_bytes
    assert model.step([(1, 0)], 1).weight_bytes == pytest.approx(shared + 2 * expert)
    two = 8 * (1 - 0.75**2)
    assert model.step([(1, 0), (1, 0)], 1).weight_bytes == pytest.approx(shared + two * expert)
    assert model.step([(4096, 0)], 1).weight_bytes == pytest.approx(shared + 8 * expert)
    assert cost.weight_bytes(spec) == pytest.approx(shared + 8 * expert)
    assert cost.weight_bytes(spec, 1) == pytest.approx(shared + 2 * expert)


def test_weight_bytes_of_dense_models() -> None:
    untied = load_spec("dummy:llama-3.1-8b")
    table = 128_256 * 4096 * 2
    assert cost.resident_weight_bytes(untied) == 2 * cost.num_params(untied)
    assert cost.weight_bytes(untied) == 2 * cost.num_params(untied) - table
    tied = load_spec("dummy:llama-3.2-1b")
    assert cost.weight_bytes(tied) == cost.resident_weight_bytes(tied) == 2 * cost.num_params(tied)


def test_int8_moves_the_prediction() -> None:
    spec = with_dtype(load_spec("dummy:llama-1b-32k"), "float32")
    small = apply_quantization(spec, "int8")
    linears = cost.num_params(spec) - 32_000 * 2048 - (2 * 16 + 1) * 2048
    rows = 16 * (2048 + 512 + 512 + 2048 + 8192 + 8192 + 2048)
    saved = cost.weight_bytes(spec) - cost.weight_bytes(small)
    assert saved == 3 * linears - 4 * rows
    assert cost.step_work(small, [(1, 9)], 1).flops == cost.step_work(spec, [(1, 9)], 1).flops


def test_a_quantised_head_leaves_the_tied_table_in_memory() -> None:
    spec = load_spec("dummy:llama-1b-32k")
    small = rewrite_linears(spec, "lm_head", INT8, "test")
    table = 32_000 * 2048
    assert (
        cost.resident_weight_bytes(small) - cost.resident_weight_bytes(spec) == table + 4 * 32_000
    )


def test_work_adds_up_and_knows_its_intensity() -> None:
    model = cost.cost_model(tiny())
    a, b = model.step([(3, 0)], 1), model.step([(1, 9)], 1)
    both = a + b
    assert both.flops == a.flops + b.flops
    assert both.bytes == a.bytes + b.bytes
    assert a.intensity == a.flops / a.bytes
    assert model.step([], 0) == cost.NO_WORK
    assert cost.prefill_work(model, 8, computed=3) == model.step([(5, 3)], 1)
    assert cost.decode_work(model, 2, 7) == model.step([(1, 7), (1, 7)], 2)


def test_pricing_a_step_is_cheap_enough_for_the_simulator() -> None:
    """50 us is the aim; the best run counts, and the limit leaves room for a slow machine."""
    model = cost.cost_model(load_spec("dummy:gemma-3-27b"))
    runs = [(1, 1000 + i) for i in range(64)]
    best = 1.0
    for _ in range(200):
        start = time.perf_counter()
        model.step(runs, 64)
        best = min(best, time.perf_counter() - start)
    assert best < 200e-6


@pytest.mark.parametrize(
    "model",
    [
        "gemma-3-4b",
        "gemma-3n-e2b",
        "gemma-4-e2b",
        "gemma-4-31b",
        "gemma-4-26b-a4b",
        "gpt-oss-20b",
        "olmo-3-7b",
        "deepseek-v2-lite",
        "llama-3.2-1b",
    ],
)
def test_inspect_the_kv_budget_and_the_cache_agree_on_bytes(model: str) -> None:
    """The printed size is the allocated one, with windows, with latent attention and without."""
    spec, context, size = load_planning_spec(model), 8192, 16
    layout = cost.kv_layout(spec)
    inputs = KvBudgetInputs(
        weight_bytes=0,
        kv_bytes_per_token=cost.kv_bytes_per_token(spec),
        max_model_len=context,
        max_num_seqs=1,
        block_size=size,
        memory_bytes=1 << 40,
        available_bytes=1 << 40,
        device="cpu",
        requested_bytes=None,
        layout=layout,
    )
    scheduler = make_scheduler(
        num_blocks=2 * inputs.blocks_per_sequence,
        block_size=size,
        max_num_batched_tokens=512,
        max_model_len=context + 8,
        kv_layout=layout,
    )
    scheduler.add(make_request("a", context - 2, max_tokens=8))
    while not scheduler.running or scheduler.running[0].num_computed < context:
        step(scheduler)
    num_blocks = scheduler.pool.num_owned
    cache = KvCache.allocate(spec, num_blocks, size, torch.bfloat16, "meta", layout=layout)
    printed = {row.name: row.value for row in inspect_table(spec)}["at 8,192 tokens"]
    assert printed == cost.held_kv_bytes(spec, context) == cache.nbytes
    assert printed == num_blocks * inputs.block_bytes
    assert printed == cost.cost_model(spec).kv_bytes(context)
    # The budget leaves room for the largest step beyond each window.
    assert printed <= inputs.blocks_per_sequence * inputs.block_bytes
    has_windows = any(layer.attention.window for layer in spec.layers)
    assert cost.kv_bytes(spec, context) <= printed
    assert (printed < context * cost.kv_bytes_per_token(spec)) == has_windows


@pytest.mark.parametrize("window", [1, 7, 64, 100])
@pytest.mark.parametrize("chunk", [None, 32])
def test_kv_layout_bounds_what_the_scheduler_holds(window: int, chunk: int | None) -> None:
    """`max_blocks` is reached by prompts in steps of `step_tokens`, and never exceeded."""
    size, step_tokens, num_tokens = 4, 24, 300
    layout = cost.KvLayout((0,), ((1,), (2,)), None if chunk else window, chunk, 1)
    bound = layout.max_blocks(num_tokens, size, step_tokens)
    scheduler = make_scheduler(
        num_blocks=bound,
        block_size=size,
        max_num_batched_tokens=step_tokens,
        max_model_len=num_tokens,
        kv_layout=layout,
    )
    scheduler.add(make_request("a", num_tokens - 1, max_tokens=1))
    while scheduler.has_work:
        step(scheduler)
    assert scheduler.totals.num_preempted == 0
    assert layout.max_tokens(bound, size, step_tokens, 2 * num_tokens) >= num_tokens
    assert layout.max_tokens(bound - 1, size, step_tokens, 2 * num_tokens) < num_tokens
