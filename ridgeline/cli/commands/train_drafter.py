"""`ridgeline train-drafter MODEL`: medusa heads or an eagle layer, from text of the model's own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from ridgeline.cli.params.fetch_model import fetch_model
from ridgeline.cli.params.invocation import Invocation
from ridgeline.config.improve import TrainDrafterFiles, TrainDrafterOptions
from ridgeline.config.rules import refuse
from ridgeline.errors import BadInput

if TYPE_CHECKING:
    from ridgeline.compress.drafter_training.train_drafter import DrafterTrainingProgress

PROMPT_TOKENS, ANSWER_TOKENS = 32, 224


def train_drafter(call: Invocation) -> int:
    """`ridgeline train-drafter`."""
    files, options = call.read(TrainDrafterFiles), call.read(TrainDrafterOptions)
    has_heads = options.kind == "medusa" or options.heads is None
    refuse([] if has_heads else ["--heads"], f"with --kind {options.kind}")
    return command(fetch_model(files.model), files.output, options)


def command(model: str, output: Path, options: TrainDrafterOptions) -> int:
    """Sample, train, write; the exit code. Raises BadInput, BadModel, CannotRun."""
    from ridgeline.compress.calibration import read_text
    from ridgeline.compress.drafter_training.train_drafter import (
        DrafterRecipe,
        check_enough,
        load_teacher,
        train,
    )
    from ridgeline.engine.tokenization import load_tokenizer

    if output.exists() and any(output.iterdir()):
        raise BadInput("the output folder is not empty", value=str(output), fix="name another")
    read = read_text(options.text)
    recipe = DrafterRecipe(
        kind=options.kind,
        num_heads=4 if options.heads is None else options.heads,
        steps=options.steps,
        batch=options.batch_size,
        length=options.tokens,
        rate=options.learning_rate,
        seed=options.seed,
    )
    teacher, begun_s = load_teacher(model), perf_counter()
    text = load_tokenizer(model).encode(read)
    own_tokens = _num_texts(options) * (PROMPT_TOKENS + ANSWER_TOKENS)
    check_enough(len(text) + own_tokens, recipe.length)  # before any are written
    tokens = text + _own_text(model, text, output, options)
    told = _Bar(recipe.steps)
    trained = train(teacher, tokens, recipe, output, told.tell)
    told.end()
    (output.with_name(output.name + ".own.json")).unlink(missing_ok=True)
    rates = ", ".join(f"{chance:.2f}" for chance in trained.acceptance)
    took_s = perf_counter() - begun_s
    print(f"{output}: {trained.nbytes / 1e6:.1f} MB, {len(tokens):,} tokens, {took_s:.0f} s")
    print(f"  a drawn draft is accepted with {rates} at place 1, 2, … (text kept apart)")
    config = json.dumps({"method": options.kind, "model": str(output)})
    print(f"Use it: ridgeline serve {model} --speculative-config '{config}'")
    return 0


def _own_text(model: str, text: list[int], output: Path, options: TrainDrafterOptions) -> list[int]:
    """What the model goes on to say after pieces of the text, at temperature 1; kept beside the
    output until it is done, so that a run that goes on has the same."""
    if not options.own_tokens:
        return []
    kept = output.with_name(output.name + ".own.json")
    asked = {"model": model, "own_tokens": options.own_tokens, "seed": options.seed}
    if kept.is_file():
        found = json.loads(kept.read_text(encoding="utf-8"))
        if found["asked"] == asked:
            return list(found["tokens"])
    tokens = _generated(model, text, options)
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps({"asked": asked, "tokens": tokens}), encoding="utf-8")
    return tokens


def _num_texts(options: TrainDrafterOptions) -> int:
    return -(-options.own_tokens // (PROMPT_TOKENS + ANSWER_TOKENS))


def _generated(model: str, text: list[int], options: TrainDrafterOptions) -> list[int]:
    from ridgeline.engine.engine import Engine
    from ridgeline.records import Sampling

    count = _num_texts(options)
    step = max(1, (len(text) - PROMPT_TOKENS) // count)
    prompts = [text[i * step : i * step + PROMPT_TOKENS] for i in range(count)]
    print(f"  {model} writes {count} texts of its own", file=sys.stderr)
    warm = [
        Sampling(temperature=1.0, seed=options.seed + i, max_tokens=ANSWER_TOKENS, ignore_eos=True)
        for i in range(count)
    ]
    with Engine.open(model, max_num_seqs=32) as engine:
        answers = engine.generate(prompts, warm)
    return [token for p, a in zip(prompts, answers, strict=True) for token in (*p, *a.tokens)]


class _Bar:
    """A bar for people who watch, a line now and then for logs; both on stderr."""

    def __init__(self, steps: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

        self._console = Console(stderr=True, highlight=False)
        self._bar = Progress(
            BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=self._console
        )
        self._task = self._bar.add_task("training", total=steps)
        if self._console.is_terminal:
            self._bar.start()

    def tell(self, progress: DrafterTrainingProgress) -> None:
        self._bar.update(self._task, completed=progress.step)
        if progress.acceptance:
            rates = " ".join(f"{chance:.3f}" for chance in progress.acceptance)
            self._console.print(
                f"  step {progress.step}: loss {progress.loss:.3f}, acceptance {rates}, "
                f"{progress.took_s:.1f} s"
            )

    def end(self) -> None:
        if self._console.is_terminal:
            self._bar.stop()
