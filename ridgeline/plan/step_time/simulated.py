"""Step times for simulations: of single steps, and of many decode steps in a row.

The host of a server adds launches, scheduling and masks over the vocabulary. Constants of it that
published points do not contain are assumptions of the usual order. Those of masks were measured
(benchmarks/results/masks.json), without what a sampler loses that could otherwise take the largest
logit unseen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import msgspec

from ridgeline.modelspec.cost import Shape
from ridgeline.plan.step_time.replica import CACHE_READS, Replica
from ridgeline.plan.step_time.speculation import SpeculationModel

LAUNCH_LAYER_S = 250e-6  # about 13 kernels of 20 us in each layer, without captured graphs
LAUNCH_ATTENTION_S = 60e-6  # three of them, and of the graphs around, with attention apart
SCHEDULE_STEP_S = 0.8e-3  # scheduling and output processing that do not overlap with the device
SCHEDULE_SEQUENCE_S = 6e-6
STRUCTURED_S, STRUCTURED_ENTRY_S = 16e-6, 1.3e-9  # of a mask, and per entry of the vocabulary
RULES_S, RULES_ENTRY_S = 12e-6, 0.12e-9  # of bad words and thinking budgets, likewise
_NEAR = 1024  # tokens of context per sequence at the first point of a line


class LinearSteps(msgspec.Struct, frozen=True):
    """Consecutive steps of linearly growing length: step j (from 0) takes first_s + j · more_s."""

    first_s: float
    more_s: float

    def seconds(self, num_steps: int) -> float:
        """Seconds of the first `num_steps` steps together."""
        return num_steps * (self.first_s + self.more_s * (num_steps - 1) / 2)

    def steps_until(self, span_s: float) -> int:
        """The smallest number of steps that take at least `span_s`."""
        if span_s <= 0:
            return 0
        b = self.first_s - self.more_s / 2
        root = math.sqrt(b * b + 2 * self.more_s * span_s)
        # Use the form of the root that adds numbers of equal sign: where more_s is almost 0,
        # root - b would be rounding error.
        guess = 2 * span_s / (root + b) if b > 0 else (root - b) / self.more_s
        steps = max(1, math.ceil(guess) - 1)
        while self.seconds(steps) < span_s:
            steps += 1
        return steps


class StepTimes(Protocol):
    """How long steps take."""

    def step_s(self, shapes: Sequence[Shape], num_sampled: int) -> float:
        """Seconds of one step."""

    def linear_steps(self, computed: Sequence[int], num_steps: int) -> LinearSteps | None:
        """The next `num_steps` steps if all of them only decode; None where they are not linear.

        `computed`: cached tokens of each running sequence before the first of them.
        """


def reader_s(replica: Replica, num_sampled: int) -> float:
    """What reading `num_sampled` tokens in the engine's process adds to their step."""
    calibration = replica.calibration
    return 0.0 if calibration is None else calibration.overheads.reader_s * num_sampled


class ModelledStepTimes:
    """The step-time model of a replica; a pipeline is timed by its micro-batches.

    Without windows, bytes and FLOPs of a decode step grow linearly with each step, and so does its
    time while the same one of the two is the bottleneck. Where the bottleneck changes, and with
    windows, `linear_steps` is None.
    """

    def __init__(self, replica: Replica, speculation: SpeculationModel | None = None) -> None:
        self._replica, self._speculation = replica, speculation
        self._has_windows = any(group.window is not None for group in replica.cost.windows)
        self._lines: dict[int, _DecodeLine] = {}
        self._by_batch: dict[int, SpeculationModel] = {}

    def step_s(self, shapes: Sequence[Shape], num_sampled: int) -> float:
        took_s = self._replica.price(shapes, num_sampled).seconds
        took_s += reader_s(self._replica, num_sampled)
        return took_s if self._speculation is None else took_s + self._speculation_s(shapes)

    def _speculation_s(self, shapes: Sequence[Shape]) -> float:
        """What drafts add to a step per token of each decode; negative where they pay off.

        The simulated scheduler yields one token per step and sequence, so a step with drafts takes
        its share of their time: the mean over many steps, without the variance.
        """
        decodes = [done for new, done in shapes if new == 1]
        if not decodes:
            return 0.0
        batch, done = len(decodes), sum(decodes) // len(decodes)
        plain_s = self._replica.uniform(batch, 1, done, sampled=batch).seconds
        return self.drafts_of(batch).decode_s(self._replica, batch, done) - plain_s

    def drafts_of(self, batch: int) -> SpeculationModel:
        """The speculation of a batch, at the depth that pays for it."""
        assert self._speculation is not None
        known = self._by_batch.get(batch)
        if known is None:
            known = self._by_batch[batch] = self._speculation.at(self._replica, batch)
        return known

    def linear_steps(self, computed: Sequence[int], num_steps: int) -> LinearSteps | None:
        if self._has_windows:
            return None
        batch, total = len(computed), sum(computed)
        line = self._lines.get(batch)
        if line is None:
            drafts = None if self._speculation is None else self.drafts_of(batch)
            line = self._lines[batch] = _decode_line(self._replica, batch, drafts)
        memory_s = line.memory_s + line.memory_more_s * total
        compute_s = line.compute_s + line.compute_more_s * total
        grown = batch * (num_steps - 1)
        memory_bound = memory_s >= compute_s
        ahead_s = memory_s - compute_s + (line.memory_more_s - line.compute_more_s) * grown
        if (ahead_s >= 0) != memory_bound:
            return None
        if memory_bound:
            return LinearSteps(memory_s + line.other_s, line.memory_more_s * batch)
        return LinearSteps(compute_s + line.other_s, line.compute_more_s * batch)


