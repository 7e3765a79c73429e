"""Verification by rejection: exact sampling from the target with drafts that were drawn from q.

What. The drafter drew x_1 … x_k, each from a distribution q_i of its own; the target's are p_i, and
p_{k+1} stands after the last draft. Two rules say how many drafts stay, and both leave the output
distributed exactly as if every token had been drawn from the target:

    standard  x_i stays with probability min(1, p_i(x_i) / q_i(x_i)); the first that does not is
              replaced by a draw from max(p_i - q_i, 0), normalised. All stay: a draw from p_{k+1}.
    block     the draft is judged as a whole. With w_0 = 1, w_i = min(w_{i-1} p_i(x_i)/q_i(x_i), 1)
              and s_i = sum_x max(w_i p_{i+1}(x) - q_{i+1}(x), 0), place i says yes with probability
              s_i / (s_i + 1 - w_i), the last one with w_k; the draft stays up to the last yes, and
              the next token comes from max(w_i p_{i+1} - q_{i+1}, 0), normalised. A token likelier
              under the target than under the draft makes up for one before it that is not.

Source. Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318); block
verification: Sun et al. 2025 (arXiv 2403.10444), never fewer accepted tokens in expectation.

Invariant. The distribution of the output is the target's, proven by enumeration and by a million
draws in tests/engine/speculate/test_rejection.py. Every verification spends numbers of its own:
they are named by the place at which the step begins, so that a number that has refused a draft is
never used again.
When it loses. The tokens of a *seeded* request then depend on what was drafted, and so on load and
depth: the engine walks (`walk.py`) for requests with a seed.

Shapes: K drafts, V vocabulary; p has K+1 rows, q has K.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.engine.sampling.uniform import uniform

_ACCEPT, DRAFT = 0x5EED_ACCE, 0x5EED_D4AF  # streams of numbers apart from the sampler's own

TreePath = tuple[int, ...]
"""The ranks on the way to a node of a tree."""
Rule = Callable[[Tensor, Tensor, Sequence[int], Sequence[float]], tuple[int, Tensor]]
"""p, q, drafts, one number per draft → how many stay, and the weights [V] of the next token."""


def uniform_numbers(seed: int, index: int, count: int, stream: int = _ACCEPT) -> list[float]:
    """`count` numbers in [0, 1) of the step that begins at output place `index`."""
    own = seed ^ (stream << 20) ^ int(uniform(seed ^ stream, index) * 2.0**52)
    return [uniform(own, i) for i in range(count)]


def accept_standard(
    p_KV: Tensor, q_KV: Tensor, drafts: Sequence[int], accept: Sequence[float]
) -> tuple[int, Tensor]:
    """Leviathan's rule, place by place."""
    for i, token in enumerate(drafts):
        if accept[i] * float(q_KV[i, token]) >= float(p_KV[i, token]):
            return i, residual(p_KV[i], q_KV[i])
    return len(drafts), p_KV[len(drafts)]


def accept_block(
    p_KV: Tensor, q_KV: Tensor, drafts: Sequence[int], accept: Sequence[float]
) -> tuple[int, Tensor]:
    """The draft judged as a whole: up to the last place that says yes."""
    weights, kept = [1.0], 0
    for i, token in enumerate(drafts):
        ratio = float(p_KV[i, token]) / float(q_KV[i, token])
        weights.append(min(weights[-1] * ratio, 1.0))
    for i in range(1, len(drafts) + 1):
        if accept[i - 1] < _stop_probability(p_KV, q_KV, weights[i], i):
            kept = i
    if kept == len(drafts):
        return kept, p_KV[kept]
    return kept, residual(p_KV[kept], q_KV[kept], weights[kept])


def _stop_probability(p_KV: Tensor, q_KV: Tensor, weight: float, i: int) -> float:
    """How likely place `i` (from 1) says that the draft stays up to it."""
    if i == len(q_KV):
        return weight
    spare = float((weight * p_KV[i] - q_KV[i]).clamp(min=0).sum())
    whole = spare + 1.0 - weight
    return spare / whole if whole > 0 else 1.0


def residual(p_V: Tensor, q_V: Tensor, weight: float = 1.0) -> Tensor:
    """What the drafter says too seldom: max(weight · p - q, 0). Where rounding leaves nothing of
    it, p itself."""
    left_V = (weight * p_V - q_V).clamp(min=0)
    return left_V if float(left_V.sum()) > 0 else p_V


def draw(weight_V: Tensor, number: float) -> int:
    """The token at `number` of the way through the weights, in the order of token ids."""
    cumulative_V = weight_V.cumsum(0, dtype=torch.float64)
    target = cumulative_V[-1:] * number
    found = int(torch.searchsorted(cumulative_V, target, right=True))
    return min(found, int(weight_V.nonzero()[-1]))


class TreeDraws(NamedTuple):
    """The guesses of a tree, place by place, and what they were drawn from, one after the other
    without putting back: `draws[i][r]` is the child of rank r of every node at place i."""

    draws: Sequence[Sequence[int]]
    q_KV: Tensor

    def tokens_of(self, path: TreePath) -> tuple[int, ...]:
        """The tokens on the way to a node."""
        return tuple(own[rank] for own, rank in zip(self.draws, path, strict=False))


def accept_tree(
    leaves: Sequence[TreePath],
    p_of: Callable[[TreePath], Tensor],
    places: TreeDraws,
    accept: Sequence[float],
) -> tuple[TreePath, Tensor]:
    """Down a tree whose guesses were drawn: the node at which it ends, and the weights [V] of the
    next token. `p_of`: the target's distribution behind a node; `accept`: one number per child that
    is asked.

    At every node the children are asked by rank: x, drawn from q, stays with probability
    min(1, p(x) / q(x)); where it does not, p becomes max(p - q, 0), normalised, and q what is left
    of it without x (multi-step rejection, Miao et al. 2023; without putting back, Jeon et al. 2024,
    arXiv 2402.14160).
    """
    node: TreePath = ()
    left = iter(accept)
    while True:
        p_V, depth = p_of(node), len(node)
        ranks = sorted(
            {leaf[depth] for leaf in leaves if len(leaf) > depth and leaf[:depth] == node}
        )
        q_V = places.q_KV[depth].clone() if ranks else p_V
        for rank in ranks:
            token = places.draws[depth][rank]
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
    """Different tokens drawn from q, one per number; fewer where it names no more."""
    q_V, found = q_V.clone(), list[int]()
    for number in accept:
        if not float(q_V.sum()) > 0:
            break
        found.append(draw(q_V, number))
        q_V[found[-1]] = 0.0
    return found


RULES: dict[str, Rule] = {"block": accept_block, "standard": accept_standard}


def verify_draft(
    rule: Rule, p_KV: Tensor, q_KV: Tensor, drafts: Sequence[int], seed: int, index: int
) -> list[int]:
    """The tokens that a step gives whose draft was drawn from `q_KV`; `index`: of the first one."""
    kept, weight_V = rule(p_KV, q_KV, drafts, uniform_numbers(seed, index, len(drafts)))
    return [*drafts[:kept], draw(weight_V, uniform(seed, index + kept))]
