"""Verification by rejection: exact sampling from the target with drafts that were drawn from q.

What. The drafter drew x_1 … x_k from its distributions q_i. The target's are p_i, and p_{k+1} is
the one after the last draft. Two rules decide how many drafts are accepted. With both, the output
is distributed exactly as if every token had been drawn from the target:

    standard  x_i is accepted with probability min(1, p_i(x_i) / q_i(x_i)). The first rejected draft
              is replaced by a draw from max(p_i - q_i, 0), normalised. If none is rejected, the
              next token is drawn from p_{k+1}.
    block     The draft is judged as a whole. With w_0 = 1, w_i = min(w_{i-1} p_i(x_i)/q_i(x_i), 1)
              and s_i = sum_x max(w_i p_{i+1}(x) - q_{i+1}(x), 0), position i votes yes with
              probability s_i / (s_i + 1 - w_i), the last with w_k. Drafts are accepted up to the
              last yes, and the next token comes from max(w_i p_{i+1} - q_{i+1}, 0), normalised. A
              token more likely under the target than under the drafter compensates for an earlier
              one that is less likely.

Source. Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318); block
verification: Sun et al. 2025 (arXiv 2403.10444), never fewer accepted tokens in expectation.

Invariant. The output has the target's distribution, shown by enumeration and by a million draws in
tests/engine/speculate/test_rejection.py. Every verification uses separate random numbers, derived
from the position at which the step begins, so a number that has rejected a draft is never reused.
When it loses. The tokens of a *seeded* request would depend on the drafts, and so on load and draft
depth. The engine therefore uses exact matching for requests with a seed.

Shapes: K drafts, V vocabulary; p has K+1 rows, q has K.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.engine.sampling.uniform import uniform

_ACCEPT, DRAFT = 0x5EED_ACCE, 0x5EED_D4AF  # random streams, separate from the sampler's

TreePath = tuple[int, ...]
"""The ranks on the path to a node of a tree."""
Rule = Callable[[Tensor, Tensor, Sequence[int], Sequence[float]], tuple[int, Tensor]]
"""p, q, drafts, one number per draft → how many are accepted, and the next token's weights [V]."""


def uniform_numbers(seed: int, index: int, count: int, stream: int = _ACCEPT) -> list[float]:
    """`count` numbers in [0, 1) for the step that begins at output position `index`."""
    own = seed ^ (stream << 20) ^ int(uniform(seed ^ stream, index) * 2.0**52)
    return [uniform(own, i) for i in range(count)]


def accept_standard(
    p_KV: Tensor, q_KV: Tensor, drafts: Sequence[int], accept: Sequence[float]
) -> tuple[int, Tensor]:
    """Leviathan's rule, position by position."""
    for i, token in enumerate(drafts):
        if accept[i] * float(q_KV[i, token]) >= float(p_KV[i, token]):
            return i, residual(p_KV[i], q_KV[i])
    return len(drafts), p_KV[len(drafts)]


def accept_block(
    p_KV: Tensor, q_KV: Tensor, drafts: Sequence[int], accept: Sequence[float]
) -> tuple[int, Tensor]:
    """Block verification: accept up to the last position that votes yes."""
    weights, kept = [1.0], 0
    for i, token in enumerate(drafts):
        ratio = float(p_KV[i, token]) / float(q_KV[i, token])
        weights.append(min(weights[-1] * ratio, 1.0))
    for i in range(1, len(drafts) + 1):
        if accept[i - 1] < _vote_probability(p_KV, q_KV, weights[i], i):
            kept = i
    if kept == len(drafts):
        return kept, p_KV[kept]
    return kept, residual(p_KV[kept], q_KV[kept], weights[kept])


def _vote_probability(p_KV: Tensor, q_KV: Tensor, weight: float, i: int) -> float:
    """The probability that position `i` (from 1) votes to accept the draft up to it."""
    if i == len(q_KV):
        return weight
    excess = float((weight * p_KV[i] - q_KV[i]).clamp(min=0).sum())
    total = excess + 1.0 - weight
    return excess / total if total > 0 else 1.0


def residual(p_V: Tensor, q_V: Tensor, weight: float = 1.0) -> Tensor:
    """max(weight · p - q, 0), the part of p that q underestimates; p if rounding leaves nothing."""
    left_V = (weight * p_V - q_V).clamp(min=0)
    return left_V if float(left_V.sum()) > 0 else p_V


def draw(weight_V: Tensor, number: float) -> int:
    """The token at the fraction `number` of the cumulative weights, in the order of token ids."""
    cumulative_V = weight_V.cumsum(0, dtype=torch.float64)
    target = cumulative_V[-1:] * number
    token = int(torch.searchsorted(cumulative_V, target, right=True))
    return min(token, int(weight_V.nonzero()[-1]))


class TreeDraws(NamedTuple):
    """The candidates of a draft tree per position, drawn from `q_KV` without replacement.

    `draws[i][r]` is the child of rank r of every node at position i.
    """

    draws: Sequence[Sequence[int]]
    q_KV: Tensor

    def tokens_of(self, path: TreePath) -> tuple[int, ...]:
        """The tokens on the path to a node."""
        return tuple(own[rank] for own, rank in zip(self.draws, path, strict=False))


def accept_tree(
    leaves: Sequence[TreePath],
    p_of: Callable[[TreePath], Tensor],
    tree: TreeDraws,
    accept: Sequence[float],
) -> tuple[TreePath, Tensor]:
    """Verify a tree of drawn drafts: returns the last accepted node, the next token's weights [V].

    `p_of` is the target's distribution after a node, `accept` has one number per child examined. At
    every node the children are examined by rank: x, drawn from q, is accepted with probability
    min(1, p(x) / q(x)). If it is rejected, p becomes max(p - q, 0), normalised, and q loses x
    (multi-step rejection, Miao et al. 2023; without replacement, Jeon et al., arXiv 2402.14160).
    """
    node: TreePath = ()
    left = iter(accept)
    while True:
        p_V, depth = p_of(node), len(node)
        ranks = sorted(
            {leaf[depth] for leaf in leaves if len(leaf) > depth and leaf[:depth] == node}
        )
        q_V = tree.q_KV[depth].clone() if ranks else p_V
        for rank in ranks:
            token = tree.draws[depth][rank]
            if next(left) * float(q_V[token]) < float(p_V[token]):
                node = (*node, rank)
                break
            rest_V = residual(p_V, q_V)
            p_V = rest_V / rest_V.sum()
            q_V[token] = 0.0
            q_V = q_V / q_V.sum() if float(q_V.sum()) > 0 else q_V
        else:
            return node, p_V


def draw_distinct(q_V: Tensor, accept: Sequence[float]) -> list[int]:
    """Distinct tokens drawn from q, one per number; fewer if q has fewer tokens."""
    q_V, tokens = q_V.clone(), list[int]()
    for number in accept:
        if not float(q_V.sum()) > 0:
            break
        tokens.append(draw(q_V, number))
        q_V[tokens[-1]] = 0.0
    return tokens


RULES: dict[str, Rule] = {"block": accept_block, "standard": accept_standard}


def verify_draft(
    rule: Rule, p_KV: Tensor, q_KV: Tensor, drafts: Sequence[int], seed: int, index: int
) -> list[int]:
    """The output tokens, from position `index` on, of a run whose draft was drawn from `q_KV`."""
    kept, weight_V = rule(p_KV, q_KV, drafts, uniform_numbers(seed, index, len(drafts)))
    return [*drafts[:kept], draw(weight_V, uniform(seed, index + kept))]
