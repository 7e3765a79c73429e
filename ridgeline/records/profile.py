"""Times of an engine's steps by operator."""

from __future__ import annotations

from typing import Literal

import msgspec

ProfiledPhase = Literal["prefill", "decode"]


class OperatorTime(msgspec.Struct, frozen=True):
    """Calls and seconds of one operator in one step, over all layers."""

    calls: int
    time_s: float


class StepProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One timed step: planning, running, committing and detokenising.

    `shapes` as in StepStat. Operators are named by the work that they do, joined by "+"
    (`ridgeline.modelspec.cost.operators` prices each part). No time is counted twice, so that the
    rest of `time_s` was spent outside operators.
    """

    shapes: tuple[tuple[int, int], ...]
    num_sampled: int
    time_s: float
    operators: dict[str, OperatorTime]

    @property
    def host_s(self) -> float:
        """Seconds outside operators: scheduler, batch preparation, waking threads, detokenising."""
        return self.time_s - sum(operator.time_s for operator in self.operators.values())


class PhaseProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Repeated passes of one phase: all steps of a prompt (prefill), or one step (decode).

    `plain_s`: seconds of the same passes without timing their operators, measured in between.
    """

    phase: ProfiledPhase
    passes: tuple[tuple[StepProfile, ...], ...]
    plain_s: tuple[float, ...]
