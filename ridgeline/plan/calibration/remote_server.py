"""A server as calibrated from outside: what its clients can know of its times, and no more.

    TTFT(n) = base + by_token · n + by_pair · n²        a prompt of n tokens, nobody else there
    TPOT(b, context) = curve(b) + by_context · b · context       b answers at once

The curve goes through the measured numbers of clients, straight on logarithmic scales. From there,
as in `predict`: with b clients in a closed loop every answer also waits for the others' prompts,
(b - 1) / osl of one per token; that is assumed, and was not measured.

Not to be known from outside, and therefore not guessed: how much of a step is memory, arithmetic
or overhead, the weights' format, the size of the KV cache. So the file answers for this server,
this model and this machine, between what was measured, and nothing else: `plan` and `simulate`,
which ask about other shapes and mixed steps, refuse it. A term that is not told apart from the
scatter of the measurements is named as such (`unknown`) and left at 0; questions which would hang
on it are refused.
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

from ridgeline.errors import BadInput, CannotRun
from ridgeline.plan.calibration.calibration import SERVER, Residual
from ridgeline.plan.calibration.published_efficiency import interval

SERVER_FORMAT = 1  # version of the file that `calibrate --url` writes
BEYOND = 1.25  # questions may go so far beyond what was measured
LEAST_LENGTHS, LEAST_BATCHES = 3, 2
LEAST_ERROR = 0.05  # one afternoon's misfit is not evidence of being closer than this
TELLING = 2.0  # standard errors that a term must be away from 0
_LEAST_SCATTER = 0.02


class PromptSample(msgspec.Struct, frozen=True):
    """A prompt to the idle server: tokens, seconds to the first one of the answer (a median)."""

    tokens: int
    ttft_s: float


class DecodeSample(msgspec.Struct, frozen=True):
    """`batch` answers at once behind `context` tokens each: seconds per token (a median)."""

    batch: int
    context: float
    tpot_s: float


class ServerRuns(msgspec.Struct, frozen=True, kw_only=True):
    """What the file tells beside the fit."""

    server: str
    model: str
    as_of: str
    source: str
    took_s: float
    runs: tuple[str, ...]


class ServerTimes(ServerRuns, frozen=True, kw_only=True):
    """See the head of this file; written and read as JSON. `*_error`: median relative errors to
    expect: TTFT's of the fit, TPOT's of each batch told from its neighbours."""

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
    """Straight on logarithmic scales; beyond the ends as between the two last."""
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
    """The terms that the measurements tell. BadInput where they are too few for any."""
    _require_enough(prompts, decodes)
    unknown = dict(NOT_FROM_OUTSIDE)
    base_s, by_token_s, by_pair_s = _fit_prompts(prompts, unknown)
    by_context_s = _fit_context(decodes, unknown)
    batches, seconds = _curve_of(decodes, by_context_s)
    found = ServerTimes(
        version=SERVER_FORMAT,
        **msgspec.structs.asdict(about),
        base_s=base_s,
        by_token_s=by_token_s,
        by_pair_s=by_pair_s,
        batches=batches,
        curve_s=seconds,
        by_context_s=by_context_s,
        longest_prompt=max(each.tokens for each in prompts),
        deepest_context=max(each.context for each in decodes),
        unknown=unknown,
        ttft_error=0.0,
        tpot_error=0.0,
    )
    residuals = tuple(_residuals(found, prompts, decodes))
    misses = [abs(r.fitted_s / r.measured_s - 1) for r in residuals[: len(prompts)]]
    return msgspec.structs.replace(
        found,
        residuals=residuals,
        ttft_error=max(LEAST_ERROR, median(misses)),
        tpot_error=max(LEAST_ERROR, median(_left_out(decodes, by_context_s))),
    )


NOT_FROM_OUTSIDE = {
    "kv_tokens": "the size of the KV cache shows only when it overflows",
    "roofline": "memory, arithmetic and overhead cannot be told apart from outside",
    "other models": "one model was served; another shape or weight format needs its own runs",
}


def _require_enough(prompts: Sequence[PromptSample], decodes: Sequence[DecodeSample]) -> None:
    lengths, batches = {p.tokens for p in prompts}, {d.batch for d in decodes}
    if len(lengths) < LEAST_LENGTHS:
        raise BadInput(
            "too few lengths of prompts were answered to tell what a token costs",
            value=f"{sorted(lengths)} tokens",
            limit=f">= {LEAST_LENGTHS} lengths",
            fix="give the server a longer context, or the calibration more --budget",
        )
    if len(batches) < LEAST_BATCHES:
        raise BadInput(
            "the server never answered two requests at once: what a batch costs is not known",
            value=f"batches of {sorted(batches)}",
            limit=f">= {LEAST_BATCHES} different ones",
            fix="start it with more than one seat (llama-server: --parallel; vLLM: --max-num-seqs)",
        )


def _fit_prompts(
    prompts: Sequence[PromptSample], unknown: dict[str, str]
) -> tuple[float, float, float]:
    """Relative least squares, no negative terms; the square only where it is told apart."""
    n = np.array([float(p.tokens) for p in prompts])
    seconds = np.array([p.ttft_s for p in prompts])
    columns = [np.ones_like(n), n, n * n]
    if len(prompts) > len(columns) and _telling(columns, seconds)[2]:
        found, _ = nnls(np.stack(columns, 1) / seconds[:, None], np.ones_like(n))
        return float(found[0]), float(found[1]), float(found[2])
    unknown["by_pair_s"] = "attention's growth with the square of a prompt is within the scatter"
    found, _ = nnls(np.stack(columns[:2], 1) / seconds[:, None], np.ones_like(n))
    if not found[1]:
        unknown["by_token_s"] = "longer prompts took no longer than short ones"
    return float(found[0]), float(found[1]), 0.0


def _fit_context(decodes: Sequence[DecodeSample], unknown: dict[str, str]) -> float:
    """Seconds per token of context that a decode step reads, over pairs of equal batches."""
    groups = {d.batch: [e for e in decodes if e.batch == d.batch] for d in decodes}
    pairs = [
        (a, b) for same in groups.values() for a in same for b in same if b.context > 2 * a.context
    ]
    slopes = [(b.tpot_s - a.tpot_s) / (b.batch * (b.context - a.context)) for a, b in pairs]
    rises = [(b.tpot_s - a.tpot_s) / a.tpot_s for a, b in pairs]
    if not slopes or median(rises) < _LEAST_SCATTER:
        unknown["by_context_s"] = "answers behind long contexts were not slower than the scatter"
        return 0.0
    return max(0.0, median(slopes))


def _curve_of(
    decodes: Sequence[DecodeSample], by_context_s: float
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """At every batch: what is left when the context's share is taken off; never below a tenth."""
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


