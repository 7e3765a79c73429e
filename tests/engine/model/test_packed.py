"""A model packed on disk is the model that was packed; and a damaged file says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ridgeline.config.improve import QuantizeOptions
from ridgeline.engine.checkpoints.load import load_decoder
from ridgeline.engine.checkpoints.packed import PackedWeights
from ridgeline.engine.checkpoints.write_packed import pack_model
from ridgeline.engine.execution.runner import TorchRunner
from ridgeline.engine.quant.int8 import choose
from ridgeline.errors import BadInput, BadModel, CannotRun
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.checkpoints.packed_config import PACKED_FILE
from ridgeline.modelspec.format import BF16, INT8, Format, int4
from ridgeline.modelspec.model import ModelSpec
from ridgeline.modelspec.rewrite import (
    apply_formats,
    apply_quantization,
    linears,
    with_activations,
    with_dtype,
)
from ridgeline.workflows.quantize.quantize import quantize
from tests.conformance.tiny_models import make_model

TOKENS = [(7 * i * i + 3) % 60 + 3 for i in range(40)]


def spec_with(model: str, layers: Format, head: Format | None = None) -> ModelSpec:
    formats = {"layers.*.attention.*": layers, "layers.*.mlp.*": layers}
    formats |= {"lm_head": head} if head else {}
    return apply_formats(with_dtype(load_spec(model), "float32"), formats, "test")


def logits(model: str, spec: ModelSpec) -> torch.Tensor:
    decoder = load_decoder(model, spec, device="cpu", compute_dtype=torch.float32)
    return TorchRunner(decoder, None, None).logits(TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen2", "phi3", "mixtral", "gemma3"])
@pytest.mark.parametrize("layers", [int4(32), int4(64, zeros=True), INT8], ids=["4", "4z", "8"])
def test_packed_is_quantised_while_loading(tmp_path: Path, kind: str, layers: Format) -> None:
    source, packed = str(tmp_path / "source"), tmp_path / "packed"
    make_model(kind, tmp_path / "source")
    spec = spec_with(source, layers, INT8)
    pack_model(source, spec, packed)
    opened = with_dtype(load_spec(str(packed)), "float32")
    assert {p: li.format for p, li in linears(opened).items()} == {
        p: li.format for p, li in linears(spec).items()
    }
    assert torch.equal(logits(str(packed), opened), logits(source, spec))


@pytest.mark.slow
def test_packed_demo_keeps_its_lm_head_as_stored(tmp_path: Path) -> None:
    spec = spec_with("demo", int4(), BF16)
    pack_model("demo", spec, tmp_path / "out")
    opened = with_dtype(load_spec(str(tmp_path / "out")), "float32")
    found = logits(str(tmp_path / "out"), opened)
    assert torch.equal(found, logits("demo", spec))
    plain = logits("demo", spec_with("demo", int4()))
    assert (found - plain).abs().max() < 1e-3  # the same head, summed in another order
    with pytest.raises(CannotRun, match="quantised already"):
        apply_quantization(opened, "int8")


@pytest.mark.slow
def test_the_file_is_the_same_where_another_kernel_is_the_fastest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8-bit weights are written in the layout of Ridgeline's kernel, not of another library."""
    spec = spec_with("demo", int4(), INT8)
    pack_model("demo", spec, tmp_path / "native")
    monkeypatch.setattr(choose, "order", lambda device: ("reference", "native"))
    choose.choose.cache_clear()
    try:
        assert choose.choose(torch.device("cpu"), 16, 32).name == "reference"
        pack_model("demo", spec, tmp_path / "other")
        opened = with_dtype(load_spec(str(tmp_path / "other")), "float32")
        found = logits(str(tmp_path / "other"), opened)
    finally:
        choose.choose.cache_clear()
    both = [(tmp_path / name / PACKED_FILE).read_bytes() for name in ("native", "other")]
    assert both[0] == both[1]
    assert torch.equal(found, logits(str(tmp_path / "native"), opened))


def test_unpackable_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CannotRun, match="dummy"):
        pack_model("dummy:llama-1b-32k", load_spec("dummy:llama-1b-32k"), tmp_path / "a")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(BadInput, match="not an empty"):
        pack_model("demo", spec_with("demo", int4()), tmp_path / "full")
    (tmp_path / "b.partial").mkdir()
    (tmp_path / "b.partial" / "run.json").touch()
    with pytest.raises(BadInput, match="another run"):
        pack_model("demo", spec_with("demo", int4()), tmp_path / "b")


