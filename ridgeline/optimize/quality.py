"""Does a lossy rung still say the same? Paired, statistical, with "inconclusive" as an answer.

Both configurations read the same held-out text and their next-token distributions are compared
position by position:

    perplexity   exp(mean change of the true token's negative log-probability)
    KL           KL(baseline || candidate), mean and 99.9th percentile: the whole distribution, not
                 only the token that happened to come next
    agreement    share of positions with the same most likely token: how soon greedy outputs part

Tokens of one piece of text are not independent, so the interval is over windows, not over tokens.
The pairing does the work: perplexity itself varies by tens of percent between windows, its *change*
hardly.

Legend: T positions, V vocabulary.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from ridgeline.optimize.stats import Interval, mean_interval

Array = NDArray[np.floating[Any]]
LogprobsOf = Callable[[Sequence[int]], Array]
GateVerdict = Literal["pass", "fail", "inconclusive"]


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """What a lossy rung may cost; see quality.toml."""

    perplexity_ratio_max: float
    kl_mean_max: float
    kl_p999_max: float
    greedy_agreement_min: float


class GateSize(msgspec.Struct, frozen=True, kw_only=True):
    """How much text the gate reads."""

    num_windows: int
    window_tokens: int
    min_positions_for_p999: int
    max_reference_bytes: int


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One threshold, what was found, and what that lets one say."""

    name: str
    found: Interval
    limit: float
    verdict: GateVerdict


class Quality(msgspec.Struct, frozen=True, kw_only=True):
    """The gate's answer. `perplexity_before`, `_after` are over the same positions."""

    verdict: GateVerdict
    checks: tuple[Check, ...]
    perplexity_before: float
    perplexity_after: float
    num_positions: int
    num_windows: int
    kl_p999: float | None


class Window(msgspec.Struct, frozen=True):
    """Sums over one window's positions."""

    count: int
    nll_before: float
    nll_after: float
    kl: float
    same_top: int


@cache
def shipped() -> tuple[Gate, GateSize]:
    """The thresholds of this package."""
    text = files("ridgeline.optimize").joinpath("quality.toml").read_text(encoding="utf-8")
    document = tomllib.loads(text)
    return msgspec.convert(document["gate"], Gate), msgspec.convert(document["size"], GateSize)


def windows(tokens: Sequence[int], size: GateSize) -> tuple[tuple[int, ...], ...]:
    """`num_windows` pieces spread evenly over a text; fewer where the text is short."""
    length = size.window_tokens
    count = min(size.num_windows, len(tokens) // length)
    stride = len(tokens) // max(1, count)
    return tuple(tuple(tokens[i * stride : i * stride + length]) for i in range(count))


def affordable(pieces: Sequence[Sequence[int]], vocab_size: int, size: GateSize) -> int:
    """How many windows' [T, V] float32 log-probabilities fit the memory of the reference."""
    per_window = max(1, size.window_tokens * vocab_size * 4)
    return min(len(pieces), max(1, size.max_reference_bytes // per_window))


def compare_window(
    tokens: Sequence[int], before_TV: Array, after_TV: Array
) -> tuple[Window, Array]:
    """Sums of one window, and the KL of each position. Row t predicts token t + 1."""
    targets = np.asarray(tokens[1:], dtype=np.int64)
    rows = np.arange(len(targets))
    before_TV, after_TV = before_TV[: len(targets)], after_TV[: len(targets)]
    kl_T = _kl(before_TV, after_TV)
    window = Window(
        count=len(targets),
        nll_before=-float(before_TV[rows, targets].sum(dtype=np.float64)),
        nll_after=-float(after_TV[rows, targets].sum(dtype=np.float64)),
        kl=float(kl_T.sum(dtype=np.float64)),
        same_top=int((before_TV.argmax(-1) == after_TV.argmax(-1)).sum()),
    )
    return window, kl_T


def _kl(before_TV: Array, after_TV: Array) -> Array:
    """KL(before || after) per position; where `before` gives no mass, `after` may say anything."""
    mass = np.exp(before_TV.astype(np.float64))
    gap = np.where(mass > 0, before_TV.astype(np.float64) - after_TV, 0.0)
    kl_T: Array = np.maximum((mass * gap).sum(-1), 0.0)
    return kl_T


def compare(
    pieces: Sequence[Sequence[int]], before: Iterable[Array], after: LogprobsOf
) -> tuple[tuple[Window, ...], Array]:
    """Every window of the candidate against the baseline's kept log-probabilities."""
    pairs = [
        compare_window(tokens, before_TV, np.asarray(after(tokens)))
        for tokens, before_TV in zip(pieces, before, strict=True)
    ]
    kl = np.concatenate([kl_T for _, kl_T in pairs]) if pairs else np.zeros(0)
    return tuple(window for window, _ in pairs), kl


def judge(found: Sequence[Window], kl: Array, gate: Gate, size: GateSize) -> Quality:
    """The gate's verdict: all checks pass, or one fails, or it is inconclusive."""
    checks = [
        _check_max("perplexity ratio", _perplexity_ratio(found), gate.perplexity_ratio_max),
        _check_max("KL mean (nats)", _per_token(found, lambda w: w.kl), gate.kl_mean_max),
        _check_min(
            "greedy agreement",
            _per_token(found, lambda w: w.same_top),
            gate.greedy_agreement_min,
        ),
    ]
    p999 = float(np.quantile(kl, 0.999)) if len(kl) >= size.min_positions_for_p999 else None
    if p999 is not None:
        point = Interval(low=p999, mid=p999, high=p999)
        checks.append(_check_max("KL p99.9 (nats)", point, gate.kl_p999_max))
    count = sum(window.count for window in found)
    return Quality(
        verdict=_overall(checks),
        checks=tuple(checks),
        perplexity_before=math.exp(sum(window.nll_before for window in found) / max(1, count)),
        perplexity_after=math.exp(sum(window.nll_after for window in found) / max(1, count)),
        num_positions=count,
        num_windows=len(found),
        kl_p999=p999,
    )


def _perplexity_ratio(found: Sequence[Window]) -> Interval:
    change = _per_token(found, lambda w: w.nll_after - w.nll_before)
    low, mid, high = (math.exp(min(value, 50)) for value in (change.low, change.mid, change.high))
    return Interval(low=low, mid=mid, high=high)


def _per_token(found: Sequence[Window], total: Callable[[Window], float]) -> Interval:
    return mean_interval([total(window) / window.count for window in found])


def _check_max(name: str, found: Interval, limit: float) -> Check:
    verdict: GateVerdict = "inconclusive"
    if found.high <= limit:
        verdict = "pass"
    elif found.low > limit:
        verdict = "fail"
    return Check(name=name, found=found, limit=limit, verdict=verdict)


def _check_min(name: str, found: Interval, limit: float) -> Check:
    verdict: GateVerdict = "inconclusive"
    if found.low >= limit:
        verdict = "pass"
    elif found.high < limit:
        verdict = "fail"
    return Check(name=name, found=found, limit=limit, verdict=verdict)


def _overall(checks: Sequence[Check]) -> GateVerdict:
    verdicts = {check.verdict for check in checks}
    if "fail" in verdicts:
        return "fail"
    return "inconclusive" if "inconclusive" in verdicts or not checks else "pass"
