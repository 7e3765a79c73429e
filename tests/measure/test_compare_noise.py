"""`compare` on generated runs with the noise of real ones, half of them next to a CPU hog."""

from __future__ import annotations

import math
import random
from pathlib import Path
from statistics import fmean

import msgspec
import pytest
from scipy.stats import ttest_rel

from ridgeline.measure.results.comparison import (
    MetricComparison,
    compare_results,
    load_differences,
)
from ridgeline.measure.results.event_log import RunContext, write_run
from ridgeline.measure.results.result_file import LoadedResult
from ridgeline.records import MachineLoad, Slo
from ridgeline.stats import hochberg
from ridgeline.workflows.bench.bench import bench_diagnosis
from ridgeline.workflows.compare_runs import ResultComparison, compare_runs
from tests.measure.simulated_run import simulated_runs

NUM_REQUESTS = 64
RUN_SD = 0.012  # run-to-run noise of a quiet machine
LOAD: dict[str, str | float] = {"workload": "chat", "num_requests": NUM_REQUESTS}


def generated_run(
    seed: int,
    *,
    slower: float = 1.0,
    hog: bool = False,
    run_sd: float = RUN_SD,
    correlation: float = 0.7,
) -> LoadedResult:
    """A run of one load: requests differ by their lengths, share a queue, and the machine's speed.

    `correlation`: of the queue from request to request. A hog takes 15 to 60 % of the CPU; the
    meter reads that with an error of 3 %.
    """
    rng = random.Random(f"{seed}/run")
    taken = rng.uniform(0.15, 0.6) if hog else rng.uniform(0.0, 0.03)
    speed = slower * math.exp(rng.gauss(0, run_sd)) / (1 - taken)
    lengths = random.Random("the load")
    queue, ttft, tpot = 0.0, [], []
    for _ in range(NUM_REQUESTS):
        queue = correlation * queue + rng.gauss(0, 0.08)
        prompt, batch = lengths.gauss(0, 0.5), lengths.gauss(0, 0.1)
        ttft.append(speed * 0.2 * math.exp(prompt + queue + rng.gauss(0, 0.1)))
        tpot.append(speed * 0.03 * math.exp(batch + 0.2 * queue + rng.gauss(0, 0.03)))
    e2e = [first + 60 * each for first, each in zip(ttft, tpot, strict=True)]
    return LoadedResult(
        source=f"run{seed}",
        tool="ridgeline",
        samples={"ttft": tuple(ttft), "tpot": tuple(tpot), "itl": tuple(tpot), "e2e": tuple(e2e)},
        figures={"output_tok_s": 2000 / speed, "request_rate": 30 / speed},
        ids=tuple(map(str, range(NUM_REQUESTS))),
        load=LOAD,
        busy_share=max(0.0, taken + rng.gauss(0, 0.03)) if hog else taken,
    )


def conclusion(a: list[LoadedResult], b: list[LoadedResult]) -> str:
    refused = load_differences(a, b)
    judgements = () if refused else compare_results(a, b)
    return ResultComparison(
        refused=refused, judgements=judgements, changes=(), effect=None
    ).conclusion


@pytest.mark.parametrize("first", [0, 1000, 2000])
def test_at_most_one_false_alarm_in_twenty_pairs_half_of_them_next_to_a_hog(first: int) -> None:
    alarms = 0
    for pair in range(20):
        seed = first + 2 * pair
        b = generated_run(seed + 1, hog=pair % 2 == 0)
        alarms += conclusion([generated_run(seed)], [b]) == "regressed"
    assert alarms <= 1


def test_slowdown_of_a_tenth_is_found_on_a_quiet_machine() -> None:
    found = sum(
        conclusion([generated_run(2 * i)], [generated_run(2 * i + 1, slower=1.1)]) == "regressed"
        for i in range(30)
    )
    assert found >= 27


def test_repeated_runs_find_a_smaller_slowdown() -> None:
    found = sum(
        conclusion(
            [generated_run(100 * i + k) for k in range(5)],
            [generated_run(100 * i + 50 + k, slower=1.08) for k in range(5)],
        )
        == "regressed"
        for i in range(10)
    )
    assert found >= 8


def test_eight_runs_a_side_find_a_slowdown_of_a_tenth_and_raise_no_more_false_alarms() -> None:
    """On a server in virtual time, with stalls and a speed that differs from run to run."""
    sides = [
        [simulated_runs(f"{pair}/{kind}", 8, slower=0.1 * (kind == "c")) for kind in "abc"]
        for pair in range(20)
    ]
    alarms = sum(conclusion(a, b) == "regressed" for a, b, _ in sides)
    found = sum(conclusion(a, c) == "regressed" for a, _, c in sides)
    assert alarms <= 1 and found >= 18