@pytest.mark.slow
def test_leftovers_of_a_killed_run_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "m.partial").mkdir()
    (tmp_path / "m.partial" / PACKED_FILE).write_bytes(b"half")
    pack_model("demo", spec_with("demo", int4()), tmp_path / "m")
    assert [each.name for each in tmp_path.iterdir()] == ["m"]
    assert (tmp_path / "m" / PACKED_FILE).stat().st_size > 1_000_000


@pytest.fixture(scope="module")
def packed_demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packed") / "demo"
    pack_model("demo", spec_with("demo", int4()), path)
    return path


def copy_of(packed: Path, target: Path) -> Path:
    target.mkdir()
    for file in packed.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


@pytest.mark.slow
@pytest.mark.parametrize("keep", [0, 4, 100, -1000])
def test_truncated_file_is_reported(packed_demo: Path, tmp_path: Path, keep: int) -> None:
    path = copy_of(packed_demo, tmp_path / "cut")
    data = (path / PACKED_FILE).read_bytes()
    (path / PACKED_FILE).write_bytes(data[:keep] if keep else b"")
    with pytest.raises(BadModel):
        PackedWeights(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [{"group_size": 64}, {"kind": "int8", "bits": 8, "group_size": None}, {"zero_bits": 8}],
)
def test_config_of_another_packing_is_reported(
    packed_demo: Path, tmp_path: Path, change: dict[str, object]
) -> None:
    path = copy_of(packed_demo, tmp_path / "other")
    config = json.loads((path / "config.json").read_text())
    for fields in config["quantization_config"]["formats"].values():
        fields.update(change)
    (path / "config.json").write_text(json.dumps(config))
    spec = with_dtype(load_spec(str(path)), "float32")
    with pytest.raises(BadModel):
        load_decoder(str(path), spec, device="cpu", compute_dtype=torch.float32)


@pytest.mark.slow
def test_rows_of_one_group_are_one_grid_whatever_the_group(tmp_path: Path) -> None:
    """Rows of 32 inputs have one scale in groups of 32, 64 and 128 alike."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "head_dim": 8}
    make_model("llama", tmp_path / "source", **sizes)
    found = []
    for group in (128, 64, 32):
        options = QuantizeOptions(method="rtn", group_size=group)
        quantize(str(tmp_path / "source"), tmp_path / str(group), options)
        spec = with_activations(
            with_dtype(load_spec(str(tmp_path / str(group))), "float32"), "float32"
        )
        assert spec.layers[0].mlp.up.format.group_size == group
        decoder = load_decoder(
            str(tmp_path / str(group)), spec, device="cpu", compute_dtype=torch.float32
        )
        found.append(TorchRunner(decoder, None, None).logits([5, 9, 1, 33]))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-4)


def test_other_versions_and_stray_paths_are_reported(packed_demo: Path, tmp_path: Path) -> None:
    path = copy_of(packed_demo, tmp_path / "new")
    config = json.loads((path / "config.json").read_text())
    packed = config["quantization_config"]
    for broken in (
        {**packed, "version": 2},
        {**packed, "formats": {"layers.99.mlp.up": {}}},
        {**packed, "formats": {"lm_head": {"bits": "many"}}},
    ):
        (path / "config.json").write_text(json.dumps({**config, "quantization_config": broken}))
        with pytest.raises(BadModel):
            load_spec(str(path))


@pytest.mark.slow
def test_dummy_weights_are_random_in_packed_formats_too() -> None:
    spec = spec_with("dummy:llama-1b-32k", int4())
    small = ModelSpec(
        **{n: getattr(spec, n) for n in spec.__struct_fields__} | {"layers": spec.layers[:1]}
    )
    decoder = load_decoder("dummy:llama-1b-32k", small, device="cpu", compute_dtype=torch.float32)
    down = decoder.blocks[0].mlp.down.native  # type: ignore[attr-defined]
    weight = down.rows(torch.arange(64))
    assert 0.015 < float(weight.std()) < 0.025 and len(torch.unique(weight[:, :64], dim=0)) == 64
