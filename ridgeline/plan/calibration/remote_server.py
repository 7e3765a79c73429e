"""The latency model of a remote server, fitted to measurements made by its clients.

    TTFT(n) = base + by_token · n + by_pair · n²        a prompt of n tokens, on an idle server
    TPOT(b, context) = curve(b) + by_context · b · context       b answers at once

The curve interpolates the measured batch sizes on log-log scales. As in `predict`, with b clients
in a closed loop each answer also waits for the others' prompts, (b - 1) / osl of a prompt per
token; this is an assumption and is not measured.

A client cannot observe how a step divides into memory, arithmetic and overhead, nor the weight
format or the size of the KV cache, so the model does not contain them. It is valid for this server,
model and machine within the measured range; `plan` and `simulate`, which need other shapes and
mixed steps, reject the file. A term that is not significant compared with the scatter of the
measurements is listed in `unknown` and set to 0.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
from scipy.optimize import nnls

from ridgeline.errors import DECODE_ERRORS, BadInput, CannotRun
from ridgeline.plan.calibration.calibration import SERVER, Residual
from ridgeline.plan.calibration.published_efficiency import interval

SERVER_FORMAT = 1  # version of the file that `calibrate --url` writes
EXTRAPOLATION = 1.25  # predictions may exceed the measured range by this factor
MIN_LENGTHS, MIN_BATCHES = 3, 2
MIN_ERROR = 0.05  # smaller residuals in one session do not justify a narrower interval
SIGNIFICANT = 2.0  # a term must exceed this many standard errors
_MIN_SCATTER = 0.02


class PromptSample(msgspec.Struct, frozen=True):
    """A prompt sent to the idle server: its tokens, and the median seconds to the first token."""

    tokens: int
    ttft_s: float


class DecodeSample(msgspec.Struct, frozen=True):
    """`batch` concurrent answers after `context` tokens each: median seconds per token."""

    batch: int
    context: float
    tpot_s: float


class ServerRuns(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a server calibration that are not fitted."""

    server: str
    model: str
    as_of: str
    source: str
    took_s: float
    runs: tuple[str, ...]


class ServerTimes(ServerRuns, frozen=True, kw_only=True):
    """The fitted latency model of a server; the content of a `calibrate --url` file.

    `ttft_error`: expected median relative error, from the residuals. `tpot_error`: from predicting
    each batch size by interpolating its neighbours.
    """

    kind: str = SERVER
    version: int
    base_s: float
    by_token_s: float
    by_pair_s: float
    batches: tuple[int, ...]
    curve_s: tuple[float, ...]
    by_context_s: float
    longest_prompt: int
    deepest_context: float
    unknown: dict[str, str]
    ttft_error: float
    tpot_error: float
    residuals: tuple[Residual, ...] = ()

    def ttft_s(self, tokens: float) -> float:
        return self.base_s + self.by_token_s * tokens + self.by_pair_s * tokens * tokens

    def tpot_s(self, batch: float, context: float) -> float:
        return curve(self.batches, self.curve_s, batch) + self.by_context_s * batch * context


class ServerPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """A prediction for a server; milliseconds, tokens per second, 80 % intervals."""

    ttft_ms: float
    tpot_ms: float
    decode_ms: float
    output_tok_s: float
    interval: dict[str, tuple[float, float]]


def curve(batches: Sequence[int], seconds: Sequence[float], batch: float) -> float:
    """Log-log interpolation; beyond the ends, the slope of the nearest segment."""
    if len(batches) == 1:
        return seconds[0]
    above = min(max(bisect_right(batches, batch), 1), len(batches) - 1)
    low, high = batches[above - 1], batches[above]
    share = math.log(batch / low) / math.log(high / low)
    return float(seconds[above - 1] * (seconds[above] / seconds[above - 1]) ** share)


# ---- the fit -----------------------------------------------------------------------------------


