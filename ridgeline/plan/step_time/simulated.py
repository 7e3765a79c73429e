"""How long steps take in a simulation, one by one and many calm ones at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import msgspec

from ridgeline.modelspec.cost import Shape
from ridgeline.plan.step_time.replica import Replica
from ridgeline.plan.step_time.speculation import SpeculationModel

_NEAR = 1024  # tokens of context between which a line is drawn


class LinearSteps(msgspec.Struct, frozen=True):
    """Calm steps in a row: step j (from 0) takes first_s + j · more_s seconds."""

    first_s: float
    more_s: float

    def seconds(self, num_steps: int) -> float:
        """Of the first `num_steps` of them."""
        return num_steps * (self.first_s + self.more_s * (num_steps - 1) / 2)

    def steps_until(self, span_s: float) -> int:
        """The fewest steps that last `span_s` or longer."""
        if span_s <= 0:
            return 0
        b = self.first_s - self.more_s / 2
        root = math.sqrt(b * b + 2 * self.more_s * span_s)
        # Of the two ways to write the solution the one that adds numbers of one sign: where more_s
        # is next to nothing, root - b is what rounding leaves.
        guess = 2 * span_s / (root + b) if b > 0 else (root - b) / self.more_s
        steps = max(1, math.ceil(guess) - 1)
        while self.seconds(steps) < span_s:
            steps += 1
        return steps


class StepTimes(Protocol):
    """Seconds of a step; and of calm steps, where they follow a line (None: go step by step)."""

    def step_s(self, shapes: Sequence[Shape], num_sampled: int) -> float: ...

    def glide(self, computed: Sequence[int], num_steps: int) -> LinearSteps | None:
        """`computed`: tokens in the cache of each running sequence before the first step."""


def reader_s(machine: Replica, num_sampled: int) -> float:
    """What readers in the engine's process add to a step that gives so many tokens."""
    calibration = machine.calibration
    return 0.0 if calibration is None else calibration.overheads.reader_s * num_sampled


class ModelledStepTimes:
    """The step-time model of a replica; pipelines are paced by their micro-batches.

    Without windows a calm step's bytes and FLOPs grow by the same amount each time. So do its
    seconds, while the same one of the two stays ahead; where they change places, and with windows,
    there is no line and `glide` is None.
    """

    def __init__(self, machine: Replica, drafts: SpeculationModel | None = None) -> None:
        self._machine, self._drafts = machine, drafts
        self._linear = all(group.window is None for group in machine.cost.windows)
        self._lines: dict[int, _DecodeLine] = {}

    def step_s(self, shapes: Sequence[Shape], num_sampled: int) -> float:
        took_s = self._machine.price(shapes, num_sampled).seconds
        took_s += reader_s(self._machine, num_sampled)
        return took_s if self._drafts is None else took_s + self._saved_s(shapes)

    def _saved_s(self, shapes: Sequence[Shape]) -> float:
        """What drafts change of a step, per token that it gives each decode: below 0 if they pay.

        The scheduler that is driven gives one token per step and sequence, so that a step with
        drafts takes its share of the seconds: the mean of many, not the jumps of each.
        """
        assert self._drafts is not None
        decoding = [done for new, done in shapes if new == 1]
        if not decoding:
            return 0.0
        batch, done = len(decoding), sum(decoding) // len(decoding)
        plain_s = self._machine.uniform(batch, 1, done, sampled=batch).seconds
        return self._drafts.decode_s(self._machine, batch, done) - plain_s

    def glide(self, computed: Sequence[int], num_steps: int) -> LinearSteps | None:
        if not self._linear:
            return None
        batch, total = len(computed), sum(computed)
        lines = self._lines.get(batch)
        if lines is None:
            lines = self._lines[batch] = _decode_line(self._machine, batch, self._drafts)
        memory_s = lines.memory_s + lines.memory_more_s * total
        compute_s = lines.compute_s + lines.compute_more_s * total
        grown = batch * (num_steps - 1)
        by_memory = memory_s >= compute_s
        ahead_s = memory_s - compute_s + (lines.memory_more_s - lines.compute_more_s) * grown
        if (ahead_s >= 0) != by_memory:
            return None
        if by_memory:
            return LinearSteps(memory_s + lines.other_s, lines.memory_more_s * batch)
        return LinearSteps(compute_s + lines.other_s, lines.compute_more_s * batch)


class _DecodeLine(msgspec.Struct, frozen=True):
    """A decode step of one batch size over the tokens that its sequences hold together."""

    memory_s: float
    memory_more_s: float
    compute_s: float
    compute_more_s: float
    other_s: float


def _decode_line(machine: Replica, batch: int, drafts: SpeculationModel | None) -> _DecodeLine:
    """From two points: both are straight without windows."""
    far = 1 << 20
    if drafts is not None:  # one line through seconds as they are: near enough to straight
        near_s, far_s = (
            drafts.decode_s(machine, batch, n) + reader_s(machine, batch)
            for n in (_NEAR, 2 * _NEAR)
        )
        more_s = (far_s - near_s) / (_NEAR * batch)
        return _DecodeLine(near_s - more_s * _NEAR * batch, more_s, 0.0, 0.0, 0.0)
    none, some = machine.decode_sum(batch, 0), machine.decode_sum(batch, far)
    if machine.calibration is not None:  # memory and compute overlap: their sum is straight
        more_s = (some.busy_s - none.busy_s) / far
        other_s = none.overhead_s + none.communication_s + reader_s(machine, batch)
        return _DecodeLine(none.busy_s, more_s, 0.0, 0.0, other_s)
    return _DecodeLine(
        none.memory_s,
        (some.memory_s - none.memory_s) / far,
        none.compute_s,
        (some.compute_s - none.compute_s) / far,
        none.overhead_s + none.communication_s,
    )
