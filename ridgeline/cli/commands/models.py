"""The flags of the subcommands that make models and judge them: quantize, train-drafter, eval."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ridgeline.cli.params.engine import EngineFlags, refuse, takes_engine_flags
from ridgeline.cli.params.units import duration_of, one_of

_MODEL = "A Hugging Face model directory, or 'demo'."
Model = Annotated[str, typer.Argument(help=_MODEL, show_default=False)]
_BITS, _HEAD_BITS, _TABLE_BITS = ("3", "4", "5", "8", "16"), ("4", "8", "16"), ("4", "8")
_METHODS = ("rtn", "hqq", "gptq", "awq", "smoothquant", "llm-int8", "qat")
_FORMATS = ("ridgeline", "compressed-tensors", "gptq", "awq", "gguf", "fp8", "bitsandbytes")
_NUMBERS = ("int", "q4_k", "q6_k", "nf4", "fp8-tensor", "fp8-channel", "fp8-block")


def add_to(app: typer.Typer) -> None:
    """Make them commands of `app`."""
    app.command()(quantize)
    app.command("train-drafter")(train_drafter)
    app.command("eval")(takes_engine_flags(evaluate))


def _end(code: int) -> None:
    if code:
        raise typer.Exit(code)


def quantize(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="Empty folder for the result.")],
    method: Annotated[
        str,
        typer.Option(
            help="rtn, hqq (no text needed), gptq, awq, smoothquant and llm-int8 (8 bits), "
            "qat (trains).",
            parser=one_of("--method", _METHODS),
        ),
    ] = "rtn",
    bits: Annotated[
        str, typer.Option(help="Bits per weight of the layers.", parser=one_of("--bits", _BITS))
    ] = "4",
    bits_budget: Annotated[
        float | None,
        typer.Option(help="Mean bits per weight: widths by measured sensitivity, e.g. 5."),
    ] = None,
    step_budget: Annotated[
        float | None, typer.Option(help="The same by speed: ms to read a decode step's weights.")
    ] = None,
    group_size: Annotated[
        int | None, typer.Option(help="3, 4 bits: inputs that share a scale: 32, 64 or 128 (128).")
    ] = None,
    zeros: Annotated[
        bool, typer.Option("--asym/--sym", help="3, 4 bits: a zero-point per group too.")
    ] = False,
    numbers: Annotated[
        str,
        typer.Option(
            help="int, or a layout of its own: q4_k, q6_k (gguf), nf4 (bitsandbytes), fp8-tensor, "
            "fp8-channel (compressed-tensors), fp8-block (fp8).",
            parser=one_of("--numbers", _NUMBERS),
        ),
    ] = "int",
    rotate: Annotated[
        bool, typer.Option("--rotate", help="Turn the model by R1 and R2 first (QuaRot).")
    ] = False,
    lm_head_bits: Annotated[
        str | None,
        typer.Option(
            help="Bits of the LM head (default: as the checkpoint stores it).",
            parser=one_of("--lm-head-bits", _HEAD_BITS),
        ),
    ] = None,
    embedding_bits: Annotated[
        str | None,
        typer.Option(
            help="Bits of the embedding table (default: as stored); a tied LM head shares it.",
            parser=one_of("--embedding-bits", _TABLE_BITS),
        ),
    ] = None,
    outlier_threshold: Annotated[
        float | None,
        typer.Option(help="llm-int8: inputs that reach it are kept apart (6)."),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(help="Text that activations are measured on (default: text shipped here)."),
    ] = None,
    calibration_windows: Annotated[
        int | None, typer.Option(help="Pieces of it that are read (64; awq: 32).")
    ] = None,
    calibration_tokens: Annotated[
        int | None, typer.Option(help="Tokens of each piece (256).")
    ] = None,
    seed: Annotated[int, typer.Option(help="Draws the pieces, and --rotate's signs.")] = 0,
    steps: Annotated[int | None, typer.Option(help="qat: steps of training (200).")] = None,
    format: Annotated[
        str,
        typer.Option(
            help="ridgeline (ready to multiply with), compressed-tensors, gptq, awq, gguf, "
            "fp8, bitsandbytes (nf4; --bits 8: LLM.int8).",
            parser=one_of("--format", _FORMATS),
        ),
    ] = "ridgeline",
) -> None:
    """Write a model in fewer bits. Interrupted, the same command goes on where it was."""
    from ridgeline.cli.commands.quantize import Choices, command

    choices = Choices(
        method=method,
        bits=int(bits),
        group_size=group_size,
        zeros=zeros,
        numbers=numbers,
        rotate=rotate,
        lm_head_bits=None if lm_head_bits is None else int(lm_head_bits),
        embedding_bits=None if embedding_bits is None else int(embedding_bits),
        threshold=outlier_threshold,
        format=format,
        calibration=calibration,
        num_windows=calibration_windows,
        window_tokens=calibration_tokens,
        seed=seed,
        steps=steps,
        bits_budget=bits_budget,
        step_budget_ms=step_budget,
    )
    _end(command(model, output, choices))


def train_drafter(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="Empty folder for the drafter.")],
    kind: Annotated[
        str,
        typer.Option(
            help="medusa: heads on the last state. eagle: one layer that goes on from it.",
            parser=one_of("--kind", ("medusa", "eagle")),
        ),
    ] = "medusa",
    text: Annotated[
        Path | None, typer.Option(help="Text to learn on (default: text shipped here).")
    ] = None,
    own_tokens: Annotated[
        int, typer.Option(help="Tokens that the model writes itself, to learn on besides.")
    ] = 65_536,
    heads: Annotated[
        int | None, typer.Option(min=1, max=16, help="medusa: tokens guessed ahead (4).")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of training.")] = 400,
    batch: Annotated[int, typer.Option(min=1, help="Pieces of text per step.")] = 8,
    tokens: Annotated[int, typer.Option(min=16, help="Tokens of each piece.")] = 128,
    rate: Annotated[float, typer.Option(help="Highest learning rate.")] = 2e-3,
    seed: Annotated[int, typer.Option(help="Draws the pieces and the first weights.")] = 0,
) -> None:
    """Train a drafter for MODEL. Interrupted, the same command goes on where it was."""
    from ridgeline.cli.commands.train_drafter import Choices, command

    refuse(["--heads"] if heads is not None and kind != "medusa" else [], f"with --kind {kind}")
    choices = Choices(
        kind=kind,
        text=text,
        own_tokens=own_tokens,
        num_heads=4 if heads is None else heads,
        steps=steps,
        batch=batch,
        length=tokens,
        rate=rate,
        seed=seed,
    )
    _end(command(model, output, choices))


def evaluate(
    a: Annotated[str, typer.Argument(help="The original: " + _MODEL, show_default=False)],
    b: Annotated[str, typer.Argument(help="The candidate.", show_default=False)],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    budget: Annotated[
        float,
        typer.Option(
            help="Judge by what was read after so long: 90s, 5m.", parser=duration_of("--budget")
        ),
    ] = "2m",  # type: ignore[assignment]
    lm_eval: Annotated[
        str | None,
        typer.Option(
            help="lm-eval's tasks too, separated by commas: both models are served to it."
        ),
    ] = None,
    lm_eval_path: Annotated[
        Path | None, typer.Option(help="Folder of YAML files that describe tasks of your own.")
    ] = None,
    lm_eval_limit: Annotated[
        int | None, typer.Option(min=2, help="Documents of each task at most (default: all).")
    ] = None,
    lm_eval_program: Annotated[
        str | None, typer.Option(help="lm-eval's program, if it is in another environment.")
    ] = None,
    *,
    engine: EngineFlags,
) -> None:
    """Does B still say what A says? The engine's flags are B's; exit code 1 unless it passes."""
    from ridgeline.cli.commands.evaluate import run_evaluate
    from ridgeline.config.settings import Settings
    from ridgeline.workflows.evaluate.lm_eval import LmEvalOptions

    more = {
        "--lm-eval-path": lm_eval_path,
        "--lm-eval-limit": lm_eval_limit,
        "--lm-eval-program": lm_eval_program,
    }
    if lm_eval is None:
        refuse([flag for flag, value in more.items() if value is not None], "without --lm-eval")
    options = None
    if lm_eval is not None:
        options = LmEvalOptions(lm_eval, lm_eval_path, lm_eval_limit, lm_eval_program)
    _end(run_evaluate(Settings(model=a), engine.settings(b), budget, options, as_json=json))
