"""Greedy answers of two models side by side: where they part, and how long they are.

The first divergence is censored by the length that was asked for: answers equal to their end would
have parted later, or never. The median is therefore Kaplan and Meier's (1958), and there is none
while more than half of the answers are equal.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ridgeline.stats import Interval, mean_interval

Outputs = Sequence[Sequence[int]]


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """`median_token`: by which half of the answers have parted; None: more than half never did."""

    num_prompts: int
    num_tokens: int
    num_same: int
    first_token: int | None
    median_token: int | None


class LengthDrift(msgspec.Struct, frozen=True, kw_only=True):
    """Lengths of answers that may end by themselves. `change`: tokens, paired, after - before.

    `num_cut`: pairs in which an answer reached the limit; what it would have become is unknown.
    """

    num_prompts: int
    mean_before: float
    mean_after: float
    change: Interval
    num_cut: int


def first_difference(old: Sequence[int], new: Sequence[int]) -> int:
    """The place of the first token that differs; the shorter length where one begins the other."""
    pairs = zip(old, new, strict=False)
    shorter = min(len(old), len(new))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)


def divergence(before: Outputs, after: Outputs) -> Divergence:
    """Where the answers part; tokens are counted from 1."""
    parted: list[int] = []
    lasted: list[int] = []
    for old, new in zip(before, after, strict=True):
        (lasted if tuple(old) == tuple(new) else parted).append(first_difference(old, new) + 1)
    return Divergence(
        num_prompts=len(before),
        num_tokens=sum(map(len, before)),
        num_same=len(lasted),
        first_token=min(parted, default=None),
        median_token=_median(parted, lasted),
    )


def _median(parted: Sequence[int], lasted: Sequence[int]) -> int | None:
    """Kaplan and Meier's: the token at which the share still equal falls to a half."""
    equal = 1.0
    for token in sorted(set(parted)):
        at_risk = sum(place >= token for place in (*parted, *lasted))
        equal *= 1 - parted.count(token) / at_risk
        if equal <= 0.5:
            return token
    return None


def length_drift(before: Outputs, after: Outputs, limit: int) -> LengthDrift:
    """How lengths changed; `limit` is the most tokens that were asked for."""
    pairs = [(len(old), len(new)) for old, new in zip(before, after, strict=True)]
    return LengthDrift(
        num_prompts=len(pairs),
        mean_before=sum(old for old, _ in pairs) / len(pairs),
        mean_after=sum(new for _, new in pairs) / len(pairs),
        change=mean_interval([float(new - old) for old, new in pairs]),
        num_cut=sum(max(pair) >= limit for pair in pairs),
    )