def _left_out(decodes: Sequence[DecodeSample], by_context_s: float) -> list[float]:
    """Relative errors of each batch between others, told by a curve without it."""
    batches, seconds = _curve_of(decodes, by_context_s)
    errors = []
    for i in range(1, len(batches) - 1):
        told = curve(batches[:i] + batches[i + 1 :], seconds[:i] + seconds[i + 1 :], batches[i])
        errors.append(abs(told / seconds[i] - 1))
    return errors or [0.25]


def _telling(columns: Sequence[np.ndarray], seconds: np.ndarray) -> list[bool]:
    """Which terms lie clearly above 0, by the scatter around the fit of all of them."""
    rows = np.stack(columns, 1) / seconds[:, None]
    scale = np.abs(rows).max(axis=0)
    found, *_ = np.linalg.lstsq(rows / scale, np.ones(len(rows)), rcond=None)
    left = 1 - rows / scale @ found
    scatter = max(float(left @ left) / (len(rows) - len(columns)), _LEAST_SCATTER**2 / 4)
    variances = scatter * np.diag(np.linalg.pinv((rows / scale).T @ (rows / scale)))
    return [bool(f > TELLING * math.sqrt(v)) for f, v in zip(found, variances, strict=True)]


def _residuals(
    found: ServerTimes, prompts: Sequence[PromptSample], decodes: Sequence[DecodeSample]
) -> list[Residual]:
    first = [
        Residual(what=f"prompt of {p.tokens}", measured_s=p.ttft_s, fitted_s=found.ttft_s(p.tokens))
        for p in prompts
    ]
    later = [
        Residual(
            what=f"{d.batch} answers behind {d.context:.0f} tokens",
            measured_s=d.tpot_s,
            fitted_s=found.tpot_s(d.batch, d.context),
        )
        for d in decodes
    ]
    return first + later


# ---- answers -----------------------------------------------------------------------------------


def predict_server_times(served: ServerTimes, isl: int, osl: int, batch: int) -> ServerPrediction:
    """A closed loop of `batch` clients. CannotRun for what the calibration cannot know."""
    for name, value in (("isl", isl), ("osl", osl), ("batch", batch)):
        if value < 1:
            raise BadInput(f"{name} must be positive", value=value, limit=">= 1")
    _require_within(served, isl, osl, batch)
    ttft_s, decode_s = served.ttft_s(isl), served.tpot_s(batch, isl + osl / 2)
    prompt_s = ttft_s - served.base_s
    wait_s = (batch - 1) / osl * prompt_s  # every token's for others' prompts, the first's too
    tpot_s = decode_s + wait_s
    ttft_s += decode_s if batch > 1 else 0.0  # the step that is under way when it comes
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
    """Between the measurements there is a line, beyond them a guess."""
    asked = (
        ("prompts", isl, float(served.longest_prompt)),
        ("contexts", isl + osl, max(served.deepest_context, float(served.longest_prompt))),
        ("batches", batch, float(served.batches[-1])),
    )
    for name, value, most in asked:
        if value > BEYOND * most:
            raise CannotRun(
                f"the server was not calibrated with {name} that large",
                value=value,
                limit=f"{BEYOND * most:.0f}",
                fix="ask for less, or calibrate again with a longer context and more seats",
            )


def load_server_times(path: Path) -> ServerTimes:
    """Read a file that `ridgeline calibrate --url` wrote. BadInput says what is wrong with it."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=ServerTimes)
    except (OSError, msgspec.MsgspecError) as error:
        raise BadInput("cannot read the calibration", value=str(path), fix=str(error)) from None
