"""Fitting a `Calibration` to measured steps: non-linear least squares on relative errors.

Every unknown is positive, so its logarithm is fitted. Three regularisers keep poorly determined
parameters plausible: overheads are pulled towards a typical order of magnitude, each curve towards
a straight line on logarithmic scales, and its slope into [0, 1] (0: a weight costs the same for
more rows; 1: each row costs the same). The loss is robust (soft L1), so single steps with a page
fault or interference do not distort the fit. The overlap exponent p is chosen from a few values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any, Literal

import msgspec
import numpy as np
from scipy.optimize import least_squares

from ridgeline.errors import BadInput
from ridgeline.plan.calibration.calibration import (
    FORMAT,
    AttentionTimes,
    CalibratedWork,
    Calibration,
    MachineMemory,
    Overheads,
    ProductTimes,
    ReaderTimes,
    Residual,
)

KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
MIN_SAMPLES = 12
# Median errors at unseen points (docs/guides/plan.md): smaller residuals do not mean that
# predictions elsewhere are more accurate than this.
MIN_DECODE_ERROR, MIN_PROMPT_ERROR = 0.08, 0.12
OVERLAPS = (2.0, 4.0)
_TERMS = {
    "step_s": (2e-4, 0.02),
    "run_s": (1e-5, 0.02),
    "run_layer_s": (3e-7, 0.05),
    "logit_s": (5e-11, 0.2),
    "begun_s": (1e-4, 0.02),
    "decode_flop_s": (1e-11, 0.05),
    "decode_byte_s": (5e-11, 0.05),
    "prompt_flop_s": (2e-11, 0.02),
    "layer_s plain": (1e-4, 0.02),
    "layer_s packed": (1e-5, 0.02),
    "output_s plain": (3e-10, 0.05),
    "output_s int8": (1e-9, 0.3),  # 0.5 to 2 ns where operators are timed one by one
    "output_s int4": (1e-9, 0.3),
    "output_s bfloat16": (1e-9, 0.3),
}  # typical seconds per unit of work on a server core; strength of the pull towards that value
_WORK = ("logit_s", "decode_flop_s", "decode_byte_s", "prompt_flop_s", "output_s")
"""Terms of reading and multiplying, typical of the device's speed; the others are of the host."""
_NUM_OVERHEADS, _NUM_ATTENDING = 5, 3
_DECODE = slice(_NUM_OVERHEADS, _NUM_OVERHEADS + 2)  # the terms of decode attention
_PEAK_SHARE = 0.95  # margin, because the measured peak may be slightly too low
_KINDS = ("plain", "packed")
_PACKED = ("int8", "int4", "bfloat16")  # Ridgeline's fused layer kernels; other formats use torch
_BEND, _SLOPE, _SHARE = 0.05, 1.0, 1.0
_SHARE_S = 0.95  # measured for one row: 0.9 to 1.04 by operator (docs/concepts/kernels.md)


class FitSample(msgspec.Struct, frozen=True, kw_only=True):
    """One measured kind of step: its work and median seconds. `prompt`: it contains no decode."""

    what: str
    work: CalibratedWork
    seconds: float
    prompt: bool


