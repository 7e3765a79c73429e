"""Finding models and loading their specs; every wrong path is a clear error."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from ridgeline.errors import BadInput, BadModel, CannotRun
from ridgeline.modelspec import cost
from ridgeline.modelspec.checkpoints.gguf_header import is_gguf
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.checkpoints.locate import is_dummy, local_path, model_path
from ridgeline.modelspec.cost.inspect import inspect_table, layer_groups
from ridgeline.modelspec.families.shapes import shape_table
from ridgeline.modelspec.format import INT8
from ridgeline.modelspec.layer_inputs import input_table_params, model_linears
from ridgeline.modelspec.rewrite import (
    apply_quantization,
    linears,
    rewrite_linears,
    with_dtype,
    with_kv_dtype,
)

TINY: dict[str, Any] = {"model_type": "llama", "num_hidden_layers": 2, "eos_token_id": 2}


def write_model(directory: Path, *, dtype: str = "BF16", **change: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**TINY, **change}))
    header = json.dumps({"x": {"dtype": dtype, "shape": [1], "data_offsets": [0, 2]}}).encode()
    blob = struct.pack("<Q", len(header)) + header + b"\0\0"
    (directory / "model.safetensors").write_bytes(blob)
    return directory


def test_a_directory(tmp_path: Path) -> None:
    spec = load_spec(str(write_model(tmp_path / "m", torch_dtype="float16")))
    assert spec.stored_dtype == "float16"
    assert spec.eos_token_ids == (2,)


def test_the_weights_tell_the_dtype_where_the_config_does_not(tmp_path: Path) -> None:
    assert load_spec(str(write_model(tmp_path / "m"))).stored_dtype == "bfloat16"
    (tmp_path / "m" / "model.safetensors").write_bytes(b"\1\0\0\0\0\0\0\0{")
    assert load_spec(str(tmp_path / "m")).stored_dtype == "float32"


def test_generation_config_adds_end_tokens(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m")
    (directory / "generation_config.json").write_text('{"eos_token_id": [2, 7, 9]}')
    assert load_spec(str(directory)).eos_token_ids == (2, 7, 9)
    (directory / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(BadModel, match="eos_token_id"):
        load_spec(str(directory))


def test_an_end_token_that_no_logit_stands_for_is_none(tmp_path: Path) -> None:
    """It would index past the logits where `min_tokens` keeps ends from coming out."""
    directory = write_model(tmp_path / "m")
    vocab = load_spec(str(directory)).vocab_size
    ends = json.dumps({"eos_token_id": [vocab - 1, vocab, vocab + 5]})
    (directory / "generation_config.json").write_text(ends)
    assert load_spec(str(directory)).eos_token_ids == (2, vocab - 1)
    beyond = write_model(tmp_path / "beyond", eos_token_id=[vocab, 3])
    assert load_spec(str(beyond)).eos_token_ids == (3,)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing", "no such model directory"),
        ("smolm2", "smollm2"),
        ("Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("some-org/some-model", "ridgeline pull some-org/some-model"),
        ("empty", "no config.json"),
        ("lora", "LoRA"),
        ("ggufs", "name the .gguf file itself"),
        ("pickles", "safetensors"),
        ("model.gguf", "GGUF"),
        ("model.bin", "can run code"),
        ("model.safetensors", "directory that holds"),
        ("readme.txt", "is a directory"),
    ],
)
def test_wrong_paths(name: str, words: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for directory in ("empty", "lora", "ggufs", "pickles"):
        (tmp_path / directory).mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text("{}")
    for file in ("m.Q4_0.gguf", "m.Q8_0.gguf"):
        (tmp_path / "ggufs" / file).write_text("")
    (tmp_path / "pickles" / "pytorch_model.bin").write_text("")
    for file in ("model.gguf", "model.bin", "model.safetensors", "readme.txt"):
        (tmp_path / file).write_text("")
    with pytest.raises(BadModel) as caught:
        load_spec(name)
    assert words in str(caught.value)
    assert name in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", '"x"', "\xff", "[" * 100_000])
def test_a_config_that_is_not_an_object(text: str, tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m")
    (directory / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(BadModel, match=r"config\.json"):
        load_spec(str(directory))


def test_a_directory_with_one_gguf_file_stands_for_the_file(tmp_path: Path) -> None:
    (tmp_path / "m.Q4_0.gguf").write_text("")
    (tmp_path / "readme.txt").write_text("")
    assert is_gguf(str(tmp_path))
    assert local_path(str(tmp_path)) == tmp_path / "m.Q4_0.gguf"
    (tmp_path / "config.json").write_text("{}")
    assert local_path(str(tmp_path)) == tmp_path
    (tmp_path / "config.json").unlink()
    (tmp_path / "mmproj.gguf").write_text("")
    assert not is_gguf(str(tmp_path))


def test_built_in_models_are_found_inside_the_package() -> None:
    try:
        path = model_path("demo")
    except BadModel as error:
        assert "install Ridgeline again" in str(error)
    else:
        assert path.parts[-2:] == ("assets", "demo")


def test_unknown_shape_lists_near_ones() -> None:
    assert is_dummy("dummy:x")
    with pytest.raises(BadModel, match=r"dummy:llama-3\.1-8b"):
        load_spec("dummy:llama-3-1-8b")
    with pytest.raises(BadModel, match="no directory"):
        model_path("dummy:llama-3.1-8b")


@pytest.mark.parametrize("shape", shape_table())
def test_every_shape_has_a_source_and_an_arithmetic(shape: str) -> None:
    assert "https://" in shape_table()[shape]["source"]
    spec = load_spec(f"dummy:{shape}")
    rows = {(row.section, row.name): row for row in inspect_table(spec)}
    assert rows["parameters", "all"].value == cost.num_params(spec)
    groups = layer_groups(spec)
    assert sum(group.num_layers for group in groups) == len(spec.layers)
    tables = (1 if spec.tied_embeddings else 2) * spec.vocab_size * spec.hidden_size
    tables += input_table_params(spec)
    tables += sum(linear.num_out * linear.num_in for linear in model_linears(spec).values())
    in_layers = sum(group.num_layers * group.params for group in groups)
    assert 0 < cost.num_params(spec) - in_layers - tables < 0.001 * cost.num_params(spec)


def test_linears_are_named_by_path() -> None:
    paths = linears(load_spec("dummy:mixtral-8x7b"))
    assert len(paths) == 32 * 8 + 1
    assert paths["layers.31.attention.k"].num_out == 1024
    assert paths["layers.0.mlp.down"].num_in == 14336
    assert paths["layers.0.router"].num_out == 8


def test_int8_leaves_router_and_head_alone() -> None:
    spec = apply_quantization(load_spec("dummy:mixtral-8x7b"), "int8")
    dense = {p for p, linear in linears(spec).items() if linear.format.kind == "dense"}
    assert dense == {f"layers.{i}.router" for i in range(32)} | {"lm_head"}
    assert len(spec.rewrites) == 2
    assert len({id(layer) for layer in spec.layers}) == 1


def test_a_rewrite_that_matches_nothing_raises() -> None:
    spec = load_spec("dummy:llama-3.2-1b")
    with pytest.raises(CannotRun, match=r"layers\.\*\.moe"):
        rewrite_linears(spec, "layers.*.moe.*", INT8, "test")
    with pytest.raises(BadInput, match="int3"):
        apply_quantization(spec, "int3")
    with pytest.raises(BadInput, match="float64"):
        with_dtype(spec, "float64")
    with pytest.raises(BadInput, match="int1"):
        with_kv_dtype(spec, "int1")


def test_dtype_moves_weights_and_kv_but_not_quantised_weights() -> None:
    spec = load_spec("dummy:llama-3.2-1b")
    wide = with_dtype(apply_quantization(spec, "int8"), "float32")
    assert (wide.stored_dtype, wide.dtype, wide.kv_dtype) == ("bfloat16", "float32", "float32")
    assert wide.lm_head.format.bits == 32
    assert linears(wide)["layers.0.mlp.up"].format == INT8
    kept = with_dtype(with_kv_dtype(spec, "float16"), "float32")
    assert kept.kv_dtype == "float16"
    assert with_dtype(spec, "bfloat16") == spec


def test_rewriting_some_layers_splits_the_groups() -> None:
    spec = rewrite_linears(load_spec("dummy:llama-3.2-1b"), "layers.[0-3].mlp.*", INT8, "test")
    assert [group.numbers for group in layer_groups(spec)] == ["0-3", "4-15"]
