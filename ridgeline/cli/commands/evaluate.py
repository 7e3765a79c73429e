"""`ridgeline eval`: compare the outputs of two models."""

from __future__ import annotations

from ridgeline.cli.params.fetch_model import fetch_model
from ridgeline.cli.params.invocation import Invocation
from ridgeline.cli.render.evaluate import evaluation_text, server_evaluation_text
from ridgeline.cli.render.live_progress import live_progress
from ridgeline.config.improve import EvaluateOptions, EvaluateServersOptions
from ridgeline.config.settings import Settings
from ridgeline.errors import BadInput
from ridgeline.report.json_line import json_line
from ridgeline.workflows.evaluate.evaluate import evaluate
from ridgeline.workflows.evaluate.evaluate_servers import ServerToCompare, evaluate_servers
from ridgeline.workflows.evaluate.lm_eval import LmEvalOptions, lm_eval_options
from ridgeline.workflows.evaluate.quality_reference import EvaluationSize

NOT_PASSED = 1


def evaluate_command(call: Invocation) -> int:
    """`ridgeline eval`."""
    options, servers = call.read(EvaluateOptions), call.read(EvaluateServersOptions)
    if servers.url:
        return _evaluate_servers(options, servers)
    if not options.a or not options.b:
        raise BadInput("eval compares two models", fix="ridgeline eval A B, or --url A --url B")
    lm_eval = lm_eval_options(options)
    candidate = call.settings(options.b)
    original = Settings(model=fetch_model(options.a))
    return run_evaluate(original, candidate, options.budget, lm_eval, as_json=options.json)


def _evaluate_servers(options: EvaluateOptions, servers: EvaluateServersOptions) -> int:
    if len(servers.url) != 2:
        raise BadInput("eval compares two servers", value=len(servers.url), fix="--url A --url B")
    first, second = (
        ServerToCompare(
            url=url,
            kind=servers.server,
            model=servers.served_model_name,
            api_key=servers.api_key,
        )
        for url in servers.url
    )
    with live_progress() as observer:
        evaluation = evaluate_servers(
            first,
            second,
            budget_s=options.budget,
            command=servers.eval_cmd,
            margin=servers.eval_margin,
            observer=observer,
        )
    as_json = json_line(evaluation.to_dict()) if options.json else ""
    print(as_json or server_evaluation_text(evaluation))
    return 0 if evaluation.verdict == "pass" else NOT_PASSED


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
