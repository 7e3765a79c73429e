"""What is written for other engines is read back as the same model, by the same kernels."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ridgeline.config.improve import QuantizeOptions
from ridgeline.engine.checkpoints.load import load_decoder
from ridgeline.engine.execution.runner import TorchRunner
from ridgeline.errors import BadModel, CannotRun
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.model import ModelSpec
from ridgeline.modelspec.rewrite import linears, with_dtype
from ridgeline.workflows.quantize.quantize import quantize

pytestmark = pytest.mark.slow

IDS = [(37 * i) % 4000 for i in range(48)]


def logits(model: Path) -> torch.Tensor:
    spec = with_dtype(load_spec(str(model)), "float32")
    decoder = load_decoder(str(model), spec, device="cpu", compute_dtype=torch.float32)
    return TorchRunner(decoder, None, None).logits(IDS)


def write(target: Path, **choices: object) -> Path:
    quantize("demo", target, QuantizeOptions(method="rtn", **choices))  # type: ignore[arg-type]
    return target


def kinds(spec: ModelSpec) -> set[str]:
    return {linear.format.kind for path, linear in linears(spec).items() if path != "lm_head"}


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_read_back_as_the_same(tmp_path: Path, name: str, zeros: bool) -> None:
    own = write(tmp_path / "own", group_size=32, zeros=zeros)
    theirs = write(tmp_path / "theirs", group_size=32, zeros=zeros, format=name)
    spec = load_spec(str(theirs))
    assert kinds(spec) == {"int4"}
    assert any(name in line.lower() and "exactly" in line for line in spec.rewrites)
    change = (logits(theirs) - logits(own)).norm() / logits(own).norm()
    assert change < 1e-6  # the head alone: bfloat16 kept in ours, float32 by torch in theirs


def test_gptq_with_a_scale_per_row(tmp_path: Path) -> None:
    """Its zero-points are one row of words."""
    own = write(tmp_path / "own", bits=8)
    theirs = write(tmp_path / "theirs", bits=8, format="gptq")
    assert kinds(load_spec(str(theirs))) == {"int8"}
    assert (logits(theirs) - logits(own)).norm() < 0.05 * logits(own).norm()


def test_compressed_tensors(tmp_path: Path) -> None:
    """Scales are bfloat16's there, as the model's dtype."""
    own = write(tmp_path / "own", group_size=64, zeros=True)
    theirs = write(tmp_path / "a", group_size=64, zeros=True, format="compressed-tensors")
    assert kinds(load_spec(str(theirs))) == {"int4"}
    change = (logits(theirs) - logits(own)).norm() / logits(own).norm()
    assert 0 < change < 0.1
    index = json.loads((theirs / "model.safetensors.index.json").read_text(encoding="utf-8"))
    first_file = {
        name for name, file in index["weight_map"].items() if file.startswith("model-00001")
    }
    assert first_file == {"model.embed_tokens.weight"}  # a table may be larger than a layer: alone
    eight = write(tmp_path / "b", bits=8, format="compressed-tensors")
    assert kinds(load_spec(str(eight))) == {"int8"}
    change = (logits(eight) - logits(write(tmp_path / "c", bits=8))).norm()
    assert change < 0.05 * logits(eight).norm()
    three = write(tmp_path / "d", bits=3, group_size=32, format="compressed-tensors")
    assert kinds(load_spec(str(three))) == {"int4"}
    sizes = [sum(f.stat().st_size for f in path.glob("*.safetensors")) for path in (three, theirs)]
    assert sizes[0] < sizes[1]


def test_act_order_is_gathered_at_run_time(tmp_path: Path) -> None:
    """Inputs of every linear shuffled among the groups, and g_idx with them: the same model."""
    plain = write(tmp_path / "plain", group_size=32, format="gptq")
    before = logits(plain)
    for file in plain.glob("*.safetensors"):
        tensors = load_file(file)
        for name in [n for n in tensors if n.endswith(".g_idx")]:
            module = name.removesuffix(".g_idx")
            scales = tensors[f"{module}.scales"]
            order = torch.arange(len(scales)).flip(0)  # groups renumbered: scattered no, moved yes
            tensors[f"{module}.scales"] = scales[order].contiguous()
            tensors[f"{module}.qzeros"] = tensors[f"{module}.qzeros"][order].contiguous()
            tensors[name] = (len(scales) - 1 - tensors[name]).contiguous()
        save_file(tensors, file)
    with pytest.raises(BadModel, match="act-order"):
        logits(plain)
    config = plain / "config.json"
    text = config.read_text(encoding="utf-8").replace('"desc_act": false', '"desc_act": true')
    config.write_text(text, encoding="utf-8")
    after = logits(plain)
    assert (after - before).norm() < 0.02 * before.norm()  # sums in another order, int8 rows


def test_groups_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    for name in ("gptq", "awq", "compressed-tensors"):
        with pytest.raises(
            CannotRun, match=r"704 inputs of layers\.0\.mlp\.down .* --group-size 32 or 64"
        ):
            write(tmp_path / name, format=name)
        assert not (tmp_path / name).exists()
    with pytest.raises(CannotRun, match="4 bits"):
        write(tmp_path / "awq3", format="awq", bits=3, group_size=32)


def test_a_broken_checkpoint_is_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", group_size=32, format="gptq")
    for spoil, message in (("quip", "unknown quant_method"), (None, "no tensor is quantised")):
        copy = tmp_path / f"copy-{spoil}"
        shutil.copytree(whole, copy)
        config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
        config["quantization_config"]["quant_method"] = spoil or "gptq"
        (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
        if spoil is None:
            for file in copy.glob("*.safetensors"):
                kept = {k: v for k, v in load_file(file).items() if "qweight" not in k}
                save_file(kept, file)
        with pytest.raises(BadModel, match=message):
            load_spec(str(copy))
    for file in whole.glob("*.safetensors"):
        tensors = load_file(file)
        tensors = {k: v for k, v in tensors.items() if not k.endswith("o_proj.scales")}
        save_file(tensors, file)
    index = json.loads((whole / "model.safetensors.index.json").read_text(encoding="utf-8"))
    index["weight_map"] = {
        k: v for k, v in index["weight_map"].items() if not k.endswith("o_proj.scales")
    }
    (whole / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(BadModel, match=r"lacks a tensor.*scales"):
        logits(whole)
