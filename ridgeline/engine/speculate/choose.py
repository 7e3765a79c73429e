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

from ridgeline.engine.core.drafting import Room
from ridgeline.engine.speculate.cost import DraftCost, StepCost

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

    step: StepCost
    draft: DraftCost | None


def plain_plan(num_opens: int, room: Room, costs: Costs) -> Plan:
    """Nothing is drafted."""
    seconds = costs.step.seconds(room.num_runs, room.num_rows)
    return Plan([0] * num_opens, float(room.num_runs), seconds)


def best_plan(
    survivals: Sequence[Sequence[float]], computed: Sequence[bool], room: Room, costs: Costs
) -> Plan:
    """`survivals[i][k]`: the chance that the first k + 1 drafts of sequence i are all accepted.
    `computed[i]`: its draft costs what `costs.draft` says; the others cost nothing."""
    order = _likeliest_first(survivals)[: room.num_free]
    plain, num_best = plain_plan(len(survivals), room, costs), 0
    if not order:
        return plain
    num_computed, deepest = sum(computed), 0
    depths, most_tokens, least_s = plain
    tokens, drafting_s = float(room.num_runs), 0.0
    line = costs.step.line(room.num_runs, room.num_rows + 1, len(order))
    for num, (chance, i, place) in enumerate(order, 1):
        tokens -= chance  # sorted by falling chance: they are kept negative
        if computed[i] and place >= deepest and costs.draft is not None:
            deepest = place + 1
            drafting_s = costs.draft.seconds(num_computed, deepest)
        seconds = line[num - 1] + drafting_s
        if tokens * least_s > most_tokens * seconds:
            most_tokens, least_s, num_best = tokens, seconds, num
    for _, i, place in order[:num_best]:
        depths[i] = max(depths[i], place + 1)
    return Plan(depths, most_tokens, least_s)


def _likeliest_first(survivals: Sequence[Sequence[float]]) -> list[tuple[float, int, int]]:
    """(minus the chance, sequence, place), in the order in which tokens are added."""
    found = [
        (-chance, i, place)
        for i, own in enumerate(survivals)
        for place, chance in enumerate(own)
        if chance >= LEAST_CHANCE
    ]
    if len(survivals) > 1:  # one sequence's own are in this order
        found.sort(key=_chance_then_place)
    return found


def _chance_then_place(entry: tuple[float, int, int]) -> tuple[float, int]:
    return entry[0], entry[2]
