"""Recall from long contexts: what the questions cover, and whose losses the gate sees."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from ridgeline.engine.engine import Engine
from ridgeline.errors import CannotRun
from ridgeline.optimize.environment import LongContexts
from ridgeline.optimize.ladder import Rung, load_default_ladder
from ridgeline.optimize.output.number_format import quality_line
from ridgeline.optimize.quality import QualityVerdict, SequentialPanel, load_quality_limits
from ridgeline.optimize.quality.recall import (
    KINDS,
    RecallPart,
    RecallReference,
    RecallTexts,
    recalls,
)
from ridgeline.optimize.quality.served_text import ScoredToken
from ridgeline.optimize.trial_checks import CandidateChecks
from ridgeline.records import Sampling
from ridgeline.stats import UNBOUNDED
from ridgeline.workflows.evaluate.long_contexts import (
    EngineContexts,
    context_tokens,
    recall_texts,
)

LIMITS, SIZE = load_quality_limits()
TEXTS = RecallTexts("A sentence of plain prose about nothing. " * 400, (800, 1600, 3200))
FACT = re.compile(r"secret number of the (\w+ \w+) is (\d+)\.")


class Memory:
    """Answers from the facts that it can still read; `lost`: which it cannot, by a rule."""

    continues_output = True

    def __init__(self, kept: float = 1.0, *, only_asked: bool = False, skip: int = 0) -> None:
        self.kept, self.only_asked, self.skip = kept, only_asked, skip
        self.num_asked = 0

    def complete(self, prompt: str, written: str, max_tokens: int) -> str:
        self.num_asked += 1
        text = prompt[int((1 - self.kept) * len(prompt)) :]
        facts = dict(FACT.findall(text))
        asked = re.findall(r"the (\w+ \w+) is$", prompt + written)[0]
        if (self.only_asked and written) or (self.skip and self.num_asked % self.skip == 0):
            return " nothing"
        return f" {facts.get(asked, 'unknown')}. More"

    def score_text(self, text: str) -> list[ScoredToken]:
        raise CannotRun("no")

    def continuation(self, text: str, num_tokens: int) -> list[ScoredToken]:
        return [ScoredToken(token="a", logprob=-0.1, top={"a": -0.1, "b": -2.5})] * num_tokens

    def answer(self, text: str, max_tokens: int) -> tuple[list[str], list[float]]:
        return [self.complete(text, "", max_tokens)], [1.0]


def judged(before: Memory, after: Memory, *, required: bool = True) -> QualityVerdict:
    reference = RecallReference(TEXTS, before)
    part = RecallPart(reference, after, LIMITS, SIZE, required=required)
    panel = SequentialPanel(None, [part], max_looks=SIZE.max_looks, clock=lambda: 0.0)
    panel.run(1e9)
    return panel.conclude()


def test_questions_cover_depths_and_lengths_and_are_answered_by_their_context() -> None:
    questions = [TEXTS.question("needle", i) for i in range(SIZE.first_contexts)]
    assert {int(4 * q.depth) for q in questions} == {0, 1, 2, 3}
    assert {q.length for q in questions} == set(TEXTS.lengths)
    assert all(len(q.prompt) >= q.length for q in questions)
    for kind in KINDS:
        assert all(recalls(Memory(), TEXTS.question(kind, i)) for i in range(24))
        assert TEXTS.question(kind, 5) == TEXTS.question(kind, 5)
    # The answer stands nowhere but in the fact.
    assert all(q.prompt.count(q.answer) == 1 for q in questions)


def test_cache_that_keeps_everything_passes() -> None:
    found = judged(Memory(), Memory())
    assert found.verdict == "pass" and found.num_looks == 3
    assert {check.name for check in found.checks} == {f"recall, {kind}" for kind in KINDS}
    assert all(score.right_after == 1.0 and score.num_items == 64 for score in found.tasks)


def test_half_of_the_context_is_refused_at_the_first_look() -> None:
    found = judged(Memory(), Memory(kept=0.5))
    assert found.verdict == "fail" and found.num_looks == 1


def test_choice_by_the_question_is_refused_for_questions_that_come_later() -> None:
    found = judged(Memory(), Memory(only_asked=True))
    verdicts = {check.name: check.verdict for check in found.checks}
    assert verdicts["recall, later"] == "fail"
    assert verdicts["recall, needle"] != "fail"


def test_rare_losses_are_read_until_they_are_decided() -> None:
    """One answer in 14 is lost: more than the margin, and too little for the first look."""
    found = judged(Memory(), Memory(skip=14))
    assert found.verdict != "pass" and found.num_looks > 1


def test_original_without_recall_shows_nothing() -> None:
    weak = Memory(kept=0.01)
    found = judged(weak, Memory(kept=0.01))
    assert found.verdict == "inconclusive" and found.checks[0].measured.high == UNBOUNDED
    assert not judged(weak, weak, required=False).checks
    assert all(score.right_after is None for score in found.tasks)


def test_server_that_takes_whole_prompts_is_not_asked_to_go_on() -> None:
    before = Memory()
    before.continues_output = False  # type: ignore[misc]
    assert {score.name for score in judged(before, Memory()).tasks} == {
        "recall, needle",
        "recall, second turn",
    }


def test_frozen_reference_compares_what_was_read() -> None:
    reference = RecallReference(TEXTS, Memory())
    RecallPart(reference, Memory(), LIMITS, SIZE, required=True).read(0)
    reference.freeze()
    part = RecallPart(reference, Memory(kept=0.5), LIMITS, SIZE, required=True)
    assert part.read(0) and not part.read(1)
    assert all(score.num_items == SIZE.first_contexts for score in part.scores())


def checks_with(contexts: LongContexts | None) -> CandidateChecks:
    runner: Any = SimpleNamespace(budget=SimpleNamespace(spent_s=0.0, total_s=1e9, left_s=1e9))
    environment: Any = SimpleNamespace(
        evaluation=None, long_contexts=contexts, served=None, heldout=(), tasks=()
    )
    return CandidateChecks(environment, runner)


def rung(name: str) -> Rung:
    return next(rung for rung in load_default_ladder().rungs if rung.id == name)


@pytest.mark.parametrize(("kept", "verdict"), [(1.0, "pass"), (0.6, "fail")])
def test_eviction_is_judged_by_long_contexts(kept: float, verdict: str) -> None:
    texts = tuple(f"text {i}" for i in range(600))
    contexts = LongContexts(texts=texts, recall=TEXTS, source_of=lambda deployment: deployment)  # type: ignore[arg-type,return-value]
    deployments: Any = Memory(), Memory(kept)
    panel = checks_with(contexts).examine(rung("kv-eviction-snapkv"), *deployments)
    assert panel is not None
    panel.run(1e9)
    assert panel.verdict == verdict
    names = {check.name for check in panel.conclude().checks}
    assert "KL mean (nats)" in names and "recall, later" in names


def test_eviction_without_long_contexts_cannot_be_judged() -> None:
    sides: Any = Memory(), Memory()
    with pytest.raises(CannotRun, match="long contexts"):
        checks_with(None).examine(rung("kv-eviction-snapkv"), *sides)


@pytest.mark.slow
def test_engine_answers_through_its_cache() -> None:
    """Output that is given is continued as if the model had written it, and a policy that evicts
    the facts loses them."""
    with Engine.open("demo", max_num_seqs=2) as engine:
        source, encode = EngineContexts(engine), engine.tokenizer.encode
        texts = recall_texts(engine.tokenizer, context_tokens(100, 400))
        question = texts.question("later", 1)
        whole = [*encode(question.prompt), *encode(question.written, add_special_tokens=False)]
        sampling = Sampling(temperature=0.0, max_tokens=6)
        [completion] = engine.generate([whole], sampling)
        written = source.complete(question.prompt, question.written, 6)
        assert written == engine.tokenizer.decode(completion.tokens)
        needles = [texts.question("needle", i) for i in range(4)]
        assert sum(recalls(source, needle) for needle in needles) >= 3
        assert len(source.continuation(question.prompt, 3)) == 3
    policy = {"method": "streaming", "budget": 64}
    with Engine.open("demo", max_num_seqs=2, kv_eviction_config=policy) as engine:
        source = EngineContexts(engine)
        assert sum(recalls(source, needle) for needle in needles) < 3


def test_verdict_without_perplexity_is_shown() -> None:
    """Rungs judged by continuations, and servers that score no text, have no such check."""
    line = quality_line(judged(Memory(), Memory(kept=0.5)))
    assert line.startswith("fail: recall, needle -0.") and "recall, later" in line
    assert "nothing" in quality_line(QualityVerdict(verdict="inconclusive", checks=()))
