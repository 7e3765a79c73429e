"""The terms of a prediction: they add up, and the effect that each stands for moves it."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import ridgeline
from ridgeline.cli.main import main
from ridgeline.hardware.catalogue import load_catalogue
from ridgeline.plan.step_time.operating_point import OperatingPoint, Pool
from ridgeline.plan.step_time.predict import predict
from ridgeline.plan.step_time.waterfall import TimeTerm, Waterfall, waterfall

POOL = OperatingPoint(
    model="gpt-oss-120b",
    device="h200-sxm",
    isl=4000,
    osl=500,
    batch=64,
    prefill=Pool(workers=2, tp=2),
    decode=Pool(workers=2, tp=4),
)

ROWS = load_catalogue()
ROOMY = {name: replace(row, memory_bytes=10**15) for name, row in ROWS.items()}


def point(**fields: object) -> OperatingPoint:
    base = {"model": "llama-3.1-8b", "device": "h100-sxm", "isl": 1000, "osl": 100}
    return OperatingPoint(**{**base, **fields})  # type: ignore[arg-type]


def explain(at: OperatingPoint) -> Waterfall:
    return waterfall(at, predict(at, ROOMY), ROOMY)


def by_name(terms: tuple[TimeTerm, ...]) -> dict[str, float]:
    return {term.name: term.ms for term in terms}


@settings(max_examples=10, deadline=None)
@given(
    model=st.sampled_from([("llama-3.1-8b", 1), ("qwen3-235b-a22b", 8), ("deepseek-v3", 8)]),
    batch=st.integers(1, 200),
    isl=st.integers(1, 20_000),
    osl=st.integers(1, 2000),
    backend=st.sampled_from([None, "vllm", "sglang", "trtllm"]),
    drafts=st.sampled_from([0, 3]),
)
def test_terms_add_up_to_the_prediction(
    model: tuple[str, int], batch: int, isl: int, osl: int, backend: str | None, drafts: int
) -> None:
    name, tp = model
    speculation = {"num_speculative_tokens": drafts, "acceptance": 0.6} if drafts else {}
    at = point(
        model=name,
        device="b200",
        tp=tp,
        batch=batch,
        isl=isl,
        osl=osl,
        backend=backend,
        kv_dtype="fp8",
        weight_dtype="fp8",
        **speculation,
    )
    found = explain(at)
    prediction = predict(at, ROOMY)
    assert found.tpot_ms == pytest.approx(prediction.tpot_ms)
    assert found.ttft_ms == pytest.approx(prediction.ttft_ms)
    assert all(term.ms > 0 for term in (*found.tpot, *found.ttft))


def test_terms_of_pools_add_up_with_the_factor_of_the_decode_pool() -> None:
    found, prediction = explain(POOL), predict(POOL)
    assert found.tpot_ms == pytest.approx(prediction.tpot_ms)
    assert found.ttft_ms == pytest.approx(prediction.ttft_ms)
    assert by_name(found.tpot)["factor of decode pools"] < 0
    assert "other clients' prompts" not in by_name(found.tpot)


def test_pools_with_their_own_speculation_do_not_take_its_factor_too() -> None:
    drafting = replace(POOL, num_speculative_tokens=2, acceptance=0.0)
    found = explain(drafting)
    assert "factor of decode pools" not in by_name(found.tpot)
    assert found.tpot_ms > explain(POOL).tpot_ms  # nothing is accepted: no gain, and more work


def test_each_term_follows_its_cause() -> None:
    dense = by_name(explain(point(batch=16)).tpot)
    assert "routed experts" not in dense and "collectives, bytes" not in dense
    split = by_name(explain(point(batch=16, tp=2)).tpot)
    assert split["dense weights"] == pytest.approx(dense["dense weights"] / 2)
    assert split["collectives, latency"] > 0 and split["collectives, bytes"] > 0
    longer = by_name(explain(point(batch=16, isl=3000)).tpot)
    assert longer["KV cache reads"] > 2 * dense["KV cache reads"]
    assert longer["dense weights"] == dense["dense weights"]
    alone = explain(point())
    assert "other clients' prompts" not in by_name(alone.tpot)
    assert "waiting for other prompts" not in by_name(alone.ttft)
    routed = explain(point(model="gpt-oss-120b", batch=4)).tpot
    assert by_name(routed)["routed experts"] > 0


def test_bound_of_a_term_is_that_of_its_part() -> None:
    bounds = {term.name: term.bound for term in explain(point(isl=8000)).ttft}
    assert bounds["dense weights"] == "compute" and bounds["LM head"] == "bandwidth"
    assert bounds["engine, per step and layer"] == ""


def test_terms_print_within_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["qwen3-235b-a22b", "--accelerator", "h200-sxm", "--tensor-parallel-size", "8"]
    args += ["--quantization", "fp8", "--max-concurrency", "128", "--input-len", "8000"]
    assert main(["explain", "predict", *args]) == 0
    printed = capsys.readouterr().out
    assert max(len(line.rstrip()) for line in printed.splitlines()) <= 80
    for name in ("dense weights", "routed experts", "waiting for other prompts", "sum"):
        assert name in printed
    assert main(["predict", "--explain", *args]) == 0
    assert capsys.readouterr().out == printed


def test_json_and_record_have_the_terms(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    result = ridgeline.predict("llama-3.1-8b", accelerator="h100-sxm", explain=True)
    assert result.waterfall is not None
    assert (
        main(["predict", "llama-3.1-8b", "--accelerator", "h100-sxm", "--explain", "--json"]) == 0
    )
    printed = json.loads(capsys.readouterr().out)
    total = sum(term["ms"] for term in printed["waterfall"]["tpot"])
    assert total == pytest.approx(printed["tpot_ms"])
    plain = ridgeline.predict("llama-3.1-8b", accelerator="h100-sxm")
    assert plain.waterfall is None and "waterfall" not in plain.to_dict()
    points = tmp_path / "points.jsonl"
    points.write_bytes(msgspec.json.encode(POOL))
    assert main(["predict", "--explain", "--input", str(points)]) == 0
    line = json.loads(capsys.readouterr().out)
    assert sum(term["ms"] for term in line["waterfall"]["ttft"]) == pytest.approx(line["ttft_ms"])
