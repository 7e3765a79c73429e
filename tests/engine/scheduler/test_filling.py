"""What lines get beside people: as much as people's promises leave, on a clock of the test's own.

A step of r rows takes what `Machine` says. People and lines are served by the scheduler itself;
nothing here waits.
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
    """4 ms as long as weights are what is waited for, then 0.2 ms a row."""
    return max(0.004, 0.0002 * rows)


@dataclass
class Served:
    """What came of a load: people's time per output token, by request; tokens and rows of lines."""

    tpot_s: list[float] = field(default_factory=list)
    line_rows: int = 0
    shared_steps: int = 0


def serve(
    sched: Scheduler,
    machine: Machine,
    *,
    slo: Slo | None,
    num_people: int = 4,
    num_requests: int = 8,
    num_lines: int = 100,
) -> Served:
    """People who ask one thing after the other, beside lines of long prompts."""
    now_s, left, served = 0.0, num_requests, Served()
    seen: dict[str, list[float]] = {}
    for i in range(num_lines):
        sched.add(make_request(f"line{i}", 500, background=True, max_tokens=4))
    while left or any(len(times) < 50 for times in seen.values()):
        running = sum(len(times) < 50 for times in seen.values())
        for _ in range(min(left, num_people - running)):
            name, left = f"person{left}", left - 1
            sched.add(make_request(name, 8, at_s=now_s, max_tokens=50, slo=slo))
            seen[name] = []
        plan = sched.plan(now_s)
        sizes = {run.seq_id: len(run.tokens) for run in plan.runs}
        owners = {run.seq_id: sched.request_id(run) or "" for run in plan.runs}
        lines = sum(n for i, n in sizes.items() if owners[i].startswith("line"))
        served.line_rows += lines
        served.shared_steps += 0 < lines < sum(sizes.values())
        now_s += machine(sum(sizes.values()))
        for event in sched.commit(plan, scripted(plan), now_s):
            if isinstance(event, Token) and event.request_id.startswith("person"):
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


def test_people_keep_their_promise_and_lines_go_on() -> None:
    served = serve(roomy(), kneed, slo=Slo(tpot_s=0.02))
    assert max(served.tpot_s) <= 0.02
    assert served.line_rows > 40 * served.shared_steps > 0, "there is room for some 76 rows of them"


def test_a_number_that_is_asked_for_is_too_much_for_this_machine() -> None:
    served = serve(roomy(400), kneed, slo=Slo(tpot_s=0.02))
    assert max(served.tpot_s) > 0.02, "the load can tell"


def test_without_a_promise_a_step_may_take_a_quarter_longer() -> None:
    served = serve(roomy(), kneed, slo=None)
    assert max(served.tpot_s) <= 1.25 * 0.004 * 1.05
    assert served.line_rows / served.shared_steps > 12, "20 rows take as long as 4, and 25 do 5 ms"


def test_a_promise_that_people_break_themselves_leaves_nothing() -> None:
    served = serve(roomy(), kneed, slo=Slo(tpot_s=0.004), num_requests=4)
    assert served.shared_steps <= 1


def test_a_machine_that_slows_down_is_noticed() -> None:
    steps = 0

    def slowing(rows: int) -> float:
        nonlocal steps
        steps += 1
        return kneed(rows) * (1.0 if steps < 200 else 2.5)

    served = serve(roomy(), slowing, slo=Slo(tpot_s=0.03), num_requests=40)
    assert max(served.tpot_s[-16:]) <= 0.03, "two and a half times as slow, as many people"
    assert served.line_rows > 0


@pytest.mark.parametrize("name", ["TPOT_SLO_SHARE", "SLOWDOWN_WITHOUT_SLO"])
def test_a_planted_bug_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_budget, name, 3.0)
    slo = Slo(tpot_s=0.02) if name == "TPOT_SLO_SHARE" else None
    limit_s = 0.02 if slo else 1.25 * 0.004 * 1.05
    assert max(serve(roomy(), kneed, slo=slo).tpot_s) > limit_s


def step_beside_nobody(sched: Scheduler, slo: Slo | None, num_steps: int = 60) -> list[float]:
    """Seconds of steps of lines alone, after one person was served with a promise."""
    serve(sched, kneed, slo=slo, num_people=1, num_requests=1, num_lines=1)
    for i in range(100):
        sched.add(make_request(f"more{i}", 500, background=True, max_tokens=4))
    now_s, took_s = 100.0, list[float]()
    for _ in range(num_steps):
        plan = sched.plan(now_s)
        took_s.append(kneed(sum(len(run.tokens) for run in plan.runs)))
        now_s += took_s[-1]
        sched.commit(plan, scripted(plan), now_s)
    return took_s


