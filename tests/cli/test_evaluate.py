"""`ridgeline eval`: the noise floor is low, the negative control fails, INT4 is detected."""

from __future__ import annotations

import msgspec
import pytest

from ridgeline.cli.render.evaluate import evaluation_text
from ridgeline.config.settings import Settings
from ridgeline.errors import BadInput
from ridgeline.workflows.evaluate.evaluate import evaluate
from ridgeline.workflows.evaluate.evaluation import Evaluation, refusal_reason
from ridgeline.workflows.evaluate.quality_reference import EvaluationSize

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def panel() -> Evaluation:
    size = EvaluationSize(budget_s=0.1, num_prompts=6, answer_tokens=24, num_long=2)
    return evaluate(Settings(model="demo"), Settings(model="demo", quantization="int4"), size)


def test_int4_demo_fails_and_the_identical_model_passes(panel: Evaluation) -> None:
    assert panel.floor.check("KL mean (nats)").measured.mid < 1e-6
    assert panel.floor.verdict != "fail"
    assert panel.control.verdict == "fail"
    assert panel.verdict == panel.candidate.verdict == "fail"  # a small model feels 4 bits
    assert 0.01 < panel.candidate.check("KL mean (nats)").measured.mid < 0.2


def test_answers_tasks_and_contexts_are_reported(panel: Evaluation) -> None:
    assert panel.floor.divergence is not None and panel.candidate.divergence is not None
    assert panel.floor.divergence.num_same > panel.candidate.divergence.num_same
    assert panel.lengths is not None and panel.lengths.mean_before > 1
    assert {task.name for task in panel.candidate.tasks} == {"arithmetic", "variables", "recall"}
    assert list(panel.by_context) == ["1-16", "17-64", "65-128", "129-256", "257-512", "513-1024"]
    assert set(panel.by_kind) == {"chat", "code", "prose"}
    assert all(part.perplexity.low < part.perplexity.high for part in panel.by_kind.values())
    assert 0 < panel.candidate.perplexity_error < 0.1 and panel.floor.perplexity_error < 1e-6


def test_evaluation_is_printed_and_encoded_as_json(panel: Evaluation) -> None:
    text = evaluation_text(panel)
    assert "(standard error, paired)" in text and max(map(len, text.splitlines())) <= 100
    assert "✗ KL mean (nats)" in text and text.endswith(")") and "verdict: fail (" in text
    assert msgspec.json.decode(msgspec.json.encode(panel))["verdict"] == "fail"


def test_passing_negative_control_invalidates_the_verdict(panel: Evaluation) -> None:
    assert "planted fault" in str(refusal_reason(panel.floor, panel.floor))
    assert "itself" in str(refusal_reason(panel.control, panel.control))
    assert refusal_reason(panel.floor, panel.control) is None


def test_model_without_a_tokenizer_is_refused() -> None:
    dummy = Settings(model="dummy:qwen2.5-0.5b")
    with pytest.raises(BadInput, match=r"judged on text.*its weights are random"):
        evaluate(dummy, dummy)


def test_vocabularies_must_agree() -> None:
    with pytest.raises(BadInput, match="vocabularies"):
        evaluate(Settings(model="demo"), Settings(model="dummy:qwen2.5-0.5b"))
