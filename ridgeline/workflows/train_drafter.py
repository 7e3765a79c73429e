"""Train a drafter for a model, on text that the model generates and any text that is given."""

from __future__ import annotations

import json
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from ridgeline.config.improve import TrainDrafterOptions
from ridgeline.errors import BadInput
from ridgeline.records.progress import Message, Observer, StageAdvanced, silent, stage
from ridgeline.report.result import Result
from ridgeline.workflows.own_text import OwnChats, OwnText, forget_own_text, num_generated

if TYPE_CHECKING:
    from ridgeline.compress.drafter_training.train_drafter import (
        DrafterRecipe,
        DrafterTrainingProgress,
        ProgressCallback,
    )

DEFAULT_HEADS = 4
DEFAULT_OWN_TOKENS = 65_536
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
    own = OwnText(model, _own_tokens(options), options.seed)
    chats = OwnChats(model, options.chat_prompts, options.seed)
    if not chats.num_prompts:  # before any text is generated, which takes long
        check_enough(len(given) + num_generated(own.num_tokens), recipe.length)
    tokens = given + own.generate((bos, given), output, observer)
    if chats.num_prompts:
        tokens += chats.generate(tokenizer, output, observer)
        bos = []  # the chats hold it
    with stage(observer, STAGE, total=recipe.steps, unit="steps"):
        trained = train(teacher, tokens, recipe, output, _reporter(observer, recipe.steps), bos=bos)
    forget_own_text(output)
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
    if options.chat_prompts and options.text is None:
        if options.own_tokens:
            raise BadInput(
                "--own-tokens continues a text, and --chat-prompts replaces the built-in one",
                value=f"--own-tokens {options.own_tokens}",
                fix="give --text, or leave --own-tokens out",
            )
        return ""
    return read_text(options.text)


def _own_tokens(options: TrainDrafterOptions) -> int:
    if options.own_tokens is not None:
        return options.own_tokens
    return 0 if options.chat_prompts else DEFAULT_OWN_TOKENS


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
