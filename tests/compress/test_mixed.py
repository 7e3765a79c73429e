"""Widths by sensitivity: the budget is kept, the sensitive get more, written and read by module."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from ridgeline.compress.layer_walk import HiddenStateWalk
from ridgeline.compress.methods.mixed_precision import (
    MixedPrecision,
    PrecisionVariant,
    _RoundedSource,
    bits_per_weight,
    measure_sensitivity,
    num_weights,
    spend_budget,
)
from ridgeline.compress.progress import QuantizeProgress
from ridgeline.compress.recipe import QuantizeRecipe
from ridgeline.config.improve import QuantizeOptions
from ridgeline.engine.checkpoints.load import load_decoder
from ridgeline.engine.checkpoints.sources import CheckpointWeights
from ridgeline.engine.checkpoints.tensor_names import Part
from ridgeline.engine.execution.runner import TorchRunner
from ridgeline.engine.model.layers import make_norm
from ridgeline.engine.tokenization import load_tokenizer
from ridgeline.errors import BadInput, BadModel, CannotRun
from ridgeline.hardware.measure import MeasuredRate
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.checkpoints.locate import model_path
from ridgeline.modelspec.checkpoints.quantization_config import read_quantization_config
from ridgeline.modelspec.model import ModelSpec
from ridgeline.modelspec.rewrite import apply_quantization, linears, with_dtype
from ridgeline.workflows.quantize.quantize import quantize
from ridgeline.workflows.quantize.step_budget import READ_SHARE, step_budget

pytestmark = pytest.mark.slow

SITES = {(0, ("o",)): 1000, (0, ("down",)): 3000, (1, ("o",)): 1000}


def test_the_budget_goes_where_it_helps() -> None:
    recipe = QuantizeRecipe(group_size=128)
    loss = {(0, ("o",)): 0.5, (0, ("down",)): 0.6, (1, ("o",)): 0.01}
    losses = {
        PrecisionVariant(*site, bits): loss[site] / (1 if bits == 4 else 100)
        for site in SITES
        for bits in (4, 8)
    }
    for budget, wide in ((4.2, set()), (5.0, {(0, ("o",))}), (7.3, {(0, ("o",)), (0, ("down",))})):
        chosen = spend_budget(losses, SITES, recipe, MixedPrecision(budget, (4, 8)))
        assert {site for site, bits in chosen.items() if bits == 8} == wide, budget
        used = sum(SITES[site] * bits_per_weight(recipe, bits) for site, bits in chosen.items())
        assert used <= budget * sum(SITES.values())


def logits(model: str, spec: ModelSpec) -> torch.Tensor:
    ids = load_tokenizer("demo").encode("def read(path):\n    with open(path) as file:\n  ")
    decoder = load_decoder(model, spec, device="cpu", compute_dtype=torch.float32)
    return TorchRunner(decoder, None, None).logits(ids)


def test_measured_by_itself() -> None:
    """Every product by itself, at every width: more bits, less KL."""
    spec = with_dtype(load_spec("demo"), "float32")
    windows = [[(7 * i) % 4000 for i in range(32)]]
    recipe = QuantizeRecipe(group_size=64)
    with torch.inference_mode(), CheckpointWeights(model_path("demo"), spec) as source:
        found = measure_sensitivity(spec, source, recipe, windows, (3, 8), lambda progress: None)
    assert len(found) == 6 * 4 * 2
    assert all(found[v] >= -1e-6 for v in found)
    for variant in found:
        if variant.bits == 3:
            assert found[variant] > found[variant._replace(bits=8)]


def test_equals_walks_of_their_own() -> None:
    """Every variant by itself: both halves of each layer built again, as if nothing was shared."""
    spec = with_dtype(load_spec("demo"), "float32")
    windows = [[(7 * i + seed) % 4000 for i in range(150)] for seed in range(2)]
    recipe = QuantizeRecipe(group_size=64)
    progress: list[QuantizeProgress] = []
    with torch.inference_mode(), CheckpointWeights(model_path("demo"), spec) as source:
        found = measure_sensitivity(spec, source, recipe, windows, (4,), progress.append)
        for variant in list(found)[::7]:
            expected = divergence_alone(spec, source, recipe, windows, variant)
            assert found[variant] == pytest.approx(expected, rel=1e-6)
    layers = [p for p in progress if p.unit == "sensitivity of layer"]
    assert len(layers) == len(spec.layers) and layers[-1].left_s == 0.0
    assert [p.layer for p in progress[len(layers) :]] == [0, 1]  # windows


def divergence_alone(
    spec: ModelSpec,
    source: CheckpointWeights,
    recipe: QuantizeRecipe,
    windows: list[list[int]],
    variant: PrecisionVariant,
) -> float:
    """Mean KL at every third position, of 150 at most 64."""
    walks = []
    for weights in (source, _RoundedSource(source, variant, recipe)):
        walk = HiddenStateWalk(spec, source, windows)
        for index in range(len(spec.layers)):
            walk.go(weights, index, 0)
            walk.go(weights, index, 1)
        walks.append(walk.states)
    norm = make_norm(spec, source.get(Part("norm", (spec.hidden_size,))), torch.float32)
    head_VC = source.get(Part("embed", (spec.vocab_size, spec.hidden_size))).float()
    found = []
    for before_TC, after_TC in zip(*walks, strict=True):
        rows = [torch.log_softmax(norm(x[::3]) @ head_VC.T, -1) for x in (before_TC, after_TC)]
        found.append(float((rows[0].exp() * (rows[0] - rows[1])).sum(-1).mean()))
    return sum(found) / len(found)


@pytest.mark.parametrize("format", ["ridgeline", "compressed-tensors"])
def test_written_and_read_by_module(tmp_path: Path, format: str) -> None:
    size = {"group_size": 64, "calibration_windows": 4, "calibration_tokens": 64, "format": format}
    quantize("demo", tmp_path / "m", QuantizeOptions(bits_budget=5.5, **size))  # type: ignore[arg-type]
    spec = with_dtype(load_spec(str(tmp_path / "m")), "float32")
    kinds = {p: linear.format.kind for p, linear in linears(spec).items() if p != "lm_head"}
    assert set(kinds.values()) == {"int4", "int8"}
    for path, kind in kinds.items():
        if path.endswith(".q"):
            assert kinds[path[:-1] + "k"] == kind
    four, eight = (apply_quantization(spec_of_demo(), name) for name in ("int4", "int8"))
    sizes = [layer_bytes(each) for each in (four, spec, eight)]
    if format == "ridgeline":
        assert sizes[0] < sizes[1] < sizes[2]
    before, after = logits("demo", spec_of_demo()), logits(str(tmp_path / "m"), spec)
    assert (after - before).norm() < 0.25 * before.norm()
    if format == "compressed-tensors":
        document = json.loads((tmp_path / "m" / "config.json").read_text(encoding="utf-8"))
        config = document["quantization_config"]
        assert config["format"] == "mixed-precision"
        assert len(config["config_groups"]) in (2, 3)
        with pytest.raises(BadModel, match="no group"):
            read_quantization_config(config, "here").at("model.layers.9.mlp.up_proj")


def layer_bytes(spec: ModelSpec) -> int:
    return sum(linear.nbytes for path, linear in linears(spec).items() if path != "lm_head")


def spec_of_demo() -> ModelSpec:
    return with_dtype(load_spec("demo"), "float32")


def test_what_cannot_be(tmp_path: Path) -> None:
    short = {"calibration_windows": 4, "calibration_tokens": 32}
    with pytest.raises(BadInput, match="no choice of widths is so small"):
        quantize("demo", tmp_path / "m", QuantizeOptions(bits_budget=3.0, **short))  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="several widths"):
        quantize("demo", tmp_path / "m", QuantizeOptions(bits_budget=5.0, format="gguf"))
    for bits in (3, 8, 16):
        with pytest.raises(BadInput):
            quantize("demo", tmp_path / "m", QuantizeOptions(bits_budget=5.0, bits=bits))
    with pytest.raises(BadInput, match="--steps"):
        quantize("demo", tmp_path / "m", QuantizeOptions(steps=5))
    assert not (tmp_path / "m").exists()


def bandwidth(monkeypatch: pytest.MonkeyPatch, per_s: float) -> None:
    """Of a machine whose kernels read `per_s` bytes a second."""
    found = MeasuredRate(per_s=per_s / READ_SHARE, cpu_share=1.0)
    monkeypatch.setattr("ridgeline.hardware.measure.read_bandwidth", lambda *_: found)


def test_a_budget_of_time_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that is written is read within it, and uses nine tenths of it."""
    bandwidth(monkeypatch, 1e9)
    milliseconds = 5.4
    short = {"group_size": 64, "calibration_windows": 4, "calibration_tokens": 64}
    quantize("demo", tmp_path / "m", QuantizeOptions(step_budget=milliseconds, **short))  # type: ignore[arg-type]
    spec = with_dtype(load_spec(str(tmp_path / "m")), "float32")
    head = spec.vocab_size * spec.hidden_size * 2
    reads_ms = 1e3 * (layer_bytes(spec) + head) / 1e9
    assert 0.9 * milliseconds < reads_ms <= milliseconds


