"""Distil a teacher into a student, and compare both with the teacher in fewer bits."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from ridgeline.config.compression import DistillFiles, DistillOptions
from ridgeline.errors import BadInput
from ridgeline.records.progress import Message, Observer, StageAdvanced, silent, stage
from ridgeline.report.result import Result
from ridgeline.workflows.own_text import OwnText, forget_own_text, num_generated

if TYPE_CHECKING:
    from ridgeline.compress.distill.distill_model import (
        CurvePoint,
        DistillProgress,
        DistillRecipe,
        ProgressCallback,
    )
    from ridgeline.workflows.shrink.compare_models import ComparedModel

JUDGED_WINDOWS, JUDGED_TOKENS = 16, 256
SEQUENCE_TOKENS = 65_536
REPORT_FILE = "distillation-report.json"
STAGES = {"teacher": "reading the text with the teacher", "training": "training"}


class DistillResult(Result, frozen=True, kw_only=True):
    """A trained student: the loss curve (nats per token), and the models it competes with, the
    teacher first.
    """

    teacher: str
    student: str
    output: str
    num_tokens: int
    curve: tuple[CurvePoint, ...]
    models: tuple[ComparedModel, ...]
    seconds: float


class TeacherAndStudent(NamedTuple):
    """Names of the two models."""

    teacher: str
    student: str


def distill(
    pair: TeacherAndStudent, output: Path, options: DistillOptions, observer: Observer = silent
) -> DistillResult:
    """Train the student into the empty folder `output`.

    An interrupted run resumes with the same arguments; one that was interrupted while it compared
    the models does not train again. Raises BadInput, BadModel or CannotRun.
    """
    from ridgeline.compress.distill.distill_model import DistillJob, distill_model, student_spec
    from ridgeline.compress.drafter_training.train_drafter import check_enough
    from ridgeline.engine.tokenization import bos_tokens, load_tokenizer

    start_s, text = perf_counter(), check_options(output, options)
    student_spec(pair.teacher, pair.student)  # before any text is generated
    recipe, tokenizer = _recipe(options), load_tokenizer(pair.teacher)
    _check_tokenizers(pair)
    given, bos = tokenizer.encode(text, add_special_tokens=False), bos_tokens(tokenizer)
    own = OwnText(pair.teacher, _own_tokens(options), options.seed)
    kept = [] if options.objective == "sequence" else given
    check_enough(len(kept) + num_generated(own.num_tokens), recipe.length)
    tokens = [*kept, *own.generate((bos, given), output, observer)]
    job = DistillJob(pair.teacher, pair.student, tokens, bos)
    finished = distill_model(job, recipe, output, _reporter(observer))
    with stage(observer, "comparing teacher and student on held-out text"):
        models = _compare(pair, output, options.compare_speed)
    result = DistillResult(
        teacher=pair.teacher,
        student=pair.student,
        output=str(output),
        num_tokens=len(tokens),
        curve=finished.curve,
        models=models,
        seconds=perf_counter() - start_s,
    )
    result.save(output / REPORT_FILE)
    forget_own_text(output)
    return result


def resolve_models(files: DistillFiles) -> TeacherAndStudent:
    """The names of teacher and student. Raises BadInput for too many, too few or unknown ones."""
    from ridgeline.compress.prune.report import read_report

    if (files.student is None) == (files.from_pruned is None):
        raise BadInput("a student is needed", fix="give either --student or --from-pruned")
    if files.from_pruned is not None:
        source = read_report(files.from_pruned).source
        return TeacherAndStudent(files.teacher or source, str(files.from_pruned))
    if files.teacher is None:
        raise BadInput("a teacher is needed", fix="give --teacher MODEL with --student")
    assert files.student is not None
    return TeacherAndStudent(files.teacher, files.student)


def check_options(output: Path, options: DistillOptions) -> str:
    """The text to train on. Raises BadInput for options that no model can have."""
    from ridgeline.compress.calibration import read_text
    from ridgeline.compress.distill.distill_model import read_run
    from ridgeline.compress.writers.store import refuse_output

    if (output / REPORT_FILE).exists() or read_run(output) is None:
        refuse_output(output)
    if options.objective == "sequence" and options.top_k != 64:
        raise BadInput("--top-k has no effect with --objective sequence", fix="leave --top-k out")
    if options.objective == "sequence" and options.own_tokens == 0:
        raise BadInput(
            "--objective sequence trains on text that the teacher writes",
            value="--own-tokens 0",
            limit="at least 1",
        )
    return read_text(options.text)


def _check_tokenizers(pair: TeacherAndStudent) -> None:
    from ridgeline.engine.tokenization import load_tokenizer

    probe = "def f(x):\n    return {'naïve': [x, 12345]}  # Ærøskøbing\n"
    ids = [load_tokenizer(model).encode(probe) for model in pair]
    if ids[0] != ids[1]:
        raise BadInput(
            "teacher and student have different tokenizers",
            value=f"{pair.teacher} and {pair.student}",
            fix="name a student with the teacher's tokenizer",
        )


def _own_tokens(options: DistillOptions) -> int:
    if options.own_tokens is not None:
        return options.own_tokens
    return SEQUENCE_TOKENS if options.objective == "sequence" else 0


def _recipe(options: DistillOptions) -> DistillRecipe:
    from ridgeline.compress.distill.distill_model import DistillRecipe

    return DistillRecipe(
        objective=options.objective,
        top_k=options.top_k,
        steps=options.steps,
        batch=options.batch_size,
        length=options.tokens,
        rate=options.learning_rate,
        seed=options.seed,
    )


def _reporter(observer: Observer) -> ProgressCallback:
    def report(progress: DistillProgress) -> None:
        loss = "" if progress.loss is None else f"loss {progress.loss:.3f}"
        observer(
            StageAdvanced(
                stage=STAGES[progress.stage],
                completed=progress.completed,
                total=progress.total,
                detail=loss,
                remaining_s=progress.remaining_s,
            )
        )
        if progress.held_loss is not None:
            text = f"  step {progress.completed}: {loss}, held-out {progress.held_loss:.3f}"
            observer(Message(text=text))

    return report


def _compare(pair: TeacherAndStudent, output: Path, speed: bool) -> tuple[ComparedModel, ...]:
    from ridgeline.engine.tokenization import load_tokenizer
    from ridgeline.workflows.evaluate.heldout_text import heldout_windows
    from ridgeline.workflows.shrink.compare_models import ModelToCompare, compare_models

    windows = heldout_windows(load_tokenizer(pair.teacher), JUDGED_TOKENS)[:JUDGED_WINDOWS]
    models = (
        ModelToCompare("teacher", pair.teacher, "bf16"),
        ModelToCompare("teacher, INT8", pair.teacher, "int8"),
        ModelToCompare("teacher, INT4", pair.teacher, "int4"),
        ModelToCompare("student before", pair.student, "bf16"),
        ModelToCompare("student", str(output), "bf16"),
        ModelToCompare("student, INT8", str(output), "int8"),
        ModelToCompare("student, INT4", str(output), "int4"),
    )
    return compare_models(models, windows, speed=speed)