def test_mean_latencies_are_not_corrected_for_the_number_of_other_metrics() -> None:
    a, b = simulated_runs("a", 4), simulated_runs("b", 4, slower=0.1)
    p_values = {one.metric: one.p_value for one in compare_results(a, b)}
    means = ("ttft_mean", "tpot_mean", "e2e_mean")
    logs = {m: [[math.log(fmean(r.samples[m[:-5]])) for r in s] for s in (a, b)] for m in means}
    raw = [float(ttest_rel(*logs[metric]).pvalue) for metric in means]
    expected = [p / 0.8 for p in hochberg(raw) if p is not None]
    assert [p_values[metric] for metric in means] == pytest.approx(expected)


def test_busy_run_is_named_with_the_share_that_was_taken() -> None:
    quiet = generated_run(0)
    busy = msgspec.structs.replace(generated_run(1), busy_share=0.51)
    (reason,) = load_differences([quiet], [busy])
    assert "run1: the machine was busy (51% of the CPU taken" in reason
    assert conclusion([quiet], [busy]) == "inconclusive"


def test_busy_runs_of_a_folder_are_left_out(tmp_path: Path, request_trace, run_trace) -> None:  # type: ignore[no-untyped-def]
    def write(folder: str, name: str, seed: int, factor: float, taken: float) -> None:
        rng = random.Random(seed)
        requests = []
        for i in range(40):
            ttft_s = factor * 0.2 * rng.lognormvariate(0, 0.05)
            token_s = (0.1 * i + ttft_s, 0.1 * i + 2)
            requests.append(request_trace(id=str(i), scheduled_s=0.1 * i, token_s=token_s))
        run = msgspec.structs.replace(
            run_trace(requests), machine_load=MachineLoad(others_share=taken)
        )
        (tmp_path / folder).mkdir(exist_ok=True)
        write_run(run, tmp_path / folder / name)

    for i in range(3):
        write("a", f"{i}.jsonl", i, 1.0, 0.02)
        write("b", f"{i}.jsonl", 10 + i, 1.0, 0.02)
    write("b", "3.jsonl", 13, 2.0, 0.5)
    compared = compare_runs(tmp_path / "a", tmp_path / "b")
    assert not compared.refused
    assert compared.conclusion != "regressed"


def test_too_few_requests_are_named_as_such() -> None:
    few = [
        msgspec.structs.replace(
            generated_run(i), samples={"ttft": generated_run(i).samples["ttft"][:12]}
        )
        for i in range(2)
    ]
    reasons = {found.reason for found in compare_results(few[:1], few[1:])}
    assert "12 requests are too few to know the noise; a run needs 20" in reasons


def test_hochberg_multiplies_the_smallest_by_the_number_of_tests() -> None:
    assert hochberg([0.001, None, 0.2, 0.04]) == pytest.approx([0.003, None, 0.2, 0.08])
    assert hochberg([0.04, 0.03]) == [0.04, 0.04]


def test_bench_says_first_that_the_machine_was_busy(request_trace, run_trace) -> None:  # type: ignore[no-untyped-def]
    run = msgspec.structs.replace(
        run_trace([request_trace(id="1", token_s=(0.2, 0.3))]),
        machine_load=MachineLoad(others_share=0.85),
    )
    options = type("Options", (), {"slo": Slo.parse("ttft:500")})()
    sentence = bench_diagnosis(run, options, None, RunContext())
    assert sentence.lower().startswith("machine-bound: other work took 85% of the cpu")


def test_rates_of_an_open_load_do_not_hide_that_latencies_are_too_noisy() -> None:
    """Whatever the server does, it answers as many requests as are sent."""
    noisy = MetricComparison(
        metric="ttft_mean", a=1.0, b=1.1, ratio=1.1, low=0.9, high=1.3, p_value=0.2, detectable=0.3,
        outcome="inconclusive", reason="too noisy",
    )  # fmt: skip
    rate = msgspec.structs.replace(noisy, metric="request_rate", outcome="unchanged", reason="")

    def of(*judgements: MetricComparison) -> str:
        return ResultComparison(
            refused=(), judgements=judgements, changes=(), effect=None
        ).conclusion

    assert of(noisy, rate) == "inconclusive"
    assert of(rate) == "not regressed"
    assert of(msgspec.structs.replace(noisy, outcome="unchanged"), rate) == "not regressed"
