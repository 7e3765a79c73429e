"""Evaluate whether a candidate model still answers as the original does.

First the floor: the original against itself on another number of threads, which is what rounding
alone does. Then the candidate, by the panel, thresholds and paired intervals that `optimize` uses
for lossy changes. Last a control: the original with one block's feed-forward output three times too
large, which must fail; if it passes, this text shows nothing, and no verdict is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import msgspec
import torch

from ridgeline.config.settings import Settings
from ridgeline.engine.checkpoints.load import load_decoder
from ridgeline.engine.config import ResolvedSettings, resolve
from ridgeline.engine.execution.runner import TorchRunner
from ridgeline.engine.tokenization import NoTokenizer, load_tokenizer
from ridgeline.errors import BadInput
from ridgeline.optimize.quality import Array, GateVerdict, LogprobsOf, QualityVerdict
from ridgeline.optimize.quality.thresholds import worst_verdict
from ridgeline.records.progress import Observer, silent, stage
from ridgeline.workflows.evaluate.evaluation import (
    Evaluation,
    LmEvalScore,
    refusal_reason,
    with_lm_eval,
)
from ridgeline.workflows.evaluate.lm_eval import (
    LmEvalOptions,
    compare_documents,
    find_program,
    run_lm_eval,
    tokenizer_folder,
)
from ridgeline.workflows.evaluate.quality_reference import (
    EvaluationSize,
    OpenModel,
    QualityReference,
)

FAULT_GAIN = 3.0  # of the control's feed-forward output
DEFAULT_SIZE = EvaluationSize()


def evaluate(
    original: Settings,
    candidate: Settings,
    size: EvaluationSize = DEFAULT_SIZE,
    *,
    lm_eval: LmEvalOptions | None = None,
    observer: Observer = silent,
) -> Evaluation:
    """Compare two configurations.

    `lm_eval`: tasks to run on both. Raises BadInput if the vocabularies differ or the original has
    no tokenizer, CannotRun if lm-eval is needed and not installed.
    """
    resolved, other = resolve(original), resolve(candidate)
    if lm_eval is not None:
        find_program(lm_eval)  # before minutes of reading
        tokenizer_folder([original.model, candidate.model])
    if resolved.spec.vocab_size != other.spec.vocab_size:
        raise BadInput(
            "the models have different vocabularies: their distributions cannot be compared",
            value=f"{resolved.spec.vocab_size} and {other.spec.vocab_size}",
        )
    tokenizer = load_tokenizer(original.model)
    if isinstance(tokenizer, NoTokenizer):
        raise BadInput(
            "quality is judged on text, which needs the tokenizer of the original",
            value=original.model,
            limit=tokenizer.reason,
            fix="name a model that has a tokenizer",
        )
    with ExitStack() as stack:
        with stage(observer, f"reading held-out text with {original.model}"):
            reference = QualityReference(OpenModel(original, stack), size)
        with (
            stage(observer, "floor: the original on another number of threads"),
            ExitStack() as short,
        ):
            same = OpenModel(_with_other_threads(original, resolved), short)
            floor = reference.compare(same.logprobs_of, reference.outputs_of(same))
        with stage(observer, f"reading held-out text with {candidate.model}"):
            model = OpenModel(candidate, stack)
            outputs = reference.outputs_of(model)
            verdict, by_kind = reference.compare_by_kind(model.logprobs_of, outputs)
        with stage(observer, "by length of context, and facts in long contexts"):
            by_context = reference.compare_by_context(model.logprobs_of)
            long = reference.compare_long(model)
        with stage(observer, "control: the original with a planted fault"):
            control = reference.compare(_with_fault(resolved))
        reason = refusal_reason(floor, control)
        evaluation = Evaluation(
            original=original.model,
            candidate_name=candidate.model,
            floor=floor,
            candidate=verdict,
            by_kind=by_kind,
            by_context=by_context,
            lengths=reference.length_drift(outputs),
            control=control,
            long_contexts=long,
            refusal=reason,
            verdict="inconclusive" if reason else _verdict_of(verdict, long),
        )
        if lm_eval is None:
            return evaluation
        return with_lm_eval(evaluation, _lm_eval_scores(reference, model, lm_eval, observer))


def _verdict_of(candidate: QualityVerdict, long: QualityVerdict | None) -> GateVerdict:
    """The worse of both."""
    return worst_verdict([candidate.verdict, *([] if long is None else [long.verdict])])


def _lm_eval_scores(
    reference: QualityReference, candidate: OpenModel, options: LmEvalOptions, observer: Observer
) -> tuple[LmEvalScore, ...]:
    models = (reference.original, candidate)
    tokenizer = tokenizer_folder([model.settings.model for model in models])
    results = []
    for model in models:
        with stage(observer, f"lm-eval on {model.settings.model}", detail=options.tasks):
            results.append(run_lm_eval(options, model.engine, tokenizer))
    before, after = results
    return compare_documents(before, after, reference.limits.task_drop_max)


def _with_other_threads(settings: Settings, resolved: ResolvedSettings) -> Settings:
    return msgspec.structs.replace(settings, num_threads=1 if resolved.num_threads > 1 else 2)


def _with_fault(resolved: ResolvedSettings) -> LogprobsOf:
    """Log-probabilities [T, V] of the original with one block's feed-forward output scaled."""
    decoder = load_decoder(
        resolved.model,
        resolved.spec,
        device=resolved.device,
        compute_dtype=getattr(torch, resolved.dtype),
        seed=resolved.seed,
        layer_backend="torch",
    )
    block = decoder.blocks[len(decoder.blocks) // 2]
    mlp = block.mlp
    block.mlp = lambda x_TC: mlp(x_TC) * FAULT_GAIN
    runner = TorchRunner(decoder, None, None)

    def logprobs_of(tokens: Sequence[int]) -> Array:
        logprobs: Array = torch.log_softmax(runner.logits(tokens), -1).cpu().numpy()
        return logprobs

    return logprobs_of
