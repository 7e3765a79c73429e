"""Chooses the draft tokens of a step that maximise expected tokens per second.

Every possible draft token has an acceptance probability and lengthens the step as measured. Tokens
are added in order of decreasing probability, up to the number that maximises

  expected tokens / (T(runs, rows) + cost of drafting)

A token of a sequence is never more likely than the one before it, so this order leaves no gaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import ridgeline._native as _native
from ridgeline.engine.scheduler.speculation.base import StepCapacity
from ridgeline.engine.speculate.depth_control.step_cost import DraftCost, StepTimeCurve

MIN_CHANCE = 0.02  # a token that is less likely is not considered


class DepthPlan(NamedTuple):
    """Depth per sequence; expected tokens and seconds of the step, drafting included."""

    depths: list[int]
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class DraftingCosts(NamedTuple):
    """Seconds of steps, and of computed drafts (None: there are none)."""

    step: StepTimeCurve
    draft: DraftCost | None


def plain_plan(num_opens: int, room: StepCapacity, costs: DraftingCosts) -> DepthPlan:
    """The plan without drafts."""
    seconds = costs.step.seconds(room.num_runs, room.num_rows)
    return DepthPlan([0] * num_opens, float(room.num_runs), seconds)


def best_plan(
    survivals: Sequence[Sequence[float]],
    computed: Sequence[bool],
    room: StepCapacity,
    costs: DraftingCosts,
) -> DepthPlan:
    """The best plan. `survivals[i][k]`: probability that the first k + 1 drafts of sequence i are
    accepted.

    `computed[i]`: its draft costs what `costs.draft` says; others are free.
    """
    num_tokens = min(room.num_free, sum(map(len, survivals)))
    plain = plain_plan(len(survivals), room, costs)
    if num_tokens <= 0:
        return plain
    line = costs.step.line(room.num_runs, room.num_rows + 1, num_tokens)
    return DepthPlan(
        *_native.choose_depths(
            survivals,
            computed,
            room.num_free,
            room.num_runs,
            plain.seconds,
            line,
            _drafting_s(survivals, computed, costs),
            MIN_CHANCE,
        )
    )


def _drafting_s(
    survivals: Sequence[Sequence[float]], computed: Sequence[bool], costs: DraftingCosts
) -> list[float]:
    """Seconds of computed drafts of 1, 2, … tokens; empty if there are none."""
    if costs.draft is None or not any(computed):
        return []
    num = sum(computed)
    deepest = max(len(chances) for chances, own in zip(survivals, computed, strict=True) if own)
    return [costs.draft.seconds(num, depth) for depth in range(1, deepest + 1)]
