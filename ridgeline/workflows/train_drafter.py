"""Train a drafter for a model, on text that the model generates and any text that is given."""

from __future__ import annotations

import json
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from ridgeline.config.improve import TrainDrafterOptions
from ridgeline.errors import BadInput
from ridgeline.records import Sampling
from ridgeline.records.progress import Message, Observer, StageAdvanced, silent, stage
from ridgeline.report.result import Result

if TYPE_CHECKING:
    from ridgeline.compress.drafter_training.train_drafter import (
        DrafterRecipe,
        DrafterTrainingProgress,
        ProgressCallback,
    )

PROMPT_TOKENS, ANSWER_TOKENS = 32, 224
DEFAULT_HEADS = 4
STAGE = "training"


class DrafterTraining(Result, frozen=True, kw_only=True):
    """A trained drafter.

    `acceptance`: per drafted position, of a draft that is sampled, on held-out text.
    """

    model: str
    output: str
    kind: str
    num_bytes: int
    num_tokens: int
    acceptance: tuple[float, ...]
    seconds: float

    @property
    def speculative_config(self) -> str:
        """The value of --speculative-config that uses the drafter."""
        return json.dumps({"method": self.kind, "model": self.output})


def train_drafter(
    model: str, output: Path, options: TrainDrafterOptions, observer: Observer = silent
) -> DrafterTraining:
    """Train a drafter for `model` into the empty folder `output`.

    An interrupted run resumes with the same arguments. Raises BadInput, BadModel or CannotRun.
    """
    from ridgeline.compress.drafter_training.train_drafter import check_enough, load_teacher, train
    from ridgeline.engine.tokenization import bos_tokens, load_tokenizer

    text = check_options(output, options)
    recipe = _recipe(options)
    teacher, start_s = load_teacher(model), perf_counter()
    tokenizer = load_tokenizer(model)
    given, bos = tokenizer.encode(text, add_special_tokens=False), bos_tokens(tokenizer)
    # before any text is generated, which takes long
    check_enough(len(given) + _num_texts(options) * (PROMPT_TOKENS + ANSWER_TOKENS), recipe.length)
    tokens = given + _generated_text(model, (bos, given), output, options, observer)
    with stage(observer, STAGE, total=recipe.steps, unit="steps"):
        trained = train(teacher, tokens, recipe, output, _reporter(observer, recipe.steps), bos=bos)
    _generated_path(output).unlink(missing_ok=True)
    return DrafterTraining(
        model=model,
        output=str(output),
        kind=options.kind,
        num_bytes=trained.nbytes,
        num_tokens=len(tokens),
        acceptance=trained.acceptance,
        seconds=perf_counter() - start_s,
    )


def check_options(output: Path, options: TrainDrafterOptions) -> str:
    """The text to train on. Raises BadInput for options that are wrong whatever the model is."""
    from ridgeline.compress.calibration import read_text

    if output.exists() and any(output.iterdir()):
        raise BadInput("the output folder is not empty", value=str(output), fix="name another")
    return read_text(options.text)


def _recipe(options: TrainDrafterOptions) -> DrafterRecipe:
    from ridgeline.compress.drafter_training.train_drafter import DrafterRecipe

    return DrafterRecipe(
        kind=options.kind,
        num_heads=DEFAULT_HEADS if options.heads is None else options.heads,
        steps=options.steps,
        batch=options.batch_size,
        length=options.tokens,
        rate=options.learning_rate,
        seed=options.seed,
    )


def _reporter(observer: Observer, num_steps: int) -> ProgressCallback:
    """Report the training's progress to the observer."""

    def report(progress: DrafterTrainingProgress) -> None:
        observer(StageAdvanced(stage=STAGE, completed=progress.step, total=num_steps))
        if progress.acceptance:
            rates = " ".join(f"{rate:.3f}" for rate in progress.acceptance)
            observer(
                Message(
                    text=f"  step {progress.step}: loss {progress.loss:.3f}, acceptance {rates}, "
                    f"{progress.took_s:.1f} s"
                )
            )

    return report


def _generated_path(output: Path) -> Path:
    """Where generated text is stored until the training is complete, for a run that resumes."""
    return output.with_name(output.name + ".own.json")


def _generated_text(
    model: str,
    given: tuple[list[int], list[int]],
    output: Path,
    options: TrainDrafterOptions,
    observer: Observer,
) -> list[int]:
    """Continuations of pieces of the given text by the model, at temperature 1.

    `given`: BOS, which the model reads before each piece, and the text.
    """
    if not options.own_tokens:
        return []
    path = _generated_path(output)
    arguments = {"model": model, "own_tokens": options.own_tokens, "seed": options.seed}
    if path.is_file():
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored.get("arguments") == arguments:
            return list(stored["tokens"])
    observer(Message(text=f"{model} generates {_num_texts(options)} texts"))
    tokens = _generate(model, given, options)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"arguments": arguments, "tokens": tokens}), encoding="utf-8")
    return tokens


def _num_texts(options: TrainDrafterOptions) -> int:
    return -(-options.own_tokens // (PROMPT_TOKENS + ANSWER_TOKENS))


def _generate(
    model: str, given: tuple[list[int], list[int]], options: TrainDrafterOptions
) -> list[int]:
    from ridgeline.engine.engine import Engine

    (bos, text), count = given, _num_texts(options)
    step = max(1, (len(text) - PROMPT_TOKENS) // count)
    prompts = [text[i * step : i * step + PROMPT_TOKENS] for i in range(count)]
    samplings = [
        Sampling(temperature=1.0, seed=options.seed + i, max_tokens=ANSWER_TOKENS, ignore_eos=True)
        for i in range(count)
    ]
    with Engine.open(model, max_num_seqs=32) as engine:
        answers = engine.generate([bos + prompt for prompt in prompts], samplings)
    return [
        token
        for prompt, answer in zip(prompts, answers, strict=True)
        for token in (*prompt, *answer.tokens)
    ]
