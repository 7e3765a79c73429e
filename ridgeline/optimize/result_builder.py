"""Turns measurements into the records of the result: verdicts, summaries, next steps."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import msgspec

import ridgeline
from ridgeline.config.settings import Settings, changed
from ridgeline.diagnose import (
    Finding,
    RooflinePoint,
    TimeShares,
    advise,
    facts_of,
    roofline_points,
    step_facts,
    time_shares,
    verdict,
)
from ridgeline.diagnose.conditions import Value
from ridgeline.errors import UserError
from ridgeline.optimize.comparison.objective import (
    JudgedRun,
    latency_samples,
    pool_runs,
    runs_within_slo,
)
from ridgeline.optimize.comparison.outcome import WORTHWHILE, outcome_of
from ridgeline.optimize.comparison.paired_comparison import PairedComparison
from ridgeline.optimize.cost import cost_of
from ridgeline.optimize.environment import Environment, NextSteps
from ridgeline.optimize.job import OptimizeJob, RunningConfiguration
from ridgeline.optimize.ladder import RungCandidate
from ridgeline.optimize.quality import QualityVerdict, SequentialPanel
from ridgeline.optimize.ranking.predictor import Forecast
from ridgeline.optimize.result import (
    ConfigurationSummary,
    Ended,
    Exactness,
    GainPrediction,
    LadderResult,
    NotTried,
    Provenance,
    Trial,
    Verdict,
)
from ridgeline.records import EngineInfo, RunTrace, Slo, StepStat
from ridgeline.stats import Interval


class TrialEvidence:
    """What one trial collects while it runs."""

    def __init__(self, forecast: Forecast, begun_s: float) -> None:
        self.forecast, self.begun_s = forecast, begun_s
        self.exactness: Exactness | None = None
        self.comparison: PairedComparison | None = None
        self.examination: SequentialPanel | None = None
        self.quality: QualityVerdict | None = None
        self.failure: tuple[Verdict, str] | None = None

    def is_of(self, candidate: RungCandidate) -> RungCandidate:
        """Replace the simulated candidate by the one measured, whose weights have been quantised."""
        self.forecast = msgspec.structs.replace(self.forecast, candidate=candidate)
        return candidate

    def failed(self, error: BaseException, reason: str) -> None:
        self.failure = ("cannot run" if isinstance(error, UserError) else "crashed", reason)


def build_trial(
    evidence: TrialEvidence, environment: Environment, job: OptimizeJob, now_s: float
) -> Trial:
    """One row of the ladder, with its verdict and the reason."""
    candidate, found = evidence.forecast.candidate, evidence.comparison
    decided, reason = judge_trial(evidence)
    predicted = evidence.forecast.predicted or GainPrediction(gain=1.0, low=1.0, high=1.0)
    return Trial(
        rung=candidate.rung.id,
        label=candidate.label,
        technique=candidate.rung.technique,
        honesty=candidate.rung.honesty,
        changes=candidate.changes,
        settings=changed(candidate.settings),
        verdict=decided,
        reason=reason,
        predicted=predicted,
        before=pool_runs(runs_within_slo(found.before), job.slo, job.objective)
        if found and found.before
        else None,
        after=pool_runs(runs_within_slo(found.after), job.slo, job.objective)
        if found and found.after
        else None,
        ratio=found.ratio if found else None,
        log_ratios=found.log_ratios if found else (),
        quality=evidence.quality,
        exactness=evidence.exactness,
        points=roofline_points_of(candidate.label, found.after, candidate.settings, environment)
        if found
        else (),
        spent_s=now_s - evidence.begun_s,
    )


def judge_trial(evidence: TrialEvidence) -> tuple[Verdict, str]:
    """The verdict and one sentence of explanation."""
    if evidence.failure is not None:
        return evidence.failure
    if evidence.exactness is not None and not evidence.exactness.same:
        return "not exact", f"claims the same tokens, but {evidence.exactness.detail}"
    found = evidence.comparison
    if found is None and evidence.quality is not None and evidence.quality.verdict == "fail":
        told = _deciding_checks(evidence.quality)
        return "quality failed", f"it breaks the quality gate, so its speed was left out: {told}"
    if found is not None and found.beaten_at is not None:
        share = found.beaten_at / found.before_rate
        return "regressed", (
            f"at {found.beaten_at:.3g} req/s, {share:.0%} of the incumbent's load, it missed the "
            "promise twice, and the incumbent kept it in between"
        )
    if found is None or found.ratio is None:
        rounds = len(found.log_ratios) if found else 0
        return "cut short", f"the budget ended after {rounds} of the rounds that a verdict needs"
    if found.outcome == "improved":
        return _judge_quality(found.ratio, evidence)
    return _judge_no_gain(found)


def _judge_no_gain(found: PairedComparison) -> tuple[Verdict, str]:
    assert found.ratio is not None
    low, high = _percent(found.ratio.low), _percent(found.ratio.high)
    if found.outcome == "regressed":
        return "regressed", f"it loses: {low} to {high}"
    if found.outcome == "unchanged":
        if found.ratio.low > 1 - WORTHWHILE:
            return "unchanged", f"this change had no effect: between {low} and {high}"
        limit = f"{100 * WORTHWHILE:.0f}%"
        return "unchanged", f"between {low} and {high}: a gain beyond {limit} is excluded"
    rounds = len(found.log_ratios)
    if outcome_of(found.ratio) != "inconclusive":
        seen = f"between {low} and {high} after {rounds} rounds"
        return "inconclusive", f"{seen}, and the slower side was still rising: its knee is unknown"
    return "inconclusive", f"between {low} and {high} after {rounds} rounds: the noise hides it"


def _judge_quality(ratio: Interval, evidence: TrialEvidence) -> tuple[Verdict, str]:
    gain = f"{ratio.mid:.2f}x, surely more than {_percent(ratio.low)}"
    gate = evidence.quality
    if evidence.forecast.candidate.rung.honesty == "exact":
        return "kept", gain
    if gate is None:
        return "inconclusive", f"{gain}, but its quality was not measured"
    if gate.verdict == "pass":
        return "kept", f"{gain}; quality within every limit"
    if gate.verdict == "fail":
        return "quality failed", f"{gain}, but it breaks the quality gate: {_deciding_checks(gate)}"
    read = f"{gate.num_windows} windows of held-out text"
    return "inconclusive", f"{gain}, but {read} do not clear its quality: {_deciding_checks(gate)}"


def _deciding_checks(gate: QualityVerdict) -> str:
    """The checks that decided the verdict, as text."""
    bad = [check for check in gate.checks if check.verdict == gate.verdict]
    return ", ".join(f"{c.name} {c.found} (limit {c.limit:g})" for c in bad)


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.0f}%" if ratio < 100 else "beyond measure"


# ---- where a configuration stands --------------------------------------------------------------


def steps_of(
    readings: Sequence[JudgedRun], settings: Settings, environment: Environment
) -> list[StepStat]:
    """Steps as the engine recorded them, or inferred from what clients of an external server saw."""
    return [step for reading in readings for step in environment.steps_of(reading.run, settings)]


def roofline_points_of(
    name: str, readings: Sequence[JudgedRun], settings: Settings, environment: Environment
) -> tuple[RooflinePoint, ...]:
    """Prefill, decode and mixed steps of these runs on the machine's roofline."""
    peaks = environment.peaks_of(settings)
    if peaks is None:
        return ()
    return roofline_points(
        name, steps_of(readings, settings, environment), environment.price_of(settings), peaks
    )


