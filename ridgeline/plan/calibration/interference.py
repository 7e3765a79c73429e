"""Interference on a shared machine: how much slower than fitted its steps were, over time.

The speed of a shared machine varies from second to second: a neighbour on the sibling hardware
thread halves a core's arithmetic for a while, and clients that read tokens compete with the engine.
Medians hide this, yet near saturation it dominates the queueing delay.

A calibration therefore records what steps took under load: the ratio of measured to fitted seconds
in time bins, separately for pure decode steps and for steps with prompts. The simulator replays the
recording cyclically from an offset chosen by the seed and the replica. Slow phases keep their
duration, and no distribution has to be assumed. The recording also contains the systematic error of
the fit under load (its steps were measured one kind at a time).

A recording covers only some seconds, possibly unusually bad ones, so each seed draws its intensity
(`InterferenceSampler`). Two effects that such a recording cannot contain are drawn separately: the
machine's speed over minutes, from the ratios between the calibration's passes over the same steps;
and the error of the fit for step mixes that were not fitted, from its errors for single kinds of
steps.
Sources: block bootstrap (Künsch 1989), with one block as long as the recording; model discrepancy
as a separate term of a prediction interval (Kennedy and O'Hagan 2001).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated

import msgspec
import numpy as np

Shapes = Sequence[tuple[int, int]]
BIN_S = 0.05
MIN_BINS = 20  # a second
MEDIAN_LEVEL = 0.5
_STEPS = (0.8566748838545029, 0.733891856627126, 0.6287067210378087, 0.5385972572236101)
"""Powers of 1/x with x^5 = x + 1: the additive recurrence for four dimensions (Roberts 2018, "The
unreasonable effectiveness of quasirandom sequences")."""


class LoadedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step under load: when it began, and the seconds until the next one could begin."""

    at_s: float
    seconds: float
    shapes: tuple[tuple[int, int], ...]
    num_sampled: int


Positive = Annotated[float, msgspec.Meta(gt=0)]
Slowness = Annotated[tuple[Positive, ...], msgspec.Meta(min_length=1)]


class InterferenceTrace(msgspec.Struct, frozen=True, kw_only=True):
    """Slowdown (1: as fitted) per time bin of `bin_s`, of pure decode steps and of other steps.

    `pass_ratios`: seconds of each calibration pass over the mean pass. `decode_errors`,
    `prompt_errors`: measured over fitted seconds by kind of step.
    """

    bin_s: Positive
    decode: Slowness
    prompt: Slowness
    pass_ratios: tuple[Positive, ...] = ()
    decode_errors: tuple[Positive, ...] = ()
    prompt_errors: tuple[Positive, ...] = ()

    @property
    def span_s(self) -> float:
        return self.bin_s * len(self.decode)


class InterferenceSampler:
    """Replays a recording from a random offset at a given intensity.

    `level` 0: no interference (the machine as fitted); 1: as recorded; a slowdown of s becomes
    s^level. None: the seed draws the level uniformly, a speed ratio per replica, and fit errors
    that are the same for all replicas, since they share one fit. `MEDIAN_LEVEL` is the level for a
    single best estimate.
    """

    def __init__(
        self, trace: InterferenceTrace, seed: int, replica: int, level: float | None = None
    ) -> None:
        rng = np.random.default_rng((seed, replica))
        self._per_s = 1 / trace.bin_s
        self._from = int(rng.integers(len(trace.decode)))
        decode = prompt = 1.0
        if level is None:
            level = _low_discrepancy(seed, 0, replica)
            pass_ratio = _quantile(trace.pass_ratios, _low_discrepancy(seed, 1, replica))
            decode = pass_ratio * _quantile(trace.decode_errors, _low_discrepancy(seed, 2))
            prompt = pass_ratio * _quantile(trace.prompt_errors, _low_discrepancy(seed, 3))
        self._decode = [float(decode * slowness**level) for slowness in trace.decode]
        self._prompt = [float(prompt * slowness**level) for slowness in trace.prompt]

    def slowness(self, shapes: Shapes, now_s: float) -> float:
        """The slowdown of a step that begins at `now_s`."""
        values = self._prompt if any(new != 1 for new, _ in shapes) else self._decode
        return values[(self._from + int(now_s * self._per_s)) % len(values)]


def _low_discrepancy(seed: int, dimension: int, replica: int | None = None) -> float:
    """A low-discrepancy value in [0, 1) for this seed and dimension (R4 sequence), so that medians
    over 40 seeds are stable. Each replica has a different offset."""
    offset = 0.0 if replica is None else np.random.default_rng((dimension, replica)).uniform()
    return float((seed * _STEPS[dimension] + offset) % 1.0)


def _quantile(values: Sequence[float], share: float) -> float:
    """The quantile `share` of the values; 1 if there are none."""
    return sorted(values)[int(share * len(values))] if values else 1.0


def has_prompt(shapes: Shapes) -> bool:
    """True if a step computes any prompt."""
    return any(new != 1 for new, _ in shapes)


def record_interference(
    windows: Iterable[Sequence[LoadedStep]], fitted_s: Callable[[Shapes, int], float]
) -> InterferenceTrace | None:
    """Record the slowdown over consecutive windows; None if either kind of step was too rare.

    A bin's value is the seconds of its steps over the fitted seconds; a bin without steps of a kind
    repeats the bin before it.
    """
    decode: list[float] = []
    prompt: list[float] = []
    for steps in windows:
        for values, fresh in ((decode, False), (prompt, True)):
            values += _binned([s for s in steps if has_prompt(s.shapes) == fresh], steps, fitted_s)
    if min(len(decode), len(prompt)) < MIN_BINS:
        return None
    if any(math.isnan(values[-1]) for values in (decode, prompt)):
        return None
    return InterferenceTrace(bin_s=BIN_S, decode=_carried(decode), prompt=_carried(prompt))


def _binned(
    steps: Sequence[LoadedStep],
    every: Sequence[LoadedStep],
    fitted_s: Callable[[Shapes, int], float],
) -> list[float]:
    """Slowdown by bin over the window spanned by `every`; nan for bins without such steps."""
    if not every:
        return []
    began_s = every[0].at_s
    num = int((every[-1].at_s - began_s) / BIN_S) + 1
    took_s, fits_s = np.zeros(num), np.zeros(num)
    for step in steps:
        at = int((step.at_s - began_s) / BIN_S)
        took_s[at] += step.seconds
        fits_s[at] += fitted_s(step.shapes, step.num_sampled)
    seen = fits_s > 0
    values = np.full(num, math.nan)
    values[seen] = took_s[seen] / fits_s[seen]
    known = values[seen]
    if len(known) and not seen[-1]:
        values[-1] = known[-1]
    return [float(value) for value in values]


def _carried(values: Sequence[float]) -> tuple[float, ...]:
    """Fill gaps with the value before them, leading gaps with the first value."""
    last = next(value for value in values if not math.isnan(value))
    filled = []
    for value in values:
        last = last if math.isnan(value) else value
        filled.append(round(last, 4))
    return tuple(filled)
