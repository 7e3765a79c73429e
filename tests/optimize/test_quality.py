"""The quality gate: its sums by hand, its verdicts on equal, close and broken models."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from ridgeline.optimize.quality import (
    Gate,
    GateSize,
    compare,
    compare_window,
    judge,
    shipped,
    windows,
)

VOCAB = 50


def model(noise: float, sharpness: float = 4.0) -> Callable[[tuple[int, ...]], np.ndarray]:
    """Log-probabilities of a language in which token + 1 follows; `noise` disturbs the logits."""

    def logprobs_of(tokens: tuple[int, ...]) -> np.ndarray:
        logits = np.random.default_rng(tokens[0]).normal(size=(len(tokens), VOCAB))
        logits[np.arange(len(tokens)), (np.asarray(tokens) + 1) % VOCAB] += sharpness
        logits += noise * np.random.default_rng(tokens[0] + 999).normal(size=logits.shape)
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    return logprobs_of


def pieces(count: int) -> list[tuple[int, ...]]:
    return [tuple((7 * i + j) % VOCAB for j in range(128)) for i in range(count)]


def verdict_of(noise: float, count: int = 16) -> tuple[str, object]:
    gate, size = shipped()
    texts = pieces(count)
    found, kl = compare(texts, map(model(0.0), texts), model(noise))
    judged = judge(found, kl, gate, size)
    return judged.verdict, judged


def test_the_same_model_passes_with_nothing_lost() -> None:
    verdict, judged = verdict_of(0.0)
    assert verdict == "pass"
    assert judged.perplexity_before == judged.perplexity_after
    assert judged.kl_p999 == 0.0
    assert {check.name for check in judged.checks} == {
        "perplexity ratio",
        "KL mean (nats)",
        "greedy agreement",
        "KL p99.9 (nats)",
    }


def test_a_little_noise_passes_and_a_lot_fails() -> None:
    assert verdict_of(0.02)[0] == "pass"
    assert verdict_of(1.5)[0] == "fail"


def test_too_little_text_is_inconclusive_not_a_pass() -> None:
    verdict, judged = verdict_of(0.12, count=2)
    assert verdict == "inconclusive"
    assert judged.kl_p999 is None


def test_one_window_by_hand() -> None:
    before = np.log(np.array([[0.5, 0.5], [0.9, 0.1]]))
    after = np.log(np.array([[0.25, 0.75], [0.9, 0.1]]))
    window, kl = compare_window((0, 1, 0), before, after)
    assert window.count == 2
    assert window.nll_before == pytest.approx(-math.log(0.5) - math.log(0.9))
    assert window.nll_after == pytest.approx(-math.log(0.75) - math.log(0.9))
    assert kl[0] == pytest.approx(0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75))
    assert kl[1] == 0
    assert window.same_top == 1


def test_a_token_that_the_baseline_excludes_costs_nothing() -> None:
    before = np.array([[0.0, -np.inf]])
    after = np.log(np.array([[0.5, 0.5]]))
    _, kl = compare_window((0, 0), before, after)
    assert kl[0] == pytest.approx(math.log(2))


def test_a_failed_check_outweighs_an_open_one() -> None:
    size = GateSize(
        num_windows=16, window_tokens=128, min_positions_for_p999=1000, max_reference_bytes=10**8
    )
    strict = Gate(
        perplexity_ratio_max=10.0,
        kl_mean_max=1e-9,
        kl_p999_max=10.0,
        greedy_agreement_min=0.0,
    )
    texts = pieces(16)
    found, kl = compare(texts, map(model(0.0), texts), model(0.1))
    assert judge(found, kl, strict, size).verdict == "fail"


def test_windows_are_spread_over_the_text() -> None:
    _, size = shipped()
    found = windows(range(10_000), size)
    assert len(found) == size.num_windows
    assert all(len(window) == size.window_tokens for window in found)
    assert found[-1][0] > 9_000
    assert len(windows(range(300), size)) == 2
