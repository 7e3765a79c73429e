"""The fast samplers against the oracle, and the invariants of `sampling/base.py`."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from ridgeline.engine.sampling import SAMPLERS, load_sampler, sample, token_logprobs
from ridgeline.engine.sampling.reference import distribution, logprobs_of
from ridgeline.engine.sampling.uniform import uniform
from ridgeline.engine.scheduler.plan import SamplePoint
from ridgeline.records import Sampling

GREEDY = Sampling(temperature=0.0)


def at(sampling: Sampling, seed: int = 0, index: int = 0, **other: object) -> SamplePoint:
    return SamplePoint(sampling=sampling, seed=seed, index=index, **{"num_prompt": 0, **other})


@st.composite
def spots(draw: st.DrawFn, vocab: int) -> SamplePoint:
    token = st.integers(0, vocab - 1)
    sampling = Sampling(
        temperature=draw(st.sampled_from([0.0, 1e-3, 0.7, 1.0, 3.0])),
        top_k=draw(st.sampled_from([-1, 0, 1, 2, 5, vocab - 1, vocab, vocab + 7])),
        top_p=draw(st.sampled_from([1.0, 0.999, 0.9, 0.5, 1e-6])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.5])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.5, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.7, -0.3])),
        logit_bias=draw(
            st.dictionaries(token, st.integers(-400, 400).map(lambda i: i / 4), max_size=3)
        ),
        logprobs=draw(st.sampled_from([None, None, 0, 1, 5])),
    )
    history = tuple(draw(st.lists(token, max_size=12)))
    return SamplePoint(
        sampling=sampling,
        seed=draw(st.integers(-5, 2**70)),
        index=draw(st.integers(0, 100)),
        num_prompt=draw(st.integers(0, len(history))),
        history=history if sampling.has_penalties else (),
        banned=tuple(draw(st.lists(token, max_size=2))),
        completing=tuple(draw(st.lists(token, max_size=1))),
        forced=draw(st.sampled_from([None, None, None, 0, vocab - 1])),
    )


@st.composite
def steps(draw: st.DrawFn) -> tuple[torch.Tensor, list[SamplePoint]]:
    """Logits with many ties (a coarse grid) or none, on vocabularies around the head's width."""
    vocab = draw(st.sampled_from([4, 31, 300, 2051]))
    rows = draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    logits = rng.normal(0, draw(st.sampled_from([0.02, 3.0])), (rows, vocab))
    if draw(st.booleans()):
        logits = np.round(logits * 2) / 2
    return torch.tensor(logits, dtype=torch.float32), [draw(spots(vocab)) for _ in range(rows)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["native", "batched"])
@settings(max_examples=120, deadline=None, derandomize=True)
@given(steps())
def test_sampler_agrees_with_the_reference(
    name: str, step: tuple[torch.Tensor, list[SamplePoint]]
) -> None:
    logits_SV, spots_S = step
    chosen = load_sampler(name)(logits_SV, spots_S)
    for row, (found, spot) in enumerate(zip(chosen, spots_S, strict=True)):
        raw_V = logits_SV[row].numpy().astype(np.float64)
        probs_V = distribution(raw_V, spot)
        assert _is_drawn_by(found[0], probs_V, uniform(spot.seed, spot.index)), (row, spot)
        if spot.sampling.logprobs is None:
            assert found[1] is None
        else:
            _same_logprobs(found[1], logprobs_of(raw_V, found[0], spot.sampling.logprobs))


def _is_drawn_by(token: int, probs_V: np.ndarray, number: float, slack: float = 1e-5) -> bool:
    """Whether `number` falls into the token's part of the CDF, or within float32 rounding of it."""
    upper = probs_V.cumsum()[token]
    return bool(probs_V[token] > 0 and upper - probs_V[token] - slack <= number < upper + slack)


def _same_logprobs(found: object, expected: object) -> None:
    assert (found.token, found.rank) == (expected.token, expected.rank)
    assert found.logprob == pytest.approx(expected.logprob, abs=1e-4)
    assert [t for t, _ in found.top] == [t for t, _ in expected.top]
    assert [v for _, v in found.top] == pytest.approx([v for _, v in expected.top], abs=1e-4)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True)
@given(steps())
def test_a_row_chooses_the_same_alone_and_batched(
    step: tuple[torch.Tensor, list[SamplePoint]],
) -> None:
    logits_SV, spots_S = step
    together = sample(logits_SV, spots_S)
    for row, spot in enumerate(spots_S):
        assert sample(logits_SV[row : row + 1], [spot])[0][0] == together[row][0]


def test_draws_follow_the_distribution() -> None:
    """χ² of 20,000 draws, each with its own index, against softmax at temperature 0.8 and top-p
    0.95.
    """
    logits_V = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0, 1.0])
    spots_S = [at(Sampling(temperature=0.8, top_p=0.95), seed=7, index=i) for i in range(20_000)]
    tokens = [token for token, _ in sample(logits_V.expand(len(spots_S), -1), spots_S)]
    expected_V = distribution(logits_V.numpy().astype(np.float64), spots_S[0]) * len(tokens)
    counts_V = np.bincount(tokens, minlength=8)
    assert counts_V[expected_V == 0].sum() == 0
    assert chisquare(counts_V[expected_V > 0], expected_V[expected_V > 0]).pvalue > 1e-3


