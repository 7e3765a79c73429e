"""The result of an optimisation as frozen records: the content of ladder.json.

Report, terminal output and configuration file show nothing that is not in `LadderResult`, so an
interrupted run, a re-rendered report and a test all start from the same record.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from ridgeline.diagnose import Advice, Finding
from ridgeline.optimize.cost import MachinePrice, TokenCost
from ridgeline.optimize.quality import QualityVerdict
from ridgeline.records.traffic import TrafficProfile
from ridgeline.roofline import Peaks, RooflinePoint
from ridgeline.stats import Interval

Verdict = Literal[
    "kept",
    "unchanged",
    "regressed",
    "inconclusive",
    "quality failed",
    "not exact",
    "cannot run",
    "crashed",
    "cut short",
    "reverted",
]
Ended = Literal[
    "no gain predicted", "budget spent", "interrupted", "every rung was tried", "failed"
]


class ConfigurationFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration at its best load: means over runs, percentiles over all requests.

    `score` is the objective (more is better). Rates are per second of offered load; `good_*` count
    only requests that met the SLO.
    """

    load: str
    score: float
    goodput_req_s: float
    good_output_tok_s: float
    good_input_tok_s: float
    output_tok_s: float
    attainment_share: float
    failed_share: float
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    tpot_p50_s: float | None
    tpot_p95_s: float | None
    e2e_p50_s: float | None
    e2e_p95_s: float | None
    num_requests: int
    num_runs: int
    preemptions: int
    spread: float | None = None


class GainPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """The simulator's prediction: `gain` new/old, `low` to `high` given its error so far."""

    gain: float
    low: float
    high: float
    note: str = ""


class Exactness(msgspec.Struct, frozen=True, kw_only=True):
    """Greedy outputs compared with the incumbent's. `near_ties`: differences between two equal best
    tokens. `num_unstable`: differences to tokens that the incumbent generates in another batch, or
    between tokens that are closer than its own margins vary, which they do by `variation` nats.
    """

    num_prompts: int
    num_tokens: int
    same: bool
    near_ties: int = 0
    num_unstable: int = 0
    variation: float = 0.0
    detail: str = ""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One rung that was tried, with its outcome.

    `busy_share`: the share of the CPU that other work took, if that made a verdict impossible.
    """

    rung: str
    label: str
    technique: str
    honesty: str
    changes: dict[str, Any]
    settings: dict[str, Any]
    verdict: Verdict
    reason: str
    predicted: GainPrediction
    before: ConfigurationFigures | None = None
    after: ConfigurationFigures | None = None
    ratio: Interval | None = None
    log_ratios: tuple[float, ...] = ()
    quality: QualityVerdict | None = None
    exactness: Exactness | None = None
    points: tuple[RooflinePoint, ...] = ()
    spent_s: float = 0.0
    busy_share: float | None = None


class NotTried(msgspec.Struct, frozen=True, kw_only=True):
    """A rung that was left out, and why."""

    rung: str
    label: str
    reason: str
    predicted: GainPrediction | None = None


def by_reason(left_out: Sequence[NotTried]) -> dict[str, list[str]]:
    """The labels of the rungs that were left out, by their reason."""
    labels: dict[str, list[str]] = {}
    for rung in left_out:
        labels.setdefault(rung.reason, []).append(rung.label)
    return labels


class LatencySamples(msgspec.Struct, frozen=True, kw_only=True):
    """TTFT and TPOT of every request, in seconds, for the figures."""

    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]


class ConfigurationSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration at the end of the search: settings, figures, roofline points, diagnosis."""

    label: str
    settings: dict[str, Any]
    measured: ConfigurationFigures
    cost: TokenCost
    samples: LatencySamples
    points: tuple[RooflinePoint, ...]
    finding: Finding
    advice: tuple[Advice, ...] = ()


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """The conditions under which the figures were measured.

    `server`: the kind of another server ("vllm", "twin of vllm"); "" for Ridgeline's engine.
    """

    version: str
    started: str
    model: str
    workload: str
    slo: str
    objective: str
    seed: int
    budget_s: float
    spent_s: float
    machine: dict[str, Any]
    model_facts: dict[str, Any]
    protocol: str
    server: str = ""

    @property
    def is_twin(self) -> bool:
        """Whether the server's device was only modelled."""
        return self.server.startswith("twin of ")


class LadderResult(msgspec.Struct, frozen=True, kw_only=True):
    """The whole search.

    `total` is the closing comparison: baseline against what the search ended with, in alternation.
    `slo_holds`: whether `final` met the SLO in any run of it. `reverted`: why the rungs that were
    kept are not in `final`, which then is the baseline; `rejected` is the configuration with them.
    `busy_share`: mean share of the CPU that other work took, if that voided a trial or the closing
    comparison. `trial_cost_s`, `closing_cost_s`: what a trial and the closing comparison were
    estimated to take at the end. `traffic`: the shape of the workload that the configuration was
    tuned for.
    """

    provenance: Provenance
    ended: Ended
    price: MachinePrice
    baseline: ConfigurationSummary
    final: ConfigurationSummary
    trials: tuple[Trial, ...]
    not_tried: tuple[NotTried, ...]
    peaks: Peaks | None = None
    total: Interval | None = None
    slo_holds: bool = False
    reverted: str = ""
    rejected: ConfigurationSummary | None = None
    trial_cost_s: float = 0.0
    closing_cost_s: float = 0.0
    busy_share: float | None = None
    next_steps: tuple[str, ...] = ()
    traffic: TrafficProfile | None = None

    @property
    def kept(self) -> tuple[Trial, ...]:
        return tuple(trial for trial in self.trials if trial.verdict == "kept")

    @property
    def decided(self) -> bool:
        """Whether any trial came to a verdict."""
        return any(trial.verdict not in ("inconclusive", "cut short") for trial in self.trials)
