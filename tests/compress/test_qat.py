"""Training through the rounding: slopes, a better model than its start, the same after a kill."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ridgeline.compress.calibration import read_text, tokens_of
from ridgeline.compress.formats.lattice import round_significant
from ridgeline.compress.methods import qat
from ridgeline.compress.methods.qat import LatentWeight, train_quantised
from ridgeline.compress.methods.rtn import round_rtn
from ridgeline.compress.pipeline import open_source, quantise_layers
from ridgeline.compress.progress import QuantizeProgress
from ridgeline.compress.quantize_model import RIDGELINE, quantize_model
from ridgeline.compress.recipe import QuantizeRecipe
from ridgeline.compress.training_model import TrainingModel
from ridgeline.engine.checkpoints.load import DecoderBuilder
from ridgeline.engine.checkpoints.tensor_names import Part
from ridgeline.engine.quant.grid import Grid
from ridgeline.engine.tokenization import load_tokenizer
from ridgeline.errors import BadInput
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.checkpoints.locate import model_path
from ridgeline.modelspec.rewrite import with_dtype

pytestmark = pytest.mark.slow

QUICK = QuantizeRecipe(method="qat", bits=3, num_windows=6, window_tokens=64, steps=50)


def test_slopes_go_straight_through() -> None:
    value = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    grid = round_rtn(value, None, QuantizeRecipe(bits=3, group_size=32))
    assert isinstance(grid, Grid)
    latent = LatentWeight(grid, value, None)
    assert torch.equal(latent.dense(), grid.dense())  # the start is the start
    latent.dense().sum().backward()
    wide = grid.scale_OG.repeat_interleave(32, 1)
    assert latent.v_OI.grad is not None and latent.log_OG.grad is not None
    inside = (latent.v_OI > -0.5) & (latent.v_OI < 7.5)
    assert torch.allclose(latent.v_OI.grad[inside], wide[inside])
    assert torch.allclose(latent.log_OG.grad, grid.dense().view(4, 2, 32).sum(2), atol=1e-5)
    same = latent.result(11)
    assert torch.equal(same.q_OI, grid.q_OI) and torch.equal(same.scale_OG, grid.scale_OG)


def test_it_beats_what_it_starts_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On held-out text, after a few seconds; benchmarks/bench_quant_quality.py has the figures."""
    monkeypatch.setattr(qat, "GRID_RATE", 0.025)  # for a quarter of the steps
    spec, text = with_dtype(load_spec("demo"), "float32"), read_text(None)
    folder = model_path("demo").parent / "heldout"
    ids = load_tokenizer("demo").encode((folder / "code.txt").read_text(encoding="utf-8")[:9000])
    windows = [list(ids[i * 64 : (i + 1) * 64]) for i in range(16)]
    with open_source("demo", spec, QUICK) as (_, source):
        start = quantise_layers("demo", spec, source, QUICK, tmp_path, text, lambda p: None)
        tokens = tokens_of("demo", text)
        tuned = train_quantised(spec, source, start, QUICK, tokens, tmp_path, lambda p: None)
        models = [
            TrainingModel(DecoderBuilder(spec, each, torch.device("cpu"), torch.float32), 64)
            for each in (source, start, tuned)
        ]

        def kl(model: TrainingModel) -> float:
            pairs = [(models[0](w), model(w)) for w in windows]
            return float(torch.stack([(a.exp() * (a - b)).sum(-1).mean() for a, b in pairs]).mean())

        assert kl(models[2]) < 0.97 * kl(models[1])
        part = Part("down", (256, 704), 3)
        before, after = start.grid(part), tuned.grid(part)
        assert before is not None and after is not None
        assert torch.equal(after.scale_OG, round_significant(after.scale_OG, 11))
        moved = (before.q_OI != after.q_OI).float().mean()
        assert 0.001 < moved < 0.5
        assert not torch.equal(after.scale_OG, before.scale_OG)


def test_after_a_kill_it_ends_as_if_there_had_been_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qat, "SAVE_EVERY", 3)
    recipe = QuantizeRecipe(method="qat", bits=4, num_windows=4, window_tokens=32, steps=6)
    choices = {"calibration": None, "write": RIDGELINE}
    quantize_model("demo", recipe, tmp_path / "whole", on_progress=lambda p: None, **choices)  # type: ignore[arg-type]

    def kill(progress: QuantizeProgress) -> None:
        if progress.unit == "step" and progress.layer == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_model("demo", recipe, tmp_path / "broken", on_progress=kill, **choices)  # type: ignore[arg-type]
    assert not (tmp_path / "broken").exists()
    steps: list[int] = []

    def note(progress: QuantizeProgress) -> None:
        steps.extend([progress.layer] if progress.unit == "step" else [])

    quantize_model("demo", recipe, tmp_path / "broken", on_progress=note, **choices)  # type: ignore[arg-type]
    assert steps == [3, 4, 5]
    for file in (tmp_path / "whole").iterdir():
        assert (tmp_path / "broken" / file.name).read_bytes() == file.read_bytes(), file.name


def test_what_it_is_not_for(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="3 and 4 bits"):
        quantize_model(
            "demo",
            QuantizeRecipe(method="qat", bits=8, group_size=None),
            tmp_path / "a",
            calibration=None,
            write=RIDGELINE,
            on_progress=lambda p: None,
        )
