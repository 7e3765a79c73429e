"""Operators compared with their bounds (checked by hand), and the roofline as text."""

from __future__ import annotations

import pytest

from ridgeline.diagnose.roofline.operators import judge, middle, table
from ridgeline.diagnose.roofline.text_chart import MARGIN, WIDTH, roofline_text
from ridgeline.hardware.ceilings import MeasuredCeilings
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.cost.operators import operator_work
from ridgeline.modelspec.rewrite import apply_quantization
from ridgeline.records import OperatorTime, PhaseProfile, StepProfile
from ridgeline.roofline import Peaks, RooflinePoint

SPEC = apply_quantization(load_spec("dummy:llama-1b-32k"), "int4")
CEILINGS = MeasuredCeilings(
    bytes_s={1 << 20: 100e9, 1 << 28: 20e9},
    flops_s={"int4": 200e9, "int16": 150e9, "float32": 100e9},
    cpu_share=1.0,
)
SHAPES = ((1, 100), (1, 200))


def step(time_s: float, **operators: float) -> StepProfile:
    timed = {name: OperatorTime(22, spent) for name, spent in operators.items()}
    return StepProfile(shapes=SHAPES, num_sampled=2, time_s=time_s, operators=timed)


def decode(*steps: StepProfile, plain_s: tuple[float, ...] = (0.030,)) -> PhaseProfile:
    return PhaseProfile(phase="decode", passes=tuple((each,) for each in steps), plain_s=plain_s)


def test_rows_and_host_add_up_to_the_pass() -> None:
    spent = {"down": 0.010, "attention": 0.002, "o": 0.003, "activation": 0.0}  # 0: in another
    found = table(decode(step(0.031, **spent)), SPEC, CEILINGS)
    assert [row.operator for row in found.rows] == ["down", "o", "attention", "host"]
    assert sum(row.time_s for row in found.rows) == pytest.approx(found.pass_s) == 0.031
    assert sum(row.share for row in found.rows) == pytest.approx(1)
    assert found.host.time_s == pytest.approx(0.016)
    assert found.timing_cost == pytest.approx(1 / 30)


def test_bounds_by_hand() -> None:
    """Two rows: the down linear is bound by its bytes at the rate of the whole model's size."""
    work = operator_work(SPEC, SHAPES, 2)["down"]
    row = table(decode(step(0.030, down=0.012)), SPEC, CEILINGS).rows[0]
    assert row.limit == "bandwidth"
    assert row.bound_s == pytest.approx(work.memory_bytes / 20e9)
    assert row.of_bound == pytest.approx(row.bound_s / 0.012)
    assert row.intensity == pytest.approx(work.flops / work.memory_bytes)
    slow = MeasuredCeilings(bytes_s=CEILINGS.bytes_s, flops_s={"int4": 1e9}, cpu_share=1.0)
    row = table(decode(step(0.030, down=0.012)), SPEC, slow).rows[0]
    assert row.limit == "compute" and row.bound_s == pytest.approx(work.flops / 1e9)


def test_cached_rows_are_compared_with_the_cache_bandwidth() -> None:
    parts = operator_work(SPEC, SHAPES, 2)
    row = table(decode(step(0.030, activation=0.001)), SPEC, CEILINGS).rows[0]
    assert row.limit == "cache" and row.intensity is None
    assert row.bound_s == pytest.approx(parts["activation"].row_bytes / 100e9)


def test_an_unknown_rate_gives_no_arithmetic_bound() -> None:
    rates = MeasuredCeilings(bytes_s=CEILINGS.bytes_s, flops_s={"float32": 1e6}, cpu_share=1.0)
    row = table(decode(step(0.030, down=0.012)), SPEC, rates).rows[0]
    assert row.limit == "bandwidth"


