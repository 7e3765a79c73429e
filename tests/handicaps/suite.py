"""Runs the search on a handicap, and compares it with other ways to spend as many trials."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from ridgeline.config.settings import Settings
from ridgeline.errors import BadInput
from ridgeline.optimize.cost import MachinePrice
from ridgeline.optimize.job import OptimizeJob
from ridgeline.optimize.result import LadderResult
from ridgeline.optimize.search import optimize
from ridgeline.optimize.server_settings import recorded_settings
from ridgeline.records import Slo
from tests.handicaps.handicaps import BUDGET_S, Handicap, Truth

LOSS = 0.95  # a kept rung with a true ratio below it is a false keep
BASELINES = Path(__file__).parent / "baselines.json"
RANDOM_DRAWS = 2  # random searches whose result is averaged


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What the search made of one handicap; goodputs are true ones, in requests/s.

    `found_at`: the number of the kept trial that mended a planted fault first (None: none did).
    `random`, `sweep`, `in_order`: the goodput that as many trials reach by random search (mean), by
    trying every rung on the start and joining those that gained, and by the ladder's order without
    forecasts. All three are given exact measurements.
    """

    name: str
    server: str
    faults: tuple[str, ...]
    start: float
    final: float
    best_known: float
    num_trials: int
    kept: tuple[str, ...]
    found_at: int | None
    num_mended: int
    false_keeps: tuple[str, ...]
    virtual_s: float
    random: float
    sweep: float
    in_order: float

    @property
    def regained(self) -> float:
        """Final goodput over the best known."""
        return self.final / self.best_known


def search(handicap: Handicap, seed: int = 0) -> tuple[LadderResult, float]:
    """The search on virtual time, and the seconds that it took there."""
    servers = handicap.servers(seed)
    job = OptimizeJob(
        settings=servers.start,
        defaults=servers.defaults,
        workload="equal requests",
        slo=Slo.parse(handicap.slo),
        objective="goodput",
        budget_s=BUDGET_S,
        price=MachinePrice(),
        seed=seed,
    )
    result = asyncio.run(optimize(job, servers.environment(), servers.ladder, clock=servers.clock))
    return result, servers.now_s


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """What there is to gain in one handicap, and what other searches gain, in requests/s.

    It depends on the handicap and the twin's model, not on the search: `random`, `sweep` and
    `in_order` are goodputs after `NUM_TRIALS` trials.
    """

    name: str
    description: str
    start: float
    best_known: float
    random: float
    sweep: float
    in_order: float


NUM_TRIALS = 6  # of the searches that `optimize` is compared with: about what its budget holds


def make_baseline(handicap: Handicap) -> Baseline:
    """Compute the baseline: up to a minute."""
    truth = Truth(handicap)
    return Baseline(
        name=handicap.name,
        description=describe(handicap),
        start=truth.careful_goodput(truth.servers.start),
        best_known=truth.best_known(),
        random=_mean_random(truth, NUM_TRIALS),
        sweep=_sweep(truth, NUM_TRIALS),
        in_order=_in_order(truth, NUM_TRIALS),
    )


def describe(handicap: Handicap) -> str:
    """Everything that a baseline depends on but the code."""
    h, traffic = handicap, handicap.traffic
    return (
        f"{h.server} {h.flags} on {h.num_devices} x {h.device}, {h.model}, {traffic.prompt}+"
        f"{traffic.output} tokens, {traffic.shared} of {traffic.num_prefixes} shared, {h.slo}, "
        f"acceptance {h.acceptance}, loss {h.loss_nats}"
    )


def stored_baselines() -> dict[str, Baseline]:
    """The baselines computed by `benchmarks/bench_handicaps.py --baselines`, by name."""
    rows = msgspec.json.decode(BASELINES.read_bytes(), type=list[Baseline])
    return {row.name: row for row in rows}


def baseline_of(handicap: Handicap) -> Baseline:
    """The stored baseline, or a new one where none is stored of this handicap."""
    known = stored_baselines().get(handicap.name)
    if known is not None and known.description == describe(handicap):
        return known
    return make_baseline(handicap)


