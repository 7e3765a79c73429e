"""`quantize_model` on the demo model: accuracy, equivalent rewrites, and resumption."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ridgeline.compress.calibration import windows as calibration_windows
from ridgeline.compress.methods.channel_balance import BalancedWeights, sites
from ridgeline.compress.methods.rotate import Rotated, rotated_spec
from ridgeline.compress.pipeline import open_source, quantise_layers
from ridgeline.compress.progress import QuantizeProgress
from ridgeline.compress.quantize_model import RIDGELINE, quantize_model
from ridgeline.compress.recipe import QuantizeRecipe
from ridgeline.engine.checkpoints import load
from ridgeline.engine.checkpoints.load import load_decoder
from ridgeline.engine.checkpoints.sources import CheckpointWeights, DummyWeights, WeightSource
from ridgeline.engine.checkpoints.tensor_names import Part
from ridgeline.engine.execution.runner import TorchRunner
from ridgeline.engine.tokenization import load_tokenizer
from ridgeline.errors import BadInput, BadModel, CannotRun
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.checkpoints.locate import model_path
from ridgeline.modelspec.model import ModelSpec
from ridgeline.modelspec.rewrite import apply_quantization, with_dtype

pytestmark = pytest.mark.slow

SMALL = {"num_windows": 10, "window_tokens": 128}


@pytest.fixture(scope="module")
def windows() -> list[list[int]]:
    folder = model_path("demo").parent / "heldout"
    ids = [
        load_tokenizer("demo").encode((folder / name).read_text(encoding="utf-8")[:20_000])
        for name in ("docs.txt", "code.txt")
    ]
    return [text[i * 192 : (i + 1) * 192] for i in range(4) for text in ids]


def logits(model: str, spec: ModelSpec, ids: Sequence[int]) -> torch.Tensor:
    decoder = load_decoder(model, spec, device="cpu", compute_dtype=torch.float32)
    return TorchRunner(decoder, None, None).logits(ids)


def logprobs(model: str, spec: ModelSpec, windows: list[list[int]]) -> torch.Tensor:
    decoder = load_decoder(model, spec, device="cpu", compute_dtype=torch.float32)
    runner = TorchRunner(decoder, None, None)
    return torch.cat([torch.log_softmax(runner.logits(ids), -1) for ids in windows])


def dense(model: str = "demo") -> ModelSpec:
    return with_dtype(load_spec(model), "float32")


def kl(before: torch.Tensor, after: torch.Tensor) -> float:
    return float((before.exp() * (before - after)).sum(-1).mean())


def made(recipe: QuantizeRecipe, target: Path, model: str = "demo") -> str:
    quantize_model(
        model,
        recipe,
        target,
        calibration=None,
        write=RIDGELINE,
        on_progress=lambda progress: None,
    )
    return str(target)


def test_gptq_and_awq_beat_rounding(tmp_path: Path, windows: list[list[int]]) -> None:
    """3 bits here; benchmarks/bench_quant_quality.py shows 4 bits and three seeds."""
    before = logprobs("demo", dense(), windows)
    found = {}
    for method in ("rtn", "gptq", "awq"):
        recipe = QuantizeRecipe(method=method, bits=3, **SMALL)  # type: ignore[arg-type]
        model = made(recipe, tmp_path / method)
        found[method] = kl(before, logprobs(model, dense(model), windows))
    assert found["gptq"] < 0.85 * found["rtn"], found
    assert found["awq"] < 0.97 * found["rtn"], found


def test_an_interrupted_run_goes_on_to_the_same_file(tmp_path: Path) -> None:
    recipe = QuantizeRecipe(method="smoothquant", bits=8, group_size=None, num_windows=4)
    whole = Path(made(recipe, tmp_path / "whole"))

    def kill(progress: QuantizeProgress) -> None:
        if progress.layer == 2:
            raise KeyboardInterrupt

    target = tmp_path / "broken"
    choices = {"calibration": None, "write": RIDGELINE}
    with pytest.raises(KeyboardInterrupt):
        quantize_model("demo", recipe, target, on_progress=kill, **choices)  # type: ignore[arg-type]
    assert not target.exists() and (tmp_path / "broken.partial").is_dir()
    with pytest.raises(BadInput, match="another run"):
        made(QuantizeRecipe(method="rtn"), target)
    fresh: list[int] = []
    quantize_model("demo", recipe, target, on_progress=lambda p: fresh.append(p.layer), **choices)  # type: ignore[arg-type]
    assert fresh == list(range(6)) and not (tmp_path / "broken.partial").exists()
    assert sorted(f.name for f in target.iterdir()) == sorted(f.name for f in whole.iterdir())
    for file in whole.iterdir():
        assert (target / file.name).read_bytes() == file.read_bytes(), file.name
    with pytest.raises(BadInput, match="not an empty"):
        made(recipe, target)


class Given:
    """Opens a source of weights in place of the model's own."""

    def __init__(self, weights: WeightSource) -> None:
        self.weights = weights

    def __enter__(self) -> WeightSource:
        return self.weights

    def __exit__(self, *error: object) -> None:
        pass