class CalibrationInputs(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a calibration that are not fitted. `kernel_ops_s`: by weight format, the peak
    rate of the instructions that its kernel uses (2 operations per weight and row). `work_speed`:
    how many times as fast as a server core the device reads and multiplies."""

    device: str
    as_of: str
    source: str
    took_s: float
    runs: tuple[str, ...]
    peak_flops: dict[str, float]
    bandwidth_bytes_s: dict[str, float]
    memory: MachineMemory
    dense_dtype: str
    first_s: float
    reading: ReaderTimes = ReaderTimes(token_s=0.0, first_s=0.0)
    kernel_ops_s: dict[str, float] = {}
    device_kind: Literal["cpu", "gpu"] = "cpu"
    work_speed: float = 1.0


def empty_calibration(facts: CalibrationInputs, formats: Sequence[str]) -> Calibration:
    """A calibration with placeholder times, used to count work before fitting."""
    unknown = ProductTimes(
        rows=(1,), weight_s=(1.0,), row_s=0.0, bandwidth=1.0, layer_s=0.0, output_s=0.0
    )
    return _calibration(facts, [1.0] * len(_TERMS), dict.fromkeys(formats, unknown), 2.0)


def fit_samples(samples: Sequence[FitSample], facts: CalibrationInputs) -> Calibration:
    """Fit a calibration to the samples. Raises BadInput if there are too few."""
    if len(samples) < MIN_SAMPLES:
        raise BadInput("too few steps to calibrate with", value=len(samples), limit=MIN_SAMPLES)
    best = min((_Fit(samples, facts, p) for p in OVERLAPS), key=lambda fit: fit.cost)
    fitted = best.calibration()
    residuals = tuple(
        Residual(what=s.what, measured_s=s.seconds, fitted_s=fitted_seconds(fitted, s.work))
        for s in samples
    )
    return msgspec.structs.replace(
        fitted,
        residuals=residuals,
        tpot_error=_median_error(residuals, samples, prompt=False),
        ttft_error=_median_error(residuals, samples, prompt=True),
    )


def fitted_seconds(calibration: Calibration, work: CalibratedWork) -> float:
    """Seconds of a step according to a calibration."""
    priced = calibration.priced(work)
    return priced.busy_s + priced.overhead_s


def _median_error(
    residuals: Sequence[Residual], samples: Sequence[FitSample], *, prompt: bool
) -> float:
    errors = [
        abs(r.fitted_s / r.measured_s - 1)
        for r, s in zip(residuals, samples, strict=True)
        if s.prompt == prompt
    ]
    smallest = MIN_PROMPT_ERROR if prompt else MIN_DECODE_ERROR
    return max(smallest, median(errors)) if errors else 0.25


class _Fit:
    """One least-squares fit for a given overlap exponent.

    Unknowns x, all logarithms: the terms, then a bandwidth share and a curve for each format.
    `Calibration.priced` does the same arithmetic for a single step.
    """

    def __init__(
        self, samples: Sequence[FitSample], facts: CalibrationInputs, overlap: float
    ) -> None:
        self._facts, self._overlap = facts, overlap
        self._log_seconds = np.log([sample.seconds for sample in samples])
        self._terms = np.array([_terms_of(s.work) for s in samples])
        self.knots = _knots_of(samples)
        self._first: dict[str, int] = {}
        at = len(_TERMS)
        for name, rows in self.knots.items():
            self._first[name] = at
            at += 1 + len(rows)
        self._parts(samples, at)
        self._pulled = np.log(_typical_terms(facts.work_speed))
        self._pull = np.array([pull for _, pull in _TERMS.values()])
        start = self._start(samples, at)
        solution = least_squares(
            self._residuals, start, jac=self._jacobian, loss="soft_l1", f_scale=0.1, max_nfev=150
        )
        self.x, self.cost = solution.x, float(solution.cost)

    def _parts(self, samples: Sequence[FitSample], num: int) -> None:
        """Collect all matrix products: log seconds per weight are `_mix` @ x + `_extra`."""
        rows: list[tuple[int, int, float, float, float]] = []
        mixes, extras = [], []
        counting = empty_calibration(self._facts, ())
        for i, sample in enumerate(samples):
            rate = counting.bandwidth(sample.work.weight_set_bytes)
            for part in sample.work.products:
                first = self._first[part.format]
                at_peak_s = part.weights * part.rows * self._row_s(part.format)
                rows.append((i, first, part.weights, part.nbytes / rate, at_peak_s))
                mix = np.zeros(num)
                low, high, share, extra = _between(self.knots[part.format], part.rows)
                mix[first + 1 + low] += 1 - share
                mix[first + 1 + high] += share
                mixes.append(mix)
                extras.append(extra)
        self._of, self._share = (np.array([row[k] for row in rows]) for k in (0, 1))
        self._weights, self._memory_s, self._least_s = (
            np.array([row[k] for row in rows]) for k in (2, 3, 4)
        )
        self._mix, self._extra = np.array(mixes), np.array(extras)

    def _row_s(self, name: str) -> float:
        """Seconds per weight and row at the arithmetic peak; 0 if no peak is known."""
        peak = self._facts.kernel_ops_s.get(name)
        return 0.0 if peak is None else _PEAK_SHARE * 2 / peak

    def _start(self, samples: Sequence[FitSample], num: int) -> Any:
        """Initial values; curves start from the best measured time per weight and row."""
        x = np.zeros(num)
        x[: len(_TERMS)] = self._pulled
        for name, rows in self.knots.items():
            first = self._first[name]
            x[first] = math.log(_SHARE_S)
            per_row = _per_row(samples, name)
            x[first + 1 : first + 1 + len(rows)] = [math.log(per_row * row) for row in rows]
        return x

    def _residuals(self, x: Any) -> Any:
        """Log relative errors of the samples, followed by the regularisers."""
        total_s, _, _, _ = self._times(x)
        pulls = [self._pull * (x[: len(_TERMS)] - self._pulled)]
        for name, rows in self.knots.items():
            first = self._first[name]
            pulls.append(_SHARE * (x[first : first + 1] - math.log(_SHARE_S)))
            slopes = np.diff(x[first + 1 : first + 1 + len(rows)]) / np.diff(np.log(rows))
            pulls.append(_SLOPE * (np.minimum(slopes, 0) + np.maximum(slopes - 1, 0)))
            pulls.append(_BEND * np.diff(slopes))
        return np.concatenate([np.log(total_s) - self._log_seconds, *pulls])

    def _times(self, x: Any) -> tuple[Any, Any, Any, Any]:
        """Seconds of the samples, and of each product: memory, arithmetic, overlapped."""
        p = self._overlap
        memory_s = self._memory_s / np.exp(x[self._share])
        above_s = self._weights * np.exp(self._mix @ x + self._extra)
        products_s = (memory_s**p + (self._least_s + above_s) ** p) ** (1 / p)
        attends = self._attends(x)
        total_s = self._terms @ np.exp(x[: len(_TERMS)]) - attends.sum(axis=1)
        total_s += self._joined(attends)
        np.add.at(total_s, self._of, products_s)
        return total_s, memory_s, above_s, products_s

    def _attends(self, x: Any) -> Any:
        """[samples, 2] seconds of decode attention: arithmetic, and memory."""
        return self._terms[:, _DECODE] * np.exp(x[_DECODE])

    def _joined(self, parts_s: Any) -> Any:
        return (parts_s**self._overlap).sum(axis=1) ** (1 / self._overlap)

    def _jacobian(self, x: Any) -> Any:
        """Derivatives of `_residuals`."""
        total_s, memory_s, above_s, products_s = self._times(x)
        p, num = self._overlap, len(_TERMS)
        by_memory = products_s ** (1 - p) * memory_s**p
        by_compute = products_s ** (1 - p) * (self._least_s + above_s) ** (p - 1) * above_s
        steps = np.zeros((len(total_s), len(x)))
        steps[:, :num] = self._terms * np.exp(x[:num])
        attends = self._attends(x)
        whole = np.maximum(self._joined(attends), 1e-30)[:, None]
        steps[:, _DECODE] = attends**p * whole ** (1 - p)
        np.add.at(steps, self._of, by_compute[:, None] * self._mix)
        np.add.at(steps, (self._of, self._share), -by_memory)
        pulls = [np.pad(np.diag(self._pull), ((0, 0), (0, len(x) - num)))]
        for name, rows in self.knots.items():
            first, many = self._first[name], len(rows)
            share = np.zeros((1, len(x)))
            share[0, first] = _SHARE
            curve = np.zeros((many, len(x)))
            curve[np.arange(many), first + 1 + np.arange(many)] = 1.0
            slope_rows = np.diff(curve, axis=0) / np.diff(np.log(rows))[:, None]
            slopes = slope_rows @ x
            outside = ((slopes < 0) | (slopes > 1)).astype(float)
            bends = np.diff(slope_rows, axis=0)
            pulls += [share, _SLOPE * outside[:, None] * slope_rows, _BEND * bends]
        return np.concatenate([steps / total_s[:, None], *pulls])

    def calibration(self) -> Calibration:
        values = np.exp(self.x).tolist()
        linears = {
            name: ProductTimes(
                rows=rows,
                weight_s=tuple(values[self._first[name] + 1 : self._first[name] + 1 + len(rows)]),
                row_s=self._row_s(name),
                bandwidth=values[self._first[name]],
                layer_s=0.0,
                output_s=0.0,
            )
            for name, rows in self.knots.items()
        }
        return _calibration(self._facts, values[: len(_TERMS)], linears, self._overlap)


def _typical_terms(work_speed: float) -> list[float]:
    return [
        term / work_speed if name.startswith(_WORK) else term for name, (term, _) in _TERMS.items()
    ]


def _terms_of(work: CalibratedWork) -> tuple[float, ...]:
    """The step's units of work, in the order of `_TERMS`."""
    plain, packed = (float(_kind(work.layer_format) == kind) for kind in _KINDS)
    return (
        1.0,
        work.num_runs,
        work.num_runs * work.num_layers,
        work.num_logits,
        work.num_begun,
        work.decode_flops,
        work.decode_kv_bytes,
        work.prompt_flops,
        work.num_layers * plain,
        work.num_layers * packed,
        work.num_outputs * plain,
        *[work.num_outputs * (work.layer_format == name) for name in _PACKED],
    )


def _kind(name: str) -> str:
    """Formats with similar kernels share the overhead per layer."""
    return _KINDS[name in _PACKED]


def _between(knots: tuple[int, ...], rows: float) -> tuple[int, int, float, float]:
    """(knot below, knot above, weight of the knot above, log of rows beyond the last knot)."""
    last = len(knots) - 1
    if rows >= knots[-1]:
        return last, last, 0.0, math.log(rows / knots[-1])
    if rows <= knots[0]:
        return 0, 0, 0.0, 0.0
    above = next(i for i, knot in enumerate(knots) if knot > rows)
    low, high = knots[above - 1], knots[above]
    return above - 1, above, math.log(rows / low) / math.log(high / low), 0.0


def _knots_of(samples: Sequence[FitSample]) -> dict[str, tuple[int, ...]]:
    """By format, the knots that have a measurement nearby."""
    measured: dict[str, set[int]] = {}
    for sample in samples:
        for part in sample.work.products:
            near = min(KNOTS, key=lambda knot: abs(math.log(knot / max(part.rows, 1.0))))
            measured.setdefault(part.format, set()).add(near)
    return {name: tuple(sorted(rows)) for name, rows in sorted(measured.items())}


def _per_row(samples: Sequence[FitSample], name: str) -> float:
    """Best seconds per weight and row of a format, charging whole steps to its products."""
    return min(
        s.seconds / (sum(part.weights for part in s.work.products) * part.rows)
        for s in samples
        for part in s.work.products
        if part.format == name
    )


def _calibration(
    facts: CalibrationInputs,
    terms: Sequence[float],
    linears: dict[str, ProductTimes],
    overlap: float,
) -> Calibration:
    named = dict(zip(_TERMS, terms, strict=True))
    names, end = list(_TERMS), _NUM_OVERHEADS + _NUM_ATTENDING
    overheads = {name: named[name] for name in names[:_NUM_OVERHEADS]}
    attending = {name: named[name] for name in names[_NUM_OVERHEADS:end]}
    linears = {
        name: msgspec.structs.replace(
            linear,
            layer_s=named[f"layer_s {_kind(name)}"],
            output_s=named[f"output_s {name if name in _PACKED else 'plain'}"],
        )
        for name, linear in linears.items()
    }
    return Calibration(
        version=FORMAT,
        device=facts.device,
        as_of=facts.as_of,
        source=facts.source,
        took_s=facts.took_s,
        runs=facts.runs,
        peak_flops=facts.peak_flops,
        bandwidth_bytes_s=facts.bandwidth_bytes_s,
        overlap=overlap,
        linears=linears,
        attention=AttentionTimes(**attending),
        overheads=Overheads(
            **overheads,
            first_s=facts.first_s,
            reader_s=facts.reading.token_s,
            reader_first_s=facts.reading.first_s,
        ),
        memory=facts.memory,
        device_kind=facts.device_kind,
        tpot_error=0.0,
        ttft_error=0.0,
        dense_dtype=facts.dense_dtype,
    )
