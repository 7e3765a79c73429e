"""Pruned models: equal to the original with the removed parts masked, and readable everywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from ridgeline.compress.calibration import read_text, windows
from ridgeline.compress.distill.student import StudentModelBuilder
from ridgeline.compress.prune import prune_model as module
from ridgeline.compress.prune.prune_model import prune_model
from ridgeline.compress.prune.recipe import PruneRecipe
from ridgeline.compress.prune.report import PruningReport, read_report
from ridgeline.compress.prune.taylor import taylor_scores
from ridgeline.compress.quantize_model import RIDGELINE, quantize_model
from ridgeline.compress.recipe import QuantizeRecipe
from ridgeline.compress.training_model import TrainingModel
from ridgeline.engine.checkpoints.codecs.sparse24 import compress_24, stored_mask
from ridgeline.engine.checkpoints.load import load_decoder
from ridgeline.engine.checkpoints.sources import CheckpointWeights
from ridgeline.engine.execution.runner import TorchRunner
from ridgeline.errors import BadInput, BadModel, CannotRun
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.rewrite import with_dtype
from tests.compress.small_llama import random_tensors, write

IDS = [(37 * i) % 900 for i in range(40)]
SIZES = {"num_windows": 4, "window_tokens": 32}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("prune") / "model", random_tensors())


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("".join(f"def f{i}(x):\n    return x * {i} + y[{i % 7}]\n" for i in range(60)))
    return file


def prune(
    model: Path,
    text: Path,
    output: Path,
    *,
    sparse: bool = False,
    judged: list[list[int]] | None = None,
    **fields: Any,
) -> PruningReport:
    recipe = PruneRecipe(**(SIZES | fields))
    judged = judged or [[(7 * i + j) % 900 for i in range(32)] for j in range(2)]
    return prune_model(
        str(model),
        recipe,
        output,
        calibration=text,
        judged=judged,
        sparse=sparse,
        on_progress=lambda progress: None,
    )


def logits(model: Path) -> Tensor:
    spec = with_dtype(load_spec(str(model)), "float32")
    decoder = load_decoder(str(model), spec, device="cpu", compute_dtype=torch.float32)
    return TorchRunner(decoder, None, None).logits(IDS)


def tensors_of(model: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in model.glob("*.safetensors"):
        found |= load_file(file)
    return found


def assert_same(model: Path, reference: Path) -> None:
    ours, theirs = logits(model), logits(reference)
    assert torch.allclose(ours, theirs, atol=1e-4 * float(theirs.abs().max()))
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def rows_kept(whole: Tensor, part: Tensor) -> list[int]:
    """Which rows of `whole` `part` consists of."""
    return [next(i for i, row in enumerate(whole) if torch.equal(row, own)) for own in part]


def test_without_channels_as_if_they_were_masked(
    original: Path, text: Path, tmp_path: Path
) -> None:
    report = prune(original, text, tmp_path / "out", drop_channels=0.25, compensate=False)
    assert report.num_channels == (128, 96)
    before, after = tensors_of(original), tensors_of(tmp_path / "out")
    for layer in range(4):
        at = f"model.layers.{layer}.mlp."
        kept = rows_kept(before[f"{at}up_proj.weight"], after[f"{at}up_proj.weight"])
        assert kept == sorted(kept)
        gone = sorted(set(range(128)) - set(kept))
        before[f"{at}down_proj.weight"][:, gone] = 0
    assert_same(tmp_path / "out", write(tmp_path / "masked", before))


def test_without_heads_as_if_they_were_masked(original: Path, text: Path, tmp_path: Path) -> None:
    report = prune(original, text, tmp_path / "out", drop_kv_heads=1, compensate=False)
    assert report.num_kv_heads == (3, 2)
    before, after = tensors_of(original), tensors_of(tmp_path / "out")
    for layer in range(4):
        at = f"model.layers.{layer}.self_attn."
        kept = rows_kept(before[f"{at}q_proj.weight"], after[f"{at}q_proj.weight"])
        assert {row // 16 for row in kept} == {
            row // 8 for row in rows_kept(before[f"{at}k_proj.weight"], after[f"{at}k_proj.weight"])
        }, "a KV head goes with the two query heads that read it"
        before[f"{at}o_proj.weight"][:, sorted(set(range(48)) - set(kept))] = 0
    assert_same(tmp_path / "out", write(tmp_path / "masked", before))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["num_attention_heads"], config["head_dim"]) == (4, 8)


def test_without_layers_as_if_they_were_skipped(original: Path, text: Path, tmp_path: Path) -> None:
    report = prune(original, text, tmp_path / "out", drop_layers=2)
    before = tensors_of(original)
    for layer in report.dropped_layers:
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            before[f"model.layers.{layer}.{name}.weight"].zero_()
    assert len(report.dropped_layers) == 2
    assert_same(tmp_path / "out", write(tmp_path / "masked", before))
    assert read_report(tmp_path / "out") == report


@pytest.mark.parametrize("importance", ["wanda", "taylor", "magnitude"])
def test_the_least_important_channels_and_heads_are_removed(
    text: Path, tmp_path: Path, importance: str
) -> None:
    tensors = random_tensors()
    for layer in range(4):
        at = f"model.layers.{layer}."
        tensors[f"{at}mlp.down_proj.weight"][:, 40:72] /= 1024
        tensors[f"{at}self_attn.o_proj.weight"][:, 16:32] /= 1024  # read by KV head 1
    model = write(tmp_path / "model", tensors)
    fields = {"drop_channels": 0.25, "drop_kv_heads": 1, "compensate": False}
    prune(model, text, tmp_path / "out", importance=importance, **fields)
    after = tensors_of(tmp_path / "out")
    for layer in range(4):
        for name, gone in (("mlp.down_proj", range(40, 72)), ("self_attn.o_proj", range(16, 32))):
            weight = tensors[f"model.layers.{layer}.{name}.weight"]
            kept = [i for i in range(weight.shape[1]) if i not in gone]
            assert torch.equal(after[f"model.layers.{layer}.{name}.weight"], weight[:, kept])


def test_the_layer_that_changes_its_input_least_is_dropped(text: Path, tmp_path: Path) -> None:
    tensors = random_tensors()
    for layer, names in {
        0: ("mlp.down_proj",),  # attention alone
        1: ("self_attn.o_proj",),  # feed-forward alone
        2: ("self_attn.o_proj", "mlp.down_proj"),
    }.items():
        for name in names:
            tensors[f"model.layers.{layer}.{name}.weight"].zero_()
    report = prune(write(tmp_path / "model", tensors), text, tmp_path / "out", drop_layers=1)
    assert report.dropped_layers == (2,)


def test_compensation_reduces_the_error_on_the_text_that_it_has_seen(
    original: Path, text: Path, tmp_path: Path
) -> None:
    drawn = QuantizeRecipe(num_windows=8, window_tokens=32, seed=0)
    learnt = [list(window) for window in windows(str(original), read_text(text), drawn, 4096)]
    plain, compensated = (
        prune(
            original,
            text,
            tmp_path / f"out-{compensate}",
            judged=learnt,
            num_windows=8,
            drop_channels=0.5,
            compensate=compensate,
        )
        for compensate in (False, True)
    )
    assert compensated.layers[0].error < 0.9 * plain.layers[0].error


def test_taylor_scores_are_squared_slopes_summed_over_windows(original: Path) -> None:
    """The slope in an input's gate is that in its column of weights, times the column."""
    spec = with_dtype(load_spec(str(original)), "float32")
    texts = [IDS[:20], IDS[20:]]
    with CheckpointWeights(original, spec) as source:
        scores = taylor_scores(spec, source, texts)
        builder = StudentModelBuilder(spec, source)
        model = TrainingModel(builder, 20)
    expected = {key: torch.zeros_like(score) for key, score in scores.items()}
    for tokens in texts:
        F.cross_entropy(model.logits(tokens)[:-1], torch.tensor(tokens[1:])).backward()
        for part, (name, _) in builder.rows.items():
            if part.key not in ("o", "down") or part.layer is None:
                continue
            weight = builder.parameters[name]
            assert weight.grad is not None
            slope = (weight.detach() * weight.grad).sum(0)
            if part.key == "o":
                slope = slope.view(3, -1).sum(-1)
            expected[part.key, part.layer] += slope.square()
        for weight in builder.parameters.values():
            weight.grad = None
    assert len(expected) == 8
    for key, score in scores.items():
        assert torch.allclose(score, expected[key], rtol=1e-3, atol=1e-12)


