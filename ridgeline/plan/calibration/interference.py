"""The weather of a machine: how much slower than the fit its steps were, over time.

A shared machine is not the same from one second to the next: a neighbour on the other thread
of a core gives it the arithmetic of half a core for a while, and a client that reads takes
turns with the engine. A median knows nothing of that, and near the end of the capacity a
queue is nothing else.

So a calibration keeps what steps under arrivals really took, as a recording: seconds over the fit's
seconds, in bins of time, for steps that only decode and for those that compute prompts. A simulated
clock plays it from a place that the seed chooses, over and over; each replica has a place of its
own. What lasts long in it, lasts long on the virtual clock: no distribution has to be assumed. What
a fit is off everywhere under load (its steps were measured one kind at a time) is in it too.

It tells the machine as it was for some seconds, which may be its worst minute: so each seed draws
how much of it there is (`InterferenceSampler`). Two things that a recording of seconds cannot tell are drawn
beside it: the machine's mood, which lasts for minutes, from how the calibration's own passes over
the same steps differed; and how far off the fit is for a mix that it was not fitted to, from how
far off it is for single kinds of steps.
Sources of the form: block bootstrap (Künsch 1989), here one block as long as the recording; model
discrepancy as a term of its own in a prediction's interval (Kennedy and O'Hagan 2001).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated

import msgspec
import numpy as np

Shapes = Sequence[tuple[int, int]]
BIN_S = 0.05
LEAST_BINS = 20  # a second
MIDDLE = 0.5
_STEPS = (0.8566748838545029, 0.733891856627126, 0.6287067210378087, 0.5385972572236101)
"""Powers of 1/x with x^5 = x + 1: the additive recurrence for four dimensions (Roberts 2018, "The
unreasonable effectiveness of quasirandom sequences")."""


class LoadedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step under load: when it began, and the seconds until the next one could."""

    at_s: float
    seconds: float
    shapes: tuple[tuple[int, int], ...]
    num_sampled: int


Positive = Annotated[float, msgspec.Meta(gt=0)]
Slowness = Annotated[tuple[Positive, ...], msgspec.Meta(min_length=1)]


class InterferenceTrace(msgspec.Struct, frozen=True, kw_only=True):
    """Slowness (1: as fitted) by bins of `bin_s`: of steps that only decode, and of others.

    `pass_ratios`: of passes over the same steps, seconds over those of the mean one. `misfits`: of
    kinds of steps, measured seconds over fitted ones, of decodes and of prompts.
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
    """A recording that is played from one place on, at one level.

    `level`: from 0, the machine at its best, which is what the fit tells, to 1, as it was recorded
    (a slowness of s is s^level), and nothing else. None: the seed draws it, evenly, since what the
    next minutes are lies somewhere between; and a mood, each replica its own, and misfits, all
    replicas the same: they have one fit. `MIDDLE` is the level of a single best guess.
    """

    def __init__(
        self, weather: InterferenceTrace, seed: int, replica: int, level: float | None = None
    ) -> None:
        rng = np.random.default_rng((seed, replica))
        self._per_s = 1 / weather.bin_s
        self._from = int(rng.integers(len(weather.decode)))
        decode = prompt = 1.0
        if level is None:
            level = _spread(seed, 0, replica)
            mood = _pick(weather.pass_ratios, _spread(seed, 1, replica))
            decode = mood * _pick(weather.decode_errors, _spread(seed, 2))
            prompt = mood * _pick(weather.prompt_errors, _spread(seed, 3))
        self._decode = [float(decode * each**level) for each in weather.decode]
        self._prompt = [float(prompt * each**level) for each in weather.prompt]

    def slowness(self, shapes: Shapes, now_s: float) -> float:
        """Of a step that begins at `now_s`."""
        values = self._prompt if any(new != 1 for new, _ in shapes) else self._decode
        return values[(self._from + int(now_s * self._per_s)) % len(values)]


def _spread(seed: int, which: int, replica: int | None = None) -> float:
    """In [0, 1): four numbers that consecutive seeds spread evenly, together too, so that forty of
    them tell a middle that another forty tell as well. Each replica has an offset of its own."""
    offset = 0.0 if replica is None else np.random.default_rng((which, replica)).uniform()
    return float((seed * _STEPS[which] + offset) % 1.0)


def _pick(values: Sequence[float], share: float) -> float:
    """The value that so many of all are below; 1 where there are none."""
    return sorted(values)[int(share * len(values))] if values else 1.0


def has_prompt(shapes: Shapes) -> bool:
    """Whether a step computes any prompt."""
    return any(new != 1 for new, _ in shapes)


def record_interference(
    windows: Iterable[Sequence[LoadedStep]], fitted_s: Callable[[Shapes, int], float]
) -> InterferenceTrace | None:
    """Windows one after the other; None where too little was seen of either kind of step.

    A bin is the seconds of its steps over the fitted ones; one without steps of a kind is as the
    bin before it.
    """
    decode: list[float] = []
    prompt: list[float] = []
    for steps in windows:
        for values, fresh in ((decode, False), (prompt, True)):
            values += _binned([s for s in steps if has_prompt(s.shapes) == fresh], steps, fitted_s)
    if min(len(decode), len(prompt)) < LEAST_BINS:
        return None
    if any(math.isnan(values[-1]) for values in (decode, prompt)):
        return None
    return InterferenceTrace(bin_s=BIN_S, decode=_carried(decode), prompt=_carried(prompt))


def _binned(
    steps: Sequence[LoadedStep],
    every: Sequence[LoadedStep],
    fitted_s: Callable[[Shapes, int], float],
) -> list[float]:
    """Slowness by bin over the whole window of `every`; nan where there were no such steps."""
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
    """Gaps filled with what was before them; the first one with what comes after."""
    last = next(value for value in values if not math.isnan(value))
    filled = []
    for value in values:
        last = last if math.isnan(value) else value
        filled.append(round(last, 4))
    return tuple(filled)
