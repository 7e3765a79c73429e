"""Held-out text read by the original and by the candidate, compared position by position.

  perplexity   exp(mean change of the true token's negative log-probability)
  KL           KL(original || candidate), mean and 99.9th percentile: the whole distribution rather
               than the true token alone
  agreement    share of positions with the same most likely token: how soon greedy outputs diverge

Tokens of one text are not independent, so intervals are over windows, not tokens. Pairing provides
the power: perplexity itself varies by tens of percent between windows, its change hardly at all.

Array suffixes: T positions, V vocabulary.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ridgeline.optimize.quality.quantile_interval import quantile_interval
from ridgeline.optimize.quality.thresholds import (
    PanelSize,
    QualityLimits,
    ThresholdCheck,
    check_max,
    check_min,
)
from ridgeline.stats import Interval, mean_interval

Array = NDArray[np.floating[Any]]
LogprobsOf = Callable[[Sequence[int]], Array]
"""[T, V] log-probabilities after each of T tokens."""

TAIL = 0.001
PERPLEXITY, KL_MEAN = "perplexity ratio", "KL mean (nats)"
AGREEMENT, KL_TAIL = "greedy agreement", "KL p99.9 (nats)"


class WindowComparison(msgspec.Struct, frozen=True):
    """Sums over the positions of one window; log-probabilities in nats."""

    count: int
    nll_before: float
    nll_after: float
    kl: float
    same_top: int


class TextSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What a panel read of held-out text, and what came of it.

    Perplexities are over the same positions; None if the text could not be scored. `num_flips`:
    positions whose most likely token changed. `perplexity_error`: standard error of the logarithm
    of the ratio of both, paired by window.
    """

    perplexity_before: Interval | None
    perplexity_after: Interval | None
    num_positions: int
    num_windows: int
    num_flips: int
    perplexity_error: float = 0.0


def cut_windows(
    texts: Sequence[Sequence[int]], length: int, seed: int = 0
) -> tuple[tuple[int, ...], ...]:
    """Every whole window of `length` tokens, the texts taking turns, each in random order.

    Any prefix of the result covers all texts equally; it ends with the shortest text.
    """
    turns = []
    for number, tokens in enumerate(texts):
        starts = range(0, len(tokens) - length + 1, length)
        windows = [tuple(tokens[start : start + length]) for start in starts]
        random.Random(f"{seed}/{number}").shuffle(windows)
        turns.append(windows)
    return tuple(piece for turn in zip(*turns, strict=False) for piece in turn)


class TextReference:
    """The original's log-probabilities of each window, computed once and cached up to `max_bytes`.

    Windows beyond the limit are recomputed each time, until `freeze`.
    """

    def __init__(self, windows: Sequence[Sequence[int]], read: LogprobsOf, max_bytes: int) -> None:
        self._windows, self._read, self._left_bytes = windows, read, max_bytes
        self._cached: dict[int, Array] = {}
        self._frozen = False

    def __len__(self) -> int:
        """How many windows can be compared."""
        if not self._frozen:
            return len(self._windows)
        return next(i for i in range(len(self._windows) + 1) if i not in self._cached)

    def window(self, index: int) -> Sequence[int]:
        return self._windows[index]

    def logprobs(self, index: int) -> Array:
        """Log-probabilities [T, V] of a window."""
        if index in self._cached:
            return self._cached[index]
        assert not self._frozen, "only cached windows are available"
        logprobs_TV = np.asarray(self._read(self._windows[index]), dtype=np.float32)
        if logprobs_TV.nbytes <= self._left_bytes:
            self._cached[index] = logprobs_TV
            self._left_bytes -= logprobs_TV.nbytes
        return logprobs_TV

    def read_with(self, read: LogprobsOf) -> None:
        """Compute the same distributions by another function from now on."""
        self._read = read

    def freeze(self) -> None:
        """The original is no longer available: only cached windows can be compared."""
        self._frozen = True


