"""What a drafter must achieve to pay, and what it achieves: the numbers behind a verdict.

With K drafts per sequence a step takes T(K) times as long as a plain one (measured, drafting
included) and yields 1 + a_1 + a_1 a_2 + … tokens, with a_i the acceptance of the i-th draft given
those before it. Break-even is where both are equal; for equal acceptance a at every position it is
the root of 1 + a + … + a^K = T(K).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ridgeline.engine.speculate.depth_control.plan import DraftingCosts

DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16)


class BreakEvenRow(msgspec.Struct, frozen=True, kw_only=True):
    """One depth at one batch size. `slower`: T(K) / T(0). `break_even`: None if no acceptance pays.

    `tokens`: expected per sequence and step; `gain`: relative to plain decoding, in steps with
    drafts.
    """

    depth: int
    slower: float
    break_even: float | None
    tokens: float
    gain: float


def survivals(tried: Sequence[float], kept: Sequence[float]) -> list[float]:
    """Probability that the first 1, 2, … drafts are all accepted, from counts of tried and accepted
    ones.

    If few long drafts did better than many short ones, the short ones count.
    """
    found: list[float] = []
    for k, t in zip(kept, tried, strict=True):
        found.append(min(k / t if t else 0.0, found[-1] if found else 1.0))
    return found


def break_even(slower: float, depth: int) -> float | None:
    """The acceptance per token at which `depth` drafts pay for a step `slower` times as long."""
    if slower > depth + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        given = sum(middle**i for i in range(depth + 1))
        low, high = (middle, high) if given < slower else (low, middle)
    return high


def rows(costs: DraftingCosts, batch: int, alive: Sequence[float], most: int) -> list[BreakEvenRow]:
    """Every depth up to `most`, each sequence of the batch drafting that many; depths beyond
    `alive` add no tokens.
    """
    found = []
    plain_s = costs.step.seconds(batch, batch)
    for depth in (d for d in DEPTHS if d <= most):
        took_s = costs.step.seconds(batch, batch * (depth + 1))
        took_s += 0.0 if costs.draft is None else costs.draft.seconds(batch, depth)
        slower, tokens = took_s / plain_s, 1 + sum(alive[:depth])
        even = break_even(slower, depth)
        row = BreakEvenRow(
            depth=depth, slower=slower, break_even=even, tokens=tokens, gain=tokens / slower
        )
        found.append(row)
    return found


def verdict(found: Sequence[BreakEvenRow], share: float, margin: float) -> str:
    """The verdict as text. `share`: of the steps that had a draft at all."""
    best = max(found, key=lambda row: row.gain, default=None)
    if best is None or best.gain <= 1 + margin:
        return "off: no depth is expected to win here"
    whole = 1 / (share / best.gain + 1 - share)
    return (
        f"up to {best.depth} drafts: {best.gain:.2f}x in steps with a draft; {share:.0%} of steps "
        f"had one, so about {whole:.2f}x in all"
    )