def test_budgets_of_time_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bandwidth(monkeypatch, 1e9)
    spec = spec_of_demo()
    whole_ms = 1e3 * (num_weights(spec) + 2 * spec.vocab_size * spec.hidden_size) / 1e9
    assert step_budget("demo", 0.999 * whole_ms, None).bits == pytest.approx(8.0, rel=0.01)
    less = 0.6 * whole_ms
    assert step_budget("demo", less, 8).bits > step_budget("demo", less, None).bits
    for milliseconds, about in (
        (1.1 * whole_ms, "8 bits per weight fit"),
        (0.01, "LM head alone"),
        (0.0, "must be positive"),
        (math.nan, "must be positive"),
    ):
        with pytest.raises(BadInput, match=about):
            step_budget("demo", milliseconds, None)
    with pytest.raises(CannotRun, match="experts"):
        step_budget("dummy:mixtral-8x7b", 100.0, None)
    with pytest.raises(BadInput, match="cannot be combined with --step-budget"):
        quantize("demo", tmp_path / "m", QuantizeOptions(step_budget=5.0, bits_budget=5.0))
    assert not (tmp_path / "m").exists()


def test_existing_output_is_reported_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*_: object) -> None:
        raise AssertionError("measured, and nowhere to write")

    monkeypatch.setattr("ridgeline.compress.quantize_model.choose_widths", measured)
    (tmp_path / "kept.txt").write_text("theirs", encoding="utf-8")
    with pytest.raises(BadInput, match="not an empty directory"):
        quantize("demo", tmp_path, QuantizeOptions(bits_budget=5.0))
    assert [file.name for file in tmp_path.iterdir()] == ["kept.txt"]
