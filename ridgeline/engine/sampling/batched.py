"""The sampler of every device: every row of a step at once, in vector operations.

What: rows that are greedy and ask for nothing else cost one argmax for all of them. The others go
through the stages of `base.py` together, each stage touching only the rows that asked for it. The
uniform numbers are made on the host (`uniform.py`): a few integer operations per row, and no device
generator to keep in step.

Invariant: token for token the choice of `reference.py`, up to float32 rounding at the boundary of a
draw.
When it loses: nothing here is fused, so that a large vocabulary on a GPU takes about ten small
kernels.

Shapes: S rows, G greedy rows, R rows drawn at random, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.engine.sampling.base import Choice
from ridgeline.engine.sampling.logits_processors import apply_edits, is_plain
from ridgeline.engine.sampling.logprobs import token_logprobs
from ridgeline.engine.sampling.topk_topp import restrict
from ridgeline.engine.sampling.uniform import uniform
from ridgeline.engine.scheduler.plan import SamplePoint
from ridgeline.records import TokenLogprobs

MIN_TEMPERATURE = 1e-30  # what float32 can still divide by; anything colder is greedy long before


@dataclass(frozen=True, slots=True)
class SamplerKernels:
    """How rows are chosen from: the first largest, and a draw. Both raise ArithmeticError."""

    greedy: Callable[[Tensor], list[int]]
    draw: Callable[[Tensor, Sequence[SamplePoint]], list[int]]


def sample(logits_SV: Tensor, at: Sequence[SamplePoint]) -> list[Choice]:
    """See `ridgeline.engine.sampling.base.Sampler`."""
    return sample_with(KERNELS, logits_SV, at)


def sample_with(
    kernels: SamplerKernels, logits_SV: Tensor, at: Sequence[SamplePoint]
) -> list[Choice]:
    """The stages that all ways share."""
    if all(map(_needs_only_argmax, at)):
        return [(token, None) for token in kernels.greedy(logits_SV)]
    tokens = _tokens(kernels, apply_edits(logits_SV.float(), at), at)
    return list(zip(tokens, _logprobs(logits_SV, at, tokens), strict=True))


def _needs_only_argmax(at: SamplePoint) -> bool:
    asked = at.sampling
    return at.is_argmax or (asked.greedy and asked.logprobs is None and is_plain(at))


def _tokens(kernels: SamplerKernels, logits_SV: Tensor, at: Sequence[SamplePoint]) -> list[int]:
    greedy = [row for row, a in enumerate(at) if a.sampling.greedy]
    drawn = [row for row, a in enumerate(at) if not a.sampling.greedy]
    chosen: dict[int, int] = {}
    if greedy:
        chosen |= zip(greedy, kernels.greedy(_rows(logits_SV, greedy)), strict=True)
    if drawn:
        tokens = kernels.draw(_rows(logits_SV, drawn), [at[row] for row in drawn])
        chosen |= zip(drawn, tokens, strict=True)
    return [chosen[row] for row in range(len(at))]


def _rows(logits_SV: Tensor, rows: Sequence[int]) -> Tensor:
    if len(rows) == len(logits_SV):
        return logits_SV
    return logits_SV[torch.tensor(rows, device=logits_SV.device)]


def _greedy(logits_GV: Tensor) -> list[int]:
    """`max` gives the first of equal maxima: the lowest token id."""
    largest_G, token_G = logits_GV.max(1)
    _check(largest_G)
    return list(token_G.tolist())


def probabilities(logits_RV: Tensor, at: Sequence[SamplePoint]) -> Tensor:
    """What each row is drawn from, float64 [R, V]: after every edit, temperature and restriction.

    Rows that are greedy are not drawn from anything; ask for none of them.
    """
    weight_RV = _weights(apply_edits(logits_RV.float(), at), at).double()
    return weight_RV / weight_RV.sum(1, keepdim=True)


def _weights(logits_RV: Tensor, at: Sequence[SamplePoint]) -> Tensor:
    """Proportional to the probabilities; excluded tokens at 0."""
    largest_R1 = logits_RV.max(1, keepdim=True).values
    _check(largest_R1)
    temperatures = [max(a.sampling.temperature, MIN_TEMPERATURE) for a in at]
    temperature_R1 = torch.tensor(temperatures, device=logits_RV.device).unsqueeze(1)
    scaled_RV = (logits_RV - largest_R1) / temperature_R1
    return restrict(scaled_RV, [a.sampling for a in at]).exp()


def _draw(logits_RV: Tensor, at: Sequence[SamplePoint]) -> list[int]:
    device = logits_RV.device
    cumulative_RV = _weights(logits_RV, at).cumsum(1, dtype=torch.float64)
    numbers = [uniform(a.seed, a.index) for a in at]
    number_R1 = torch.tensor(numbers, dtype=torch.float64, device=device).unsqueeze(1)
    target_R1 = number_R1 * cumulative_RV[:, -1:]
    return list(torch.searchsorted(cumulative_RV, target_R1, right=True).flatten().tolist())


def _check(largest_S: Tensor) -> None:
    finite_S = largest_S.flatten().isfinite().tolist()
    if not all(finite_S):
        raise no_token_error(finite_S.index(False))


def no_token_error(row: int) -> ArithmeticError:
    """The error of a row whose largest logit is not finite."""
    return ArithmeticError(
        f"row {row}: no token can be chosen from these logits: every one is forbidden, or the "
        "model computed NaN (a damaged checkpoint does)"
    )


def _logprobs(
    logits_SV: Tensor, at: Sequence[SamplePoint], tokens: Sequence[int]
) -> list[TokenLogprobs | None]:
    rows = [row for row, a in enumerate(at) if a.sampling.logprobs is not None]
    if not rows:
        return [None] * len(at)
    most = max(at[row].sampling.logprobs or 0 for row in rows)
    found = token_logprobs(_rows(logits_SV, rows), [tokens[row] for row in rows], most)
    by_row = dict(zip(rows, found, strict=True))
    return [_trimmed(by_row.get(row), a.sampling.logprobs) for row, a in enumerate(at)]


def _trimmed(found: TokenLogprobs | None, k: int | None) -> TokenLogprobs | None:
    if found is None or len(found.top) == k:
        return found
    return TokenLogprobs(found.token, found.logprob, found.rank, found.top[:k])


KERNELS = SamplerKernels(_greedy, _draw)
