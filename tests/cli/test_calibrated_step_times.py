"""`optimize --calibration`: unmeasured formats come from the file, scaled to today's speed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ridgeline.cli.main import main
from ridgeline.config.settings import Settings
from ridgeline.errors import CannotRun
from ridgeline.plan.calibration.calibration import Calibration, MachineMemory, ProductTimes
from ridgeline.plan.calibration.fit import CalibrationInputs, empty_calibration
from ridgeline.records import StepStat
from ridgeline.workflows.optimize.calibrated_step_times import (
    CalibratedStepTimes,
    require_calibrated,
)
from ridgeline.workflows.optimize.simulator import SimulatedEngine

PLAIN = Settings(model="demo")
INT8 = Settings(model="demo", quantization="int8")
INT4 = Settings(model="demo", quantization="int4")
SHAPES = ((1, 100), (1, 40))


def calibration() -> Calibration:
    """Dense, bfloat16 (heads) and int8; int8 weights take half as long."""
    facts = CalibrationInputs(
        device="this-machine",
        as_of="2026-11-21",
        source="a test",
        took_s=1.0,
        runs=(),
        peak_flops={"float32": 2e11, "int8": 4e11},
        bandwidth_bytes_s={"1048576": 50e9, "536870912": 20e9},
        memory=MachineMemory(total_bytes=16 << 30, available_bytes=12 << 30),
        dense_dtype="float32",
        first_s=1e-3,
    )

    def linear(weight_s: float) -> ProductTimes:
        return ProductTimes(
            rows=(1,), weight_s=(weight_s,), row_s=0.0, bandwidth=1.0, layer_s=1e-5, output_s=1e-12
        )

    found = empty_calibration(facts, ("float32", "bfloat16", "int8"))
    over = msgspec.structs.replace(
        found.overheads, step_s=1e-4, run_s=1e-5, run_layer_s=0.0, logit_s=0.0
    )
    free = msgspec.structs.replace(
        found.attention, decode_flop_s=0.0, decode_byte_s=0.0, prompt_flop_s=0.0
    )
    return msgspec.structs.replace(
        found,
        linears={"float32": linear(2e-9), "bfloat16": linear(2e-9), "int8": linear(1e-9)},
        overheads=over,
        attention=free,
    )


def steps(seconds: float, count: int = 20) -> list[StepStat]:
    return [
        StepStat(
            index=i, at_s=0.0, plan_s=0.0, run_s=seconds, shapes=SHAPES, num_sampled=2,
            num_running=2, num_waiting=0, used_blocks=0, num_blocks=99, max_num_seqs=8,
        )
        for i in range(count)
    ]  # fmt: skip


def step_s(prices: CalibratedStepTimes, settings: Settings) -> float:
    priced = prices.of(settings)
    assert priced is not None
    return priced(SHAPES, 2)


def test_calibrated_seconds_are_scaled_to_what_was_measured() -> None:
    prices = CalibratedStepTimes(calibration())
    plain_s, int8_s = step_s(prices, PLAIN), step_s(prices, INT8)
    assert int8_s < 0.7 * plain_s
    prices.learn(PLAIN, steps(1.5 * plain_s))
    assert step_s(prices, PLAIN) == pytest.approx(1.5 * plain_s)
    assert step_s(prices, INT8) == pytest.approx(1.5 * int8_s)
    prices.learn(INT8, steps(2 * int8_s))
    assert step_s(prices, INT8) == pytest.approx(2 * int8_s)
    assert step_s(prices, PLAIN) == pytest.approx(1.5 * plain_s), "its own steps are known"


def test_uncalibrated_format_is_rejected_until_measured() -> None:
    prices = CalibratedStepTimes(calibration())
    assert prices.of(INT4) is None
    with pytest.raises(CannotRun, match="does not cover"):
        require_calibrated(prices, INT4)
    require_calibrated(prices, INT8)


def test_simulator_uses_the_calibration_before_measurements() -> None:
    prices = CalibratedStepTimes(calibration())

    def nothing(*_: object) -> object:
        raise AssertionError("not asked")

    oracle = SimulatedEngine(nothing, nothing, nothing, prices)  # type: ignore[arg-type]
    assert oracle._plain_step_s(INT8)(SHAPES, 2) == pytest.approx(step_s(prices, INT8))
    with pytest.raises(CannotRun, match="too few steps"):
        oracle._plain_step_s(INT4)


def test_remote_server_has_no_calibrated_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--url", "http://127.0.0.1:9", "--restart-cmd", "llama-server --port 9 {flags}"]
    code = main(["optimize", *given, "--calibration", str(tmp_path / "no.json")])
    assert code == 2
    assert "not of a server" in capsys.readouterr().err