def test_everything_at_once_by_taylor_with_masks(
    original: Path, text: Path, tmp_path: Path
) -> None:
    report = prune(
        original,
        text,
        tmp_path / "out",
        drop_layers=1,
        drop_channels=0.5,
        drop_kv_heads=1,
        importance="taylor",
        sparsity=0.5,
        method="sparsegpt",
    )
    spec = load_spec(str(tmp_path / "out"))
    assert len(spec.layers) == 3 and spec.layers[0].mlp.up.num_out == 64
    assert all(0.49 < layer.zeros < 0.51 and layer.error > 0 for layer in report.layers)
    assert report.num_params[1] < report.num_params[0] and logits(tmp_path / "out").isfinite().all()


def test_sparse_24_is_read_back_as_it_was_written(
    original: Path, text: Path, tmp_path: Path
) -> None:
    fields: dict[str, Any] = {"sparsity": 0.5, "pattern": "2:4"}
    dense = prune(original, text, tmp_path / "dense", **fields)
    sparse = prune(original, text, tmp_path / "sparse", sparse=True, **fields)
    assert sparse.num_bytes[1] < dense.num_bytes[1] and sparse.layers == dense.layers
    assert torch.equal(logits(tmp_path / "sparse"), logits(tmp_path / "dense"))
    assert "sparse-24" in load_spec(str(tmp_path / "sparse")).rewrites[0]
    after = tensors_of(tmp_path / "sparse")
    assert tuple(after["model.layers.0.mlp.down_proj.compressed"].shape) == (48, 64)


