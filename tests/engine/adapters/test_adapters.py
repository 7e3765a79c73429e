"""Adapters against the base with merged weights, on tiny random models and fresh adapters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ridgeline import Engine, Sampling
from ridgeline.engine.adapters.products import largest_bytes, load_products
from ridgeline.engine.adapters.weights import read_adapter
from ridgeline.errors import BadInput, BadModel, CannotRun, UserError
from ridgeline.modelspec.checkpoints.load import load_spec
from tests.conformance.tiny_models import VOCAB, make_model
from tests.engine.adapters.make_adapter import LLAMA, merge, save_adapter

SIZES = {"kv_cache_memory_bytes": 1 << 20, "num_threads": 1, "block_size": 4}
GREEDY = Sampling(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=2)
ALL = list(LLAMA)
FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "all": {"modules": ALL},
    "attention": {"modules": ["q_proj", "v_proj"], "rank": 2, "use_rslora": True},
    "mlp": {"modules": ["down_proj", "up_proj"], "rank": 3},
}


def prompts(num: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(3, 14, (num,), generator=generator).tolist()
    return [torch.randint(2, VOCAB, (size,), generator=generator).tolist() for size in sizes]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lora")
    make_model("llama", path / "base")
    for seed, (name, fields) in enumerate(KINDS.items()):
        save_adapter(path / name, path / "base", seed=seed, **fields)
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    modules = tuple(f"{name}={folder / name}" for name in KINDS)
    with Engine.open(
        str(folder / "base"), enable_lora=True, lora_modules=modules, max_lora_rank=4, **SIZES
    ) as opened:
        yield opened


@pytest.mark.parametrize("name", KINDS)
def test_adapter_equals_merged_weights(folder: Path, engine: Engine, name: str) -> None:
    merged = merge(folder / f"merged-{name}", folder / "base", folder / name)
    texts = prompts(3, seed=5)
    with Engine.open(str(merged), **SIZES) as plain:
        expected = plain.generate(texts, GREEDY)
    found = engine.generate(texts, GREEDY, name)
    base = engine.generate(texts, GREEDY)
    for own, other, unadapted in zip(found, expected, base, strict=True):
        assert own.tokens == other.tokens != unadapted.tokens
        for a, b in zip(own.answers[0].logprobs, other.answers[0].logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=2e-4)


def test_mixing_adapters_in_a_batch_changes_no_bit(engine: Engine) -> None:
    names = ["", "all", "attention", "mlp", "all", "", "mlp"]
    texts = prompts(1, seed=9) * len(names)  # equal prompts: the cache must tell them apart
    alone = [engine.generate([t], GREEDY, n)[0] for t, n in zip(texts, names, strict=True)]
    together = engine.generate(texts, GREEDY, names)
    assert [own.answers for own in together] == [own.answers for own in alone]
    assert len({own.tokens for own in together}) == 4


@pytest.mark.parametrize("method", ["ngram", "suffix", "lookahead"])
def test_speculation_and_preemption_change_no_token(
    folder: Path, engine: Engine, method: str
) -> None:
    modules = tuple(f"{name}={folder / name}" for name in KINDS)
    names, texts = ["all", "", "mlp", "attention"], prompts(4, seed=3)
    sampling = Sampling(temperature=0.0, max_tokens=40, ignore_eos=True)
    expected = [own.tokens for own in engine.generate(texts, sampling, names)]
    config = {"method": method, "num_speculative_tokens": 3}
    small = {**SIZES, "kv_cache_memory_bytes": 40 << 10, "max_model_len": 60}
    with Engine.open(
        str(folder / "base"),
        enable_lora=True,
        lora_modules=modules,
        speculative_config=config,
        **small,
    ) as opened:
        found = [own.tokens for own in opened.generate(texts, sampling, names)]
        counters = opened.counters()
    assert found == expected
    assert counters["num_preemptions"] > 0 and counters["spec_decode_num_draft_tokens"] > 0


@pytest.mark.parametrize("quantization", ["int8"])
def test_quantised_base_is_adapted(folder: Path, quantization: Any) -> None:
    texts = prompts(2, seed=4)
    with Engine.open(
        str(folder / "base"),
        quantization=quantization,
        enable_lora=True,
        lora_modules=(f"all={folder / 'all'}",),
        **SIZES,
    ) as opened:
        mixed = opened.generate([texts[0], texts[0], texts[1]], GREEDY, ["all", "", "all"])
        alone = opened.generate([texts[0]], GREEDY, "all")[0]
    assert mixed[0].answers == alone.answers
    assert mixed[0].tokens != mixed[1].tokens


def test_fused_modules_are_split(tmp_path: Path) -> None:
    make_model("phi3", tmp_path / "base")
    save_adapter(tmp_path / "a", tmp_path / "base", FUSED)
    merged = merge(tmp_path / "merged", tmp_path / "base", tmp_path / "a")
    texts = prompts(2, seed=6)
    with Engine.open(str(merged), **SIZES) as plain:
        expected = [own.tokens for own in plain.generate(texts, GREEDY)]
    modules = (f"a={tmp_path / 'a'}",)
    with Engine.open(
        str(tmp_path / "base"), enable_lora=True, lora_modules=modules, **SIZES
    ) as opened:
        assert [own.tokens for own in opened.generate(texts, GREEDY, "a")] == expected


def test_adapters_are_loaded_and_unloaded_while_serving(folder: Path) -> None:
    text = prompts(1)
    with Engine.open(str(folder / "base"), enable_lora=True, max_loras=1, **SIZES) as opened:
        base = opened.generate(text, GREEDY)[0].tokens
        first = opened.load_adapter("x", str(folder / "all"))
        tokens = opened.generate(text, GREEDY, "x")[0].tokens
        with pytest.raises(BadInput, match="--max-loras 1"):
            opened.load_adapter("y", str(folder / "mlp"))
        opened.unload_adapter("x")
        with pytest.raises(BadInput, match="unknown adapter"):
            opened.generate(text, GREEDY, "x")
        second = opened.load_adapter("x", str(folder / "mlp"))
        assert second.id != first.id
        assert opened.generate(text, GREEDY, "x")[0].tokens not in (tokens, base)
        assert opened.generate(text, GREEDY)[0].tokens == base


def test_reserved_memory_holds_the_largest_adapters(folder: Path, engine: Engine) -> None:
    spec = load_spec(str(folder / "base"))
    largest = largest_bytes(spec, 4, torch.device("cpu"), torch.float32)
    assert f"{4 * largest / 1024:.1f} KiB reserved" in engine.info.derivations["max_loras"]
    loaded = {own.name: own.nbytes for own in engine.adapters}
    assert loaded["all"] == largest  # of rank 4 on every linear
    assert max(loaded["attention"], loaded["mlp"]) < largest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "modules"), [("llama", ALL), ("phi3", FUSED)])
@pytest.mark.parametrize("rank", [1, 8, 33])
def test_no_adapter_takes_more_than_the_reserved_memory(
    tmp_path: Path, family: str, modules: list[str], dtype: torch.dtype, rank: int
) -> None:
    make_model(family, tmp_path / "base")
    save_adapter(tmp_path / "own", tmp_path / "base", modules, rank=rank)
    spec, device = load_spec(str(tmp_path / "base")), torch.device("cpu")
    held = load_products(read_adapter(tmp_path / "own", spec, rank), spec, device, dtype).nbytes
    reserved = largest_bytes(spec, rank, device, dtype)
    assert held <= reserved
    if family == "llama":  # fused modules have one A for several linears, so these may take less
        assert held == reserved


BAD_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "use_dora": ({"use_dora": True}, "use_dora"),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "bias": ({"bias": "all"}, "bias"),
    "alpha_pattern": ({"alpha_pattern": {"q_proj": 3}}, "alpha_pattern"),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
    "other": ({"peft_type": "IA3"}, "peft_type"),
    "unknown": ({"some_new_thing": 4}, "some_new_thing"),
    "rank": ({"r": 0}, "r is not a rank"),
    "alpha": ({"lora_alpha": "x"}, "lora_alpha"),
    "wrong rank": ({"r": 3}, "does not fit the base model"),
    "large": ({"r": 17}, "--max-lora-rank"),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_what_is_not_understood_is_refused_by_name(
    folder: Path, engine: Engine, tmp_path: Path, case: str
) -> None:
    fields, wording = BAD_CONFIGS[case]
    save_adapter(tmp_path / "bad", folder / "base", ["q_proj"], **fields)
    engine.unload_adapter("mlp")
    with pytest.raises(UserError, match=wording):
        engine.load_adapter("bad", str(tmp_path / "bad"))
    engine.load_adapter("mlp", str(folder / "mlp"))


@pytest.mark.parametrize(
    ("change", "wording"),
    [
        ({"base_model.model.lm_head.lora_A.weight": (4, 24)}, "cannot be added to"),
        ({"base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": (4, 24)}, "cannot be added"),
        ({"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": (4, 24)}, "one half"),
        (
            {"base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector": (24,)},
            "cannot be added",
        ),
    ],
)
def test_unknown_tensors_are_refused(
    folder: Path, engine: Engine, tmp_path: Path, change: dict[str, Any], wording: str
) -> None:
    save_adapter(tmp_path / "bad", folder / "base", ["q_proj"])
    file = tmp_path / "bad" / "adapter_model.safetensors"
    tensors = load_file(file) | {name: torch.ones(shape) for name, shape in change.items()}
    save_file(tensors, file)
    engine.unload_adapter("mlp")
    with pytest.raises((CannotRun, BadModel), match=wording):
        engine.load_adapter("bad", str(tmp_path / "bad"))
    engine.load_adapter("mlp", str(folder / "mlp"))


def test_pickled_or_infinite_weights_are_refused(
    folder: Path, engine: Engine, tmp_path: Path
) -> None:
    save_adapter(tmp_path / "bad", folder / "base", ["q_proj"])
    file = tmp_path / "bad" / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors[next(iter(tensors))][0, 0] = torch.inf
    save_file(tensors, file)
    engine.unload_adapter("mlp")
    with pytest.raises(BadModel, match="not finite"):
        engine.load_adapter("bad", str(tmp_path / "bad"))
    file.rename(tmp_path / "bad" / "adapter_model.bin")
    with pytest.raises(BadModel, match="no safetensors"):
        engine.load_adapter("bad", str(tmp_path / "bad"))
    engine.load_adapter("mlp", str(folder / "mlp"))


@pytest.mark.parametrize(
    ("settings", "wording"),
    [
        ({"lora_modules": ("a=b",)}, "needs --enable-lora"),
        ({"enable_lora": True, "lora_modules": ("a",)}, "cannot be read"),
        ({"enable_lora": True, "lora_modules": ("a=b", "c=d"), "max_loras": 1}, "--max-loras"),
        ({"enable_lora": True, "layer_backend": "native"}, "no place for adapters"),
        ({"enable_lora": True, "speculative_config": {"method": "self"}}, "self"),
    ],
)
def test_settings_that_contradict_are_refused(
    folder: Path, settings: dict[str, Any], wording: str
) -> None:
    with pytest.raises(UserError, match=wording):
        Engine.open(str(folder / "base"), **SIZES, **settings)


def test_engine_without_adapters_says_so(folder: Path) -> None:
    with Engine.open(str(folder / "base"), **SIZES) as plain:
        with pytest.raises(CannotRun, match="--enable-lora"):
            plain.generate([[3, 4]], GREEDY, "x")
        assert plain.adapters == ()
    assert json.loads((folder / "all" / "adapter_config.json").read_text())["r"] == 4
