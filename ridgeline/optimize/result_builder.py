"""Turns measurements into the records of the result: verdicts, summaries, next steps."""

from __future__ import annotations

import datetime
import math
import shlex
from collections.abc import Sequence
from typing import Any

import msgspec

import ridgeline
from ridgeline.config.settings import Settings
from ridgeline.diagnose import (
    Finding,
    TimeShares,
    advise,
    facts_of,
    roofline_points,
    step_facts,
    time_shares,
    verdict,
    verdict_of_point,
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
from ridgeline.optimize.drivers.base import ServerCrashedError
from ridgeline.optimize.environment import Environment, NextSteps
from ridgeline.optimize.job import OptimizeJob, RunningConfiguration
from ridgeline.optimize.ladder import RungCandidate
from ridgeline.optimize.output import number_format
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
from ridgeline.optimize.server_settings import changed_settings
from ridgeline.optimize.time_budget import OutOfTimeError
from ridgeline.records import EngineInfo, RunTrace, Slo, StepStat
from ridgeline.report.numbers import rounded
from ridgeline.roofline import Peaks, RooflinePoint
from ridgeline.stats import Interval


class TrialEvidence:
    """What one trial collects while it runs."""

    def __init__(self, forecast: Forecast, begun_s: float) -> None:
        self.forecast, self.begun_s = forecast, begun_s
        self.exactness: Exactness | None = None
        self.comparison: PairedComparison | None = None
        self.panel: SequentialPanel | None = None
        self.quality: QualityVerdict | None = None
        self.failure: tuple[Verdict, str] | None = None

    def use_candidate(self, candidate: RungCandidate) -> RungCandidate:
        """Replace the simulated candidate by the one measured, with quantised weights."""
        self.forecast = msgspec.structs.replace(self.forecast, candidate=candidate)
        return candidate

    def failed(self, error: BaseException, reason: str) -> None:
        if isinstance(error, OutOfTimeError):
            missing = "it was measured" if self.comparison is None else "its quality was known"
            self.failure = ("cut short", f"the budget ended before {missing}")
            return
        has_crashed = isinstance(error, ServerCrashedError) or not isinstance(error, UserError)
        self.failure = ("crashed" if has_crashed else "cannot run", reason)


def build_trial(
    evidence: TrialEvidence, environment: Environment, job: OptimizeJob, now_s: float
) -> Trial:
    """One row of the ladder, with its verdict and the reason."""
    candidate, comparison = evidence.forecast.candidate, evidence.comparison
    decided, reason = judge_trial(evidence)
    predicted = evidence.forecast.predicted or GainPrediction(gain=1.0, low=1.0, high=1.0)
    return Trial(
        rung=candidate.rung.id,
        label=candidate.label,
        technique=candidate.rung.technique,
        honesty=candidate.rung.honesty,
        changes=candidate.changes,
        settings=changed_settings(candidate.settings),
        verdict=decided,
        reason=reason,
        predicted=predicted,
        before=pool_runs(comparison.before, job.slo, job.objective)
        if comparison and comparison.before
        else None,
        after=pool_runs(comparison.after, job.slo, job.objective)
        if comparison and comparison.after
        else None,
        ratio=comparison.ratio if comparison else None,
        log_ratios=comparison.log_ratios if comparison else (),
        quality=evidence.quality,
        exactness=evidence.exactness,
        points=roofline_points_of(
            candidate.label, comparison.after, candidate.settings, environment
        )
        if comparison
        else (),
        spent_s=now_s - evidence.begun_s,
        busy_share=comparison.busy_share if comparison else None,
    )


def judge_trial(evidence: TrialEvidence) -> tuple[Verdict, str]:
    """The verdict and one sentence of explanation."""
    if evidence.failure is not None:
        return evidence.failure
    if evidence.exactness is not None and not evidence.exactness.same:
        return "not exact", f"claims the same tokens, but {evidence.exactness.detail}"
    comparison = evidence.comparison
    if comparison is None and evidence.quality is not None and evidence.quality.verdict == "fail":
        failed = _deciding_checks(evidence.quality)
        return (
            "quality failed",
            f"it fails the quality gate, so its speed was not measured: {failed}",
        )
    if comparison is not None and comparison.busy_share is not None:
        return "inconclusive", busy_text(comparison.busy_share)
    if comparison is not None and comparison.beaten_at is not None:
        share = comparison.beaten_at / comparison.before_rate
        return "regressed", (
            f"at {rounded(comparison.beaten_at)} req/s, {share:.0%} of the incumbent's load, it "
            "missed the SLO twice, and the incumbent met it in between"
        )
    if comparison is None or comparison.ratio is None:
        rounds = len(comparison.log_ratios) if comparison else 0
        return "cut short", f"the budget ended after {rounds} rounds, too few for a verdict"
    if comparison.outcome == "improved":
        return _judge_quality(comparison.ratio, evidence)
    return _judge_no_gain(comparison)


def busy_text(share: float) -> str:
    """What is said of measurements that other work disturbed."""
    return f"the machine was busy ({share:.0%} of the CPU taken)"


def why_reverted(closing: PairedComparison | None, final: ConfigurationSummary) -> str:
    """Why the closing measurement takes back what the trials kept; "" if it does not."""
    if closing is None or closing.ratio is None:
        return ""
    ratio = closing.ratio
    if not _held(closing.after) and _held(closing.before):
        figures = final.measured
        latencies = [
            f"{name} p95 {number_format.duration(value)}"
            for name, value in (("TTFT", figures.ttft_p95_s), ("TPOT", figures.tpot_p95_s))
            if value is not None
        ]
        what = f" ({', '.join(latencies)})" if latencies else ""
        return (
            f"in the closing measurement the new configuration met the SLO in no run{what}, and "
            "the baseline did"
        )
    if ratio.mid < 1:
        shown = number_format.ratio(ratio)
        return f"the closing measurement put the new configuration at {shown} of the baseline"
    return ""


def _held(runs: Sequence[JudgedRun]) -> bool:
    return any(judged.holds for judged in runs)


def revert_kept(trials: Sequence[Trial], reason: str) -> tuple[Trial, ...]:
    """The trials after the closing measurement contradicted those that were kept."""
    return tuple(
        msgspec.structs.replace(
            trial, verdict="reverted", reason=f"{trial.reason} in its trial, but {reason}"
        )
        if trial.verdict == "kept"
        else trial
        for trial in trials
    )


def _judge_no_gain(comparison: PairedComparison) -> tuple[Verdict, str]:
    assert comparison.ratio is not None
    low, high = _percent(comparison.ratio.low), _percent(comparison.ratio.high)
    if comparison.outcome == "regressed":
        return "regressed", f"slower: {low} to {high}"
    if comparison.outcome == "unchanged":
        if comparison.ratio.low > 1 - WORTHWHILE:
            return "unchanged", f"no effect: between {low} and {high}"
        limit = f"{100 * WORTHWHILE:.0f}%"
        return "unchanged", f"between {low} and {high}: a gain of more than {limit} is excluded"
    rounds = len(comparison.log_ratios)
    if not any(judged.holds for judged in comparison.after):
        return "inconclusive", f"it met the SLO in none of {rounds} rounds, so nothing is kept"
    if outcome_of(comparison.ratio) != "inconclusive":
        range_text = f"between {low} and {high} after {rounds} rounds"
        return (
            "inconclusive",
            f"{range_text}, and the slower side was still rising: its knee is unknown",
        )
    return "inconclusive", f"between {low} and {high} after {rounds} rounds: too noisy to decide"


def _judge_quality(ratio: Interval, evidence: TrialEvidence) -> tuple[Verdict, str]:
    low = _percent(ratio.low)
    gain = f"{ratio.mid:.2f}x, " + ("certain to be a gain" if low == "0%" else f"at least {low}")
    gate = evidence.quality
    if evidence.forecast.candidate.rung.honesty == "exact":
        return "kept", gain
    if gate is None:
        return "inconclusive", f"{gain}, but its quality was not measured"
    if gate.verdict == "pass":
        return "kept", f"{gain}; quality within every limit"
    if gate.verdict == "fail":
        return "quality failed", f"{gain}, but it fails the quality gate: {_deciding_checks(gate)}"
    read = f"{gate.num_windows} windows of held-out text do" if gate.num_windows else "that does"
    reason = f"{gain}, but {read} not settle its quality: {_deciding_checks(gate)}"
    return "inconclusive", reason


def _deciding_checks(gate: QualityVerdict) -> str:
    """The checks that decided the verdict, as text."""
    bad = [check for check in gate.checks if check.verdict == gate.verdict]
    return ", ".join(f"{c.name} {c.measured} (limit {c.limit:g})" for c in bad)


def _percent(ratio: float) -> str:
    """A change, with a digit more where whole percents would hide it: +12%, -0.4%, 0%."""
    if ratio >= 100:
        return "unbounded"
    change = 100 * (ratio - 1)
    if abs(change) >= 0.95:
        return f"{change:+.0f}%"
    return f"{change:+.1f}%" if abs(change) >= 0.05 else "0%"


# ---- where a configuration stands --------------------------------------------------------------


def steps_of(
    runs: Sequence[JudgedRun], settings: Settings, environment: Environment
) -> list[StepStat]:
    """Steps as the engine recorded them, or inferred from what an external server's clients saw."""
    return [step for judged in runs for step in environment.steps_of(judged.trace, settings)]


def roofline_points_of(
    name: str, runs: Sequence[JudgedRun], settings: Settings, environment: Environment
) -> tuple[RooflinePoint, ...]:
    """Prefill, decode and mixed steps of these runs on the machine's roofline."""
    peaks = environment.peaks_of(settings)
    if peaks is None:
        return ()
    return roofline_points(
        name, steps_of(runs, settings, environment), environment.price_of(settings), peaks
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
    runs: Sequence[JudgedRun],
    settings: Settings,
    environment: Environment,
    slo: Slo,
) -> dict[str, Value]:
    """Facts that rungs and rules may refer to: machine, model, workload, run, settings."""
    facts = dict(environment.facts)
    if runs:
        run = runs_within_slo(runs)[-1].trace
        facts.update(facts_of(run, slo, time_shares_of(run, settings, environment)))
        facts.update(step_facts(run))
    facts.update(msgspec.structs.asdict(settings))
    drafts = settings.speculative_config
    facts["num_draft_tokens"] = None if drafts is None else drafts.num_speculative_tokens
    plain = (bool, int, float, str)
    facts.update({k: v for k, v in info.settings.items() if v is None or isinstance(v, plain)})
    return facts


def summarise_configuration(
    label: str,
    configuration: RunningConfiguration,
    runs: Sequence[JudgedRun],
    environment: Environment,
    job: OptimizeJob,
) -> ConfigurationSummary:
    """Figures, roofline points and diagnosis of one configuration."""
    settings = configuration.settings
    figures = pool_runs(runs, job.slo, job.objective)
    facts = collect_facts(configuration.deployment.info, runs, settings, environment, job.slo)
    points = roofline_points_of(label, runs, settings, environment)
    return ConfigurationSummary(
        label=label,
        settings=changed_settings(settings),
        measured=figures,
        cost=cost_of(job.price, figures.good_output_tok_s, figures.good_input_tok_s),
        samples=latency_samples(runs_within_slo(runs)),
        points=points,
        finding=_finding(facts, points, environment.peaks_of(settings)),
        advice=advise(facts),
    )


def _finding(
    facts: dict[str, Value], points: Sequence[RooflinePoint], peaks: Peaks | None
) -> Finding:
    """What bounds the run, leaving out idle time, which the search itself chose by its load.

    Of a server that reports nothing about its steps: the side of the roofline on which the phase
    that took most time is, by the steps that clients saw.
    """
    found = verdict({name: value for name, value in facts.items() if name != "idle_share"})
    if found.bound != "unknown" or peaks is None or not points:
        return found
    seen = verdict_of_point(max(points, key=lambda point: point.time_s), peaks)
    return msgspec.structs.replace(seen, sentence=f"As clients saw its steps: {seen.sentence}")


# ---- the whole ---------------------------------------------------------------------------------

SHARED = " The machine was shared: runs counted although other work took the CPU."
PROTOCOL = (
    "Every rung was measured against the incumbent in alternating order (A B, B A, …), both under "
    "the same prompts and arrivals in a round and new ones in the next, in runs of {window:.1f} s. "
    "With limits on TTFT and TPOT, a run is cut once they are decided, and requests in "
    "flight are judged by their TPOT so far. Each side's load follows its own staircase around the "
    "largest load that keeps the SLO. The ratio is the mean over rounds of log(after / before) "
    "with a 95% interval (Student's, its variance moderated by earlier comparisons); decisions "
    "before the last round require 99%. Goodput is the offered rate times the share of requests "
    "that met the SLO, failures included, latencies counted from the scheduled arrival."
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
    trial_cost_s: float
    closing_cost_s: float
    busy_share: float | None
    reverted: str = ""
    rejected: ConfigurationSummary | None = None


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
        trial_cost_s=account.trial_cost_s,
        closing_cost_s=account.closing_cost_s,
        busy_share=account.busy_share,
        reverted=account.reverted,
        rejected=account.rejected,
        traffic=environment.traffic,
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
        protocol=PROTOCOL.format(window=window_s) + (SHARED if job.shared_machine else ""),
        server=str(environment.facts.get("server", "")),
    )


def _plain(facts: dict[str, Value], prefix: str) -> dict[str, Any]:
    """Facts with a common prefix, without it: `machine_cores` under "machine" becomes `cores`."""
    start = prefix + "_"
    return {k.removeprefix(start): v for k, v in facts.items() if k.startswith(start)}


def _next_steps(result: LadderResult, commands: NextSteps) -> tuple[str, ...]:
    provenance = result.provenance

    def filled(command: str) -> str:
        words = {"model": provenance.model, "workload": provenance.workload, "slo": provenance.slo}
        for name, value in words.items():
            command = command.replace(f"{{{name}}}", shlex.quote(value))
        return command

    steps = []
    if result.kept:
        model = provenance.model.removeprefix("dummy:" if provenance.server else "")
        served = f"serve {model} with the settings found"
        steps.append(f"{filled(commands.serve)}      # {served}")
    waiting = [left for left in result.not_tried if "the budget ended" in left.reason]
    noisy = [trial for trial in result.trials if trial.verdict in ("inconclusive", "cut short")]
    is_cut = result.ended == "interrupted" and bool(commands.folder)
    if waiting or noisy or is_cut:
        enough_s = provenance.spent_s + (len(waiting) + len(noisy) + 2) * result.trial_cost_s
        wanted_s = max(2 * provenance.budget_s, min(enough_s, 3600))
        minutes = math.ceil((provenance.budget_s if is_cut else wanted_s) / 60)
        why = f"{len(waiting)} rung(s) not reached, {len(noisy)} inconclusive"
        why = "go on from here" if is_cut else why
        objective = provenance.objective
        goal = "" if objective == "goodput" else f" --objective {objective}"
        # What was tried is not tried again by a search that is resumed.
        resumes = is_cut or (waiting and commands.folder)
        resume = f" --resume {shlex.quote(commands.folder)}" if resumes else ""
        budget = f"--budget {minutes}m"
        steps.append(f"{filled(commands.optimize)}{goal}{resume} {budget}      # {why}")
    steps.append(f"{filled(commands.bench)}      # measure again")
    return tuple(steps)
