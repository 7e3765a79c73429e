"""The reference sampler: row by row, in float64, every stage in its simplest form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ridgeline.engine.sampling.base import Choice
from ridgeline.engine.sampling.uniform import uniform
from ridgeline.engine.scheduler.plan import SamplePoint
from ridgeline.records import Sampling, TokenLogprobs

if TYPE_CHECKING:
    from torch import Tensor

Row = npt.NDArray[np.float64]  # [vocabulary]


def sample(logits_SV: Tensor, points: Sequence[SamplePoint]) -> list[Choice]:
    """Choose one token per row of logits_SV [S, V]."""
    rows = logits_SV.detach().float().cpu().numpy().astype(np.float64)
    return [_choose(row, point) for row, point in zip(rows, points, strict=True)]


def _choose(raw_V: Row, point: SamplePoint) -> Choice:
    probs_V = distribution(raw_V, point)
    cumulative_V = probs_V.cumsum()
    target = uniform(point.seed, point.index) * cumulative_V[-1]
    token = int(np.searchsorted(cumulative_V, target, side="right"))
    k = point.sampling.logprobs
    if k is None:
        return token, None
    return token, logprobs_of(raw_V, token, k, point.sampling.logprob_token_ids)


def distribution(raw_V: Row, point: SamplePoint) -> Row:
    """The distribution the token is drawn from; one-hot if greedy."""
    logits_V = _edited(raw_V.copy(), point)
    largest = logits_V.max()
    if not np.isfinite(largest):
        raise ArithmeticError("no token can be chosen from these logits")
    order = _order(logits_V)
    if point.sampling.greedy:
        return np.where(np.arange(len(raw_V)) == order[0], 1.0, 0.0)
    probs_V: Row = np.exp((logits_V - largest) / point.sampling.temperature)
    probs_V[~_kept(probs_V, order, point.sampling)] = 0
    shares_V: Row = probs_V / probs_V.sum()
    return shares_V


def _order(logits_V: Row) -> npt.NDArray[np.int64]:
    return np.argsort(-logits_V, kind="stable")


def _edited(logits_V: Row, point: SamplePoint) -> Row:
    sampling = point.sampling
    for token, bias in sampling.logit_bias.items():
        logits_V[token] += bias
    if point.forced is not None:
        logits_V[np.arange(len(logits_V)) != point.forced] = -np.inf
    else:
        logits_V[[*point.banned, *point.completing]] = -np.inf
    for token in set(point.history):
        positive = logits_V[token] > 0
        factor = sampling.repetition_penalty
        logits_V[token] = logits_V[token] / factor if positive else logits_V[token] * factor
    output = point.history[point.num_prompt :]
    for token in set(output):
        logits_V[token] -= sampling.frequency_penalty * output.count(token)
        logits_V[token] -= sampling.presence_penalty
    return logits_V


def _kept(probs_V: Row, order: npt.NDArray[np.int64], sampling: Sampling) -> npt.NDArray[np.bool_]:
    eligible = [token for token in order if probs_V[token] >= sampling.min_p * probs_V[order[0]]]
    if sampling.top_k > 0:
        eligible = eligible[: sampling.top_k]
    kept = np.zeros(len(probs_V), dtype=bool)
    mass = probs_V[eligible].sum()
    before = 0.0
    for token in eligible:
        if sampling.top_p < 1 and before >= sampling.top_p * mass:
            break
        kept[token] = True
        before += probs_V[token]
    return kept


def logprobs_of(raw_V: Row, token: int, k: int, ids: tuple[int, ...] = ()) -> TokenLogprobs:
    """Log-softmax of the raw logits: that of the token, its rank, and the k largest or `ids`."""
    order = _order(raw_V)
    top = raw_V[order[0]]
    logprobs_V = raw_V - (top + np.log(np.exp(raw_V - top).sum()))
    rank = int(np.where(order == token)[0][0]) + 1
    best = tuple((int(t), float(logprobs_V[t])) for t in ids or order[:k])
    return TokenLogprobs(token, float(logprobs_V[token]), rank, best)
