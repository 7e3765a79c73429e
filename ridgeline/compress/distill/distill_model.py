"""Distils a teacher into a student: `ridgeline distill`.

  text ─▶ windows ─▶ teacher, once: its likely next tokens, on disk
                 └─▶ student ─▶ loss ─▶ Adam ─▶ a checkpoint like the student's, in its dtype

Every window is used once before any is used twice. Weights, moments and the loss curve are
checkpointed next to the output; after an interruption the same command continues there and produces
the same student, because the windows of a step depend only on seed and step.

When it loses: with less text than millions of tokens. A student that reads a few thousand learns
that text and answers worse elsewhere.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

from ridgeline.compress.adam import AdamState, scheduled_rate
from ridgeline.compress.distill.losses import text_loss, top_k_divergence
from ridgeline.compress.distill.student import StudentModelBuilder, StudentWeights
from ridgeline.compress.distill.teacher_cache import CHUNK, LogitsOf, TeacherCache
from ridgeline.compress.drafter_training.train_drafter import HELD_WINDOWS, windows
from ridgeline.compress.pipeline import content_digest
from ridgeline.compress.training_model import TrainingModel
from ridgeline.compress.unfinished import file_of_interrupted_run
from ridgeline.compress.writers.dense import DenseCheckpoint, write_dense
from ridgeline.compress.writers.store import (
    new_result,
    open_folder,
    publish_result,
    refuse_output,
)
from ridgeline.engine.checkpoints.load import load_decoder
from ridgeline.engine.checkpoints.sources import CheckpointWeights
from ridgeline.engine.execution.runner import TorchRunner
from ridgeline.errors import DECODE_ERRORS, BadInput, CannotRun
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.checkpoints.locate import model_path
from ridgeline.modelspec.cost.parameters import num_params
from ridgeline.modelspec.model import ModelSpec
from ridgeline.modelspec.rewrite import with_dtype

BYTES_PER_WEIGHT = 16  # weight, gradient, two moments
SAVE_EVERY_S = 60.0
NUM_LOOKS = 10  # at the held-out windows
CURVE_FILE = "distillation.json"


class DistillRecipe(msgspec.Struct, frozen=True, kw_only=True):
    """How to train. `batch`: windows per step, of `length` tokens each; `rate`: at its peak."""

    objective: Literal["logits", "sequence"] = "logits"
    top_k: int = 64
    steps: int = 400
    batch: int = 8
    length: int = 256
    rate: float = 3e-4
    seed: int = 0


class DistillProgress(msgspec.Struct, frozen=True, kw_only=True):
    """A step of the training, or a file of the teacher's cache. `held_loss`: if just measured."""

    stage: Literal["teacher", "training"]
    completed: int
    total: int
    loss: float | None = None
    held_loss: float | None = None
    remaining_s: float | None = None


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True):
    """Losses in nats per token: of the step, and of the held-out windows."""

    step: int
    num_tokens: int
    loss: float | None
    held_loss: float


class DistillRun(msgspec.Struct, frozen=True, kw_only=True):
    """A finished training; stored with the student as `distillation.json`.

    `digest`: of the recipe, both models' weights and the text.
    """

    teacher: str
    student: str
    num_tokens: int
    recipe: DistillRecipe
    curve: tuple[CurvePoint, ...]
    digest: str = ""


ProgressCallback = Callable[[DistillProgress], None]


class DistillJob(NamedTuple):
    """Teacher, student, and the tokens of the text; every window of it begins with `bos`."""

    teacher: str
    student: str
    tokens: Sequence[int]
    bos: Sequence[int]