class _DecodeLine(msgspec.Struct, frozen=True):
    """Seconds of a decode step of one batch size: constants, and growth per token in the cache."""

    memory_s: float
    memory_more_s: float
    compute_s: float
    compute_more_s: float
    other_s: float


def _decode_line(replica: Replica, batch: int, speculation: SpeculationModel | None) -> _DecodeLine:
    """The line through two points; exact without windows and speculation."""
    far = 1 << 20
    if speculation is not None:  # through total seconds, which are close to linear
        near_s, far_s = (
            speculation.decode_s(replica, batch, n) + reader_s(replica, batch)
            for n in (_NEAR, 2 * _NEAR)
        )
        more_s = (far_s - near_s) / (_NEAR * batch)
        return _DecodeLine(near_s - more_s * _NEAR * batch, more_s, 0.0, 0.0, 0.0)
    if replica.calibration is not None:  # memory and compute overlap: their sum is linear
        empty, full = replica.decode_sum(batch, 0), replica.decode_sum(batch, far)
        more_s = (full.busy_s - empty.busy_s) / far
        other_s = empty.overhead_s + empty.communication_s + reader_s(replica, batch)
        return _DecodeLine(empty.busy_s, more_s, 0.0, 0.0, other_s)
    # Only the cache that is read grows; every other part is bound by one side, and constant.
    near, twice = (replica.step_terms(((batch, 1, n),), batch) for n in (_NEAR, 2 * _NEAR))
    growing = near.pop(CACHE_READS)
    memory_more_s = (twice[CACHE_READS].memory_s - growing.memory_s) / (_NEAR * batch)
    compute_more_s = (twice[CACHE_READS].compute_s - growing.compute_s) / (_NEAR * batch)
    return _DecodeLine(
        growing.memory_s - memory_more_s * _NEAR * batch,
        memory_more_s,
        growing.compute_s - compute_more_s * _NEAR * batch,
        compute_more_s,
        sum(term.seconds for term in near.values()),
    )


def masks_s(vocab_size: int, structured: float, ruled: float) -> float:
    """Mean seconds of masks per token, where these shares of the requests have a grammar, or bad
    words or a thinking budget."""
    return structured * (STRUCTURED_S + STRUCTURED_ENTRY_S * vocab_size) + ruled * (
        RULES_S + RULES_ENTRY_S * vocab_size
    )


class HostTime(msgspec.Struct, frozen=True, kw_only=True):
    """What the host of a server adds to its steps, in seconds.

    `layer_s`: launching the kernels of one layer, which runs ahead of the device, so that a step
    takes at least as long as all its launches (0 with captured graphs). `step_s` and `sequence_s`:
    scheduling that the device waits for (0 where it overlaps with the previous step). `token_s`:
    work on the logits of each token before it is sampled, such as a mask of structured output.
    """

    layer_s: float = 0.0
    step_s: float = 0.0
    sequence_s: float = 0.0
    token_s: float = 0.0


class HostedStepTimes:
    """Modelled seconds of a step of one replica, with the host's share.

    A step with drafts yields several tokens per sequence, and the simulated scheduler plans one: a
    planned step that only decodes has its share of the host's time, as of the device's.
    """

    def __init__(
        self, replica: Replica, speculation: SpeculationModel | None, host: HostTime
    ) -> None:
        self._modelled = ModelledStepTimes(replica, speculation)
        self._launch_s = host.layer_s * len(replica.spec.layers)
        self._host = host
        self._speculation = speculation

    def _share(self, batch: int) -> float:
        """Of a step with drafts, in one token of each of `batch` sequences."""
        if self._speculation is None:
            return 1.0
        return 1 / self._modelled.drafts_of(batch).tokens_per_step

    def linear_steps(self, computed: Sequence[int], num_steps: int) -> LinearSteps | None:
        """The next `num_steps` decode steps, as of `StepTimes`; None too where the launches take
        longer than some of them and not longer than others.
        """
        steps = self._modelled.linear_steps(computed, num_steps)
        if steps is None:
            return None
        host, batch = self._host, len(computed)
        share = self._share(batch)
        launch_s, last_s = share * self._launch_s, steps.first_s + steps.more_s * (num_steps - 1)
        host_s = share * (host.step_s + host.sequence_s * batch) + host.token_s * batch
        if last_s <= launch_s:
            return LinearSteps(launch_s + host_s, 0.0)
        if steps.first_s < launch_s:
            return None
        return LinearSteps(steps.first_s + host_s, steps.more_s)

    def step_s(self, shapes: Sequence[Shape], num_sampled: int) -> float:
        host = self._host
        share = self._share(len(shapes)) if all(new == 1 for new, _ in shapes) else 1.0
        device_s = max(self._modelled.step_s(shapes, num_sampled), share * self._launch_s)
        own_s = share * (host.step_s + host.sequence_s * len(shapes))
        return device_s + own_s + host.token_s * num_sampled
