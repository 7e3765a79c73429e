"""The sampler for any device: all rows of a step at once, in vector operations.

What. Greedy rows without other requirements cost one argmax for all of them. The others pass
through the sampler stages together, each stage touching only the rows that need it. Uniform numbers
are computed on the host: a few integer operations per row, and no device generator to keep in step.

Invariant. Token for token the choice of `reference.py`, up to float32 rounding at the boundary of a
draw.
Five numbers a row go to the device in one copy, and the tokens are all that is waited for, unless
top-p keeps more tokens than were examined first: these tell, and the step draws again.
When it loses. Nothing here is fused, so a large vocabulary on a GPU takes about ten small kernels.

Shapes: S rows, G greedy rows, R rows drawn at random, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.engine.sampling.base import Choice
from ridgeline.engine.sampling.logits_processors import apply_edits, is_plain
from ridgeline.engine.sampling.logprobs import token_logprobs
from ridgeline.engine.sampling.topk_topp import (
    Limits,
    head_width,
    limits_of,
    restrict,
    restrict_once,
)
from ridgeline.engine.sampling.uniform import uniform
from ridgeline.engine.scheduler.plan import NoTokenError, SamplePoint
from ridgeline.records import TokenLogprobs

_NO_TOKEN, _UNSETTLED = -1, -2
MIN_TEMPERATURE = 1e-30  # smallest float32 divisor; sampling is greedy long before


@dataclass(frozen=True, slots=True)
class SamplerKernels:
    """The argmax of rows, and a random draw per row. Both raise ArithmeticError."""

    greedy: Callable[[Tensor], list[int]]
    draw: Callable[[Tensor, Sequence[SamplePoint]], list[int]]
    both: Callable[[Tensor, Sequence[SamplePoint]], list[int]] | None = None
    """Greedy and drawn rows together; None: each kind is taken out and passed to its kernel."""


def sample(logits_SV: Tensor, points: Sequence[SamplePoint]) -> list[Choice]:
    """Choose one token per row of logits_SV [S, V]."""
    return sample_with(KERNELS, logits_SV, points)


def sample_with(
    kernels: SamplerKernels, logits_SV: Tensor, points: Sequence[SamplePoint]
) -> list[Choice]:
    """The stages that all samplers share, around their kernels."""
    if all(map(_needs_only_argmax, points)):
        return [(token, None) for token in kernels.greedy(logits_SV)]
    edited_SV = apply_edits(logits_SV.float(), points)
    if kernels.both is not None:
        tokens = kernels.both(edited_SV, points)
    else:
        tokens = _tokens(kernels, edited_SV, points)
    return list(zip(tokens, _logprobs(logits_SV, points, tokens), strict=True))


def _needs_only_argmax(point: SamplePoint) -> bool:
    sampling = point.sampling
    return point.is_argmax or (sampling.greedy and sampling.logprobs is None and is_plain(point))


def _tokens(kernels: SamplerKernels, logits_SV: Tensor, points: Sequence[SamplePoint]) -> list[int]:
    greedy = [row for row, point in enumerate(points) if point.sampling.greedy]
    drawn = [row for row, point in enumerate(points) if not point.sampling.greedy]
    chosen: dict[int, int] = {}
    if greedy:
        chosen |= zip(greedy, kernels.greedy(_rows(logits_SV, greedy)), strict=True)
    if drawn:
        tokens = kernels.draw(_rows(logits_SV, drawn), [points[row] for row in drawn])
        chosen |= zip(drawn, tokens, strict=True)
    return [chosen[row] for row in range(len(points))]


def _rows(logits_SV: Tensor, rows: Sequence[int]) -> Tensor:
    if len(rows) == len(logits_SV):
        return logits_SV
    return logits_SV[torch.tensor(rows, device=logits_SV.device)]


def _greedy(logits_GV: Tensor) -> list[int]:
    # Of equal maxima, `max` returns the first: the lowest token id.
    largest_G, token_G = logits_GV.max(1)
    return _checked(token_G.where(largest_G.isfinite(), _NO_TOKEN).tolist())


def _checked(tokens: list[int]) -> list[int]:
    if _NO_TOKEN in tokens:
        raise no_token_error(tokens.index(_NO_TOKEN))
    return tokens


def probabilities(logits_RV: Tensor, points: Sequence[SamplePoint]) -> Tensor:
    """The distribution each row is drawn from, float64 [R, V].

    All edits, the temperature and top-k/top-p/min-p are applied. No row may be greedy.
    """
    weight_RV = _weights(apply_edits(logits_RV.float(), points), points).double()
    return weight_RV / weight_RV.sum(1, keepdim=True)


def _weights(logits_RV: Tensor, points: Sequence[SamplePoint]) -> Tensor:
    """Weights proportional to the probabilities; 0 for excluded tokens."""
    largest_R1 = logits_RV.max(1, keepdim=True).values
    _check_finite(largest_R1)
    temperatures = [max(point.sampling.temperature, MIN_TEMPERATURE) for point in points]
    temperature_R1 = torch.tensor(temperatures, device=logits_RV.device).unsqueeze(1)
    scaled_RV = (logits_RV - largest_R1) / temperature_R1
    return restrict(scaled_RV, [point.sampling for point in points]).exp()


def _choose(logits_SV: Tensor, points: Sequence[SamplePoint]) -> list[int]:
    """The tokens of greedy and of drawn rows: one copy to the device, one wait."""
    if all(point.sampling.greedy for point in points):
        return _greedy(logits_SV)
    num_tokens = logits_SV.shape[1]
    rows = [_numbers_of(point, num_tokens) for point in points]
    width = head_width([row[2:] for row in rows], num_tokens)
    packed_S5 = torch.tensor(rows, dtype=torch.float64)
    if logits_SV.is_cuda:
        packed_S5 = packed_S5.pin_memory().to(logits_SV.device, non_blocking=True)
    tokens: list[int] = _tokens_of(logits_SV, packed_S5, width).tolist()
    if _UNSETTLED in tokens:
        tokens = _tokens_of(logits_SV, packed_S5, num_tokens).tolist()
    return _checked(tokens)


def _numbers_of(point: SamplePoint, num_tokens: int) -> tuple[float, float, float, int, float]:
    """Temperature (0: greedy), the random number, and the row's limits."""
    sampling = point.sampling
    if sampling.greedy:
        return 0.0, 0.0, -math.inf, num_tokens, 1.0
    temperature = max(sampling.temperature, MIN_TEMPERATURE)
    return temperature, uniform(point.seed, point.index), *limits_of(sampling, num_tokens)


