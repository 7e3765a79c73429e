"""`--operators measured`: tables are interpolated, take the place of analytic parts, or are missed.

The tables here are small and made up; the package's own are read by benchmarks/fit_measured.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from msgspec.structs import replace

import ridgeline
from ridgeline.cli.main import main
from ridgeline.errors import BadInput, CannotRun
from ridgeline.hardware.catalogue import find_accelerator
from ridgeline.plan.calibration.published_efficiency import efficiency_of
from ridgeline.plan.operators import tables
from ridgeline.plan.operators.curves import Curve, CurveFamily
from ridgeline.plan.operators.tables import ExpertShape, HeadShape, OperatorTables, operator_tables
from ridgeline.plan.step_time.operating_point import OperatingPoint
from ridgeline.plan.step_time.predict import predict
from ridgeline.plan.step_time.waterfall import waterfall

HEADS = HeadShape(num_heads=32, num_kv_heads=8, head_dim=128, window=0)
POINT = OperatingPoint(
    model="llama-3.1-8b", device="h100-sxm", isl=512, osl=128, batch=8, backend="vllm"
)
Row = dict[str, Any]


def write(folder: Path, operator: str, version: str, name: str, rows: list[Row]) -> None:
    path = folder / operator / "vllm" / version / f"{name}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def products(factor: float) -> list[Row]:
    """Products that take `factor` nanoseconds per million multiply-adds."""
    return [
        {"gemm_dtype": "bfloat16", "m": m, "n": n, "k": k, "latency": factor * m * n * k * 1e-12}
        for m in (1, 8, 64, 512, 4096)
        for n in (1024, 8192, 65536)
        for k in (1024, 16384)
    ]


def decodes() -> list[Row]:
    shape = {"num_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "window_size": 0}
    return [
        {"kv_cache_dtype": "bfloat16", **shape, "batch_size": b, "step": s - 1, "latency": b * s}
        for b in (1, 16)
        for s in (256, 1024)
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A package with the tables of one system, for vLLM."""
    folder = tmp_path / "systems" / "data" / "h100_sxm"
    write(folder, "gemm", "0.9.0", "gemm_perf", products(5.0))
    write(folder, "gemm", "0.10.0", "gemm_perf", [*products(2.0), *products(1.0)])
    write(folder, "attention", "0.10.0", "generation_attention_perf", decodes())
    sizes = [{"num_gpus": 2, "message_size": n, "latency": 1e-8 * n} for n in (1024, 2**28)]
    write(folder, "comm", "0.10.0", "custom_allreduce_perf", sizes)
    shape = {"hidden_size": 64, "inter_size": 32, "topk": 2, "num_experts": 8}
    rows = [
        {
            **shape,
            "moe_dtype": "fp8",
            "distribution": name,
            "moe_tp_size": 2,
            "moe_ep_size": 1,
            "num_tokens": number,
            "latency": factor * number,
        }
        for name, factor in (("balanced", 1.0), ("power_law_1.01", 2.0))
        for number in (1, 100)
    ]
    write(folder, "moe", "0.10.0", "moe_perf", rows)
    return folder