def compare_window(
    tokens: Sequence[int], before_TV: Array, after_TV: Array
) -> tuple[WindowComparison, Array]:
    """Sums of one window, and the KL divergence of each position. Row t predicts token t + 1."""
    targets = np.asarray(tokens[1:], dtype=np.int64)
    rows = np.arange(len(targets))
    before_TV, after_TV = before_TV[: len(targets)], after_TV[: len(targets)]
    kl_T = kl_divergence(before_TV, after_TV)
    window = WindowComparison(
        count=len(targets),
        nll_before=-float(before_TV[rows, targets].sum(dtype=np.float64)),
        nll_after=-float(after_TV[rows, targets].sum(dtype=np.float64)),
        kl=float(kl_T.sum(dtype=np.float64)),
        same_top=int((before_TV.argmax(-1) == after_TV.argmax(-1)).sum()),
    )
    return window, kl_T


def kl_divergence(before_TV: Array, after_TV: Array) -> Array:
    """KL(before || after) per position; positions where `before` has no mass contribute nothing."""
    mass = np.exp(before_TV.astype(np.float64))
    gap = np.where(mass > 0, before_TV.astype(np.float64) - after_TV, 0.0)
    kl_T: Array = np.maximum((mass * gap).sum(-1), 0.0)
    return kl_T


class TextPanelPart:
    """Held-out text as a part of the panel."""

    def __init__(
        self, reference: TextReference, after: LogprobsOf, gate: QualityLimits, size: PanelSize
    ) -> None:
        self._reference, self._after, self._gate, self._size = reference, after, gate, size
        self.windows: list[WindowComparison] = []
        self.kl: list[Array] = []

    def read(self, look: int) -> bool:
        """Read as far as look number `look` (from 0) requires; False if the text has ended."""
        wanted = min(len(self._reference), self._size.first_windows << look)
        for index in range(len(self.windows), wanted):
            tokens = self._reference.window(index)
            after_TV = np.asarray(self._after(tokens))
            window, kl_T = compare_window(tokens, self._reference.logprobs(index), after_TV)
            self.windows.append(window)
            self.kl.append(kl_T)
        return wanted == self._size.first_windows << look

    def checks(self, level: float) -> tuple[ThresholdCheck, ...]:
        """Every threshold against what has been read, at a confidence level."""
        gate, windows = self._gate, self.windows
        change = _per_token(windows, lambda w: w.nll_after - w.nll_before, level)
        return (
            check_max(PERPLEXITY, _exp(change), gate.perplexity_ratio_max),
            check_max(KL_MEAN, _per_token(windows, lambda w: w.kl, level), gate.kl_mean_max),
            check_min(
                AGREEMENT,
                _per_token(windows, lambda w: w.same_top, level),
                gate.greedy_agreement_min,
            ),
            check_max(KL_TAIL, quantile_interval(self.kl, TAIL, level), gate.kl_p999_max),
        )

    def summary(self) -> TextSummary:
        """The figures to show."""
        windows = self.windows
        positions = sum(window.count for window in windows)
        return TextSummary(
            perplexity_before=perplexity(windows, lambda w: w.nll_before),
            perplexity_after=perplexity(windows, lambda w: w.nll_after),
            num_positions=positions,
            num_windows=len(windows),
            num_flips=positions - sum(window.same_top for window in windows),
            perplexity_error=loss_change_error(windows),
        )


def perplexity(
    windows: Sequence[WindowComparison], nll: Callable[[WindowComparison], float]
) -> Interval:
    """Perplexity with its interval over windows, unpaired."""
    return _exp(_per_token(windows, nll))


def loss_change_error(windows: Sequence[WindowComparison]) -> float:
    """Standard error of the change in loss per token, over windows; 0 with fewer than two."""
    changes = [(window.nll_after - window.nll_before) / window.count for window in windows]
    return statistics.stdev(changes) / math.sqrt(len(changes)) if len(changes) > 1 else 0.0


def _per_token(
    windows: Sequence[WindowComparison],
    total: Callable[[WindowComparison], float],
    level: float = 0.95,
) -> Interval:
    return mean_interval([total(window) / window.count for window in windows], level=level)


def _exp(change: Interval) -> Interval:
    low, mid, high = (math.exp(min(value, 50)) for value in (change.low, change.mid, change.high))
    return Interval(low=low, mid=mid, high=high, level=change.level)
