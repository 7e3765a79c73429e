"""`ridgeline quantize`: what it writes opens, and what it cannot do it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline.cli.main import main
from ridgeline.config.improve import QuantizeOptions
from ridgeline.config.settings import Settings
from ridgeline.engine.config import resolve
from ridgeline.errors import BadInput, CannotRun
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.rewrite import linears
from ridgeline.workflows.quantize.quantize import quantize, recipe_for


@pytest.mark.slow
def test_quantised_demo_is_written_and_opens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "demo-int4"
    flags = ["--group-size", "64", "--asym", "--lm-head-bits", "8", "--calibration-windows", "4"]
    assert main(["quantize", "demo", "-o", str(target), *flags]) == 0
    out = capsys.readouterr().out
    assert str(target) in out and "by gptq" in out and "cost quality" not in out
    kinds = {path: linear.format for path, linear in linears(load_spec(str(target))).items()}
    assert (kinds["lm_head"].kind, kinds["layers.0.mlp.up"].group_size) == ("int8", 64)
    assert kinds["layers.5.attention.o"].zero_bits == 8
    resolved = resolve(Settings(model=str(target), max_model_len=64))
    assert resolved.spec.layers[0].mlp.gate.format.kind == "int4"
    with pytest.raises(CannotRun, match="already"):
        resolve(Settings(model=str(target), quantization="int8"))
    with pytest.raises(CannotRun, match="LM head is quantised already"):
        resolve(Settings(model=str(target), lm_head_quantization="int4"))


@pytest.mark.slow
def test_lm_head_is_kept_unless_requested(tmp_path: Path) -> None:
    for choices, kind in [
        (QuantizeOptions(method="rtn"), "bf16"),
        (QuantizeOptions(method="rtn", lm_head_bits=4), "int4"),
        (QuantizeOptions(bits=16), "bf16"),
        (QuantizeOptions(rotate=True, bits=8), "dense"),  # its numbers are no longer bfloat16's
    ]:
        target = tmp_path / f"{choices.bits}-{choices.lm_head_bits}-{choices.rotate}"
        quantize("demo", target, choices)
        assert load_spec(str(target)).lm_head.format.kind == kind


def test_flags_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    for wrong in [
        {"bits": 8, "group_size": 64},
        {"bits": 16, "zeros": True},
        {"bits": 16, "method": "gptq"},
        {"method": "hqq", "calibration_text": tmp_path / "text"},
        {"method": "smoothquant"},
        {"bits_budget": float("nan")},
        {"group_size": 0},
        {"method": "qat", "steps": 0},
    ]:
        with pytest.raises(BadInput):
            quantize("demo", tmp_path / "out", QuantizeOptions(**wrong))
    assert recipe_for(QuantizeOptions(bits=3)).group_size == 128


def test_the_head_can_be_quantised_while_loading() -> None:
    asked = Settings(
        model="demo", quantization="int4", lm_head_quantization="int8", max_model_len=64
    )
    resolved = resolve(asked)
    assert resolved.spec.lm_head.format.kind == "int8"
    assert "as requested" in resolved.derivations["lm_head_quantization"]
    lossless = resolve(Settings(model="demo", quantization="bf16", max_model_len=64))
    assert {linear.format.kind for linear in linears(lossless.spec).values()} == {"bf16"}


def test_output_named_as_a_gguf_file_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "demo-q4.gguf"
    assert main(["quantize", "demo", "-o", str(output)]) == 2
    assert "a folder, not a file" in capsys.readouterr().err and not output.exists()