def _tokens_of(logits_SV: Tensor, packed_S5: Tensor, width: int) -> Tensor:
    """Tokens [S]; `_NO_TOKEN` where a row has none, `_UNSETTLED` where `width` was too small."""
    temperature_S1, number_S1, floor_S1, k_S1, p_S1 = packed_S5.split(1, dim=1)
    largest_S1, first_S1 = logits_SV.max(1, keepdim=True)
    is_greedy_S1 = temperature_S1 == 0
    divisor_S1 = torch.where(is_greedy_S1, 1.0, temperature_S1).float()
    limits = Limits(floor_S1.float(), k_S1.long(), p_S1, width)
    kept_SV, settled_S = restrict_once((logits_SV - largest_S1) / divisor_S1, limits)
    cumulative_SV = kept_SV.exp().cumsum(1, dtype=torch.float64)
    target_S1 = number_S1 * cumulative_SV[:, -1:]
    drawn_S1 = torch.searchsorted(cumulative_SV, target_S1, right=True)
    token_S1 = torch.where(is_greedy_S1, first_S1, drawn_S1)
    token_S1 = token_S1.where(settled_S.unsqueeze(1), _UNSETTLED)
    return token_S1.where(largest_S1.isfinite(), _NO_TOKEN).flatten()


def _check_finite(largest_S: Tensor) -> None:
    finite_S = largest_S.flatten().isfinite().tolist()
    if not all(finite_S):
        raise no_token_error(finite_S.index(False))


def no_token_error(row: int) -> NoTokenError:
    """The error for a row whose largest logit is not finite."""
    return NoTokenError(
        f"row {row}: no token can be chosen from these logits: every token is forbidden, or the "
        "model computed NaN (as a damaged checkpoint does)"
    )


def _logprobs(
    logits_SV: Tensor, points: Sequence[SamplePoint], tokens: Sequence[int]
) -> list[TokenLogprobs | None]:
    rows = [row for row, point in enumerate(points) if point.sampling.logprobs is not None]
    if not rows:
        return [None] * len(points)
    largest_k = max(points[row].sampling.logprobs or 0 for row in rows)
    logprobs = token_logprobs(_rows(logits_SV, rows), [tokens[row] for row in rows], largest_k)
    by_row = dict(zip(rows, logprobs, strict=True))
    for row in rows:
        if ids := points[row].sampling.logprob_token_ids:
            by_row[row] = _of_tokens(logits_SV[row], by_row[row], ids)
    return [
        by_row[row]
        if point.sampling.logprob_token_ids and row in by_row
        else _top(by_row.get(row), point.sampling.logprobs)
        for row, point in enumerate(points)
    ]


def _of_tokens(logits_V: Tensor, own: TokenLogprobs, ids: tuple[int, ...]) -> TokenLogprobs:
    """The log-probabilities of the tokens `ids` in place of the largest."""
    shift = own.logprob - float(logits_V[own.token])
    top = tuple((token, float(logits_V[token]) + shift) for token in ids)
    return TokenLogprobs(own.token, own.logprob, own.rank, top)


def _top(logprobs: TokenLogprobs | None, k: int | None) -> TokenLogprobs | None:
    if logprobs is None or len(logprobs.top) == k:
        return logprobs
    return TokenLogprobs(logprobs.token, logprobs.logprob, logprobs.rank, logprobs.top[:k])


KERNELS = SamplerKernels(_greedy, _choose, _choose)
