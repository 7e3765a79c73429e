"""Formats numbers the same way in the terminal and in the report."""

from __future__ import annotations

import json
import shlex
from typing import Any

from ridgeline.diagnose.conditions import seconds
from ridgeline.optimize.cost import TokenCost
from ridgeline.optimize.quality import QualityVerdict, ThresholdCheck
from ridgeline.optimize.quality.text_comparison import AGREEMENT, KL_MEAN, PERPLEXITY
from ridgeline.optimize.result import ConfigurationFigures, Exactness, Trial
from ridgeline.optimize.server_settings import FLAGS
from ridgeline.report.numbers import rounded
from ridgeline.stats import Interval

DASH = "–"


def duration(value: float | None) -> str:
    return DASH if value is None else seconds(value)


def rate(value: float | None) -> str:
    """A rate with three significant digits."""
    return DASH if value is None else rounded(value)


def share(value: float | None) -> str:
    return DASH if value is None else f"{rounded(100 * value)}%"


def dollars(value: float | None) -> str:
    if value is None:
        return "nothing delivered"
    return f"${rounded(value)}" if value < 100 else f"${value:,.0f}"


def cost(value: TokenCost) -> str:
    return dollars(value.output_dollars_per_mtok)


def ratio(interval: Interval | None) -> str:
    """For example 1.42x [1.30, 1.55]."""
    if interval is None:
        return DASH
    return f"{interval.mid:.2f}x {bounds(interval)}"


def bounds(interval: Interval) -> str:
    high = f"{interval.high:.2f}" if interval.high < 1000 else "∞"
    return f"[{interval.low:.2f}, {high}]"


def change(before: ConfigurationFigures | None, after: ConfigurationFigures | None) -> str:
    if before is None or after is None:
        return DASH
    return f"{rate(before.goodput_req_s)} → {rate(after.goodput_req_s)}"


def quality(trial: Trial) -> str:
    """One table cell: what is known about the candidate's tokens."""
    if trial.quality is not None:
        return quality_line(trial.quality)
    if trial.exactness is not None:
        return exactness_line(trial.exactness)
    return "exact by design" if trial.honesty == "exact" else "not measured"


def quality_line(verdict: QualityVerdict) -> str:
    """What each check measured; which ones there are depends on the rung and the server."""
    return f"{verdict.verdict}: {', '.join(map(_measured, verdict.checks)) or 'nothing was read'}"


def _measured(check: ThresholdCheck) -> str:
    value = check.measured.mid
    if check.name == PERPLEXITY:
        return f"perplexity {100 * (value - 1):+.2f}%"
    if check.name == KL_MEAN:
        return f"KL {rounded(value, 2)}"
    if check.name == AGREEMENT:
        return f"agreement {100 * value:.1f}%"
    return f"{check.name} {rounded(value, 2)}"


def exactness_line(exactness: Exactness) -> str:
    if not exactness.same:
        return f"NOT exact: {exactness.detail}"
    ties = f", {exactness.near_ties} near tie(s)" if exactness.near_ties else ""
    if exactness.num_unstable:
        ties += f", {exactness.num_unstable} where the baseline's own answers vary"
        if exactness.variation > 0:
            ties += f" (margins by up to {rounded(exactness.variation, 2)} nats)"
    return f"same tokens ({exactness.num_prompts} prompts, {exactness.num_tokens} tokens{ties})"


def settings_line(changes: dict[str, Any]) -> str:
    """The changes as command-line flags, e.g. --max-num-seqs 16 --enable-prefix-caching."""
    return " ".join(_flag(name, value) for name, value in changes.items())


def _flag(name: str, value: Any) -> str:
    if name == FLAGS:  # of the server itself, as pairs or as a table
        pairs = value.items() if isinstance(value, dict) else value
        return " ".join(shlex.join(word for word in pair if word) for pair in pairs)
    flag = name.replace("_", "-")
    if value is None:  # left at its default, as `shown_flags` writes it
        return f"without --{flag}"
    if value is True:
        return f"--{flag}"
    if value is False:
        return f"--no-{flag}"
    if isinstance(value, dict):
        return f"--{flag} {shlex.quote(json.dumps(value))}"
    return f"--{flag} {value}"
