"""bitsandbytes' LLM.int8: written, read back, run by its rule; and what the rule wins back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ridgeline.config.improve import QuantizeOptions
from ridgeline.engine.checkpoints.load import load_decoder
from ridgeline.engine.quant.outlier_rows import OutlierRowsLinear
from ridgeline.errors import BadModel, CannotRun
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.checkpoints.quantization_config import read_quantization_config
from ridgeline.modelspec.rewrite import linears
from ridgeline.workflows.quantize.quantize import quantize
from tests.compress.test_make import dense, kl, logits, logprobs, with_outliers
from tests.compress.test_make import windows as windows

pytestmark = pytest.mark.slow

IDS = [(37 * i) % 4000 for i in range(48)]


def written(target: Path, model: str = "demo", threshold: float = 6.0) -> str:
    quantize(model, target, QuantizeOptions(bits=8, format="bitsandbytes"))
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"]["llm_int8_threshold"] = threshold
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(target)


def test_read_back_as_the_same(tmp_path: Path) -> None:
    """Without a threshold it is our own W8A8, bit for bit but for the head's order of adding."""
    theirs = written(tmp_path / "theirs", threshold=0.0)
    quantize("demo", tmp_path / "own", QuantizeOptions(bits=8))
    own = str(tmp_path / "own")
    wanted = logits(own, dense(own), IDS)
    assert (logits(theirs, dense(theirs), IDS) - wanted).norm() < 1e-6 * wanted.norm()
    tensors = load_file(next((tmp_path / "theirs").glob("model-00002-*")))
    start = "model.layers.0.mlp.up_proj"
    assert tensors[f"{start}.weight"].dtype == torch.int8
    assert tensors[f"{start}.SCB"].shape == tensors[f"{start}.weight"].shape[:1]
    with pytest.raises(CannotRun, match="NF4, and whole numbers of 8 bits"):
        quantize("demo", tmp_path / "m", QuantizeOptions(bits=4, format="bitsandbytes"))


def test_the_threshold_is_the_checkpoints(tmp_path: Path) -> None:
    spec = load_spec(written(tmp_path / "m", threshold=3.5))
    formats = {path: linear.format for path, linear in linears(spec).items()}
    assert formats.pop("lm_head").threshold == 0
    assert {format.threshold for format in formats.values()} == {3.5}
    assert any("of magnitude 3.5 or more multiplied as floats" in line for line in spec.rewrites)
    model = str(tmp_path / "m")
    decoder = load_decoder(model, dense(model), device="cpu", compute_dtype=torch.float32)
    down = decoder.blocks[2].mlp.down  # type: ignore[union-attr]
    assert isinstance(down, OutlierRowsLinear) and down.threshold == 3.5
    config = {"load_in_8bit": True}
    assert read_quantization_config(config, "here").threshold == 6.0  # bitsandbytes' own default
    for wrong in ("six", -1, float("inf"), None):
        with pytest.raises(BadModel, match="cannot read the threshold"):
            read_quantization_config(config | {"llm_int8_threshold": wrong}, "here")


def test_what_the_rule_wins_back(tmp_path: Path, windows: list[list[int]]) -> None:
    """Loud channels planted: at least GAIN of what they cost the activations of plain W8A8."""
    loud = with_outliers(tmp_path / "loud", 12)
    before = logprobs("demo", dense(), windows)
    found = {}
    for threshold in (0.0, 6.0):
        model = written(tmp_path / f"m{threshold}", loud, threshold)
        found[threshold] = kl(before, logprobs(model, dense(model), windows))
    exact = written(tmp_path / "weights", loud, 1e-30)  # every input is an outlier: weights alone
    floor = kl(before, logprobs(exact, dense(exact), windows))
    print(found, floor)
    assert found[6.0] - floor < 0.2 * (found[0.0] - floor), (found, floor)