def fit_server_times(
    prompts: Sequence[PromptSample], decodes: Sequence[DecodeSample], about: ServerRuns
) -> ServerTimes:
    """Fit the terms that the measurements determine. Raises BadInput if there are too few."""
    _require_enough(prompts, decodes)
    unknown = dict(UNOBSERVABLE)
    base_s, by_token_s, by_pair_s = _fit_prompts(prompts, unknown)
    by_context_s = _fit_context(decodes, unknown)
    batches, seconds = _curve_of(decodes, by_context_s)
    fitted = ServerTimes(
        version=SERVER_FORMAT,
        **msgspec.structs.asdict(about),
        base_s=base_s,
        by_token_s=by_token_s,
        by_pair_s=by_pair_s,
        batches=batches,
        curve_s=seconds,
        by_context_s=by_context_s,
        longest_prompt=max(sample.tokens for sample in prompts),
        deepest_context=max(sample.context for sample in decodes),
        unknown=unknown,
        ttft_error=0.0,
        tpot_error=0.0,
    )
    residuals = tuple(_residuals(fitted, prompts, decodes))
    errors = [abs(r.fitted_s / r.measured_s - 1) for r in residuals[: len(prompts)]]
    return msgspec.structs.replace(
        fitted,
        residuals=residuals,
        ttft_error=max(MIN_ERROR, median(errors)),
        tpot_error=max(MIN_ERROR, median(_interpolation_errors(decodes, by_context_s))),
    )


UNOBSERVABLE = {
    "kv_tokens": "clients cannot observe the size of the KV cache",
    "roofline": "clients cannot separate memory, arithmetic and overhead",
    "other models": "only the served model was measured; other shapes or formats need their own "
    "runs",
}


def _require_enough(prompts: Sequence[PromptSample], decodes: Sequence[DecodeSample]) -> None:
    lengths, batches = {p.tokens for p in prompts}, {d.batch for d in decodes}
    if len(lengths) < MIN_LENGTHS:
        raise BadInput(
            "too few prompt lengths were answered to fit the cost per token",
            value=f"{sorted(lengths)} tokens",
            limit=f">= {MIN_LENGTHS} lengths",
            fix="give the server a longer context, or the calibration more --budget",
        )
    if len(batches) < MIN_BATCHES:
        raise BadInput(
            "the server never answered two requests at once, so the cost of a batch is unknown",
            value=f"batches of {sorted(batches)}",
            limit=f">= {MIN_BATCHES} batch sizes",
            fix="start it with more than one slot (llama-server: --parallel; vLLM: --max-num-seqs)",
        )


def _fit_prompts(
    prompts: Sequence[PromptSample], unknown: dict[str, str]
) -> tuple[float, float, float]:
    """Non-negative least squares on relative errors; the quadratic term only if significant."""
    n = np.array([float(p.tokens) for p in prompts])
    seconds = np.array([p.ttft_s for p in prompts])
    columns = [np.ones_like(n), n, n * n]
    if len(prompts) > len(columns) and _significant(columns, seconds)[2]:
        terms, _ = nnls(np.stack(columns, 1) / seconds[:, None], np.ones_like(n))
        return float(terms[0]), float(terms[1]), float(terms[2])
    unknown["by_pair_s"] = "the quadratic growth of attention is within the scatter"
    terms, _ = nnls(np.stack(columns[:2], 1) / seconds[:, None], np.ones_like(n))
    if not terms[1]:
        unknown["by_token_s"] = "long prompts took no longer than short ones"
    return float(terms[0]), float(terms[1]), 0.0


def _fit_context(decodes: Sequence[DecodeSample], unknown: dict[str, str]) -> float:
    """Seconds per context token read by a decode step, from pairs with equal batch sizes."""
    groups = {d.batch: [e for e in decodes if e.batch == d.batch] for d in decodes}
    pairs = [
        (a, b) for same in groups.values() for a in same for b in same if b.context > 2 * a.context
    ]
    slopes = [(b.tpot_s - a.tpot_s) / (b.batch * (b.context - a.context)) for a, b in pairs]
    rises = [(b.tpot_s - a.tpot_s) / a.tpot_s for a, b in pairs]
    if not slopes or median(rises) < _MIN_SCATTER:
        unknown["by_context_s"] = "the slowdown of answers with long contexts is within the scatter"
        return 0.0
    return max(0.0, median(slopes))


