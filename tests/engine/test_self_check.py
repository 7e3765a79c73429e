"""`ridgeline inspect` on quantised checkpoints: intact ones pass, planted faults are found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ridgeline.cli.main import main
from ridgeline.config.improve import QuantizeOptions
from ridgeline.engine.checkpoints.self_check import check_layers
from ridgeline.errors import BadInput
from ridgeline.workflows.inspect_model import inspect_model
from ridgeline.workflows.quantize.quantize import quantize


@pytest.mark.slow
@pytest.mark.parametrize(
    "choices",
    [
        QuantizeOptions(method="rtn", zeros=True),
        QuantizeOptions(method="rtn", group_size=32, format="gptq"),
        QuantizeOptions(method="rtn", group_size=32, format="gguf"),
        QuantizeOptions(numbers="nf4", format="bitsandbytes"),
    ],
    ids=lambda c: c.format,
)
def test_intact_checkpoints_pass(
    tmp_path: Path, choices: QuantizeOptions, capsys: pytest.CaptureFixture[str]
) -> None:
    quantize("demo", tmp_path / "m", choices)
    name = str(tmp_path / "m" / "model.gguf" if choices.format == "gguf" else tmp_path / "m")
    checks = list(check_layers(name, "demo"))
    assert [check.num_weights for check in checks] == [7] * 6
    assert not any(check.faults for check in checks)
    assert all(check.error is not None and 0.05 < check.error < 0.15 for check in checks)
    capsys.readouterr()
    assert main(["inspect", name, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["self_check"]) == 6 and report["self_check"][0]["error"] is None


@pytest.mark.slow
def test_planted_faults_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantize("demo", tmp_path / "m", QuantizeOptions(method="rtn", group_size=32, format="gptq"))
    file = next((tmp_path / "m").glob("model-00004*"))  # layer 2
    tensors = load_file(file)
    name = next(n for n in tensors if n.endswith("o_proj.scales"))
    tensors[name][0, 3] = float("inf")
    save_file(tensors, file)
    checks = list(check_layers(str(tmp_path / "m")))
    assert [check.layer for check in checks if check.faults] == [2]
    assert any("scales are not finite" in fault for fault in checks[2].faults)
    assert main(["inspect", str(tmp_path / "m")]) == 1
    assert "o of layer 2: scales are not finite" in capsys.readouterr().out


def test_original_is_only_for_quantised_models() -> None:
    with pytest.raises(BadInput, match="needs a quantised model"):
        inspect_model("demo", against="demo")
    assert main(["inspect", "demo", "--json"]) == 0
    assert torch.is_inference_mode_enabled() is False
