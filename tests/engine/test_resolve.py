"""Resolved settings: every value is explicit and has a derivation; the KV budget and its errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from ridgeline.config.settings import Settings, settings_from
from ridgeline.engine import config, dtype
from ridgeline.engine.config import _formats, resolve
from ridgeline.engine.device import choose_device
from ridgeline.engine.scheduler.kv.kv_budget import (
    GIB,
    KvBudgetInputs,
    fitting_model_len,
    kv_budget,
    size,
)
from ridgeline.errors import BadInput, BadModel, CannotRun, DoesNotFit
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.checkpoints.locate import model_path
from ridgeline.modelspec.model import LinearSpec, ModelSpec
from ridgeline.modelspec.rewrite import linears

INPUTS = KvBudgetInputs(
    weight_bytes=1 * GIB,
    kv_bytes_per_token=1 << 16,
    max_model_len=1000,
    max_num_seqs=4,
    block_size=16,
    memory_bytes=16 * GIB,
    available_bytes=5 * GIB,
    device="cpu",
    requested_bytes=None,
)
BLOCK_BYTES = 16 << 16


MAY_BE_NONE = ("ttl", "quantization", "tier", "speculative", "evict", "batch_wait", "master")
"""Parts of names of what may be off, or is derived from the load while the engine runs."""


def test_every_setting_has_a_value_and_a_derivation() -> None:
    resolved = resolve(Settings(model="demo"))
    values = resolved.values()
    assert set(values) == set(resolved.derivations)
    none = [name for name, value in values.items() if value is None]
    assert not [name for name in none if not any(part in name for part in MAY_BE_NONE)]
    assert set(Settings.__struct_fields__) <= set(values)


def test_requested_values_are_used() -> None:
    asked = {
        "max_model_len": 100,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 64,
        "block_size": 32,
        "kv_cache_memory_bytes": 8 << 20,
        "num_threads": 2,
        "attention_backend": "torch",
        "layer_backend": "torch",
        "batching": "static",
        "seed": 9,
    }
    resolved = resolve(Settings(model="demo", **asked))
    for name, value in asked.items():
        assert getattr(resolved, name) == value
        assert "as requested" in resolved.derivations[name]
    assert resolved.num_blocks == (8 << 20) // (32 * 6144)


def test_quantisation_rewrites_the_spec() -> None:
    plain, int8 = (
        resolve(Settings(model="demo")),
        resolve(Settings(model="demo", quantization="int8")),
    )
    assert plain.spec.layers[0].mlp.gate.format.kind == "dense"
    assert int8.spec.layers[0].mlp.gate.format.kind == "int8"
    assert int8.spec.lm_head.format.kind == "bf16"  # as the demo's checkpoint stores it
    assert "weights" in int8.derivations["quantization"]  # which kernel, and why


def test_activation_precision_follows_the_setting() -> None:
    resolved = resolve(Settings(model="demo", quantization="int8", activations="int16"))
    assert resolved.spec.layers[0].mlp.gate.format.digits == 2
    assert resolved.spec.lm_head.format.digits == 1  # in bfloat16, which takes floats
    assert resolved.layer_backend == "native" and resolved.values()["activations"] == "int16"
    with pytest.raises(CannotRun, match="needs integer weights"):
        resolve(Settings(model="demo", activations="float32"))
    with pytest.raises(CannotRun, match="only supported on the CPU"):
        cuda, why = torch.device("cuda"), dict[str, str]()
        _formats(
            Settings(model="demo", activations="int16"), load_spec("demo"), cuda, torch.float32, why
        )


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        ("mps", "Metal"),
        ("mps:0", "Metal"),
        ("rocm", "AMD"),
        ("rocm:1", "AMD"),
        ("hip", "AMD"),
        ("xpu", "kernels for CPUs and for NVIDIA GPUs only"),
        ("npu:0", "kernels for CPUs and for NVIDIA GPUs only"),
    ],
)
def test_devices_without_kernels_are_refused_with_the_reason(device: str, reason: str) -> None:
    with pytest.raises(CannotRun, match=reason):
        resolve(Settings(model="demo", device=device))


@pytest.mark.parametrize(
    ("device", "fix"),
    [
        ("gpu", "use --device cuda"),
        ("CUDA", "use --device cuda"),
        ("0", "use --device cuda:0"),
        ("cuda:", "use --device cuda"),
        ("cuda:-1", "use --device cuda"),
        ("cuda:1.5", "use --device cuda"),
        ("cuda:0,1", "use --device cuda"),
        ("cpu:3", "--num-threads"),
        ("h100-sxm", "--twin --device h100-sxm`"),
        ("h100-sxm:8", "--twin --device h100-sxm:8`"),
        ("H200_SXM", "h200-sxm is a row of the catalogue"),
        ("", "ridgeline doctor"),
        ("meta", "ridgeline doctor"),
        ("toaster", "ridgeline doctor"),
    ],
)
def test_what_is_no_device_is_refused_with_what_is_meant(device: str, fix: str) -> None:
    with pytest.raises(BadInput, match="unknown device") as caught:
        resolve(Settings(model="demo", device=device))
    assert fix in str(caught.value.fix) and "cuda:N" in str(caught.value.limit)


def test_the_first_cpu_is_the_cpu() -> None:
    """PyTorch's own name of it, which other tools write."""
    assert resolve(Settings(model="demo", device="cpu:0")).device == "cpu"