@pytest.fixture
def package(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    spec = ModuleSpec(tables.PACKAGE, None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(tables, "find_spec", lambda name: spec)
    operator_tables.cache_clear()
    yield folder
    operator_tables.cache_clear()


def test_curve_meets_its_points_and_is_a_power_law_between_them() -> None:
    curve = Curve.of({10.0: 1.0, 1000.0: 100.0, 100.0: 10.0})
    assert [curve.at(x) for x in (10, 100, 1000)] == pytest.approx([1, 10, 100])
    assert curve.at(30) == pytest.approx(3.0)
    assert curve.at(1) == 1.0 and curve.at(2000) == pytest.approx(200.0)
    family = CurveFamily.of({(1, 10): 1.0, (1, 100): 10.0, (4, 10): 4.0})
    assert family.at(2, 10) == pytest.approx(2.0) and family.at(8, 10) == pytest.approx(8.0)
    assert family.at(1, 50) == pytest.approx(5.0)


def test_products_are_interpolated_and_the_newest_fastest_kernel_counts(folder: Path) -> None:
    read = OperatorTables(folder, "vllm")
    for rows, num_out, num_in in ((8, 8192, 1024), (20, 4096, 4096), (4096, 65536, 16384)):
        expected = 1e-15 * rows * num_out * num_in
        assert read.product_s("bfloat16", rows, num_out, num_in) == pytest.approx(expected)
    assert read.product_s("fp8", 8, 8192, 1024) is None


def test_attention_experts_and_all_reduce_are_found_by_shape(folder: Path) -> None:
    read = OperatorTables(folder, "vllm")
    assert read.decode_attention_s("bfloat16", HEADS, 4, 512) == pytest.approx(2.048)
    assert read.decode_attention_s("bfloat16", HEADS._replace(num_heads=8), 4, 512) is None
    assert read.prompt_attention_s("bfloat16", HEADS, 100, 0) is None
    assert read.all_reduce_s(2, 2 * 1024) == pytest.approx(1e-3 * 1e-8 * 1024)
    assert read.all_reduce_s(4, 2 * 1024) is None
    shape = ExpertShape(64, 32, 2, 8, 2, 1)
    assert read.experts_s("fp8", 10, shape) == pytest.approx(0.02)  # of the uneven routing
    assert read.experts_s("fp8", 10, shape._replace(ep=2)) is None


def test_measured_parts_take_the_place_of_analytic_ones(package: Path) -> None:
    analytic, measured = predict(POINT), predict(POINT, measured=True)
    assert measured.tpot_ms != analytic.tpot_ms
    terms = {term.name: term.ms for term in waterfall(POINT, measured, measured=True).tpot}
    plain = {term.name: term.ms for term in waterfall(POINT, analytic).tpot}
    # 8 · 562.5 s: the made-up attention is absurdly slow, and dominates
    weight = efficiency_of(find_accelerator(POINT.device), "vllm", measured=True).measured_weight
    assert 0.2 < weight < 0.8
    expected = (32 * 8 * (512 + 64 + 1)) ** weight * plain["KV cache reads"] ** (1 - weight)
    assert terms["KV cache reads"] == pytest.approx(expected, rel=1e-3)
    assert terms["dense weights"] != pytest.approx(plain["dense weights"])
    assert measured.bound == analytic.bound


def test_shape_that_was_not_measured_keeps_its_analytic_time(package: Path) -> None:
    wide = replace(POINT, tp=4)
    measured = waterfall(wide, predict(wide, measured=True), measured=True)
    terms = {term.name: term.ms for term in measured.tpot}
    plain = {term.name: term.ms for term in waterfall(wide, predict(wide)).tpot}
    assert terms["KV cache reads"] == pytest.approx(plain["KV cache reads"])
    assert terms["collectives, bytes"] == pytest.approx(plain["collectives, bytes"])


def test_without_the_package_the_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tables, "find_spec", lambda name: None)
    operator_tables.cache_clear()
    words = ["predict", "llama-3.1-8b", "--accelerator", "h100-sxm", "--backend", "vllm"]
    assert main([*words, "--operators", "measured"]) == 2
    assert "pip install 'ridgeline[silicon]'" in capsys.readouterr().err


def test_engine_and_device_need_tables(package: Path) -> None:
    with pytest.raises(BadInput, match="--backend"):
        ridgeline.predict("llama-3.1-8b", accelerator="h100-sxm", operators="measured")
    with pytest.raises(BadInput, match="no measured operators"):
        ridgeline.predict(
            "llama-3.1-8b", accelerator="mi300x", backend="vllm", operators="measured"
        )
    with pytest.raises(BadInput, match="no products"):
        ridgeline.predict(
            "llama-3.1-8b", accelerator="h200-sxm", backend="vllm", operators="measured"
        )
    with pytest.raises(CannotRun, match="adapters"):
        predict(replace(POINT, max_loras=2), measured=True)
    with pytest.raises(CannotRun, match="not installed"):
        raise tables._missing("pyarrow")