def test_uniform_numbers_are_uniform_over_seeds_and_indices() -> None:
    for numbers in (
        [uniform(seed, 0) for seed in range(10_000)],
        [uniform(3, index) for index in range(10_000)],
    ):
        counts = np.histogram(numbers, bins=50, range=(0, 1))[0]
        assert chisquare(counts).pvalue > 1e-3
    assert len({uniform(seed, index) for seed in range(100) for index in range(100)}) == 10_000


def test_uniform_is_the_same_on_every_machine() -> None:
    """Golden values: a change of the generator changes every seeded completion ever logged."""
    assert [uniform(0, 0), uniform(0, 1), uniform(-1, 0), uniform(2**64 + 5, 9)] == [
        uniform(2**64, 0),
        uniform(2**64, 1),
        uniform(2**64 - 1, 0),
        uniform(5, 9),
    ]
    assert uniform(1234, 56) == GOLDEN_1234_56


GOLDEN_1234_56 = 0.13669885217308897


def test_ties_go_to_the_lowest_token_id() -> None:
    logits_SV = torch.tensor([[0.0, 5.0, 5.0, 1.0], [3.0, 3.0, 3.0, 3.0]])
    assert [token for token, _ in sample(logits_SV, [at(GREEDY), at(GREEDY)])] == [1, 0]
    one = at(Sampling(temperature=1.0, top_k=1), seed=3)
    assert [token for token, _ in sample(logits_SV, [one, one])] == [1, 0]


def test_top_k_keeps_exactly_k_of_equal_tokens() -> None:
    logits_SV = torch.zeros(2_000, 600)
    spots_S = [at(Sampling(top_k=3), index=i) for i in range(2_000)]
    assert {token for token, _ in sample(logits_SV, spots_S)} == {0, 1, 2}


def test_top_p_falls_back_to_the_whole_vocabulary() -> None:
    logits_SV = torch.zeros(3_000, 1_000)
    spots_S = [at(Sampling(top_p=0.5), index=i) for i in range(3_000)]
    tokens = {token for token, _ in sample(logits_SV, spots_S)}
    assert max(tokens) == 499 and len(tokens) > 450


def test_tiny_temperature_is_greedy_and_a_huge_one_uniform() -> None:
    logits_SV = torch.tensor([[100.0, 99.0, -100.0]]).expand(300, -1)
    cold = [at(Sampling(temperature=5e-324), index=i) for i in range(300)]
    hot = [at(Sampling(temperature=1e30), index=i) for i in range(300)]
    assert {token for token, _ in sample(logits_SV, cold)} == {0}
    assert {token for token, _ in sample(logits_SV, hot)} == {0, 1, 2}


def test_logprobs_are_those_of_the_unmodified_logits() -> None:
    """Before bias, penalties and temperature, and without changing the caller's logits."""
    logits_SV = torch.tensor([[1.0, 2.0, 3.0]])
    sampling = Sampling(temperature=0.0, logit_bias={0: 50.0}, repetition_penalty=2.0, logprobs=2)
    [(token, found)] = sample(logits_SV, [at(sampling, history=(2,))])
    expected = torch.log_softmax(torch.tensor([1.0, 2.0, 3.0]), 0)
    assert token == 0 and found is not None and found.rank == 3
    assert found.logprob == pytest.approx(expected[0].item())
    assert [t for t, _ in found.top] == [2, 1]
    assert logits_SV.tolist() == [[1.0, 2.0, 3.0]]


def test_logprobs_of_named_tokens_replace_the_largest() -> None:
    logits_SV = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    named = Sampling(temperature=0.0, logprobs=0, logprob_token_ids=(1, 0))
    plain = Sampling(temperature=0.0, logprobs=1)
    (token, found), (_, other) = sample(logits_SV, [at(named), at(plain)])
    expected = torch.log_softmax(logits_SV[0], 0).tolist()
    assert token == 2 and found is not None and other is not None
    assert found.logprob == pytest.approx(expected[2])
    assert [t for t, _ in found.top] == [1, 0] and [t for t, _ in other.top] == [2]
    assert [value for _, value in found.top] == pytest.approx([expected[1], expected[0]])


def test_prompt_logprobs_agree_with_the_oracle_and_break_ties_by_id() -> None:
    rng = np.random.default_rng(5)
    logits = np.round(rng.normal(0, 1, (40, 50)) * 2) / 2
    tokens = rng.integers(0, 50, 40).tolist()
    found = token_logprobs(torch.tensor(logits, dtype=torch.float32), tokens, 6)
    for row, token in enumerate(tokens):
        _same_logprobs(found[row], logprobs_of(logits[row], token, 6))


def test_more_logprobs_than_the_vocabulary_are_clipped() -> None:
    [found] = token_logprobs(torch.tensor([[0.0, 1.0, 1.0]]), [0], 20)
    assert [t for t, _ in found.top] == [1, 2, 0]


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_without_a_finite_value_raise(name: str, temperature: float, bad: float) -> None:
    logits_SV = torch.tensor([[0.0, 1.0], [0.0, bad]])
    with pytest.raises(ArithmeticError):
        load_sampler(name)(logits_SV, [at(Sampling(temperature=temperature))] * 2)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banning_every_token_raises(temperature: float) -> None:
    banned = at(Sampling(temperature=temperature), banned=(0, 1))
    with pytest.raises(ArithmeticError, match="row 0"):
        sample(torch.zeros(1, 2), [banned])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_sampled(dtype: torch.dtype) -> None:
    logits_SV = torch.tensor([[0.0, 2.0, 1.0]], dtype=dtype)
    [(token, found)] = sample(logits_SV, [at(Sampling(temperature=0.0, logprobs=1))])
    assert token == 1 and found is not None and found.rank == 1
