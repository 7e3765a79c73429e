"""Packed embedding tables: rows against what their numbers mean, and whole models with them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ridgeline.config.improve import QuantizeOptions
from ridgeline.engine.checkpoints.load import load_decoder
from ridgeline.engine.checkpoints.packed import PackedWeights
from ridgeline.engine.checkpoints.tensor_names import Part
from ridgeline.engine.execution.runner import TorchRunner
from ridgeline.engine.kernels.native_int8 import pack as pack_int8
from ridgeline.engine.kernels.native_linear import PANEL, NativeLinear, concatenate_outputs
from ridgeline.engine.model.table import PackedTable, PlainTable
from ridgeline.engine.quant.int4.linear import pack as pack_int4
from ridgeline.engine.quant.int4.quantise import quantise as quantise_int4
from ridgeline.engine.quant.int8.quantise import quantise as quantise_int8
from ridgeline.errors import CannotRun
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.checkpoints.locate import model_path
from ridgeline.modelspec.cost import resident_weight_bytes
from ridgeline.modelspec.model import ModelSpec
from ridgeline.modelspec.rewrite import with_dtype
from ridgeline.workflows.quantize.quantize import quantize

IDS = [(37 * i) % 4000 for i in range(48)]


def test_embedding_rows_equal_the_dequantised_weights() -> None:
    """In pieces of whole panels, the last one ragged."""
    torch.manual_seed(1)
    weight_VC = torch.randn(3 * PANEL + 5, 70)
    q_VC, scale_V = quantise_int8(weight_VC, "full")
    eight = [quantise_int8(piece, "full") for piece in weight_VC.split(2 * PANEL)]
    four = [quantise_int4(piece, 32, zeros=True) for piece in weight_VC.split(2 * PANEL)]
    cases = [
        (concatenate_outputs([pack_int8(*each) for each in eight]), q_VC * scale_V.unsqueeze(1)),
        (
            concatenate_outputs([pack_int4(each, 32) for each in four]),
            torch.cat([each.dense(32) for each in four]),
        ),
    ]
    tokens = torch.tensor([[0, 52, 17], [31, 32, 52]])
    for packed, wanted_VC in cases:
        rows = PackedTable(packed).rows(tokens)
        assert rows.shape == (2, 3, 70)
        assert (rows - wanted_VC[tokens]).abs().max() < 1e-6
        x_TC = torch.randn(3, 70)
        parts = [NativeLinear(packed)(x_TC)[t] for t in range(3)]
        wanted = x_TC @ wanted_VC.T
        assert (torch.stack(parts) - wanted).norm() < 0.02 * wanted.norm()


def untied(target: Path) -> str:
    """The demo model with a separate table for its head."""
    shutil.copytree(model_path("demo"), target)
    tensors = load_file(target / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(1).contiguous()
    save_file(tensors, target / "model.safetensors")
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    (target / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    return str(target)


def write(model: str, target: Path, **choices: object) -> str:
    quantize(model, target, QuantizeOptions(bits=8, **choices))  # type: ignore[arg-type]
    return str(target)


def opened(model: str, backend: str = "auto") -> tuple[ModelSpec, TorchRunner, int]:
    spec = with_dtype(load_spec(model), "float32")
    decoder = load_decoder(
        model, spec, device="cpu", compute_dtype=torch.float32, layer_backend=backend
    )
    return spec, TorchRunner(decoder, None, None), decoder.nbytes


class Without(PackedWeights):
    """The table must not be requested in floats."""

    def get(self, part: Part) -> torch.Tensor:
        assert part.key != "embed", "the whole table, in floats"
        return super().get(part)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bits", "head", "shared"), [(8, None, True), (4, None, True), (4, 8, False)]
)
def test_packed_embedding_tied_to_the_head_matches_a_plain_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: int, head: int | None, shared: bool
) -> None:
    model = write("demo", tmp_path / "m", embedding_bits=bits, lm_head_bits=head)
    monkeypatch.setattr("ridgeline.engine.checkpoints.load.PackedWeights", Without)
    spec, runner, nbytes = opened(model)
    assert nbytes == pytest.approx(resident_weight_bytes(spec), rel=5e-3)
    decoder = runner.decoder
    assert isinstance(decoder.table, PackedTable)
    same = decoder.lm_head.native.packed.lines is decoder.table.native.packed.lines  # type: ignore[attr-defined]
    assert same == shared
    # The plain reading of the same numbers: a plain table of the rows, operators of torch.
    slow = opened(model, "torch")[1]
    rows_VC = decoder.table.rows(torch.arange(spec.vocab_size))
    object.__setattr__(slow.decoder.body, "table", PlainTable(rows_VC))
    x_TC = [each.logits(IDS) for each in (runner, slow)]
    assert (x_TC[0] - x_TC[1]).norm() < 0.02 * x_TC[1].norm()
    exact = load_file(model_path("demo") / "model.safetensors")["model.embed_tokens.weight"].float()
    error = (rows_VC - exact).norm() / exact.norm()
    assert error < {8: 0.01, 4: 0.15}[bits], error


@pytest.mark.slow
def test_untied_embedding_is_quantised_and_smaller(tmp_path: Path) -> None:
    model = untied(tmp_path / "untied")
    sizes = {}
    for bits in (None, 8, 4):
        made = write(model, tmp_path / f"m{bits}", embedding_bits=bits)
        spec, runner, nbytes = opened(made)
        assert nbytes == pytest.approx(resident_weight_bytes(spec), rel=5e-3)
        assert spec.lm_head.format.kind == "bf16"
        sizes[bits] = nbytes
        if bits is None:
            before = runner.logits(IDS)
        else:
            change = (runner.logits(IDS) - before).norm() / before.norm()
            assert 0 < change < {8: 0.03, 4: 0.3}[bits], change
    table = 4096 * 256
    assert sizes[None] - sizes[8] == table * 2 - (table + 4 * 4096)
    assert sizes[8] - sizes[4] == table // 2 - 4096 * 2 * 2  # two groups of 128 a row


def test_other_formats_are_refused(tmp_path: Path) -> None:
    for name in ("compressed-tensors", "gguf"):
        with pytest.raises(CannotRun, match="stay as they are"):
            write("demo", tmp_path / "m", format=name, embedding_bits=8)
