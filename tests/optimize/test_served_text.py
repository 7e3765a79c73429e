"""The quality panel over texts: what each server lets it check, and what it finds."""

from __future__ import annotations

import math

import msgspec
import pytest

from ridgeline.errors import CannotRun
from ridgeline.optimize.external.scoring import ServerScorer
from ridgeline.optimize.quality import load_quality_limits
from ridgeline.optimize.quality.sequential import QualityVerdict, SequentialPanel
from ridgeline.optimize.quality.served_text import (
    ScoredToken,
    ServedComparison,
    ServedQuestionsPart,
    ServedReference,
    ServedText,
    ServedTextPart,
    TextSource,
    compare_served,
    text_checks,
)
from ridgeline.optimize.quality.task_questions import TextQuestion, text_questions
from tests.cli.test_evaluate_servers import SERVERS, server

TEXTS = tuple("".join(chr(97 + (i * j) % 26) for j in range(50)) for i in range(1, 40))
LIMITS, SIZE = load_quality_limits()
CHECKS = {
    "vllm": {"perplexity ratio", "KL mean (nats)", "greedy agreement"},
    "sglang": {"perplexity ratio", "KL mean (nats)", "greedy agreement"},
    "tgi": {"perplexity ratio", "KL mean (nats)", "greedy agreement"},
    "llama-server": {"KL mean (nats)", "greedy agreement"},
}


def judged(before: TextSource, after: TextSource) -> QualityVerdict:
    reference = ServedReference(TEXTS, tuple(text_questions(8)), before)
    panel = SequentialPanel(
        ServedTextPart(reference, after, LIMITS, SIZE),
        [ServedQuestionsPart(reference, after, LIMITS, SIZE)],
        max_looks=2,
        clock=lambda: 0.0,
    )
    panel.run(10.0)
    return panel.conclude()


@pytest.mark.slow
@pytest.mark.parametrize("kind", SERVERS)
def test_same_model_passes_and_a_worse_one_does_not(kind: str) -> None:
    with server(kind) as a, server(kind, shift=0.6) as b:
        same, worse = (
            judged(ServerScorer(a, "m", kind), ServerScorer(url, "m", kind)) for url in (a, b)
        )
    assert {check.name for check in same.checks} == CHECKS[kind]
    assert same.verdict == "pass" and same.num_windows == len(TEXTS[:16])
    assert worse.verdict == "fail"
    assert (same.perplexity_before is None) == (kind == "llama-server")
    assert same.num_flips == 0


def token(name: str, **top: float) -> ScoredToken:
    tops = {key: math.log(value) for key, value in top.items()}
    return ScoredToken(token=name, logprob=tops[name], top=tops)


def test_continuations_are_compared_up_to_their_first_difference() -> None:
    before = (token("a", a=0.9, b=0.1), token("b", b=0.6, a=0.4), token("a", a=0.9))
    after = (token("a", a=0.8, b=0.2), token("a", a=0.6, b=0.4), token("a", a=0.1))
    row = compare_served(
        ServedText(scored=(), continued=before), ServedText(scored=(), continued=after)
    )
    assert row.num_compared == 2 and row.same_top == 1 and row.num_scored == 0
    assert row.kl > 0


def test_early_difference_counts_as_one_position_not_as_one_text() -> None:
    """1 of 100 positions differs, wherever in its text: the agreement is 99 %."""
    whole = ServedComparison(
        num_scored=0, nll_before=0.0, nll_after=0.0, num_compared=11, kl=0.0, same_top=11
    )
    early = msgspec.structs.replace(whole, num_compared=1, same_top=0, kl=0.5)
    [kl, agreement] = text_checks([whole] * 9 + [early], LIMITS)
    assert agreement.name == "greedy agreement"
    assert agreement.measured.mid == pytest.approx(0.99)
    assert kl.measured.mid == pytest.approx(0.005)
    assert agreement.measured.low < 0.99 < agreement.measured.high


def test_text_that_is_tokenised_differently_has_no_positions() -> None:
    before, after = (token("a", a=0.9),), (token("b", b=0.9),)
    row = compare_served(
        ServedText(scored=before, continued=()), ServedText(scored=after, continued=())
    )
    assert row.num_scored == 0 and row.num_compared == 0


class Right:
    """A server that answers every question rightly, or wrongly from some point on."""

    def __init__(self, wrong: bool = False) -> None:
        self.wrong, self.asked = wrong, 0
        self.answers = {q.prompt: q.options[q.right] for q in QUESTIONS}

    def score_text(self, text: str) -> list[ScoredToken]:
        raise CannotRun("no")

    def continuation(self, text: str, num_tokens: int) -> list[ScoredToken]:
        return [token("a", a=0.9, b=0.1)] * num_tokens

    def answer(self, text: str, max_tokens: int) -> tuple[list[str], list[float]]:
        self.asked += 1
        return [" none" if self.wrong else self.answers[text], "."], [1.0, 1.0]


QUESTIONS: tuple[TextQuestion, ...] = tuple(text_questions(SIZE.first_items * 2))


def test_lost_answers_fail_the_panel() -> None:
    reference = ServedReference(TEXTS, QUESTIONS, Right())
    for wrong, verdict in ((False, "pass"), (True, "fail")):
        after = Right(wrong)
        panel = SequentialPanel(
            ServedTextPart(reference, after, LIMITS, SIZE),
            [ServedQuestionsPart(reference, after, LIMITS, SIZE)],
            max_looks=2,
            clock=lambda: 0.0,
        )
        panel.run(10.0)
        assert panel.verdict == verdict
        assert panel.conclude().tasks[0].right_before == 1.0


def test_frozen_reference_compares_what_was_read() -> None:
    source = Right()
    reference = ServedReference(TEXTS, QUESTIONS, source)
    reference.advance(0, SIZE)
    reference.freeze()
    assert len(reference.texts(99)) == SIZE.first_windows
    assert len(reference.questions(999)) == SIZE.first_items == source.asked