def relative_change(
    spec: ModelSpec,
    after: ModelSpec,
    source: WeightSource,
    edited: WeightSource,
    patch: pytest.MonkeyPatch,
) -> float:
    ids = [(7 * i) % spec.vocab_size for i in range(24)]
    patch.setattr(load, "open_weights", lambda *_: Given(source))
    before = logits("given", spec, ids)
    patch.setattr(load, "open_weights", lambda *_: Given(edited))
    return float((logits("given", after, ids) - before).norm() / before.norm())


@pytest.mark.parametrize("name", ["demo", "dummy:qwen2.5-0.5b"])
def test_rotations_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = dense(name)
    if name == "demo":
        with CheckpointWeights(model_path("demo"), spec) as source:
            turned = Rotated(source, spec, 0)
            change = relative_change(spec, rotated_spec(spec), source, turned, monkeypatch)
    else:  # biases on q, k, v; a hidden size that is no power of two
        import msgspec

        head = msgspec.structs.replace(spec.lm_head, num_out=512)
        spec = msgspec.structs.replace(spec, layers=spec.layers[:2], vocab_size=512, lm_head=head)
        dummy = DummyWeights(spec, 0)
        turned = Rotated(dummy, spec, 0)
        change = relative_change(spec, rotated_spec(spec), dummy, turned, monkeypatch)
    assert 0 < change < 1e-5


def test_balancing_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = dense()
    with CheckpointWeights(model_path("demo"), spec) as source:
        balanced = BalancedWeights(source, spec)
        generator = torch.Generator().manual_seed(0)
        for index, layer in enumerate(spec.layers):
            for site in sites(layer, index):
                size = {"o": 256, "down": 704}.get(site.keys[0], 256)
                scale_I = torch.exp(torch.randn(size, generator=generator))
                if site.before == "v":
                    one_KD = scale_I.view(2, 2, 64)[:, :1]
                    scale_I = one_KD.expand(2, 2, 64).reshape(-1)
                balanced.apply(site, scale_I)
        assert 0 < relative_change(spec, spec, source, balanced, monkeypatch) < 1e-5


def with_outliers(target: Path, gain: int = 64) -> str:
    """The demo model with loud channels planted: gains × 64 (`gain`), the readers' columns less."""
    shutil.copytree(model_path("demo"), target)
    tensors = {k: v.float() for k, v in load_file(target / "model.safetensors").items()}
    channels = torch.tensor([3, 77, 150, 201])
    readers = {
        "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
    }
    for layer in range(6):
        for norm, names in readers.items():
            tensors[f"model.layers.{layer}.{norm}.weight"][channels] *= gain
            for name in names:
                tensors[f"model.layers.{layer}.{name}.weight"][:, channels] /= gain
    save_file(tensors, target / "model.safetensors")
    config = (target / "config.json").read_text(encoding="utf-8").replace("bfloat16", "float32")
    (target / "config.json").write_text(config, encoding="utf-8")
    return str(target)


def test_smoothquant_recovers_planted_outliers(tmp_path: Path, windows: list[list[int]]) -> None:
    """At least 90 % of what they cost rounding to nearest in KL."""
    loud = with_outliers(tmp_path / "loud")
    before = logprobs("demo", dense(), windows)
    assert kl(before, logprobs(loud, dense(loud), windows)) < 1e-8  # the same function
    floor = kl(before, logprobs("demo", apply_quantization(dense(), "int8"), windows))
    plain = kl(before, logprobs(loud, apply_quantization(dense(loud), "int8"), windows))
    recipe = QuantizeRecipe(method="smoothquant", bits=8, group_size=None, **SMALL)
    model = made(recipe, tmp_path / "smooth", loud)
    smooth = kl(before, logprobs(model, dense(model), windows))
    assert plain > 10 * floor, (floor, plain)
    assert smooth - floor < 0.1 * (plain - floor), (floor, smooth, plain)