def distill_model(
    job: DistillJob, recipe: DistillRecipe, output: Path, on_progress: ProgressCallback
) -> DistillRun:
    """Train the student into `output`. Raises BadInput, BadModel, CannotRun.

    A student that the same job has put there already is not trained again.
    """
    run = _fingerprint(job, recipe)
    if (known := read_run(output)) is not None and known.digest == _digest(run):
        return known
    refuse_output(output)
    spec = student_spec(job.teacher, job.student)
    windows_NT = windows(job.tokens, recipe.length, job.bos)
    path = model_path(job.student)
    order = window_order(len(windows_NT), recipe)
    with (
        open_folder(output, run) as partial,
        CheckpointWeights(path, spec) as source,
    ):
        cache = TeacherCache(partial, windows_NT, recipe.top_k)
        if recipe.objective == "logits":
            _fill_cache(cache, job.teacher, max(max(order) + 1, HELD_WINDOWS), on_progress)
        with torch.inference_mode(False), torch.enable_grad():
            builder = StudentModelBuilder(spec, source)
            model = TrainingModel(builder, recipe.length)
            state = AdamState(builder.parameters)
            state.load(partial)
            training = DistillTraining(model, state, recipe, windows_NT, cache)
            curve = training.run(order, partial, on_progress)
        finished = DistillRun(
            teacher=job.teacher,
            student=job.student,
            num_tokens=len(job.tokens),
            recipe=recipe,
            curve=tuple(curve),
            digest=_digest(run),
        )
        result = new_result(partial)
        weights = StudentWeights(builder, source)
        write_dense(DenseCheckpoint(path, spec, weights, {}), result)
        text = msgspec.json.format(msgspec.json.encode(finished), indent=1)
        (result / CURVE_FILE).write_bytes(text)
    publish_result(partial, output)
    return finished


def read_run(output: Path) -> DistillRun | None:
    """The training whose student is in `output`; None if there is none."""
    try:
        return msgspec.json.decode((output / CURVE_FILE).read_bytes(), type=DistillRun)
    except (OSError, *DECODE_ERRORS):
        return None


def student_spec(teacher: str, student: str) -> ModelSpec:
    """The student's spec in float32. Raises BadInput or CannotRun if it cannot be trained."""
    from ridgeline.compress.prune.prune_model import prunable_spec

    spec, other = prunable_spec(student), load_spec(teacher)
    if spec.vocab_size != other.vocab_size:
        raise BadInput(
            "teacher and student have different vocabularies",
            value=f"{other.vocab_size:,} and {spec.vocab_size:,} tokens",
            fix="name models with the same tokenizer",
        )
    needed = BYTES_PER_WEIGHT * num_params(spec)
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        raise CannotRun(
            "the student, its gradients and moments do not fit in memory",
            value=f"{needed / 1e9:.1f} GB",
            limit=f"{there / 1e9:.1f} GB",
            fix="prune it further, or train elsewhere",
        )
    return with_dtype(spec, "float32")


def window_order(num_windows: int, recipe: DistillRecipe) -> list[int]:
    """The window of every sequence of every step: a shuffled pass over all that are not held out,
    then another.
    """
    found: list[int] = []
    count, epoch = recipe.steps * recipe.batch, 0
    while len(found) < count:
        random = torch.Generator().manual_seed(recipe.seed * 1_000_003 + epoch)
        free = num_windows - HELD_WINDOWS
        # the windows are shuffled already: a pass that is not completed reads the first of them
        size = min(free, count - len(found))
        found += (torch.randperm(size, generator=random) + HELD_WINDOWS).tolist()
        epoch += 1
    return found


