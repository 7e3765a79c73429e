"""Repeat a simulation with several seeds, and report each figure as an interval.

One run gives one sample of a p99. Every seed draws new arrivals and lengths and, on a calibrated
machine, its own point in the recorded interference, with its own level and model error.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from ridgeline.config.planning import SimulateOptions
from ridgeline.errors import BadInput
from ridgeline.plan.simulate.summary import FleetSummary, LatencySpread
from ridgeline.records.progress import Observer, StageAdvanced, silent, stage
from ridgeline.report.result import Result
from ridgeline.stats import Interval
from ridgeline.workflows.planning.simulate import simulate

LOW, HIGH = 5, 95  # percentiles over the seeds
MIN_SEEDS, MAX_SEEDS = 5, 10_000


class SeedsResult(Result, frozen=True, kw_only=True):
    """The same fleet under `num_seeds` loads; times in seconds.

    An interval holds the 5th percentile, median and 95th percentile over the seeds.
    """

    model: str
    replicas: int
    first_seed: int
    num_seeds: int
    figures: dict[str, Interval]


def simulate_seeds(options: SimulateOptions, observer: Observer = silent) -> SeedsResult:
    """Simulate with `options.num_seeds` consecutive seeds from `options.seed` on."""
    if not MIN_SEEDS <= options.num_seeds <= MAX_SEEDS:
        raise BadInput(
            "--num-seeds is out of range",
            value=options.num_seeds,
            limit=f"1, or {MIN_SEEDS} to {MAX_SEEDS:,}",
        )
    summaries: list[FleetSummary] = []
    with stage(observer, "seeds", total=options.num_seeds, unit="seeds"):
        for seed in range(options.seed, options.seed + options.num_seeds):
            run = simulate(msgspec.structs.replace(options, seed=seed))
            summaries.append(run.summary)
            observer(
                StageAdvanced(stage="seeds", completed=len(summaries), total=options.num_seeds)
            )
    return SeedsResult(
        model=options.model,
        replicas=options.replicas,
        first_seed=options.seed,
        num_seeds=options.num_seeds,
        figures=intervals(summaries),
    )


def intervals(summaries: Sequence[FleetSummary]) -> dict[str, Interval]:
    """Every figure that any seed has, by name."""
    values: dict[str, list[float]] = {}
    for summary in summaries:
        for name, value in _figures(summary):
            values.setdefault(name, []).append(value)
    result = {}
    for name, samples in values.items():
        low, middle, high = np.percentile(samples, (LOW, 50, HIGH)).tolist()
        result[name] = Interval(low=low, mid=middle, high=high, level=(HIGH - LOW) / 100)
    return result


def _figures(summary: FleetSummary) -> list[tuple[str, float]]:
    figures: list[tuple[str, float]] = []
    for name, spread in (("ttft", summary.ttft), ("tpot", summary.tpot), ("e2e", summary.e2e)):
        figures += _percentiles(name, spread)
    if summary.goodput_req_s is not None and summary.attainment is not None:
        figures += [("goodput_req_s", summary.goodput_req_s), ("attainment", summary.attainment)]
    return [*figures, ("output_tok_s", summary.output_tok_s), ("utilisation", summary.utilisation)]


def _percentiles(name: str, spread: LatencySpread | None) -> list[tuple[str, float]]:
    if spread is None:
        return []
    return [(f"{name}_p50_s", spread.p50), (f"{name}_p99_s", spread.p99)]
