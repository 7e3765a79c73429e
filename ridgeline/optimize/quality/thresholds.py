"""What may be lost, how much is read to tell, and one threshold with what was found about it."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Literal

import msgspec

from ridgeline.stats import Interval

GateVerdict = Literal["pass", "fail", "inconclusive"]


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """What a lossy change may cost; see quality.toml."""

    perplexity_ratio_max: float
    kl_mean_max: float
    kl_p999_max: float
    greedy_agreement_min: float
    task_drop_max: float


class GateSize(msgspec.Struct, frozen=True, kw_only=True):
    """How much the panel reads; see quality.toml."""

    window_tokens: int
    first_windows: int
    first_items: int
    most_looks: int
    max_reference_bytes: int


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One threshold, what was found, and what that lets one say."""

    name: str
    found: Interval
    limit: float
    verdict: GateVerdict


@cache
def shipped() -> tuple[Gate, GateSize]:
    """The thresholds of this package."""
    text = files("ridgeline.optimize.quality").joinpath("quality.toml").read_text("utf-8")
    document = tomllib.loads(text)
    return msgspec.convert(document["gate"], Gate), msgspec.convert(document["size"], GateSize)


def check_max(name: str, found: Interval, limit: float) -> Check:
    """At most `limit`: passes wholly below it, fails wholly above."""
    verdict: GateVerdict = "inconclusive"
    if found.high <= limit:
        verdict = "pass"
    elif found.low > limit:
        verdict = "fail"
    return Check(name=name, found=found, limit=limit, verdict=verdict)


def check_min(name: str, found: Interval, limit: float) -> Check:
    """At least `limit`."""
    verdict: GateVerdict = "inconclusive"
    if found.low >= limit:
        verdict = "pass"
    elif found.high < limit:
        verdict = "fail"
    return Check(name=name, found=found, limit=limit, verdict=verdict)
