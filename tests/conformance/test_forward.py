"""Every layer backend keeps the invariants of `engine/forward/base.py`; `torch` is the oracle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ridgeline._native as _native
from ridgeline.engine.attention import build_attention
from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.attention.kv_format import kv_format
from ridgeline.engine.checkpoints.load import load_decoder
from ridgeline.engine.execution.layers import choose
from ridgeline.engine.execution.layers.native import NativeForward
from ridgeline.engine.execution.layers.native_segments import ROWS
from ridgeline.engine.kernels.native_linear import ISA_VARIABLE
from ridgeline.engine.model.decoder import Decoder
from ridgeline.engine.scheduler.plan import Run
from ridgeline.errors import CannotRun
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.model import ModelSpec
from ridgeline.modelspec.rewrite import (
    apply_quantization,
    with_activations,
    with_dtype,
    with_kv_dtype,
)
from tests.conformance.tiny_models import FAMILIES, TORCH_ONLY, make_model

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
TOLERANCE = {
    "none": 2e-5,
    "bf16": 2e-5,
    "int8": 0.03,
    "int4": 0.05,
    "int8, int16": 5e-4,
    "int4, float32": 2e-5,
}  # a last bit may move an activation's rounding


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            make_model(name, made[name]).bfloat16().save_pretrained(made[name])
        return made[name]

    return get


def spec_of(directory: Path, quantization: str) -> ModelSpec:
    """As `quantization` has it; behind a comma, how exactly activations meet the weights."""
    weights, _, activations = quantization.partition(", ")
    spec = load_spec(str(directory))
    spec = spec if weights == "none" else apply_quantization(spec, weights)
    return with_activations(spec, activations) if activations else spec


def decoder_of(directory: Path, quantization: str, backend: str) -> Decoder:
    spec = spec_of(directory, quantization)
    dtype = torch.float32
    return load_decoder(
        str(directory), spec, device="cpu", compute_dtype=dtype, layer_backend=backend
    )


def row_by_row(q_THD: Tensor, kv_T2KD: Tensor, layer: int, sinks_H: Tensor | None = None) -> Tensor:
    """An attention that looks at nothing but the row itself; sums and products alone, whose bits
    do not depend on the shape."""
    k_TKD, v_TKD = kv_T2KD.unbind(1)
    group = q_THD.shape[1] // k_TKD.shape[1]
    k_THD, v_THD = k_TKD.repeat_interleave(group, 1), v_TKD.repeat_interleave(group, 1)
    return q_THD * k_THD + v_THD * (0.5 + 0.25 * layer)


def hidden(decoder: Decoder, tokens: list[int], positions: list[int]) -> Tensor:
    with torch.inference_mode():
        at_T = torch.tensor(positions)
        return decoder.hidden(torch.tensor(tokens), at_T, max(positions) + 1, row_by_row).clone()


def random_rows(num_rows: int) -> tuple[list[int], list[int]]:
    return torch.randint(0, 67, (num_rows,)).tolist(), torch.randint(0, 24, (num_rows,)).tolist()


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("name", TORCH_ONLY)
def test_other_layers_are_refused_with_the_reason(
    name: str, checkpoint: Callable[[str], Path]
) -> None:
    spec = spec_of(checkpoint(name), "none")
    with pytest.raises(CannotRun, match=TORCH_ONLY[name]):
        choose("native", spec, CPU, torch.float32)
    assert choose("auto", spec, CPU, torch.float32)[0] == "torch"


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in TORCH_ONLY])
@pytest.mark.parametrize("quantization", TOLERANCE)
def test_native_layers_equal_torch(
    name: str, quantization: str, checkpoint: Callable[[str], Path]
) -> None:
    native, plain = (decoder_of(checkpoint(name), quantization, b) for b in ("native", "torch"))
    for num_rows in (1, 2, 7, 33):
        rows = random_rows(num_rows)
        found, expected = hidden(native, *rows), hidden(plain, *rows)
        assert found.shape == expected.shape and found.dtype == torch.float32
        assert relative(found, expected) < TOLERANCE[quantization], num_rows


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe", "glm4-moe"])
@pytest.mark.parametrize("quantization", TOLERANCE)
def test_a_row_is_the_same_bits_in_any_batch_and_on_any_number_of_threads(
    name: str, quantization: str, checkpoint: Callable[[str], Path]
) -> None:
    decoder = decoder_of(checkpoint(name), quantization, "native")
    tokens, positions = random_rows(500)
    alone = hidden(decoder, tokens, positions)
    assert isinstance(decoder.forward, NativeForward)
    decoder.forward.num_threads = 3
    assert torch.equal(hidden(decoder, tokens, positions), alone)
    for first, end in ((0, 1), (7, 8), (3, 12), (490, 500)):
        part = hidden(decoder, tokens[first:end], positions[first:end])
        assert torch.equal(part, alone[first:end]), (first, end)


@pytest.mark.parametrize("isa", _native.linear_isas().split(","))
@pytest.mark.parametrize("name", ["llama-bias", "gemma2", "mixtral"])
@pytest.mark.parametrize("quantization", ["int4", "int4, float32"])
def test_every_isa_gives_the_same_bits(
    quantization: str,
    name: str,
    isa: str,
    checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    several = [random_rows(count) for count in (1, 9, 45)]
    best = decoder_of(checkpoint(name), quantization, "native")
    expected = [hidden(best, *rows) for rows in several]
    monkeypatch.setenv(ISA_VARIABLE, isa)
    decoder = decoder_of(checkpoint(name), quantization, "native")
    for rows, each in zip(several, expected, strict=True):
        assert torch.equal(hidden(decoder, *rows), each), len(rows[0])


@pytest.mark.parametrize("quantization", ["int4", "int8", "int4, int16"])
def test_rows_too_many_for_a_cache_are_the_same_bits(quantization: str, tmp_path: Path) -> None:
    """Variants that also cut rows among the threads (native/layer/segment.cpp) agree with one."""
    make_model("llama", tmp_path, intermediate_size=7000, num_hidden_layers=1)
    decoder = decoder_of(tmp_path, quantization, "native")
    tokens, positions = random_rows(200)
    together = hidden(decoder, tokens, positions)
    for first in range(0, 200, 50):
        part = hidden(decoder, tokens[first : first + 50], positions[first : first + 50])
        assert torch.equal(part, together[first : first + 50]), first


LARGE = {"intermediate_size": 128, "hidden_size": 4096}  # 301 of its rows do not fit a cache


@pytest.mark.parametrize(
    "isa, sizes",
    [
        *((isa, {"intermediate_size": 384}) for isa in _native.linear_isas().split(",")),
        ("auto", LARGE),
    ],
)
@pytest.mark.parametrize("quantization", ["int4", "int4, float32"])
def test_gating_many_rows_is_bitwise_equal_in_every_thread_layout(
    quantization: str,
    isa: str,
    sizes: dict[str, object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """native/layer/gate.cpp: of several rows no halves lie in memory."""
    make_model("llama", tmp_path, num_hidden_layers=1, **sizes)
    monkeypatch.setenv(ISA_VARIABLE, isa)
    decoder = decoder_of(tmp_path, quantization, "native")
    tokens, positions = random_rows(301)
    together = hidden(decoder, tokens, positions)
    assert isinstance(decoder.forward, NativeForward)
    for count in (301, 100, 13, 12, 2, 1):
        for first in (0, 100, 200) if count <= 100 else (0,):
            assert not decoder.forward.frame.profile(True)
            part = hidden(decoder, tokens[first : first + count], positions[first : first + count])
            gating_s = decoder.forward.frame.profile(False)["activation"]
            assert (gating_s == 0.0) == (count > 1), count
            assert torch.equal(part, together[first : first + count]), (count, first)


NUM_BLOCKS, BLOCK = 200, 5


def steps_of(lengths: list[int], chunk: int) -> list[list[Run]]:
    """Every sequence fed `chunk` tokens at a time, together, its blocks anywhere."""
    order = iter(torch.randperm(NUM_BLOCKS).tolist())
    tokens = [tuple(torch.randint(0, 67, (length,)).tolist()) for length in lengths]
    blocks = [tuple(next(order) for _ in range(-(-length // BLOCK))) for length in lengths]
    return [
        [
            Run(seq, first, given, blocks[seq], None)
            for seq, known in enumerate(tokens)
            if (given := known[first : first + chunk])
        ]
        for first in range(0, max(lengths), chunk)
    ]


def through_cache(
    decoder: Decoder, steps: list[list[Run]], kv: str, whole: bool
) -> tuple[list[Tensor], KvCache]:
    """Hidden states of each step, and the cache behind them; `whole`: the step as one segment."""
    spec = with_kv_dtype(with_dtype(decoder.spec, "float32"), kv)
    cache = KvCache.allocate(spec, NUM_BLOCKS, BLOCK, torch.float32, "cpu", kv_format(kv))
    attention = build_attention("native", spec, cache)
    found = []
    with torch.inference_mode():
        for runs in steps:
            step = attention.prepare(runs)
            attend = step if whole else lambda *new, step=step: step(*new)
            tokens = torch.tensor([token for run in runs for token in run.tokens])
            at = [torch.arange(run.start, run.start + len(run.tokens)) for run in runs]
            end = max(run.start + len(run.tokens) for run in runs)
            found.append(decoder.hidden(tokens, torch.cat(at), end, attend).clone())
    return found, cache


@pytest.mark.parametrize("kv", ["float32", "int8", "fp8"])
@pytest.mark.parametrize(
    "name",
    [
        *("llama", "qwen3", "gemma2", "mixtral", "olmo3", "granite", "ernie4.5", "arcee"),
        *("gpt-oss", "glm4", "glm4-moe", "minimax-m2", "qwen2-moe"),
    ],
)
def test_a_step_in_one_segment_gives_the_bits_of_attention_between_segments(
    name: str, kv: str, checkpoint: Callable[[str], Path]
) -> None:
    decoder = decoder_of(checkpoint(name), "int4", "native")
    assert isinstance(decoder.forward, NativeForward)
    for lengths, chunk, threads in (([7], 3, 1), ([600, 40, 1], 550, 3), ([3] * 9, 2, 2)):
        steps, decoder.forward.num_threads = steps_of(lengths, chunk), threads
        (found, cache), (expected, twin) = (
            through_cache(decoder, steps, kv, whole) for whole in (True, False)
        )
        assert all(map(torch.equal, found, expected)), (lengths, threads)
        assert all(map(torch.equal, cache.layers, twin.layers)), (lengths, threads)


def test_a_profile_names_every_operator_of_a_step(checkpoint: Callable[[str], Path]) -> None:
    decoder = decoder_of(checkpoint("llama"), "int4", "native")
    assert isinstance(decoder.forward, NativeForward)
    frame, steps = decoder.forward.frame, steps_of([4], 4)
    through_cache(decoder, steps, "int8", whole=True)
    assert not frame.profile(True)
    through_cache(decoder, steps, "int8", whole=True)
    spent = frame.profile(False)
    assert {"embed", "qkv", "rope+kv_write", "attention", "o", "gate_up", "down", ROWS} <= set(
        spent
    )
    assert all(seconds >= 0 for seconds in spent.values())
    through_cache(decoder, steps, "int8", whole=True)
    assert not frame.profile(False)


def test_tokens_and_positions_outside_the_tables_are_refused(
    checkpoint: Callable[[str], Path],
) -> None:
    decoder = decoder_of(checkpoint("llama"), "int4", "native")
    for token in (-1, 67):
        with pytest.raises(ValueError, match="vocabulary"):
            hidden(decoder, [0, token], [0, 1])
    with torch.inference_mode(), pytest.raises(ValueError, match="position"):
        decoder.hidden(torch.tensor([0]), torch.tensor([5000]), 1, row_by_row)


def test_what_the_native_layers_cannot_run_they_refuse(
    checkpoint: Callable[[str], Path],
) -> None:
    for quantization in ("none", "int4"):
        spec = spec_of(checkpoint("llama"), quantization)
        with pytest.raises(CannotRun, match="float32 only"):
            choose("native", spec, CPU, torch.bfloat16)
        assert choose("auto", spec, CPU, torch.bfloat16)[0] == "torch"
        assert choose("auto", spec, CPU, torch.float32)[0] == "native"
