"""LLM.int8: outlying inputs kept apart, made, written, loaded, run; against the plain reading."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ridgeline.compress.methods.outliers import outlier_columns, round_split
from ridgeline.compress.quantize_model import RIDGELINE, TableFormats, quantize_model
from ridgeline.compress.recipe import QuantizeRecipe, check
from ridgeline.compress.statistics import InputStats
from ridgeline.compress.writers.gguf import GGUF
from ridgeline.compress.writers.safetensors import COMPRESSED
from ridgeline.config.improve import QuantizeOptions
from ridgeline.engine.checkpoints.load import load_decoder
from ridgeline.engine.checkpoints.self_check import check_layers
from ridgeline.engine.quant import build_linear
from ridgeline.engine.quant.int8.reference import ReferenceGemm
from ridgeline.engine.quant.outliers import OutlierLinear, OutlierSplit, pack_split
from ridgeline.engine.quant.ready import linear_of
from ridgeline.errors import BadInput, BadModel, CannotRun
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.cost import resident_weight_bytes
from ridgeline.modelspec.format import Format
from ridgeline.modelspec.model import LinearSpec
from ridgeline.modelspec.rewrite import apply_quantization, linears
from ridgeline.workflows.quantize.quantize import recipe_for
from tests.compress.test_make import SMALL, dense, kl, logprobs, with_outliers
from tests.compress.test_make import windows as windows

pytestmark = pytest.mark.slow

LLM_INT8 = QuantizeRecipe(method="llm-int8", bits=8, group_size=None, **SMALL)  # type: ignore[arg-type]


def made(target: Path, model: str = "demo", recipe: QuantizeRecipe = LLM_INT8) -> str:
    quantize_model(
        model, recipe, target, calibration=None, write=RIDGELINE, on_progress=lambda progress: None
    )
    return str(target)


def loud_rows(num_rows: int, columns: list[int]) -> torch.Tensor:
    x_TI = torch.randn(num_rows, 100)
    x_TI[:, columns] *= 60
    return x_TI


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_the_split_product_against_the_plain_reading(stored: str) -> None:
    torch.manual_seed(4)
    columns, weight_OI, bias_O = [3, 40, 99], torch.randn(37, 100), torch.randn(37)
    weight_OI = weight_OI.bfloat16().float() if stored == "bfloat16" else weight_OI
    split = round_split(weight_OI, torch.tensor(columns), LLM_INT8, stored)
    assert isinstance(split, OutlierSplit)
    assert torch.equal(split.dense()[:, columns], weight_OI[:, columns])
    linear = linear_of(pack_split([split]), bias_O, torch.float32)
    assert isinstance(linear, OutlierLinear)
    x_TI = loud_rows(9, columns)
    rest_TI = x_TI.clone()
    rest_TI[:, columns] = 0
    reference = ReferenceGemm(split.grid.q_OI.int() - 128, split.grid.scale_OG[:, 0])
    wanted_TO = reference(rest_TI).double() + bias_O.double()
    wanted_TO += x_TI[:, columns].double() @ weight_OI[:, columns].double().T
    y_TO = linear(x_TI)
    assert (y_TO - wanted_TO).norm() < 1e-6 * wanted_TO.norm()
    # A row's bits do not depend on its batch; and a row-wise scale alone would have been far off.
    assert torch.equal(torch.cat([linear(x_TI[t : t + 1]) for t in range(9)]), y_TO)
    plain = linear_of(
        pack_split([round_split(weight_OI, torch.tensor([0]), LLM_INT8, stored)]),
        bias_O,
        x_TI.dtype,
    )
    exact_TO = x_TI @ weight_OI.T + bias_O
    quiet_TO = exact_TO - x_TI[:, columns] @ weight_OI[:, columns].T
    errors = [(each(x_TI) - exact_TO).norm() / quiet_TO.norm() for each in (linear, plain)]
    assert errors[0] < 0.015 < 0.1 < errors[1], errors


def test_what_counts_as_an_outlier() -> None:
    one, other = InputStats.empty(64, False), InputStats.empty(64, False)
    one.add(torch.tensor([[1.0, -6.0, 5.9, 0.0] + 60 * [0.0]]))
    other.add(torch.tensor([[0.0, 0.0, 0.0, 7.0] + 60 * [0.0]]))
    stats = {(("expert_down",), 0): one, (("expert_down",), 1): other, (("o",), None): other}
    assert outlier_columns(stats, (("expert_down",), 1), 6.0).tolist() == [1, 3]
    assert outlier_columns(stats, (("o",), None), 6.0).tolist() == [3]
    assert not len(outlier_columns(stats, (("o",), None), 7.5))
    other.add(torch.arange(64.0).unsqueeze(0) + 10)  # everything is loud: the loudest of them
    assert outlier_columns(stats, (("o",), None), 6.0).tolist() == [60, 61, 62, 63]


def test_planted_outliers_cost_nothing(tmp_path: Path, windows: list[list[int]]) -> None:
    """Plain INT8 collapses; with the loud inputs kept apart at least 95 % of that is won back."""
    loud = with_outliers(tmp_path / "loud")
    before = logprobs("demo", dense(), windows)
    floor = kl(before, logprobs("demo", apply_quantization(dense(), "int8"), windows))
    plain = kl(before, logprobs(loud, apply_quantization(dense(loud), "int8"), windows))
    model = made(tmp_path / "apart", loud)
    found = kl(before, logprobs(model, dense(model), windows))
    assert plain > 10 * floor, (floor, plain)
    assert found - floor < 0.05 * (plain - floor), (floor, found, plain)
    formats = {path: each.format for path, each in linears(load_spec(model)).items()}
    for path, format in formats.items():
        if path.endswith((".q", ".k", ".v", ".gate", ".up")):
            assert format.kind == "int8" and 4 <= format.wide <= 16 and format.wide_bits == 32, path


def test_the_spec_knows_its_bytes_and_the_check_passes(tmp_path: Path) -> None:
    model = made(tmp_path / "m", recipe=QuantizeRecipe(**{**_fields(LLM_INT8), "threshold": 4.0}))
    spec = dense(model)
    widths = [linear.format.wide for linear in linears(spec).values()]
    assert max(widths) > 0
    decoder = load_decoder(model, spec, device="cpu", compute_dtype=torch.float32)
    assert decoder.nbytes == pytest.approx(resident_weight_bytes(spec), rel=5e-3)  # but the indices
    for layer in check_layers(model, "demo"):
        assert not layer.faults and layer.error is not None and layer.error < 0.02


def _fields(recipe: QuantizeRecipe) -> dict[str, object]:
    return {name: getattr(recipe, name) for name in recipe.__struct_fields__}


def test_without_outliers_it_is_plain_int8(tmp_path: Path) -> None:
    model = made(tmp_path / "m", recipe=QuantizeRecipe(**{**_fields(LLM_INT8), "threshold": 1e9}))
    plain = made(tmp_path / "p", recipe=QuantizeRecipe(bits=8, group_size=None))
    name = "model.ridgeline.safetensors"
    assert (tmp_path / "m" / name).read_bytes() == (tmp_path / "p" / name).read_bytes()
    assert linears(load_spec(model)) == linears(load_spec(plain))


def test_columns_that_are_none_are_refused(tmp_path: Path) -> None:
    model = Path(
        made(tmp_path / "m", recipe=QuantizeRecipe(**{**_fields(LLM_INT8), "threshold": 4.0}))
    )
    file = model / "model.ridgeline.safetensors"
    raw = bytearray(file.read_bytes())
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    name = next(name for name in header if name.endswith(".columns"))
    begin = 8 + size + header[name]["data_offsets"][0]
    raw[begin : begin + 4] = (100_000).to_bytes(4, "little")
    file.write_bytes(raw)
    with pytest.raises(BadModel, match="no inputs in order"):
        load_decoder(str(model), dense(str(model)), device="cpu", compute_dtype=torch.float32)


def test_what_cannot_be(tmp_path: Path) -> None:
    for writer in (GGUF, COMPRESSED):
        with pytest.raises(CannotRun, match="kept apart"):
            writer.refuse(load_spec("demo"), LLM_INT8, TableFormats())
    with pytest.raises(BadInput, match="8 bits"):
        check(QuantizeRecipe(method="llm-int8"))
    with pytest.raises(BadInput, match="keeps no outliers"):
        recipe_for(QuantizeOptions(method="gptq", outlier_threshold=5.0))
    with pytest.raises(BadInput, match="out of range"):
        recipe_for(QuantizeOptions(method="llm-int8", bits=8, outlier_threshold=0.0))
    spec = LinearSpec(num_out=4, num_in=8, format=Format(kind="int8", bits=8, wide=2))
    with pytest.raises(CannotRun, match="llm-int8"):
        build_linear(spec, torch.randn(4, 8), None, torch.device("cpu"), torch.float32)
