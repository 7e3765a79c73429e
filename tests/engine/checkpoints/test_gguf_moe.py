"""GGUF mixture-of-experts models: written, and read back part by part and as a whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from ridgeline.config.improve import QuantizeOptions
from ridgeline.engine.checkpoints.gguf.weights import GgufWeights
from ridgeline.engine.checkpoints.load import load_decoder
from ridgeline.engine.checkpoints.sources import CheckpointWeights
from ridgeline.engine.checkpoints.tensor_names import parts
from ridgeline.engine.execution.runner import TorchRunner
from ridgeline.errors import BadModel, CannotRun
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.format import blocks
from ridgeline.modelspec.rewrite import with_dtype
from ridgeline.workflows.quantize.quantize import quantize
from scripts.readback import MOE, random_experts

IDS = [(37 * i) % 4000 for i in range(24)]


def logits(model: str) -> torch.Tensor:
    spec = with_dtype(load_spec(model), "float32")
    decoder = load_decoder(model, spec, device="cpu", compute_dtype=torch.float32)
    return TorchRunner(decoder, None, None).logits(IDS)


def far(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.fixture(scope="module", params=MOE)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(random_experts(tmp_path_factory.mktemp("moe") / request.param, request.param))


@pytest.mark.slow
def test_eight_bit_experts_give_the_logits_of_the_dense_model(model: Path, tmp_path: Path) -> None:
    """Every part within what rounding moves it, none at another expert's place."""
    quantize(str(model), tmp_path / "q8", QuantizeOptions(bits=8, format="gguf"))
    name = str(tmp_path / "q8" / "model.gguf")
    dense, spec = load_spec(str(model)), load_spec(name)
    assert spec.family == dense.family and spec.layers[0].mlp.num_experts in (4, 6)
    theirs = GgufWeights(name, spec)
    with CheckpointWeights(model, dense) as ours:
        for part in parts(dense):
            assert far(theirs.get(part), ours.get(part)) < 0.01, part
    theirs_TV, ours_TV = logits(name), logits(str(model))
    apart_T = (theirs_TV - ours_TV).norm(dim=1) / ours_TV.norm(dim=1)
    # Rows are rounded to 8 bits as well, and a rounded router may send a token elsewhere.
    assert apart_T.median() < 0.08, apart_T


@pytest.mark.slow
def test_four_bit_experts_run_packed(model: Path, tmp_path: Path) -> None:
    choices = QuantizeOptions(method="rtn", group_size=32)
    quantize(str(model), tmp_path / "q4", replace(choices, format="gguf"))
    quantize(str(model), tmp_path / "own", choices)
    name = str(tmp_path / "q4" / "model.gguf")
    assert load_spec(name).layers[1].mlp.down.format == blocks(4, 32)
    assert load_spec(name).layers[1].mlp.router.format.kind == "dense"  # type: ignore[union-attr]
    assert far(logits(name), logits(str(tmp_path / "own"))) < 1e-5


@pytest.mark.slow
def test_models_that_llama_cpp_cannot_hold_are_refused(tmp_path: Path) -> None:
    folder = Path(random_experts(tmp_path / "m", "qwen3_moe"))
    file = folder / "config.json"
    config_text = file.read_text(encoding="utf-8")
    file.write_text(config_text.replace('"norm_topk_prob": true', '"norm_topk_prob": false'))
    with pytest.raises(CannotRun, match="renormalises"):
        quantize(str(folder), tmp_path / "x", QuantizeOptions(bits=8, format="gguf"))
    file.write_text(config_text)
    quantize(str(folder), tmp_path / "q8", QuantizeOptions(bits=8, format="gguf"))
    raw = (tmp_path / "q8" / "model.gguf").read_bytes()
    other = tmp_path / "other.gguf"
    other.write_bytes(raw.replace(b"blk.1.ffn_gate_exps", b"blk.1.ffn_gate_exqs"))
    with pytest.raises(BadModel, match="lacks a tensor"):
        load_spec(str(other))
    key = b"qwen3moe.block_count" + bytes([4, 0, 0, 0])  # u32
    at = raw.index(key) + len(key)
    other.write_bytes(raw[:at] + bytes([255] * 4) + raw[at + 4 :])
    with pytest.raises(BadModel, match="at most 4096"):
        load_spec(str(other))