@pytest.mark.parametrize("device", ["cuda:1", "cuda:255", "cuda:256", "cuda:99999"])
def test_number_of_a_device_is_not_cut_to_eight_bits(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch reads `cuda:256` as `cuda:0`."""
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(CannotRun, match="no such CUDA device"):
        resolve(Settings(model="demo", device=device))
    assert choose_device("cuda:0", {}) == torch.device("cuda", 0)


def test_context_may_be_shortened_but_not_extended() -> None:
    assert resolve(Settings(model="demo", max_model_len=10)).max_model_len == 10
    with pytest.raises(BadInput, match=r"4096; limit: 2048; fix: use --max-model-len 2048"):
        resolve(Settings(model="demo", max_model_len=4096))


@pytest.mark.parametrize(
    ("changes", "nbytes", "why"),
    [
        ({}, 4 * 63 * BLOCK_BYTES, "4 sequences"),
        ({"max_num_seqs": 1000}, 2 * GIB, "50% of the 4.0 GiB"),
        ({"max_num_seqs": 1000, "available_bytes": 15 * GIB}, 4 * GIB, "ceiling on cpu"),
        ({"max_num_seqs": 1000, "available_bytes": 24 * GIB}, 6 * GIB, "ceiling on cpu"),
        ({"requested_bytes": 1 * GIB}, 1 * GIB, "as requested"),
        (
            {"device": "cuda", "max_num_seqs": 1000, "available_bytes": 13 * GIB},
            9 * GIB,
            "90% of the 10.0 GiB",
        ),
    ],
)
def test_default_budget_is_the_smallest_of_its_limits(changes: dict, nbytes: int, why: str) -> None:
    budget = kv_budget(replace(INPUTS, **changes))
    assert budget.nbytes == pytest.approx(nbytes) and why in budget.why
    assert budget.num_blocks == budget.nbytes // BLOCK_BYTES


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({"requested_bytes": BLOCK_BYTES * 62}, f"use --kv-cache-memory-bytes {BLOCK_BYTES * 63}"),
        ({"requested_bytes": 40 * GIB}, f"use --kv-cache-memory-bytes {2 * GIB}"),
        ({"available_bytes": 1 * GIB + BLOCK_BYTES * 20}, "use --max-model-len 160"),
        ({"available_bytes": 1 * GIB}, "free 1.0 GiB of memory, or use a smaller model"),
    ],
)
def test_too_little_memory_is_rejected_with_a_working_fix(changes: dict, fix: str) -> None:
    asked = replace(INPUTS, **changes)
    with pytest.raises(DoesNotFit) as caught:
        kv_budget(asked)
    assert caught.value.fix == fix
    for words in ("memory available", "weights", "KV per token", "64.0 KiB", "KV cache"):
        assert words in str(caught.value)
    if fix.startswith("use --kv"):
        assert kv_budget(replace(asked, requested_bytes=int(fix.split()[-1]))).num_blocks >= 63
    elif fix.startswith("use --max"):
        assert kv_budget(replace(asked, max_model_len=int(fix.split()[-1]))).num_blocks >= 10


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (GIB, "1.0 GiB"), (3e15, "2728.5 TiB")],
)
def test_sizes_are_printed_in_binary_units(nbytes: float, text: str) -> None:
    assert size(nbytes) == text


@pytest.mark.parametrize("quantization", [None, "int8", "int4", "bf16"])
def test_bfloat16_instructions_do_not_disable_native_layers(
    quantization: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dtype, "_native_on_cpu", lambda: frozenset({"bfloat16"}))
    asked = {"model": "dummy:tinyllama-1.1b", "device": "cpu", "quantization": quantization}
    resolved = resolve(settings_from(asked))
    assert (resolved.dtype, resolved.layer_backend) == ("float32", "native")
    assert "computed in float32" in resolved.derivations["dtype"]
    dense = resolve(
        settings_from({"model": "demo", **asked, "dtype": "bfloat16", "quantization": None})
    )
    assert (dense.dtype, dense.layer_backend) == ("bfloat16", "torch")


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"model": "dummy:qwen2.5-0.5b"}, "bf16"),
        ({"model": "dummy:qwen2.5-0.5b", "dtype": "float32"}, "dense"),
        ({"model": "dummy:qwen2.5-0.5b", "quantization": "int8"}, "int8"),
        ({"model": "dummy:qwen2.5-0.5b", "layer_backend": "torch"}, "bf16"),
        ({"model": "demo"}, "dense"),
    ],
)
def test_large_bfloat16_model_stays_bfloat16_in_memory(changes: dict, kind: str) -> None:
    resolved = resolve(settings_from(changes))
    assert {layer_linear.format.kind for layer_linear in layer_linears(resolved.spec)} == {kind}
    assert resolved.dtype == "float32"
    is_reported = "in memory in bfloat16" in resolved.derivations["quantization"]
    assert is_reported == (kind == "bf16")


def layer_linears(spec: ModelSpec) -> list[LinearSpec]:
    return [each for path, each in linears(spec).items() if path.startswith("layers.")]


# Popular shapes; with a float32 cache and the full context, most do not fit such a machine.
SHAPES = [
    "qwen2.5-0.5b",
    "qwen2.5-1.5b",
    "qwen2.5-7b",
    "qwen3-0.6b",
    "qwen3-1.7b",
    "qwen3-4b",
    "llama-3.2-1b",
    "llama-3.2-3b",
    "llama-3.1-8b",
    "gemma-3-1b",
    "gemma-3-4b",
    "phi-4-mini",
    "mistral-7b",
    "smollm2-360m",
    "tinyllama-1.1b",
]


@pytest.mark.parametrize("shape", SHAPES)
def test_published_shape_opens_without_flags_on_20_gib(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "_memory", lambda device: (24 * GIB, 20 * GIB))
    resolved = resolve(
        Settings(model=f"dummy:{shape}", device="cpu", num_threads=1, num_threads_decode=1)
    )
    context, lowered = resolved.spec.max_positions, resolved.max_model_len
    assert 2048 <= lowered <= context
    assert ("lowered" in resolved.derivations["max_model_len"]) == (lowered < context)
    assert resolved.kv_cache_dtype == "bfloat16"
    assert resolved.num_blocks * resolved.block_size >= lowered


def test_context_is_lowered_to_a_multiple_of_1024_that_fits() -> None:
    inputs = replace(INPUTS, max_model_len=131_072, available_bytes=3 * GIB)
    assert fitting_model_len(inputs) == 16_384  # half of 2 GiB, 64 KiB a token
    assert kv_budget(replace(inputs, max_model_len=16_384)).num_blocks >= 1024
    assert fitting_model_len(replace(inputs, max_model_len=1000)) == 1000


def test_context_is_not_lowered_to_a_few_tokens() -> None:
    inputs = replace(INPUTS, max_model_len=2048, available_bytes=1 * GIB + 20 * BLOCK_BYTES)
    assert fitting_model_len(inputs) == 2048
    with pytest.raises(DoesNotFit):
        kv_budget(inputs)


def test_requested_context_is_never_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "_memory", lambda device: (24 * GIB, 20 * GIB))
    with pytest.raises(DoesNotFit, match="use --max-model-len"):
        resolve(Settings(model="dummy:llama-3.1-8b", device="cpu", max_model_len=131_072))


def test_steps_after_pooling_are_refused_before_weights_are_loaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to(model_path("demo") / "config.json")
    modules = [{"type": "sentence_transformers.models.Dense"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    with pytest.raises(BadModel, match=r"modules\.json has a step.*Dense"):
        resolve(Settings(model=str(tmp_path), device="cpu"))


def test_kv_cache_of_a_small_model_has_the_dtype_of_the_computation() -> None:
    assert resolve(Settings(model="demo", device="cpu")).kv_cache_dtype == "float32"


def test_derivations_say_which_defaults_have_no_effect() -> None:
    plain = resolve(Settings(model="demo", enable_prefix_caching=False, max_loras=2)).derivations
    assert plain["activations"] == "no effect: the weights are not quantised"
    assert plain["prefix_cache_ttl_s"] == "no effect: enable_prefix_caching is false"
    assert plain["disaggregation_port"] == "no effect: disaggregation_mode is none"
    assert plain["max_loras"] == "as requested"
    used = resolve(Settings(model="demo", quantization="int8", enable_lora=True)).derivations
    assert used["activations"] == used["prefix_cache_ttl_s"] == "default"
    assert "no effect" not in used["max_loras"]
