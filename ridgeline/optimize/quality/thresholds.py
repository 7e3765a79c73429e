"""What may be lost, how much is read to tell, and one threshold with what was found about it."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Literal

import msgspec

from ridgeline.stats import Interval

GateVerdict = Literal["pass", "fail", "inconclusive"]


class QualityLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a lossy change may cost; see quality.toml."""

    perplexity_ratio_max: float
    kl_mean_max: float
    kl_p999_max: float
    greedy_agreement_min: float
    task_drop_max: float


class PanelSize(msgspec.Struct, frozen=True, kw_only=True):
    """How much the panel reads; see quality.toml."""

    window_tokens: int
    first_windows: int
    first_items: int
    most_looks: int
    max_reference_bytes: int


class ThresholdCheck(msgspec.Struct, frozen=True, kw_only=True):
    """One threshold, what was found, and what that lets one say."""

    name: str
    found: Interval
    limit: float
    verdict: GateVerdict


@cache
def load_quality_limits() -> tuple[QualityLimits, PanelSize]:
    """The thresholds of this package."""
    text = files("ridgeline.optimize.quality").joinpath("quality.toml").read_text("utf-8")
    document = tomllib.loads(text)
    return msgspec.convert(document["gate"], QualityLimits), msgspec.convert(
        document["size"], PanelSize
    )


def check_max(name: str, found: Interval, limit: float) -> ThresholdCheck:
    """At most `limit`: passes wholly below it, fails wholly above."""
    verdict: GateVerdict = "inconclusive"
    if found.high <= limit:
        verdict = "pass"
    elif found.low > limit:
        verdict = "fail"
    return ThresholdCheck(name=name, found=found, limit=limit, verdict=verdict)


def check_min(name: str, found: Interval, limit: float) -> ThresholdCheck:
    """At least `limit`."""
    verdict: GateVerdict = "inconclusive"
    if found.low >= limit:
        verdict = "pass"
    elif found.high < limit:
        verdict = "fail"
    return ThresholdCheck(name=name, found=found, limit=limit, verdict=verdict)
