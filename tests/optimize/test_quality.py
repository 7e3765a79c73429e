"""The quality panel: its sums by hand, its verdicts, and how often it errs at the limit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from ridgeline.optimize.quality import (
    QualityLimits,
    QualityVerdict,
    SequentialPanel,
    Task,
    TaskPanelPart,
    TaskReference,
    TextPanelPart,
    TextReference,
    cut_windows,
    divergence,
    length_drift,
    load_quality_limits,
    make_tasks,
)
from ridgeline.optimize.quality.quantile_interval import quantile_interval
from ridgeline.optimize.quality.sequential import ERROR, INTERIM
from ridgeline.optimize.quality.text_comparison import KL_TAIL, compare_window
from ridgeline.optimize.quality.thresholds import ThresholdCheck, check_max
from ridgeline.stats import UNBOUNDED, mean_interval

VOCAB = 50
NO_TIME = 1e9


def model(noise: float, sharpness: float = 4.0) -> Callable[[Sequence[int]], np.ndarray]:
    """Log-probabilities of a language in which token + 1 follows; `noise` disturbs the logits."""

    def logprobs_of(tokens: Sequence[int]) -> np.ndarray:
        logits = np.random.default_rng(sum(tokens)).normal(size=(len(tokens), VOCAB))
        logits[np.arange(len(tokens)), (np.asarray(tokens) + 1) % VOCAB] += sharpness
        logits += noise * np.random.default_rng(sum(tokens) + 999).normal(size=logits.shape)
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    return logprobs_of


def pieces(count: int) -> list[tuple[int, ...]]:
    return [tuple((7 * i + j * (1 + i % 5)) % VOCAB for j in range(128)) for i in range(count)]


def examined(
    noise: float, count: int = 512, limit_s: float = NO_TIME, gate: QualityLimits | None = None
) -> QualityVerdict:
    standard, size = load_quality_limits()
    reference = TextReference(pieces(count), model(0.0), size.max_reference_bytes)
    text = TextPanelPart(reference, model(noise), gate or standard, size)
    examination = SequentialPanel(
        text, [], max_looks=size.max_looks, clock=itertools.count().__next__
    )
    examination.run(limit_s)
    return examination.conclude()


def test_the_same_model_passes_with_nothing_lost() -> None:
    found = examined(0.0)
    assert found.verdict == "pass"
    assert found.perplexity_before.mid == pytest.approx(found.perplexity_after.mid, rel=1e-6)
    assert found.num_flips == 0
    assert {check.name for check in found.checks} == {
        "perplexity ratio",
        "KL mean (nats)",
        "greedy agreement",
        "KL p99.9 (nats)",
    }


def test_a_little_noise_passes_and_a_lot_fails_at_the_first_look() -> None:
    assert examined(0.02).verdict == "pass"
    broken = examined(1.5)
    assert broken.verdict == "fail" and broken.num_looks == 1


@pytest.mark.slow
def test_reading_continues_near_the_limit() -> None:
    near = examined(0.14)
    assert near.num_windows > 16 and near.num_looks > 1
    assert any(check.verdict != "inconclusive" for check in near.checks)


def test_too_little_text_or_time_is_inconclusive_not_a_pass() -> None:
    assert examined(0.02, count=2).verdict == "inconclusive"
    hurried = examined(0.02, limit_s=0.5)
    assert hurried.verdict == "inconclusive" and hurried.num_looks == 1
    assert hurried.check(KL_TAIL).measured.high == UNBOUNDED


def test_a_failed_check_outweighs_an_open_one() -> None:
    strict = QualityLimits(
        perplexity_ratio_max=10.0,
        kl_mean_max=1e-9,
        kl_p999_max=10.0,
        greedy_agreement_min=0.0,
        task_drop_max=1.0,
        recall_drop_max=1.0,
    )
    assert examined(0.1, count=16, gate=strict).verdict == "fail"


class Coin:
    """A question whose true mean lies exactly on its limit."""

    def __init__(self, seed: int) -> None:
        self.rng, self.values = np.random.default_rng(seed), np.zeros(0)
        self.found: list[object] = []

    def read(self, look: int) -> bool:
        more = (16 << look) - len(self.values)
        self.values = np.concatenate([self.values, self.rng.normal(size=more)])
        return True

    def checks(self, level: float) -> tuple[ThresholdCheck, ...]:
        return (check_max("coin", mean_interval(self.values.tolist(), level=level), 0.0),)


@pytest.mark.slow
def test_repeated_looks_keep_the_error_rate() -> None:
    """One-sided 2.5 % in all six looks together; six naive looks at 95 % pass about 8 %."""
    passed = 0
    for seed in range(800):
        coin = Coin(seed)
        examination = SequentialPanel(coin, [], max_looks=6, clock=lambda: 0.0)  # type: ignore[arg-type]
        examination.run(NO_TIME)
        passed += examination.verdict == "pass"
    assert 0 < passed / 800 < 0.025 + 3 * math.sqrt(0.025 / 800)
    assert 5 * INTERIM < ERROR


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


def test_the_tail_s_interval_holds_the_truth() -> None:
    rng, truth = np.random.default_rng(0), -math.log(0.001)
    held = 0
    for _ in range(200):
        found = quantile_interval(list(rng.exponential(size=(64, 127))), 0.001)
        held += found.low <= truth <= found.high
    assert held >= 0.9 * 200
    assert quantile_interval(list(rng.exponential(size=(16, 127))), 0.001).high == UNBOUNDED


def test_bursts_widen_the_tail_s_interval() -> None:
    rng = np.random.default_rng(1)
    scattered = list(rng.exponential(size=(256, 127)))
    burst = [window.copy() for window in scattered]
    for window in burst[:8]:
        window[:10] += 10.0
    wide, narrow = (quantile_interval(each, 0.001) for each in (burst, scattered))
    assert wide.high == UNBOUNDED or wide.high - wide.low > narrow.high - narrow.low


def test_windows_take_every_text_in_turn() -> None:
    texts = [range(10_000), range(20_000, 21_000)]
    found = cut_windows(texts, 128)
    assert len(found) == 2 * (1_000 // 128)
    assert all(len(window) == 128 for window in found)
    assert [window[0] >= 20_000 for window in found] == [False, True] * 7
    assert len(set(found)) == len(found)


def test_stored_reference_does_not_need_the_original() -> None:
    reads: list[Sequence[int]] = []

    def read(tokens: Sequence[int]) -> np.ndarray:
        reads.append(tokens)
        return np.zeros((len(tokens), 4), dtype=np.float32)

    reference = TextReference(pieces(4), read, max_bytes=2 * 128 * 4 * 4)
    for index in (0, 1, 2, 0, 2):
        reference.logprobs(index)
    assert len(reads) == 4  # the third does not fit and is read twice
    reference.freeze()
    assert len(reference) == 2


def digits(text: str) -> list[int]:
    """A tokenizer of characters and of words with their blank."""
    found, rest = [], text
    while rest:
        size = 2 if rest[0] == " " and len(rest) > 1 else 1
        found.append(sum(ord(c) * 256**i for i, c in enumerate(rest[:size])))
        rest = rest[size:]
    return found


def task_of(name: str) -> Task:
    return next(task for task in make_tasks(digits) if task.name == name)


def answering(task: Task, wrong: Callable[[int], bool]) -> Callable[[Sequence[int]], np.ndarray]:
    """A model that knows every answer but those of the questions that are `wrong`."""
    known = {task.item(i).prompt: (i, task.item(i)) for i in range(600)}

    def read(tokens: Sequence[int]) -> np.ndarray:
        index, item = known[tuple(tokens)]
        row = np.full((1, max(item.options) + 1), -9.0)
        row[0, item.options[(item.right + wrong(index)) % len(item.options)]] = 0.0
        return row

    return read


def summed(text: str) -> int:
    """`3 + 4 - 2`."""
    words = text.translate(str.maketrans("", "", "[],'")).split()
    signs = [1, *(1 if word == "+" else -1 for word in words[1::2])]
    return sum(sign * int(word) for sign, word in zip(signs, words[::2], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["arithmetic", "variables", "recall"])
def test_right_answers_are_right_and_evenly_drawn(name: str) -> None:
    task = task_of(name)
    for index in range(40):
        item = task.item(index)
        text = "".join(chr(t % 256) + (chr(t // 256) if t > 255 else "") for t in item.prompt)
        answer = chr(item.options[item.right] // 256)
        if name == "arithmetic":
            assert summed(text.splitlines()[-1].removesuffix("=")) == int(answer)
        elif name == "variables":
            value = 0
            for line in text.split("\n\n")[-1].splitlines()[:-1]:
                words = line.partition("=")[2].split()
                value = int(words[0]) if len(words) == 1 else summed(f"{value} {words[1:]}")
            assert value == int(answer)
        else:
            last = text.splitlines()[-1]
            assert f"{last} {answer}" in text.splitlines()[:-1]
    rights = [task.item(i).right for i in range(600)]
    share = max(rights.count(r) for r in set(rights)) / 600
    assert share < 1.5 * task.chance


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (lambda i: False, lambda i: False, "pass"),
        (lambda i: False, lambda i: i % 100 == 3, "pass"),
        (lambda i: False, lambda i: i % 4 == 3, "fail"),
        (lambda i: True, lambda i: False, None),
    ],
)
def test_a_task_passes_fails_or_is_too_hard(
    before: Callable[[int], bool], after: Callable[[int], bool], verdict: str | None
) -> None:
    task, (gate, size) = task_of("recall"), load_quality_limits()
    question = TaskPanelPart(
        TaskReference(task, answering(task, before)), answering(task, after), gate, size
    )
    for look in range(3):
        question.read(look)
    checks = question.checks(0.95)
    assert [check.verdict for check in checks] == ([verdict] if verdict else [])
    assert (question.scores()[0].right_after is not None) == (verdict is not None)


def test_a_tokenizer_that_splits_the_answers_has_no_tasks() -> None:
    assert make_tasks(lambda text: [ord(c) for c in text]) != ()
    assert make_tasks(lambda text: [ord(c) // 16 for c in text]) == ()


def test_position_where_answers_diverge() -> None:
    before = [(1, 2, 3, 4), (1, 2, 3, 4), (5, 6, 7, 8)]
    found = divergence(before, [(1, 2, 3, 4), (1, 9, 3, 4), (5, 6, 7, 9)])
    assert (found.num_same, found.first_token, found.median_token) == (1, 2, 4)
    assert divergence(before, before).median_token is None


def test_lengths_are_compared_in_pairs() -> None:
    found = length_drift([(1,) * 4, (1,) * 10, (1,) * 6], [(1,) * 6, (1,) * 10, (1,) * 9], 10)
    assert found.change.mid == pytest.approx(5 / 3)
    assert found.num_cut == 1
