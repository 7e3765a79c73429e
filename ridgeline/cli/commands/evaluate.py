"""`ridgeline eval`: compare the outputs of two models."""

from __future__ import annotations

from ridgeline.cli.params.fetch_model import fetch_model
from ridgeline.cli.params.invocation import Invocation
from ridgeline.cli.render.evaluate import evaluation_text
from ridgeline.cli.render.live_progress import live_progress
from ridgeline.config.improve import EvaluateOptions
from ridgeline.config.settings import Settings
from ridgeline.report.json_line import json_line
from ridgeline.workflows.evaluate.evaluate import evaluate
from ridgeline.workflows.evaluate.lm_eval import LmEvalOptions, lm_eval_options
from ridgeline.workflows.evaluate.quality_reference import EvaluationSize

NOT_PASSED = 1


def evaluate_command(call: Invocation) -> int:
    """`ridgeline eval`."""
    options = call.read(EvaluateOptions)
    lm_eval = lm_eval_options(options)
    original, candidate = Settings(model=fetch_model(options.a)), call.settings(options.b)
    return run_evaluate(original, candidate, options.budget, lm_eval, as_json=options.json)


def run_evaluate(
    original: Settings,
    candidate: Settings,
    budget_s: float,
    lm_eval: LmEvalOptions | None,
    *,
    as_json: bool,
) -> int:
    """Evaluate and print; 1 unless the candidate passes."""
    size = EvaluationSize(budget_s=budget_s)
    with live_progress() as observer:
        evaluation = evaluate(original, candidate, size, lm_eval=lm_eval, observer=observer)
    print(json_line(evaluation.to_dict()) if as_json else evaluation_text(evaluation))
    return 0 if evaluation.verdict == "pass" else NOT_PASSED