def test_bad_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CannotRun, match="dummy"):
        made(QuantizeRecipe(), tmp_path / "a", "dummy:llama-1b-32k")
    broken = tmp_path / "broken"
    shutil.copytree(model_path("demo"), broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"][5, 5] = float("nan")
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(BadModel, match="up of layer 2 holds NaN"):
        made(QuantizeRecipe(), tmp_path / "b", str(broken))
    short = tmp_path / "short.txt"
    short.write_text("hello", encoding="utf-8")
    with pytest.raises(BadInput, match="too short"):
        quantize_model(
            "demo",
            QuantizeRecipe(method="gptq"),
            tmp_path / "c",
            calibration=short,
            write=RIDGELINE,
            on_progress=lambda progress: None,
        )
    made(QuantizeRecipe(), tmp_path / "c")  # the failed run has left nothing that would be lost
    tensors["model.layers.2.mlp.up_proj.weight"][5, 5] = float("inf")
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(BadModel, match="up of layer 2 holds NaN or infinite"):
        made(QuantizeRecipe(), tmp_path / "e", str(broken))
    tensors["model.layers.2.mlp.up_proj.weight"][5, 5] = 0.0
    tensors["model.embed_tokens.weight"][9, 9] = float("nan")
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(BadModel, match="embed holds NaN"):
        made(QuantizeRecipe(), tmp_path / "f", str(broken))
    spec = dense()
    with open_source("demo", spec, QuantizeRecipe()) as (_, source):
        quantise_layers("demo", spec, source, QuantizeRecipe(), tmp_path, "", lambda progress: None)
    packed = made(QuantizeRecipe(), tmp_path / "packed")
    with pytest.raises(CannotRun, match="quantised already"):
        made(QuantizeRecipe(), tmp_path / "d", packed)


def test_what_was_read_is_not_kept_mapped() -> None:
    """A checkpoint's pages would count as this process's memory, all of them in the end."""
    spec, file = dense(), str(model_path("demo") / "model.safetensors")
    part = Part("down", (256, 704), 1)
    with CheckpointWeights(model_path("demo"), spec) as kept:
        expected = kept.get(part)
        assert file in Path("/proc/self/maps").read_text(encoding="utf-8")
    with open_source("demo", spec, QuantizeRecipe()) as (_, source):
        assert torch.equal(source.get(part), expected)
        assert file not in Path("/proc/self/maps").read_text(encoding="utf-8")


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    def tell(progress: QuantizeProgress) -> None:
        with pytest.raises(BadInput, match="another process is making this model"):
            made(QuantizeRecipe(), tmp_path / "m")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_model(
            "demo",
            QuantizeRecipe(),
            tmp_path / "m",
            calibration=None,
            write=RIDGELINE,
            on_progress=tell,
        )
    made(QuantizeRecipe(), tmp_path / "m")  # an interrupted run holds no lock
    assert [each.name for each in tmp_path.iterdir()] == ["m"]


def test_a_tokenizer_of_another_model_is_refused() -> None:
    text = "def read(path): return path " * 200
    with pytest.raises(BadInput, match="do not belong together"):
        calibration_windows("demo", text, QuantizeRecipe(method="gptq", window_tokens=32), 300)


def test_the_original_is_never_touched(tmp_path: Path) -> None:
    original = tmp_path / "original"
    shutil.copytree(model_path("demo"), original)
    before = {f.name: (f.read_bytes(), f.stat().st_mtime_ns) for f in original.iterdir()}
    made(QuantizeRecipe(), tmp_path / "m", str(original))
    with pytest.raises(BadInput, match="not an empty"):
        made(QuantizeRecipe(), original, str(original))  # the output in the original's place
    after = {f.name: (f.read_bytes(), f.stat().st_mtime_ns) for f in original.iterdir()}
    assert after == before
