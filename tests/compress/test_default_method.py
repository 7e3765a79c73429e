"""`quantize` without a method: GPTQ at few bits, else rounding, and a reason."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from ridgeline.cli.main import main
from ridgeline.config.improve import QuantizeOptions
from ridgeline.engine.checkpoints.load import load_decoder
from ridgeline.engine.execution.runner import TorchRunner
from ridgeline.errors import BadInput, CannotRun, UserError
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.checkpoints.locate import model_path
from ridgeline.modelspec.rewrite import with_dtype
from ridgeline.workflows.quantize.quantize import choose_recipe, quantize, recipe_for
from tests.conformance.tiny_models import make_model

BRIEF = {"calibration_windows": 8, "calibration_tokens": 64}


def tiny(family: str, folder: Path, *, tokenizer: bool = True) -> str:
    """A random model of a family, with the demo model's tokenizer or none."""
    make_model(family, folder, vocab_size=4096)
    if tokenizer:
        shutil.copy(model_path("demo") / "tokenizer.json", folder)
    return str(folder)


def logits(model: str) -> torch.Tensor:
    spec = with_dtype(load_spec(model), "float32")
    decoder = load_decoder(model, spec, device="cpu", compute_dtype=torch.float32)
    return TorchRunner(decoder, None, None).logits([(37 * i) % 4000 for i in range(24)])


@pytest.mark.parametrize(
    ("choices", "method"),
    [
        ({}, "gptq"),
        ({"bits": 3}, "gptq"),
        ({"bits": 5, "format": "compressed-tensors"}, "gptq"),
        ({"bits_budget": 5.0}, "gptq"),
        ({"calibration_tokens": 64}, "gptq"),
        ({"method": "rtn"}, "rtn"),
        ({"bits": 8}, "rtn"),
        ({"numbers": "q4_k"}, "rtn"),
        ({"numbers": "nf4"}, "rtn"),
    ],
    ids=str,
)
def test_default_is_gptq_for_integers_of_few_bits(choices: dict[str, object], method: str) -> None:
    assert recipe_for(QuantizeOptions(**choices)).method == method  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "deepseek-v3", "apertus"])
def test_default_loses_less_than_rounding_in_every_kind_of_layer(
    tmp_path: Path, family: str
) -> None:
    model = tiny(family, tmp_path / "m")
    result = quantize(model, tmp_path / "q", QuantizeOptions(**BRIEF))
    assert (result.method, result.method_reason) == ("gptq", "")
    rounded = quantize(model, tmp_path / "rtn", QuantizeOptions(method="rtn"))
    wanted = logits(model)
    change, of_rounding = ((logits(r.path) - wanted).norm() for r in (result, rounded))
    assert 0 < change < of_rounding


@pytest.mark.parametrize(
    ("family", "tokenizer", "reason"),
    [("llama", False, "has no tokenizer"), ("cohere", True, "parallel attention and MLP")],
)
def test_what_cannot_be_calibrated_is_rounded_and_the_reason_is_printed(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    family: str,
    tokenizer: bool,
    reason: str,
) -> None:
    model = tiny(family, tmp_path / "m", tokenizer=tokenizer)
    capsys.readouterr()
    assert main(["quantize", model, "-o", str(tmp_path / "q")]) == 0
    out, err = capsys.readouterr()
    assert "by rtn" in out and "gptq cannot calibrate" in out and reason in " ".join(out.split())
    assert reason in " ".join(err.split())
    asked = QuantizeOptions(method="gptq")
    assert choose_recipe(model, asked)[0].method == "gptq"  # what was asked for is not replaced
    with pytest.raises(UserError):
        quantize(model, tmp_path / "asked", asked)


def test_head_that_16_bits_would_round_is_refused_before_any_layer(tmp_path: Path) -> None:
    model = tiny("llama", tmp_path / "m")  # float32
    with pytest.raises(CannotRun, match="would round the LM head"):
        quantize(model, tmp_path / "q", QuantizeOptions(method="rtn", lm_head_bits=16))
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_calibration_that_was_asked_for_is_not_dropped(tmp_path: Path) -> None:
    model = tiny("llama", tmp_path / "m", tokenizer=False)
    with pytest.raises(BadInput, match="has no tokenizer"):
        quantize(model, tmp_path / "q", QuantizeOptions(**BRIEF))
    assert not (tmp_path / "q").exists()
