"""What an engine's steps spent their time on, operator by operator."""

from __future__ import annotations

from typing import Literal

import msgspec

ProfiledPhase = Literal["prefill", "decode"]


class OperatorTime(msgspec.Struct, frozen=True):
    """One operator in one step, all layers together: how often it ran, and for how long."""

    calls: int
    time_s: float


class StepProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One timed step: plan, run, commit and texts.

    `shapes` as in StepStat. Operators are named by the work that they do, joined by "+"
    (`ridgeline.modelspec.cost.operators` prices each part); no time is counted twice, so that what is left
    of `time_s` was spent outside them.
    """

    shapes: tuple[tuple[int, int], ...]
    num_sampled: int
    time_s: float
    operators: dict[str, OperatorTime]

    @property
    def host_s(self) -> float:
        """Scheduler, batch, waking of threads, texts: what no operator took."""
        return self.time_s - sum(each.time_s for each in self.operators.values())


class PhaseProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One phase, measured pass by pass: of prefill all steps of a prompt, of decode one step.

    `plain_s`: what the same passes took in between without timing their operators.
    """

    phase: ProfiledPhase
    passes: tuple[tuple[StepProfile, ...], ...]
    plain_s: tuple[float, ...]