def test_compressed_tensors_own_layout() -> None:
    """The example of its documentation, by hand: bits from the lowest, values in order."""
    weight = torch.tensor([[0.0, 2.0, 0.0, -1.0, 3.0, 0.0, 0.0, 0.0]])
    found = compress_24(weight)
    assert found[".compressed"].tolist() == [[2.0, -1.0, 3.0, 0.0]]
    assert found[".bitmask"].tolist() == [[0b0011_1010]]
    assert found[".shape"].tolist() == [[1], [8]]
    assert int(stored_mask(weight).sum()) == 4
    with pytest.raises(BadInput, match="more than two"):
        compress_24(torch.ones(1, 4))
    with pytest.raises(BadInput, match="groups of four"):
        compress_24(torch.ones(1, 6))


def test_damaged_bitmasks_are_refused(original: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prune(original, text, out, sparse=True, sparsity=0.5, pattern="2:4", method="magnitude")
    file = next(f for f in out.glob("*.safetensors") if any(".bitmask" in n for n in load_file(f)))
    tensors = load_file(file)
    name = next(n for n in tensors if n.endswith(".bitmask"))
    tensors[name][0, 0] = 255
    save_file(tensors, file)
    with pytest.raises(BadModel, match="bits of a row"):
        logits(out)


def test_an_interrupted_run_continues_to_the_same_model(
    original: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields: dict[str, Any] = {"drop_layers": 1, "drop_channels": 0.25, "sparsity": 0.5}
    whole = prune(original, text, tmp_path / "whole", **fields)
    real = module.PruningRun._prune_layer

    def stop(self: module.PruningRun, index: int) -> None:
        if index == 2:
            raise KeyboardInterrupt
        real(self, index)

    monkeypatch.setattr(module.PruningRun, "_prune_layer", stop)
    with pytest.raises(KeyboardInterrupt):
        prune(original, text, tmp_path / "cut", **fields)
    assert not (tmp_path / "cut").exists()
    fresh: list[int] = []

    def note(self: module.PruningRun, index: int) -> None:
        fresh.append(index)
        real(self, index)

    monkeypatch.setattr(module.PruningRun, "_prune_layer", note)
    cut = prune(original, text, tmp_path / "cut", **fields)
    assert fresh == [2] and cut == whole
    ours, theirs = tensors_of(tmp_path / "whole"), tensors_of(tmp_path / "cut")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours | theirs)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"drop_layers": 4}, "needs a layer"),
        ({"drop_kv_heads": 3}, "needs a KV head"),
        ({"sparsity": 0.5, "sparse": True}, "2:4 masks alone"),
    ],
)
def test_wrong_choices_are_refused_before_any_work(
    original: Path, text: Path, tmp_path: Path, fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(BadInput, match=reason):
        prune(original, text, tmp_path / "out", **fields)
    assert not list(tmp_path.iterdir())


def test_models_without_plain_weights_are_refused(
    original: Path, text: Path, tmp_path: Path
) -> None:
    with pytest.raises(CannotRun, match="dummy"):
        prune(Path("dummy:llama-1b"), text, tmp_path / "a", drop_layers=1)
    prune(original, text, tmp_path / "b", sparse=True, sparsity=0.5, pattern="2:4")
    with pytest.raises(CannotRun, match="compressed already"):
        prune(tmp_path / "b", text, tmp_path / "c", drop_layers=1)


def test_quantising_a_sparse_24_folder_is_refused_with_the_fix(
    original: Path, text: Path, tmp_path: Path
) -> None:
    masks: dict[str, Any] = {"sparsity": 0.5, "pattern": "2:4", "method": "magnitude"}
    prune(original, text, tmp_path / "b", sparse=True, **masks)
    with pytest.raises(CannotRun, match=r"sparse-24-bitmask.*--format dense.*--quantization int8"):
        quantize_model(
            str(tmp_path / "b"),
            QuantizeRecipe(),
            tmp_path / "c",
            calibration=None,
            write=RIDGELINE,
            on_progress=lambda progress: None,
        )
