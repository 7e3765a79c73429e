"""Checkpoints: every layout is read right; whatever is inconsistent is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch import Tensor

from ridgeline.engine.checkpoints.load import load_decoder
from ridgeline.engine.checkpoints.safetensors import INDEX, SINGLE, entries_of, open_tensors
from ridgeline.engine.checkpoints.sources import DummyWeights
from ridgeline.engine.checkpoints.tensor_names import Part, parts
from ridgeline.errors import BadModel
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.cost import resident_weight_bytes
from ridgeline.modelspec.rewrite import with_dtype
from tests.conformance.tiny_models import load_ours, make_model

TOKENS = list(range(3, 30))
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: Any) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    make_model("llama", directory)
    return directory


def rewritten(source: Path, target: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """A copy of a model directory with its tensors changed."""
    target.mkdir(exist_ok=True)
    (target / "config.json").write_text((source / "config.json").read_text())
    save_file(change(load_file(source / SINGLE)), target / SINGLE)
    return target


def load(directory: Path) -> None:
    spec = load_spec(str(directory))
    load_decoder(str(directory), spec, device="cpu", compute_dtype=torch.float32)


def same_logits(a: Path, b: Path) -> bool:
    return torch.equal(load_ours(a).runner.logits(TOKENS), load_ours(b).runner.logits(TOKENS))


def test_sharded_checkpoint_equals_a_single_file(llama: Path, tmp_path: Path) -> None:
    tensors = load_file(llama / SINGLE)
    names = sorted(tensors)
    (tmp_path / "config.json").write_text((llama / "config.json").read_text())
    weight_map = {}
    for shard in range(3):
        file = f"model-{shard}.safetensors"
        save_file({name: tensors[name] for name in names[shard::3]}, tmp_path / file)
        weight_map |= dict.fromkeys(names[shard::3], file)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert same_logits(llama, tmp_path)


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
def test_stacked_experts_equal_single_ones(family: str, tmp_path: Path) -> None:
    """The layout that transformers 5 holds in memory: [experts, 2·inner, hidden]."""
    make_model(family, tmp_path / "old")
    new = rewritten(tmp_path / "old", tmp_path / "new", stack_experts)
    assert any(name.endswith("experts.gate_up_proj") for name in entries_of(new))
    assert same_logits(tmp_path / "old", new)


def stack_experts(tensors: Tensors) -> Tensors:
    renamed = {
        name.replace("block_sparse_moe", "mlp")
        .replace(".w1.", ".gate_proj.")
        .replace(".w2.", ".down_proj.")
        .replace(".w3.", ".up_proj."): tensor
        for name, tensor in tensors.items()
    }
    out = {name: tensor for name, tensor in renamed.items() if ".experts." not in name}
    for name in renamed:
        module, mark, _ = name.partition(".experts.0.gate_proj.weight")
        if not mark:
            continue
        count = sum(n.startswith(f"{module}.experts.") and ".gate_" in n for n in renamed)

        def every(kind: str, module: str = module, count: int = count) -> Tensor:
            names = (f"{module}.experts.{e}.{kind}_proj.weight" for e in range(count))
            return torch.stack([renamed[n] for n in names])

        out[f"{module}.experts.gate_up_proj"] = torch.cat((every("gate"), every("up")), dim=1)
        out[f"{module}.experts.down_proj"] = every("down")
    return out


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_gemma3_inside_its_multimodal_wrapper(prefix: str, tmp_path: Path) -> None:
    make_model("gemma3", tmp_path / "text")

    def wrap(tensors: Tensors) -> Tensors:
        inner = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}
        return {**inner, "vision_tower.patch.weight": torch.zeros(3)}

    wrapped = rewritten(tmp_path / "text", tmp_path / "wrapped", wrap)
    assert same_logits(tmp_path / "text", wrapped)


def test_base_model_names_without_a_prefix(llama: Path, tmp_path: Path) -> None:
    bare = rewritten(
        llama, tmp_path, lambda t: {name.removeprefix("model."): x for name, x in t.items()}
    )
    assert "layers.0.mlp.up_proj.weight" in entries_of(bare)
    assert same_logits(llama, bare)


def test_qwen_vl_config_with_its_text_fields_at_the_top(tmp_path: Path) -> None:
    """As Qwen published it; later versions of transformers nest the fields in text_config."""
    make_model("qwen2.5-vl", tmp_path / "nested")
    flat = rewritten(tmp_path / "nested", tmp_path / "flat", lambda tensors: tensors)
    config = json.loads((flat / "config.json").read_text())
    text = {k: v for k, v in config.pop("text_config").items() if k != "model_type"}
    text["rope_scaling"] = {"type": "mrope", "mrope_section": [1, 1, 1]}
    text["rope_theta"] = text.pop("rope_parameters")["rope_theta"]
    (flat / "config.json").write_text(json.dumps({**text, **config}))
    assert same_logits(tmp_path / "nested", flat)
    (flat / "config.json").write_text(json.dumps({**text, **config, "attention_sink": 4}))
    with pytest.raises(BadModel, match="attention_sink"):
        load_spec(str(flat))


def test_tied_head_may_be_stored_and_rotary_buffers_too(tmp_path: Path) -> None:
    make_model("llama-tied-mha", tmp_path / "a")
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(3)}
    b = rewritten(
        tmp_path / "a",
        tmp_path / "b",
        lambda t: {**t, **extra, "lm_head.weight": t["model.embed_tokens.weight"].clone()},
    )
    assert same_logits(tmp_path / "a", b)


def test_bfloat16_checkpoint_computes_in_float32(llama: Path, tmp_path: Path) -> None:
    half = rewritten(llama, tmp_path / "half", lambda t: {k: v.bfloat16() for k, v in t.items()})
    rounded = rewritten(
        llama, tmp_path / "rounded", lambda t: {k: v.bfloat16().float() for k, v in t.items()}
    )
    assert same_logits(half, rounded)


def test_missing_tensor_is_named(llama: Path, tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    bad = rewritten(llama, tmp_path / "m", lambda t: {k: v for k, v in t.items() if k != name})
    with pytest.raises(BadModel, match=f"lacks 1 tensor.*{name}"):
        load(bad)


def test_unexpected_tensor_is_named(llama: Path, tmp_path: Path) -> None:
    bad = rewritten(llama, tmp_path / "m", lambda t: {**t, "model.extra.weight": torch.zeros(2)})
    with pytest.raises(BadModel, match=r"does not explain.*model\.extra\.weight"):
        load(bad)


def test_wrong_shape_is_named(llama: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    bad = rewritten(llama, tmp_path / "m", lambda t: {**t, name: t[name][:-1].clone()})
    with pytest.raises(BadModel, match=rf"{name}.*\[39, 24\].*\[40, 24\]"):
        load(bad)


@pytest.mark.parametrize("size", [0, 5, 8, 100, -1, -1000])
def test_truncated_file_is_reported(llama: Path, tmp_path: Path, size: int) -> None:
    raw = (llama / SINGLE).read_bytes()
    (tmp_path / "config.json").write_text((llama / "config.json").read_text())
    (tmp_path / SINGLE).write_bytes(raw[:size])
    with pytest.raises(BadModel, match="fetch it again"):
        load(tmp_path)


def header_file(path: Path, header: Any, data: bytes = b"") -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    (path / SINGLE).write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return path


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{not json", "not JSON"),
        (b"[1]", "not a JSON object"),
        ({"__metadata__": {"format": {"a": 1}}}, "not a map of strings"),
        ({"__metadata__": 3}, "not a map of strings"),
        ({"w": {"dtype": [], "shape": [2], "data_offsets": [0, 8]}}, "tensor w is malformed"),
        ({"w": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, "tensor w is malformed"),
        (b"[" * 100_000, "not JSON"),
        ({"w": {"dtype": "F32", "shape": [2]}}, "tensor w is malformed"),
        ({"w": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, "tensor w is malformed"),
        ({"w": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}, "not plain floating"),
        ({"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, "does not fill"),
        ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, "overlap or leave a gap"),
        (
            {
                "v": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
                "w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
            },
            "overlap",
        ),
        ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, "truncated or has bytes"),
    ],
)
def test_malformed_header_is_reported(tmp_path: Path, header: Any, message: str) -> None:
    with pytest.raises(BadModel, match=message):
        entries_of(header_file(tmp_path, header, b"\0" * 8))


def test_errors_of_the_library_are_reported(tmp_path: Path) -> None:
    file = header_file(tmp_path, b'{"w": 1}') / SINGLE
    with pytest.raises(BadModel, match=r"fetch it again"):
        open_tensors(file)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"w": "absent.safetensors"}, r"not there.*absent\.safetensors"),
        ({"w": "../model.safetensors"}, "in the same directory"),
        ({"w": "model.bin"}, "in the same directory"),
        ({"other": SINGLE}, "file without it"),
        ({}, "in the same directory"),
        ([], "not a weight index"),
    ],
)
def test_malformed_index_is_reported(tmp_path: Path, weight_map: Any, message: str) -> None:
    save_file({"w": torch.zeros(2)}, tmp_path / SINGLE)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(BadModel, match=message):
        entries_of(tmp_path)


def test_tensor_that_the_index_omits_is_reported(tmp_path: Path) -> None:
    save_file({"v": torch.zeros(2), "w": torch.zeros(2)}, tmp_path / SINGLE)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": SINGLE}}))
    with pytest.raises(BadModel, match="does not list"):
        entries_of(tmp_path)
    frequencies = {"layers.0.rotary_emb.inv_freq": torch.ones(2), "w": torch.zeros(2)}
    save_file(frequencies, tmp_path / SINGLE)
    assert list(entries_of(tmp_path)) == ["w"]


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("pytorch_model.bin", "pickle runs code"),
        ("consolidated.pth", "pickle runs code"),
        ("model.ckpt", "pickle runs code"),
        ("model.q4.gguf", "GGUF"),
        ("weights.safetensors", "rename"),
        ("readme.txt", "no weights"),
    ],
)
def test_unsupported_weight_files_are_refused(tmp_path: Path, file: str, message: str) -> None:
    (tmp_path / file).write_bytes(b"x")
    with pytest.raises(BadModel, match=message):
        entries_of(tmp_path)


def test_dummy_weights_are_deterministic_by_seed() -> None:
    spec = load_spec("demo-draft")
    q = Part("q", (96, 96), 0)
    one, again, two = DummyWeights(spec, 1), DummyWeights(spec, 1), DummyWeights(spec, 2)
    assert torch.equal(one.get(q), again.get(q))
    assert not torch.equal(one.get(q), two.get(q))
    assert not torch.equal(one.get(q), one.get(q._replace(layer=1)))
    for part in parts(spec):
        tensor = one.get(part)
        assert tuple(tensor.shape) == part.shape
        assert bool((tensor == 1).all()) == part.key.endswith("norm")
    big = one.get(Part("q", (1200, 1000), 0))
    assert 0.019 < float(big.std()) < 0.021 and len(torch.unique(big[:, :2], dim=0)) > 1100


@pytest.mark.slow
def test_dummy_model_occupies_what_the_spec_predicts() -> None:
    name = "dummy:smollm2-135m"
    spec = with_dtype(load_spec(name), "float32")
    short = replace(spec, layers=spec.layers[:2])
    decoder = load_decoder(name, short, device="cpu", compute_dtype=torch.float32, seed=3)
    assert decoder.nbytes == resident_weight_bytes(short)
