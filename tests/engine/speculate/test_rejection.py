"""Rejection leaves the target's distribution alone: by enumeration, by draws, with bugs planted.

Toy models over a small vocabulary: p and q of the next token depend on all tokens before it, at
random, with zeros. `exact` sums over every draft and every yes or no; `drawn` plays the real
functions. Sequences of three tokens are compared, over as many steps as they take, so that what one
step leaves behind for the next counts too.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from ridgeline.engine.sampling.uniform import uniform
from ridgeline.engine.sampling.verify import rejection_sampling
from ridgeline.engine.sampling.verify.exact_match import accept_matching
from ridgeline.engine.sampling.verify.rejection_sampling import (
    RULES,
    Rule,
    draw,
    residual,
    uniform_numbers,
    verify_draft,
)

LENGTH = 3


class Toy:
    """Target and drafter over V tokens; both look at everything before."""

    def __init__(self, seed: int, vocab: int, likeness: float) -> None:
        self.seed, self.vocab, self.likeness = seed, vocab, likeness
        self.p = cache(self._p)
        self.q = cache(self._q)

    def _p(self, text: tuple[int, ...]) -> Tensor:
        rng = np.random.default_rng([self.seed, 1, *text, len(text)])
        weights = rng.exponential(1.0, self.vocab) * (rng.random(self.vocab) < 0.8)
        weights[rng.integers(self.vocab)] += 0.3
        return torch.tensor(weights / weights.sum(), dtype=torch.float64)

    def _q(self, text: tuple[int, ...]) -> Tensor:
        rng = np.random.default_rng([self.seed, 2, *text, len(text)])
        other = torch.tensor(rng.dirichlet(np.ones(self.vocab)))
        return self.likeness * self.p(text) + (1 - self.likeness) * other

    def rows(self, text: tuple[int, ...], drafts: Sequence[int]) -> tuple[Tensor, Tensor]:
        heads = [(*text, *drafts[:i]) for i in range(len(drafts) + 1)]
        return torch.stack([self.p(h) for h in heads]), torch.stack([self.q(h) for h in heads[:-1]])

    def truth(self) -> dict[tuple[int, ...], float]:
        found = {}
        for text in itertools.product(range(self.vocab), repeat=LENGTH):
            steps = [float(self.p(text[:i])[token]) for i, token in enumerate(text)]
            found[text] = float(np.prod(steps))
        return found


def outcomes(
    toy: Toy, rule: Rule, text: tuple[int, ...], depth: int
) -> dict[tuple[int, ...], float]:
    """Probability of every output of one step, exactly: the rule is asked with every yes and no."""
    found: Counter[tuple[int, ...]] = Counter()
    for drafts in itertools.product(range(toy.vocab), repeat=depth):
        p_KV, q_KV = toy.rows(text, drafts)
        chance = float(np.prod([float(q_KV[i, t]) for i, t in enumerate(drafts)]))
        if not chance:
            continue
        for kept, share in kept_shares(rule, p_KV, q_KV, drafts).items():
            _, weight_V = kept_with(rule, p_KV, q_KV, drafts, kept)
            total = float(weight_V.sum())
            for token in range(toy.vocab):
                head = (*text, *drafts[:kept], token)
                found[head] += chance * share * float(weight_V[token]) / total
    return found


def thresholds(rule: Rule, p_KV: Tensor, q_KV: Tensor, drafts: Sequence[int]) -> list[float]:
    """The yes-probability of each place, found by bisecting the rule from outside."""
    found = []
    for i in range(len(drafts)):
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            # only place i is in question: those before it say yes, those behind it no
            accept = [-1.0] * i + [middle] + [2.0] * (len(drafts) - i - 1)
            low, high = (middle, high) if rule(p_KV, q_KV, drafts, accept)[0] > i else (low, middle)
        found.append(0.0 if low < 1e-12 else min(low, 1.0))
    return found


def kept_shares(rule: Rule, p_KV: Tensor, q_KV: Tensor, drafts: Sequence[int]) -> dict[int, float]:
    chances, shares = thresholds(rule, p_KV, q_KV, drafts), Counter[int]()
    for answers in itertools.product((False, True), repeat=len(drafts)):
        share = float(np.prod([c if a else 1 - c for a, c in zip(answers, chances, strict=True)]))
        if share > 0:
            accept = [-1.0 if yes else 2.0 for yes in answers]
            shares[rule(p_KV, q_KV, drafts, accept)[0]] += share
    return shares


def kept_with(
    rule: Rule, p_KV: Tensor, q_KV: Tensor, drafts: Sequence[int], kept: int
) -> tuple[int, Tensor]:
    accept = [-1.0] * kept + [2.0] * (len(drafts) - kept)
    return rule(p_KV, q_KV, drafts, accept)


def exact(toy: Toy, rule: Rule, depth: int) -> dict[tuple[int, ...], float]:
    """Distribution of the first `LENGTH` tokens when every step drafts `depth` of them."""
    return whole(lambda text: step(toy, rule, text, depth))


def whole(
    step_of: Callable[[tuple[int, ...]], dict[tuple[int, ...], float]],
) -> dict[tuple[int, ...], float]:
    """Of the first `LENGTH` tokens, step after step."""
    found: Counter[tuple[int, ...]] = Counter()
    todo: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while todo:
        text, chance = todo.pop()
        if len(text) >= LENGTH:
            found[text[:LENGTH]] += chance
            continue
        todo += [(t, chance * c) for t, c in step_of(text).items() if c > 0]
    return found


@cache
def step(toy: Toy, rule: Rule, text: tuple[int, ...], depth: int) -> dict[tuple[int, ...], float]:
    return outcomes(toy, rule, text, depth)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(RULES))
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(("seed", "likeness"), [(0, 0.0), (1, 0.7)])
def test_distribution_is_kept_by_enumeration(
    name: str, depth: int, seed: int, likeness: float
) -> None:
    toy = Toy(seed, 3 if depth < 3 else 2, likeness)
    truth, found = toy.truth(), exact(toy, RULES[name], depth)
    for text, chance in truth.items():
        assert found[text] == pytest.approx(chance, abs=1e-9), text


@pytest.mark.slow
def test_block_never_keeps_less_than_standard() -> None:
    for seed in range(2):
        toy = Toy(seed, 3, 0.6)
        kept = {name: mean_kept(toy, RULES[name], 3) for name in RULES}
        assert kept["block"] >= kept["standard"] - 1e-9
    assert kept["block"] > kept["standard"] + 1e-3


def mean_kept(toy: Toy, rule: Rule, depth: int) -> float:
    return sum(chance * (len(text) - 1) for text, chance in outcomes(toy, rule, (), depth).items())


# -- by draws, with the engine's own numbers


def play(toy: Toy, rule: Rule, seed: int, depth: int) -> tuple[int, ...]:
    """The first tokens of one request, step by step, as the engine draws and verifies them."""
    text: tuple[int, ...] = ()
    while len(text) < LENGTH:
        drafts: list[int] = []
        for number in uniform_numbers(seed, len(text), depth, rejection_sampling.DRAFT):
            drafts.append(draw(toy.q((*text, *drafts)), number))
        p_KV, q_KV = toy.rows(text, drafts)
        text += tuple(verify_draft(rule, p_KV, q_KV, drafts, seed, len(text)))
    return text[:LENGTH]


def p_value(toy: Toy, texts: Counter[tuple[int, ...]]) -> float:
    truth = {text: chance for text, chance in toy.truth().items() if chance > 0}
    if set(texts) - set(truth):
        return 0.0
    num = texts.total()
    return float(chisquare([texts[t] for t in truth], [c * num for c in truth.values()]).pvalue)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(RULES))
def test_distribution_is_kept_over_seeded_draws(name: str) -> None:
    toy = Toy(7, 3, 0.5)
    texts = Counter(play(toy, RULES[name], seed, 2) for seed in range(5_000))
    assert p_value(toy, texts) > 1e-3


@pytest.mark.slow
def test_certain_drafts_keep_the_distribution() -> None:
    """Walking with drafts that are named with certainty: greedy drafts, n-grams."""
    toy = Toy(8, 3, 0.5)

    def walked(seed: int) -> tuple[int, ...]:
        text: tuple[int, ...] = ()
        while len(text) < LENGTH:
            drafts: list[int] = []
            for _ in range(2):
                drafts.append(int(toy.q((*text, *drafts)).argmax()))
            p_KV, _ = toy.rows(text, drafts)
            drawn = [(draw(p, uniform(seed, len(text) + i)), None) for i, p in enumerate(p_KV)]
            text += tuple(token for token, _ in accept_matching(drafts, drawn))
        return text[:LENGTH]

    plain = [play_plain(toy, seed) for seed in range(4_000)]
    assert [walked(seed) for seed in range(4_000)] == plain
    assert p_value(toy, Counter(plain)) > 1e-3


def play_plain(toy: Toy, seed: int) -> tuple[int, ...]:
    text: tuple[int, ...] = ()
    while len(text) < LENGTH:
        text += (draw(toy.p(text), uniform(seed, len(text))),)
    return text


# -- a million draws, many at a time: the same rules in array form, first shown to be the same


def many(toy: Toy, name: str, num: int, depth: int, bug: str = "") -> Counter[tuple[int, ...]]:
    """One step from nothing, then plain draws, for `num` requests at once."""
    rng = np.random.default_rng(99)
    drafts = np.zeros((num, 0), dtype=np.int64)
    rows_p, rows_q = [], []
    for i in range(depth + 1):
        p, q = table(toy.p, toy.vocab, drafts), table(toy.q, toy.vocab, drafts)
        rows_p.append(p)
        rows_q.append(q)
        if i < depth:
            drafts = np.column_stack([drafts, pick(q, rng.random(num))])
    accept = rng.random((num, depth))
    if bug == "one number for all":
        accept[:] = accept[:, :1]
    kept, weight = judge(name, rows_p, rows_q, drafts, accept, bug)
    text = np.full((num, depth + 1), -1)
    fresh = pick(weight, rng.random(num))
    for i in range(depth + 1):
        text[:, i] = np.where(kept > i, drafts[:, i] if i < depth else -1, text[:, i])
        text[:, i] = np.where(kept == i, fresh, text[:, i])
    return finish(toy, text, kept + 1, rng)


def table(of: Callable[[tuple[int, ...]], Tensor], vocab: int, heads: np.ndarray) -> np.ndarray:
    codes = heads @ (vocab ** np.arange(heads.shape[1])) if heads.shape[1] else heads.sum(1)
    codes = codes.astype(np.int64)
    all_heads = itertools.product(range(vocab), repeat=heads.shape[1])
    rows = {sum(t * vocab**i for i, t in enumerate(h)): of(h).numpy() for h in all_heads}
    return np.stack([rows[c] for c in range(len(rows))])[codes]


def pick(weights: np.ndarray, number: np.ndarray) -> np.ndarray:
    cumulative = weights.cumsum(1)
    return (cumulative <= number[:, None] * cumulative[:, -1:]).sum(1)


def judge(
    name: str,
    p: list[np.ndarray],
    q: list[np.ndarray],
    drafts: np.ndarray,
    accept: np.ndarray,
    bug: str,
) -> tuple[np.ndarray, np.ndarray]:
    num, depth = drafts.shape
    at = np.arange(num)
    if bug == "p and q swapped":
        p, q = [*q[:depth], p[depth]], [*p[:depth], q[depth]]
    weight = [np.ones(num)]
    for i in range(depth):
        ratio = p[i][at, drafts[:, i]] / np.maximum(q[i][at, drafts[:, i]], 1e-300)
        before = weight[-1] if name == "block" else np.ones(num)
        weight.append(np.minimum(before * ratio, 1))
    kept = np.zeros(num, dtype=np.int64)
    for i in range(1, depth + 1):
        if name == "standard":
            kept = np.where((kept == i - 1) & (accept[:, i - 1] < weight[i]), i, kept)
            continue
        yes = weight[i]
        if i < depth:
            spare = np.maximum(weight[i][:, None] * p[i] - q[i], 0).sum(1)
            whole = spare + 1 - weight[i]
            yes = np.where(whole > 0, spare / np.where(whole > 0, whole, 1), 1)
        kept = np.where(accept[:, i - 1] < yes, i, kept)
    next_weight = p[depth].copy()
    for i in range(depth):
        scale = weight[i][:, None] if name == "block" else 1.0
        left = p[i] if bug == "residual forgotten" else np.maximum(scale * p[i] - q[i], 0)
        next_weight = np.where((kept == i)[:, None], left, next_weight)
    return kept, next_weight


def finish(toy: Toy, text: np.ndarray, lengths: np.ndarray, rng: np.random.Generator) -> Counter:
    for i in range(1, LENGTH):
        plain = pick(table(toy.p, toy.vocab, np.maximum(text[:, :i], 0)), rng.random(len(text)))
        text[:, i] = np.where(lengths <= i, plain, text[:, i])
    codes, counts = np.unique(text[:, :LENGTH], axis=0, return_counts=True)
    return Counter({tuple(map(int, c)): int(n) for c, n in zip(codes, counts, strict=True)})


@pytest.mark.parametrize("name", sorted(RULES))
def test_array_form_equals_the_scalar_rule(name: str) -> None:
    toy, rng = Toy(3, 4, 0.5), np.random.default_rng(1)
    for _ in range(100):
        drafts = [int(t) for t in rng.integers(0, 4, 2)]
        p_KV, q_KV = toy.rows((), drafts)
        accept = rng.random(2)
        kept, weight_V = RULES[name](p_KV, q_KV, drafts, list(accept))
        rows_q = [*q_KV.numpy()[:, None], q_KV.numpy()[:1]]
        many_kept, many_weight = judge(
            name, list(p_KV.numpy()[:, None]), rows_q, np.array([drafts]), accept[None], ""
        )
        assert kept == many_kept[0]
        assert np.allclose(weight_V.numpy(), many_weight[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(RULES))
def test_distribution_is_kept_over_a_million_draws(name: str) -> None:
    toy = Toy(21, 4, 0.3)
    assert p_value(toy, many(toy, name, 1_000_000, 2)) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(RULES))
@pytest.mark.parametrize("bug", ["p and q swapped", "one number for all", "residual forgotten"])
def test_planted_bugs_are_caught(name: str, bug: str) -> None:
    toy = Toy(21, 4, 0.3)
    assert p_value(toy, many(toy, name, 300_000, 2, bug)) < 1e-6


def test_no_random_number_is_used_twice() -> None:
    """Other steps of the request, and the drafter's draws, use different random numbers."""
    found = [n for index in range(40) for n in uniform_numbers(5, index, 4)]
    found += [
        n for index in range(40) for n in uniform_numbers(5, index, 4, rejection_sampling.DRAFT)
    ]
    found += [uniform(5, index) for index in range(40)]
    assert len(set(found)) == len(found)


def test_empty_residual_falls_back_to_the_target() -> None:
    p_V = torch.tensor([0.5, 0.5], dtype=torch.float64)
    assert torch.equal(residual(p_V, p_V), p_V)
    assert draw(torch.tensor([0.0, 1.0, 0.0]), 0.999999999999) == 1