def _fill_cache(
    cache: TeacherCache, teacher: str, num_windows: int, on_progress: ProgressCallback
) -> None:
    missing, total = cache.missing(num_windows), -(-num_windows // CHUNK)
    if not missing:
        return
    logits_of, times = _logits_of(teacher), list[float]()
    for done, chunk in enumerate(missing, 1):
        begun_s = perf_counter()
        cache.add(chunk, logits_of)
        times.append(perf_counter() - begun_s)
        left_s = (len(missing) - done) * sum(times) / len(times)
        on_progress(
            DistillProgress(
                stage="teacher",
                completed=total - len(missing) + done,
                total=total,
                remaining_s=left_s,
            )
        )


def _logits_of(model: str) -> LogitsOf:
    spec = with_dtype(load_spec(model), "float32")
    decoder = load_decoder(model, spec, device="cpu", compute_dtype=torch.float32)
    return TorchRunner(decoder, None, None).logits


class DistillTraining:
    """The student, its optimiser, and what it learns from."""

    def __init__(
        self,
        model: TrainingModel,
        state: AdamState,
        recipe: DistillRecipe,
        windows_NT: Tensor,
        cache: TeacherCache,
    ) -> None:
        self._model, self._state, self._recipe = model, state, recipe
        self._windows_NT, self._cache = windows_NT, cache

    def run(
        self, order: Sequence[int], partial: Path, on_progress: ProgressCallback
    ) -> list[CurvePoint]:
        """Train to the end; returns the loss curve. Raises CannotRun if it diverges."""
        recipe, state = self._recipe, self._state
        curve = [point for point in _read_curve(partial) if point.step <= state.step]
        look_every = max(1, recipe.steps // NUM_LOOKS)
        times, saved_s, first = list[float](), perf_counter(), state.step
        if not curve:
            curve.append(self._look(None))
        while state.step < recipe.steps:
            begun_s = perf_counter()
            at = state.step * recipe.batch
            loss = self._step(order[at : at + recipe.batch])
            held = None
            if state.step % look_every == 0 or state.step == recipe.steps:
                curve.append(self._look(loss))
                held = curve[-1].held_loss
            times.append(perf_counter() - begun_s)
            left_s = (recipe.steps - state.step) * sum(times) / len(times)
            if perf_counter() - saved_s > SAVE_EVERY_S or state.step == first + 1:
                _write_curve(partial, curve)
                state.save(partial)
                saved_s = perf_counter()
            on_progress(
                DistillProgress(
                    stage="training",
                    completed=state.step,
                    total=recipe.steps,
                    loss=loss,
                    held_loss=held,
                    remaining_s=left_s,
                )
            )
        return curve

    def _loss(self, window: int) -> Tensor:
        tokens = self._windows_NT[window].tolist()
        logits_TV = self._model.logits(tokens)
        if self._recipe.objective == "sequence":
            return text_loss(logits_TV, tokens)
        return top_k_divergence(logits_TV, self._cache[window])

    def _step(self, picked: Sequence[int]) -> float:
        total = 0.0
        for window in picked:
            loss = self._loss(window)
            (loss / len(picked)).backward()
            total += loss.item()
        if not math.isfinite(total):
            raise CannotRun(
                "the training diverged", value=f"loss {total}", fix="lower --learning-rate"
            )
        step, steps = self._state.step, self._recipe.steps
        self._state.update(scheduled_rate(self._recipe.rate, step, steps))
        return total / len(picked)

    @torch.no_grad()
    def _look(self, loss: float | None) -> CurvePoint:
        held = [float(self._loss(window)) for window in range(HELD_WINDOWS)]
        return CurvePoint(
            step=self._state.step,
            num_tokens=self._state.step * self._recipe.batch * self._recipe.length,
            loss=loss,
            held_loss=sum(held) / len(held),
        )


def _read_curve(partial: Path) -> list[CurvePoint]:
    file = partial / "curve.json"
    if not file.is_file():
        return []
    with file_of_interrupted_run(file):
        return msgspec.json.decode(file.read_bytes(), type=list[CurvePoint])


def _write_curve(partial: Path, curve: Sequence[CurvePoint]) -> None:
    temporary = partial / "curve.tmp"
    temporary.write_bytes(msgspec.json.encode(list(curve)))
    temporary.replace(partial / "curve.json")


def _fingerprint(job: DistillJob, recipe: DistillRecipe) -> dict[str, Any]:
    """What an interrupted run must share with the run that continues it."""
    tokens = torch.tensor([*job.bos, -1, *job.tokens]).numpy().tobytes()
    files = [
        sorted((f.name, content_digest(f)) for f in model_path(model).glob("*.safetensors"))
        for model in (job.teacher, job.student)
    ]
    return {
        "recipe": msgspec.to_builtins(recipe),
        "weights": [[list(pair) for pair in pairs] for pairs in files],
        "text": hashlib.sha256(tokens).hexdigest(),
    }


def _digest(run: dict[str, Any]) -> str:
    return hashlib.sha256(msgspec.json.encode(run, order="sorted")).hexdigest()
