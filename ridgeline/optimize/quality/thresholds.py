"""Limits of the quality panel, how much it reads, and one threshold with its measurement."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Literal

import msgspec

from ridgeline.stats import Interval

GateVerdict = Literal["pass", "fail", "inconclusive"]
_WORST_FIRST: tuple[GateVerdict, ...] = ("fail", "inconclusive", "pass")


class QualityLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a lossy change may cost; see quality.toml for the units."""

    perplexity_ratio_max: float
    kl_mean_max: float
    kl_p999_max: float
    greedy_agreement_min: float
    task_drop_max: float
    recall_drop_max: float


class PanelSize(msgspec.Struct, frozen=True, kw_only=True):
    """How much the panel reads; see quality.toml for the units."""

    window_tokens: int
    first_windows: int
    first_items: int
    first_contexts: int
    max_looks: int
    max_reference_bytes: int


class ThresholdCheck(msgspec.Struct, frozen=True, kw_only=True):
    """One threshold, the measured interval, and the resulting verdict."""

    name: str
    measured: Interval
    limit: float
    verdict: GateVerdict


@cache
def load_quality_limits() -> tuple[QualityLimits, PanelSize]:
    """The limits shipped with this package."""
    text = files("ridgeline.optimize.quality").joinpath("quality.toml").read_text("utf-8")
    document = tomllib.loads(text)
    return msgspec.convert(document["gate"], QualityLimits), msgspec.convert(
        document["size"], PanelSize
    )


def worst_verdict(verdicts: Iterable[GateVerdict]) -> GateVerdict:
    """The verdict of several checks together: the worst of them, inconclusive if there are none."""
    return min(verdicts, key=_WORST_FIRST.index, default="inconclusive")


def check_max(name: str, measured: Interval, limit: float) -> ThresholdCheck:
    """At most `limit`: passes if the whole interval is below it, fails if the whole is above."""
    verdict: GateVerdict = "inconclusive"
    if measured.high <= limit:
        verdict = "pass"
    elif measured.low > limit:
        verdict = "fail"
    return ThresholdCheck(name=name, measured=measured, limit=limit, verdict=verdict)


def check_min(name: str, measured: Interval, limit: float) -> ThresholdCheck:
    """At least `limit`: passes if the whole interval is above it, fails if the whole is below."""
    verdict: GateVerdict = "inconclusive"
    if measured.low >= limit:
        verdict = "pass"
    elif measured.high < limit:
        verdict = "fail"
    return ThresholdCheck(name=name, measured=measured, limit=limit, verdict=verdict)