def test_whoever_comes_waits_for_no_more_than_half_of_the_promise() -> None:
    promised = step_beside_nobody(roomy(), Slo(ttft_s=0.05))
    assert max(promised) <= 0.025 < max(step_beside_nobody(roomy(), None))
    assert statistics.fmean(promised[10:]) > 0.02, "and lines use what there is"
    assert max(step_beside_nobody(roomy(400), Slo(ttft_s=0.05))) > 0.025, "a number that was asked"


def test_a_promise_that_no_step_can_keep_does_not_stop_lines() -> None:
    sched = roomy()
    assert max(step_beside_nobody(sched, Slo(ttft_s=0.001))) == kneed(16)
    assert "alone 16 rows" in sched.background_budget.policy.told()


def test_a_promise_is_forgotten_when_nobody_asks_for_it() -> None:
    sched = roomy()
    step_beside_nobody(sched, Slo(ttft_s=0.05))
    now_s = 100.0 + background_budget._REMEMBERED_S + 1
    assert sum(len(run.tokens) for run in sched.plan(now_s).runs) == 512


def seconds_of(curve: StepTimeByRows, rows: int) -> float:
    """T(rows) as the curve has it: the inverse of `rows_within`."""
    above = bisect_left(curve._rows, rows)
    if above == len(curve._rows):
        return curve._machine * curve._at[-1] * rows / curve._rows[-1]
    if not above or curve._rows[above] == rows:
        return curve._machine * curve._at[above]
    share = (rows - curve._rows[above - 1]) / (curve._rows[above] - curve._rows[above - 1])
    low_s, high_s = curve._at[above - 1], curve._at[above]
    return curve._machine * (low_s + (high_s - low_s) * share)


@given(
    base_s=st.floats(1e-3, 0.1),
    row_s=st.floats(1e-6, 1e-3),
    seen=st.lists(st.integers(1, 512), min_size=1, max_size=30),
    rows=st.integers(1, 512),
)
@example(base_s=0.0625, row_s=2**-14, seen=[218, 256, 216], rows=256)  # 216: of a kind with 218
def test_the_curve_is_never_too_low_where_nothing_was_tried(
    base_s: float, row_s: float, seen: list[int], rows: int
) -> None:
    curve = StepTimeByRows()
    for each in seen:
        curve.observe(each, base_s + row_s * each)
    true_s = base_s + row_s * rows
    assert rows < max(seen) or seconds_of(curve, rows) >= 0.9999 * true_s
    assert curve.at_least(rows) <= true_s * 1.07, "rows of one kind differ by a sixteenth"


@given(limit_s=st.floats(1e-4, 1.0), seen=st.lists(st.integers(1, 512), min_size=1, max_size=30))
def test_rows_within_a_limit_take_no_longer(limit_s: float, seen: list[int]) -> None:
    curve = StepTimeByRows()
    for each in seen:
        curve.observe(each, kneed(each))
    rows = curve.rows_within(limit_s)
    assert not rows or seconds_of(curve, rows) <= limit_s * 1.000001
    assert not 0 < rows < 512 or seconds_of(curve, rows + 1) > limit_s * 0.999999


def test_the_curve_comes_to_what_is_seen() -> None:
    curve = StepTimeByRows()
    for _ in range(100):
        for rows in (4, 20, 100, 400):
            curve.observe(rows, kneed(rows))
    for rows in (4, 20, 100, 400):
        assert seconds_of(curve, rows) == pytest.approx(kneed(rows), rel=0.1)


def test_what_is_told() -> None:
    learnt = make_background_policy(None)
    assert learnt.told() == "derived from what steps take"
    assert learnt.most(4, None) == learnt.most(4, 0.02) == 0, "nothing is known"
    learnt.took(4, 0.004)
    assert learnt.most(4, 0.02) == 12, "16 rows take at most four times as long as 4"
    told = "derived: 12 rows beside people's 4: 16 take at most 16.0 ms, "
    assert learnt.told() == told + "0.8 of the 20 ms promised per output token"
    assert learnt.most(4, None) == 1 and "promised nothing" in learnt.told()
    assert isinstance(learnt, LearnedBackgroundTokens)
    fixed = make_background_policy(7)
    assert isinstance(fixed, FixedBackgroundTokens)
    fixed.took(3, 1.0)
    assert fixed.most(9, None) == 7 and fixed.told() == "7: asked for"
