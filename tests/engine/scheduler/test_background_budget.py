"""Background requests get what the SLOs of interactive requests leave, on a simulated clock.

A step of r rows takes what `Machine` says. People and lines are served by the scheduler itself;
A step of r rows takes `machine(r)` seconds. The scheduler serves both kinds of requests.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ridgeline.engine.scheduler import background_budget
from ridgeline.engine.scheduler.background_budget import (
    FixedBackgroundTokens,
    LearnedBackgroundTokens,
    StepTimeByRows,
    make_background_policy,
)
from ridgeline.engine.scheduler.scheduler import Scheduler
from ridgeline.records import Slo, Token
from tests.engine.scheduler.helpers import make_request, scheduler, scripted

Machine = Callable[[int], float]


def kneed(rows: int) -> float:
    """Seconds of a step: 4 ms while memory-bound, then 0.2 ms per row."""
    return max(0.004, 0.0002 * rows)


@dataclass
class Served:
    """Result of a run: TPOT of each interactive request, background rows, mixed steps."""

    tpot_s: list[float] = field(default_factory=list)
    background_rows: int = 0
    mixed_steps: int = 0


def serve(
    sched: Scheduler,
    machine: Machine,
    *,
    slo: Slo | None,
    num_interactive: int = 4,
    num_requests: int = 8,
    num_background: int = 100,
) -> Served:
    """Interactive requests one after the other, alongside background requests with long prompts."""
    now_s, left, served = 0.0, num_requests, Served()
    seen: dict[str, list[float]] = {}
    for i in range(num_background):
        sched.add(make_request(f"background{i}", 500, background=True, max_tokens=4))
    while left or any(len(times) < 50 for times in seen.values()):
        running = sum(len(times) < 50 for times in seen.values())
        for _ in range(min(left, num_interactive - running)):
            name, left = f"interactive{left}", left - 1
            sched.add(make_request(name, 8, at_s=now_s, max_tokens=50, slo=slo))
            seen[name] = []
        plan = sched.plan(now_s)
        sizes = {run.seq_id: len(run.tokens) for run in plan.runs}
        owners = {run.seq_id: sched.request_id_of(run.seq_id) or "" for run in plan.runs}
        background = sum(n for i, n in sizes.items() if owners[i].startswith("background"))
        served.background_rows += background
        served.mixed_steps += 0 < background < sum(sizes.values())
        now_s += machine(sum(sizes.values()))
        for event in sched.commit(plan, scripted(plan), now_s):
            if isinstance(event, Token) and event.request_id.startswith("interactive"):
                seen[event.request_id].append(now_s)
    served.tpot_s = [(times[-1] - times[0]) / 49 for times in seen.values()]
    return served


def roomy(background_tokens: int | None = None) -> Scheduler:
    return scheduler(
        num_blocks=4096,
        block_size=16,
        max_num_seqs=48,
        max_num_batched_tokens=512,
        max_model_len=600,
        background_tokens=background_tokens,
    )


def test_tpot_slo_is_kept_while_background_requests_progress() -> None:
    served = serve(roomy(), kneed, slo=Slo(tpot_s=0.02))
    assert max(served.tpot_s) <= 0.02
    assert served.background_rows > 40 * served.mixed_steps > 0, (
        "there is room for about 76 background rows"
    )


def test_configured_number_can_violate_the_slo() -> None:
    served = serve(roomy(400), kneed, slo=Slo(tpot_s=0.02))
    assert max(served.tpot_s) > 0.02, "this load can tell the difference"


def test_without_slo_a_step_may_take_a_quarter_longer() -> None:
    served = serve(roomy(), kneed, slo=None)
    assert max(served.tpot_s) <= 1.25 * 0.004 * 1.05
    assert served.background_rows / served.mixed_steps > 12, (
        "20 rows take as long as 4, and 25 do 5 ms"
    )


def test_slo_violated_without_background_load_leaves_no_budget() -> None:
    served = serve(roomy(), kneed, slo=Slo(tpot_s=0.004), num_requests=4)
    assert served.mixed_steps <= 1


def test_slower_machine_is_noticed() -> None:
    steps = 0

    def slowing(rows: int) -> float:
        nonlocal steps
        steps += 1
        return kneed(rows) * (1.0 if steps < 200 else 2.5)

    served = serve(roomy(), slowing, slo=Slo(tpot_s=0.03), num_requests=40)
    assert max(served.tpot_s[-16:]) <= 0.03, "2.5 times as slow, the same number of requests"
    assert served.background_rows > 0


@pytest.mark.parametrize("name", ["TPOT_SLO_SHARE", "SLOWDOWN_WITHOUT_SLO"])
def test_wrong_constant_is_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_budget, name, 3.0)
    slo = Slo(tpot_s=0.02) if name == "TPOT_SLO_SHARE" else None
    limit_s = 0.02 if slo else 1.25 * 0.004 * 1.05
    assert max(serve(roomy(), kneed, slo=slo).tpot_s) > limit_s


def background_step_times(sched: Scheduler, slo: Slo | None, num_steps: int = 60) -> list[float]:
    """Seconds of background-only steps, after one interactive request with an SLO was served."""
    serve(sched, kneed, slo=slo, num_interactive=1, num_requests=1, num_background=1)
    for i in range(100):
        sched.add(make_request(f"more{i}", 500, background=True, max_tokens=4))
    now_s, took_s = 100.0, list[float]()
    for _ in range(num_steps):
        plan = sched.plan(now_s)
        took_s.append(kneed(sum(len(run.tokens) for run in plan.runs)))
        now_s += took_s[-1]
        sched.commit(plan, scripted(plan), now_s)
    return took_s


def test_background_only_step_takes_at_most_half_the_ttft_slo() -> None:
    ttft_s = background_step_times(roomy(), Slo(ttft_s=0.05))
    assert max(ttft_s) <= 0.025 < max(background_step_times(roomy(), None))
    assert statistics.fmean(ttft_s[10:]) > 0.02, "background requests use the allowance"
    assert max(background_step_times(roomy(400), Slo(ttft_s=0.05))) > 0.025, "a configured number"


def test_impossible_ttft_slo_does_not_stop_background_requests() -> None:
    sched = roomy()
    assert max(background_step_times(sched, Slo(ttft_s=0.001))) == kneed(16)
    assert "16 rows on their own" in sched.background_budget.policy.describe()


def test_ttft_slo_expires_without_further_requests() -> None:
    sched = roomy()
    background_step_times(sched, Slo(ttft_s=0.05))
    now_s = 100.0 + background_budget._SLO_MEMORY_S + 1
    assert sum(len(run.tokens) for run in sched.plan(now_s).runs) == 512


def seconds_of(curve: StepTimeByRows, rows: int) -> float:
    """T(rows) according to the curve: the inverse of `max_rows_within`."""
    above = bisect_left(curve._rows, rows)
    if above == len(curve._rows):
        return curve._machine * curve._at_s[-1] * rows / curve._rows[-1]
    if not above or curve._rows[above] == rows:
        return curve._machine * curve._at_s[above]
    share = (rows - curve._rows[above - 1]) / (curve._rows[above] - curve._rows[above - 1])
    low_s, high_s = curve._at_s[above - 1], curve._at_s[above]
    return curve._machine * (low_s + (high_s - low_s) * share)


@pytest.mark.slow
@given(
    base_s=st.floats(1e-3, 0.1),
    row_s=st.floats(1e-6, 1e-3),
    seen=st.lists(st.integers(1, 512), min_size=1, max_size=30),
    rows=st.integers(1, 512),
)
@example(base_s=0.0625, row_s=2**-14, seen=[218, 256, 216], rows=256)  # 216 shares a point with 218
def test_curve_never_underestimates_beyond_what_was_seen(
    base_s: float, row_s: float, seen: list[int], rows: int
) -> None:
    curve = StepTimeByRows()
    for each in seen:
        curve.observe(each, base_s + row_s * each)
    true_s = base_s + row_s * rows
    assert rows < max(seen) or seconds_of(curve, rows) >= 0.9999 * true_s
    assert curve.lower_bound_s(rows) <= true_s * 1.07, (
        "row counts of one point differ by a sixteenth"
    )


@given(limit_s=st.floats(1e-4, 1.0), seen=st.lists(st.integers(1, 512), min_size=1, max_size=30))
def test_max_rows_within_a_limit_stay_within_it(limit_s: float, seen: list[int]) -> None:
    curve = StepTimeByRows()
    for each in seen:
        curve.observe(each, kneed(each))
    rows = curve.max_rows_within(limit_s)
    assert not rows or seconds_of(curve, rows) <= limit_s * 1.000001
    assert not 0 < rows < 512 or seconds_of(curve, rows + 1) > limit_s * 0.999999


def test_curve_converges_to_observed_times() -> None:
    curve = StepTimeByRows()
    for _ in range(100):
        for rows in (4, 20, 100, 400):
            curve.observe(rows, kneed(rows))
    for rows in (4, 20, 100, 400):
        assert seconds_of(curve, rows) == pytest.approx(kneed(rows), rel=0.1)


def test_describe_names_the_decision_and_its_reason() -> None:
    learnt = make_background_policy(None)
    assert learnt.describe() == "derived from measured step times"
    assert learnt.max_tokens_mixed(4, None) == learnt.max_tokens_mixed(4, 0.02) == 0, (
        "nothing was observed yet"
    )
    learnt.observe_step(4, 0.004)
    assert learnt.max_tokens_mixed(4, 0.02) == 12, "16 rows take at most four times as long as 4"
    reason = "derived: 12 rows next to 4 interactive ones: 16 take at most 16.0 ms, "
    assert learnt.describe() == reason + "0.8 of the TPOT SLO of 20 ms"
    assert learnt.max_tokens_mixed(4, None) == 1 and "no TPOT SLO applies" in learnt.describe()
    assert isinstance(learnt, LearnedBackgroundTokens)
    fixed = make_background_policy(7)
    assert isinstance(fixed, FixedBackgroundTokens)
    fixed.observe_step(3, 1.0)
    assert fixed.max_tokens_mixed(9, None) == 7 and fixed.describe() == "7: as requested"