def time_shares_of(
    run: RunTrace, settings: Settings, environment: Environment
) -> TimeShares | None:
    peaks = environment.peaks_of(settings)
    if peaks is None or not run.steps:
        return None
    return time_shares(run.steps, run.duration_s, environment.price_of(settings), peaks)


def collect_facts(
    info: EngineInfo,
    readings: Sequence[JudgedRun],
    settings: Settings,
    environment: Environment,
    slo: Slo,
) -> dict[str, Value]:
    """Facts that rungs and rules may refer to: machine, model, workload, this run, these settings."""
    facts = dict(environment.facts)
    if readings:
        run = runs_within_slo(readings)[-1].run
        facts.update(facts_of(run, slo, time_shares_of(run, settings, environment)))
        facts.update(step_facts(run))
    facts.update(msgspec.structs.asdict(settings))
    plain = (bool, int, float, str)
    facts.update({k: v for k, v in info.settings.items() if v is None or isinstance(v, plain)})
    return facts


def summarise_configuration(
    label: str,
    configuration: RunningConfiguration,
    readings: Sequence[JudgedRun],
    environment: Environment,
    job: OptimizeJob,
) -> ConfigurationSummary:
    """Figures, roofline points and diagnosis of one configuration."""
    settings = configuration.settings
    found = pool_runs(runs_within_slo(readings), job.slo, job.objective)
    facts = collect_facts(configuration.deployment.info, readings, settings, environment, job.slo)
    return ConfigurationSummary(
        label=label,
        settings=changed(settings),
        measured=found,
        cost=cost_of(job.price, found.good_output_tok_s, found.good_input_tok_s),
        samples=latency_samples(runs_within_slo(readings)),
        points=roofline_points_of(label, readings, settings, environment),
        finding=_finding(facts),
        advice=advise(facts),
    )


