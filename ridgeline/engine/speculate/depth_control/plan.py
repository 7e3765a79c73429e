"""Which draft tokens ride in a step: those at which expected tokens per second are highest.

Every token that could be drafted has a chance to be accepted, and makes the step longer by what the
measured curve says. Tokens are added in order of falling chance; the number is taken at which

    expected tokens / (T(runs, rows) + what drafting costs)

is largest. A token of a sequence is never likelier than the one before it, so the order never
leaves one out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import ridgeline._native as _native
from ridgeline.engine.scheduler.speculation.base import StepCapacity
from ridgeline.engine.speculate.depth_control.step_cost import DraftCost, StepTimeCurve

LEAST_CHANCE = 0.02  # a token that is less likely is not considered


class Plan(NamedTuple):
    """Depth per sequence; what the step is expected to give and to take, drafting included."""

    depths: list[int]
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Costs(NamedTuple):
    """Seconds of steps, and of drafts that are computed (None: nothing is)."""

    step: StepTimeCurve
    draft: DraftCost | None


def plain_plan(num_opens: int, room: StepCapacity, costs: Costs) -> Plan:
    """Nothing is drafted."""
    seconds = costs.step.seconds(room.num_runs, room.num_rows)
    return Plan([0] * num_opens, float(room.num_runs), seconds)


def best_plan(
    survivals: Sequence[Sequence[float]], computed: Sequence[bool], room: StepCapacity, costs: Costs
) -> Plan:
    """`survivals[i][k]`: the chance that the first k + 1 drafts of sequence i are all accepted.
    `computed[i]`: its draft costs what `costs.draft` says; the others cost nothing."""
    num_tokens = min(room.num_free, sum(map(len, survivals)))
    plain = plain_plan(len(survivals), room, costs)
    if num_tokens <= 0:
        return plain
    line = costs.step.line(room.num_runs, room.num_rows + 1, num_tokens)
    return Plan(
        *_native.choose_depths(
            survivals,
            computed,
            room.num_free,
            room.num_runs,
            plain.seconds,
            line,
            _drafting_s(survivals, computed, costs),
            LEAST_CHANCE,
        )
    )


def _drafting_s(
    survivals: Sequence[Sequence[float]], computed: Sequence[bool], costs: Costs
) -> list[float]:
    """Seconds of drafts of 1, 2, … tokens that are computed; none where nothing is."""
    if costs.draft is None or not any(computed):
        return []
    num = sum(computed)
    deepest = max(len(chances) for chances, own in zip(survivals, computed, strict=True) if own)
    return [costs.draft.seconds(num, depth) for depth in range(1, deepest + 1)]
