"""Greedy responses of two models compared: where they diverge, and how long they are.

The first divergence is censored by the requested length: responses equal to the end would have
diverged later, or never. The median is therefore the Kaplan-Meier estimate (1958), which does not
exist while more than half of the responses are equal.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ridgeline.stats import Interval, mean_interval

Outputs = Sequence[Sequence[int]]


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """Divergence of greedy responses; tokens are counted from 1.

    `median_token`: the token by which half of the responses have diverged; None if fewer than half
    have.
    """

    num_prompts: int
    num_tokens: int
    num_same: int
    first_token: int | None
    median_token: int | None


class LengthDrift(msgspec.Struct, frozen=True, kw_only=True):
    """Lengths of responses that may stop on their own. `change`: tokens, paired, after - before.

    `num_cut`: pairs in which a response reached the limit, so its full length is unknown.
    """

    num_prompts: int
    mean_before: float
    mean_after: float
    change: Interval
    num_cut: int


def first_difference(old: Sequence[int], new: Sequence[int]) -> int:
    """Index of the first differing token; the shorter length if one is a prefix of the other."""
    pairs = zip(old, new, strict=False)
    shorter = min(len(old), len(new))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)


def divergence(before: Outputs, after: Outputs) -> Divergence:
    """Where the responses diverge; tokens are counted from 1."""
    diverged_at: list[int] = []
    equal_to: list[int] = []
    for old, new in zip(before, after, strict=True):
        (equal_to if tuple(old) == tuple(new) else diverged_at).append(
            first_difference(old, new) + 1
        )
    return Divergence(
        num_prompts=len(before),
        num_tokens=sum(map(len, before)),
        num_same=len(equal_to),
        first_token=min(diverged_at, default=None),
        median_token=_median(diverged_at, equal_to),
    )


def _median(diverged_at: Sequence[int], equal_to: Sequence[int]) -> int | None:
    """Kaplan-Meier estimate: the token at which the share of equal responses falls to one half."""
    equal = 1.0
    for token in sorted(set(diverged_at)):
        at_risk = sum(position >= token for position in (*diverged_at, *equal_to))
        equal *= 1 - diverged_at.count(token) / at_risk
        if equal <= 0.5:
            return token
    return None


def length_drift(before: Outputs, after: Outputs, limit: int) -> LengthDrift:
    """How lengths changed; `limit` is the requested maximum."""
    pairs = [(len(old), len(new)) for old, new in zip(before, after, strict=True)]
    return LengthDrift(
        num_prompts=len(pairs),
        mean_before=sum(old for old, _ in pairs) / len(pairs),
        mean_after=sum(new for _, new in pairs) / len(pairs),
        change=mean_interval([float(new - old) for old, new in pairs]),
        num_cut=sum(max(pair) >= limit for pair in pairs),
    )