def _finding(facts: dict[str, Value]) -> Finding:
    """What bounds the run, leaving out idle time, which the search itself chose by its load."""
    return verdict({name: value for name, value in facts.items() if name != "idle_share"})


# ---- the whole ---------------------------------------------------------------------------------

PROTOCOL = (
    "Every rung was measured beside the incumbent in alternating order (A B, B A, …), both under "
    "the same prompts and arrivals in a round and new ones in the next, in runs of {window:.1f} s. "
    "With promises on first token and pace, a run is cut once they are decided, and what is in "
    "flight is judged by its pace so far. Each side's load follows its own staircase around the "
    "largest load that keeps the SLO. The ratio is the mean over rounds of log(after / before) "
    "with a 95% interval (Student's, its variance moderated by the comparisons before); looks before "
    "the last round ask for 99%. Goodput is the offered rate times the share of requests that met "
    "the SLO, failures included, latencies counted from the scheduled arrival."
)


class SearchTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of a search at its end."""

    ended: Ended
    spent_s: float
    window_s: float
    trials: tuple[Trial, ...]
    not_tried: tuple[NotTried, ...]
    total: Interval | None
    slo_holds: bool


def build_result(
    job: OptimizeJob,
    environment: Environment,
    account: SearchTotals,
    baseline: ConfigurationSummary,
    final: ConfigurationSummary,
) -> LadderResult:
    """Assemble the complete result."""
    result = LadderResult(
        provenance=_provenance(job, environment, account.spent_s, account.window_s),
        ended=account.ended,
        price=job.price,
        baseline=baseline,
        final=final,
        trials=account.trials,
        not_tried=account.not_tried,
        peaks=environment.peaks_of(job.settings),
        total=account.total,
        slo_holds=account.slo_holds,
    )
    return msgspec.structs.replace(result, next_steps=_next_steps(result, environment.next_steps))


def _provenance(
    job: OptimizeJob, environment: Environment, spent_s: float, window_s: float
) -> Provenance:
    return Provenance(
        version=ridgeline.__version__,
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        model=job.settings.model,
        workload=job.workload,
        slo=str(job.slo),
        objective=job.objective,
        seed=job.seed,
        budget_s=job.budget_s,
        spent_s=spent_s,
        machine=_plain(environment.facts, "machine"),
        model_facts=_plain(environment.facts, "model"),
        protocol=PROTOCOL.format(window=window_s),
    )


def _plain(facts: dict[str, Value], prefix: str) -> dict[str, Any]:
    """Facts with a common prefix, without it: `machine_cores` under "machine" becomes `cores`."""
    start = prefix + "_"
    return {k.removeprefix(start): v for k, v in facts.items() if k.startswith(start)}


def _next_steps(result: LadderResult, commands: NextSteps) -> tuple[str, ...]:
    told = result.provenance

    def filled(command: str) -> str:
        return command.replace("{model}", told.model).replace("{workload}", told.workload)

    steps = [f"{filled(commands.serve)}      # what was found, serving {told.model}"]
    waiting = [left for left in result.not_tried if "the budget ended" in left.reason]
    noisy = [trial for trial in result.trials if trial.verdict in ("inconclusive", "cut short")]
    if waiting or noisy:
        minutes = max(2, round(2 * told.budget_s / 60))
        why = f"{len(waiting)} rung(s) were not reached, {len(noisy)} stayed inconclusive"
        steps.append(f"{filled(commands.optimize)} --budget {minutes}m      # {why}")
    steps.append(f"{filled(commands.bench)}      # check it again")
    return tuple(steps)