def judge(
    handicap: Handicap, result: LadderResult, virtual_s: float, baseline: Baseline
) -> Outcome:
    """Compare the result with the truth."""
    truth = Truth(handicap)
    servers = truth.servers
    start, current = servers.config(servers.start), servers.start
    mended: set[str] = set()
    found_at, kept, false_keeps = None, [], []
    for number, trial in enumerate(result.trials, 1):
        if trial.verdict != "kept":
            continue
        settings = recorded_settings(trial.settings)
        kept.append(trial.label)
        refused = trial.honesty == "lossy" and not handicap.lossy_permitted
        if refused or truth.careful_goodput(settings) < LOSS * truth.careful_goodput(current):
            false_keeps.append(trial.label)
        current = settings
        config = servers.config(settings)
        mended |= {fault.name for fault in handicap.faults if fault.mended(start, config)}
        if mended and found_at is None:
            found_at = number
    return Outcome(
        name=handicap.name,
        server=handicap.server,
        faults=tuple(fault.name for fault in handicap.faults),
        start=baseline.start,
        final=truth.careful_goodput(recorded_settings(result.final.settings)),
        best_known=baseline.best_known,
        num_trials=len(result.trials),
        kept=tuple(kept),
        found_at=found_at,
        num_mended=len(mended),
        false_keeps=tuple(false_keeps),
        virtual_s=virtual_s,
        random=baseline.random,
        sweep=baseline.sweep,
        in_order=baseline.in_order,
    )


def _mean_random(truth: Truth, num_trials: int) -> float:
    return sum(_random(truth, num_trials, seed) for seed in range(RANDOM_DRAWS)) / RANDOM_DRAWS


def _random(truth: Truth, num_trials: int, seed: int) -> float:
    """The best of `num_trials` random walks of up to three rungs from the start."""
    rng = random.Random(seed)
    best = truth.goodput(truth.servers.start)
    for _ in range(num_trials):
        settings = truth.servers.start
        for _ in range(rng.randint(1, 3)):
            settings = rng.choice([c.settings for c in truth.neighbours(settings)])
        best = max(best, truth.goodput(settings))
    return best


def _sweep(truth: Truth, num_trials: int) -> float:
    """One rung at a time from the start; what gained is joined, each rung by its best variant."""
    start = truth.servers.start
    base = truth.goodput(start)
    gains: dict[str, tuple[float, dict[str, object]]] = {}
    for candidate in list(truth.neighbours(start))[: num_trials - 1]:
        goodput = truth.goodput(candidate.settings)
        if goodput > base * 1.02 and goodput > gains.get(candidate.rung.id, (0.0, {}))[0]:
            gains[candidate.rung.id] = goodput, candidate.changes
    joined = msgspec.to_builtins(start)
    for _, changes in sorted(gains.values(), key=lambda gain: gain[0]):
        joined |= msgspec.to_builtins(changes)
    singles = [goodput for goodput, _ in gains.values()]
    return max(base, *singles, _goodput(truth, joined), 0.0) if singles else base


def _goodput(truth: Truth, values: dict[str, object]) -> float:
    try:
        return truth.goodput(msgspec.convert(values, type(truth.servers.start)))
    except (BadInput, msgspec.ValidationError):
        return 0.0


def _in_order(truth: Truth, num_trials: int) -> float:
    """Rung by rung in the ladder's order, each kept where it gains."""
    settings, tried, left = truth.servers.start, set[Settings](), num_trials
    best = truth.goodput(settings)
    while left and (candidate := next(_untried(truth, settings, tried), None)) is not None:
        tried.add(candidate)
        left -= 1
        if truth.goodput(candidate) > best * 1.02:
            best, settings = truth.goodput(candidate), candidate
    return best


def _untried(truth: Truth, settings: Settings, tried: set[Settings]) -> Iterator[Settings]:
    return (c.settings for c in truth.neighbours(settings) if c.settings not in tried)


def summary(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """The shares that the suite is judged by."""
    count = len(outcomes)

    def mean(values: Sequence[float]) -> float:
        return sum(values) / count

    return {
        "handicaps": count,
        "found": sum(o.found_at is not None for o in outcomes),
        "found_first_or_second": sum((o.found_at or 99) <= 2 for o in outcomes),
        "within_5_percent": sum(o.regained >= 0.95 for o in outcomes),
        "false_keeps": sum(len(o.false_keeps) for o in outcomes),
        "mean_trials": mean([o.num_trials for o in outcomes]),
        "mean_regained": mean([o.regained for o in outcomes]),
        "mean_start": mean([o.start / o.best_known for o in outcomes]),
        "mean_random": mean([o.random / o.best_known for o in outcomes]),
        "mean_sweep": mean([o.sweep / o.best_known for o in outcomes]),
        "mean_in_order": mean([o.in_order / o.best_known for o in outcomes]),
    }