def test_middle_half_of_the_passes_is_averaged() -> None:
    steps = [(step(t),) for t in (9.0, 1.0, 3.0, 2.0, 4.0, 5.0, 6.0, 100.0)]
    assert [each[0].time_s for each in middle(steps)] == [3.0, 4.0, 5.0, 6.0]
    assert len(middle(steps[:3])) == 3


def test_notable_operators_are_reported() -> None:
    spent = {"down": 0.020, "attention": 0.010}
    phase = decode(step(0.040, **spent), plain_s=(0.030,))
    lines = judge("x", [phase], SPEC, CEILINGS).stands_out
    text = "\n".join(lines)
    assert "bandwidth: fewer bytes" in lines[0]
    assert "down linear has the most to gain" in text
    assert "also far from their bounds: attention" in text
    assert "25% is spent outside the operators" in text
    assert "33% longer" in text
    quiet = decode(step(0.0301, down=0.0300), plain_s=(0.030,))
    assert "outside" not in "\n".join(judge("x", [quiet], SPEC, CEILINGS).stands_out)


def test_points_are_the_phase_and_its_arithmetic_operators() -> None:
    found = judge("x", [decode(step(0.030, down=0.012, activation=0.001))], SPEC, CEILINGS)
    assert [point.name for point in found.points] == ["decode", "down linear"]
    whole = found.points[0]
    assert whole.achieved_flops_s == pytest.approx(found.phases[0].flops / 0.030)
    shares = [point.share_of_roof for point in found.points]
    assert shares[1] == pytest.approx(found.phases[0].rows[0].of_bound)
    assert shares[0] == pytest.approx(found.phases[0].bound_s / 0.030)
    assert found.peaks.bytes_s == 20e9 and found.peaks.dtype == "int4"
    assert "disturbed" not in found.peaks.source


PEAKS = Peaks(bytes_s=10e9, flops_s=100e9, dtype="float32")


def point(intensity: float, flop_s: float, name: str = "decode") -> RooflinePoint:
    return RooflinePoint(
        name=name,
        phase="decode",
        intensity=intensity,
        achieved_flops_s=flop_s,
        achieved_bytes_s=flop_s / intensity,
        roof_flops_s=PEAKS.attainable_flops_s(intensity),
        time_s=1.0,
        num_steps=1,
    )


def test_the_chart_puts_points_below_their_roof() -> None:
    lines = roofline_text([point(1.0, 5e9), point(100.0, 50e9, "qkv")], PEAKS)
    plot = [line[MARGIN:] for line in lines[1:16]]
    (at_a,) = [(y, line.index("a")) for y, line in enumerate(plot) if "a" in line]
    (at_b,) = [(y, line.index("b")) for y, line in enumerate(plot) if "b" in line]
    assert at_a[0] > at_b[0] and at_a[1] < at_b[1]
    slope = [y for y, line in enumerate(plot) if len(line) > at_a[1] and line[at_a[1]] == "/"]
    assert slope and max(slope) < at_a[0]
    flat = [y for y, line in enumerate(plot) if "─" in line]
    assert len(flat) == 1 and flat[0] < at_b[0]
    assert max(map(len, plot)) <= WIDTH + 8
    assert "50% (bandwidth)" in lines[-2] and "decode: qkv" in lines[-1]
    assert max(map(len, lines)) <= 80


def test_no_points_give_an_empty_chart() -> None:
    assert roofline_text([], PEAKS) == ()


def test_figures_of_several_accelerators_do_not_run_together_in_the_legend() -> None:
    peaks = Peaks(bytes_s=27e12, flops_s=8e15, dtype="bfloat16")
    point = RooflinePoint(
        name="prefill", phase="prefill", intensity=506.0, achieved_flops_s=2.4e15,
        achieved_bytes_s=5e12, roof_flops_s=8e15, time_s=1.0, num_steps=1,
    )  # fmt: skip
    legend = roofline_text([point], peaks)[-1].split()
    assert legend[:4] == ["a", "prefill", "506", "2,400,000"]