def _curve_of(
    decodes: Sequence[DecodeSample], by_context_s: float
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Median seconds by batch size without the context's share, at least a tenth of the total."""
    batches = sorted({d.batch for d in decodes})
    seconds = [
        median(
            max(d.tpot_s - by_context_s * d.batch * d.context, 0.1 * d.tpot_s)
            for d in decodes
            if d.batch == batch
        )
        for batch in batches
    ]
    return tuple(batches), tuple(seconds)


def _interpolation_errors(decodes: Sequence[DecodeSample], by_context_s: float) -> list[float]:
    """Relative error of each inner batch size when interpolated from the others."""
    batches, seconds = _curve_of(decodes, by_context_s)
    errors = []
    for i in range(1, len(batches) - 1):
        other_s = seconds[:i] + seconds[i + 1 :]
        interpolated_s = curve(batches[:i] + batches[i + 1 :], other_s, batches[i])
        errors.append(abs(interpolated_s / seconds[i] - 1))
    return errors or [0.25]


def _significant(columns: Sequence[np.ndarray], seconds: np.ndarray) -> list[bool]:
    """Which terms exceed 0 significantly, given the scatter around the full fit."""
    rows = np.stack(columns, 1) / seconds[:, None]
    scale = np.abs(rows).max(axis=0)
    terms, *_ = np.linalg.lstsq(rows / scale, np.ones(len(rows)), rcond=None)
    left = 1 - rows / scale @ terms
    scatter = max(float(left @ left) / (len(rows) - len(columns)), _MIN_SCATTER**2 / 4)
    variances = scatter * np.diag(np.linalg.pinv((rows / scale).T @ (rows / scale)))
    return [bool(t > SIGNIFICANT * math.sqrt(v)) for t, v in zip(terms, variances, strict=True)]


def _residuals(
    fitted: ServerTimes, prompts: Sequence[PromptSample], decodes: Sequence[DecodeSample]
) -> list[Residual]:
    first = [
        Residual(
            what=f"prompt of {p.tokens}", measured_s=p.ttft_s, fitted_s=fitted.ttft_s(p.tokens)
        )
        for p in prompts
    ]
    later = [
        Residual(
            what=f"{d.batch} answers after {d.context:.0f} tokens",
            measured_s=d.tpot_s,
            fitted_s=fitted.tpot_s(d.batch, d.context),
        )
        for d in decodes
    ]
    return first + later


# ---- predictions -------------------------------------------------------------------------------


def predict_server_times(served: ServerTimes, isl: int, osl: int, batch: int) -> ServerPrediction:
    """Predict a closed loop of `batch` clients.

    Raises CannotRun for lengths or batches beyond the calibrated range.
    """
    for name, value in (("isl", isl), ("osl", osl), ("batch", batch)):
        if value < 1:
            raise BadInput(f"{name} must be positive", value=value, limit=">= 1")
    _require_within(served, isl, osl, batch)
    ttft_s, decode_s = served.ttft_s(isl), served.tpot_s(batch, isl + osl / 2)
    prompt_s = ttft_s - served.base_s
    wait_s = (batch - 1) / osl * prompt_s  # per token, for the other clients' prompts
    tpot_s = decode_s + wait_s
    ttft_s += decode_s if batch > 1 else 0.0  # the step in progress on arrival
    rate = batch * osl / (ttft_s + wait_s + (osl - 1) * tpot_s)
    return ServerPrediction(
        ttft_ms=1000 * ttft_s,
        tpot_ms=1000 * tpot_s,
        decode_ms=1000 * decode_s,
        output_tok_s=rate,
        interval={
            "ttft_ms": interval(1000 * ttft_s, served.ttft_error),
            "tpot_ms": interval(1000 * tpot_s, served.tpot_error),
            "output_tok_s": interval(rate, served.tpot_error),
        },
    )


def _require_within(served: ServerTimes, isl: int, osl: int, batch: int) -> None:
    measured = (
        ("prompts", isl, float(served.longest_prompt)),
        ("contexts", isl + osl, max(served.deepest_context, float(served.longest_prompt))),
        ("batches", batch, float(served.batches[-1])),
    )
    for name, value, largest in measured:
        if value > EXTRAPOLATION * largest:
            raise CannotRun(
                f"the server was not calibrated with {name} that large",
                value=value,
                limit=f"{EXTRAPOLATION * largest:.0f}",
                fix="reduce it, or calibrate a server with a longer context and more slots",
            )


def load_server_times(path: Path) -> ServerTimes:
    """Read a file written by `ridgeline calibrate --url`. Raises BadInput if it is malformed."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=ServerTimes)
    except (OSError, *DECODE_ERRORS) as error:
        raise BadInput("cannot read the calibration", value=str(path), fix=str(error)) from None
