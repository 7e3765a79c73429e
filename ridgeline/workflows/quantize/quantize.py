"""Quantise a model: write its weights in fewer bits, for this engine or in other formats."""

from __future__ import annotations

from importlib import import_module
from math import inf
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ridgeline.config.improve import QuantizeOptions
from ridgeline.config.shared import QuantizeMethod
from ridgeline.errors import BadInput
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.checkpoints.locate import is_dummy
from ridgeline.modelspec.cost import resident_weight_bytes
from ridgeline.modelspec.format import BF16
from ridgeline.modelspec.model import ModelSpec
from ridgeline.modelspec.rewrite import apply_formats, with_dtype
from ridgeline.records.progress import Message, Observer, StageAdvanced, silent
from ridgeline.report.result import Result

if TYPE_CHECKING:
    from ridgeline.compress.methods.mixed_precision import MixedPrecision
    from ridgeline.compress.progress import ProgressCallback, QuantizeProgress
    from ridgeline.compress.quantize_model import FormatWriter
    from ridgeline.compress.recipe import QuantizeRecipe

FORMATS = {
    "ridgeline": "ridgeline.compress.quantize_model:RIDGELINE",
    "compressed-tensors": "ridgeline.compress.writers.safetensors:COMPRESSED",
    "gptq": "ridgeline.compress.writers.safetensors:GPTQ",
    "awq": "ridgeline.compress.writers.safetensors:AWQ",
    "bitsandbytes": "ridgeline.compress.writers.bitsandbytes:BITSANDBYTES",
    "fp8": "ridgeline.compress.writers.safetensors:FP8",
    "gguf": "ridgeline.compress.writers.gguf:GGUF",
}
"""Checkpoint format → its writer."""
MIXED_WIDTHS = {"ridgeline": (4, 8), "compressed-tensors": (3, 4, 8)}
"""Widths that a bit budget chooses from; 3 bits save nothing in the packed form of this engine."""
SCALE_BITS = {("compressed-tensors", False): 8, ("compressed-tensors", True): 8, ("gguf", True): 7}
"""(format, zero-points) → significant bits of a scale, if fewer than the 11 of float16.

compressed-tensors stores bfloat16 scales; GGUF stores float16 minima, which are scale × zero-point.
"""


class QuantizeResult(Result, frozen=True, kw_only=True):
    """A quantised checkpoint. `path` is what `serve` and `Engine` open; sizes are bytes.

    `method` made it; None where weights are stored unquantised. `method_reason` says why the
    default is not the usual one for so few bits, if it is not.
    """

    model: str
    path: str
    output: str
    method: QuantizeMethod | None
    method_reason: str = ""
    written_bytes: int
    memory_bytes: float
    seconds: float


def quantize(
    model: str, output: Path, options: QuantizeOptions, observer: Observer = silent
) -> QuantizeResult:
    """Quantise `model` into the empty folder `output`.

    An interrupted run resumes with the same arguments. Raises BadInput, BadModel or CannotRun.
    """
    from ridgeline.compress.writers.store import refuse_output

    start_s = perf_counter()
    if output.suffix == ".gguf":
        raise BadInput(
            "a checkpoint is written into a folder, not a file",
            value=str(output),
            fix=f"use --format gguf --output {output.stem}, which writes {output.stem}/model.gguf",
        )
    method: QuantizeMethod | None = None
    reason = ""
    if options.bits == 16:
        written = _store_16_bits(model, output, options)
    else:
        refuse_output(output)  # before the text is tokenised and --step-budget measures
        recipe, reason = choose_recipe(model, options)
        method = recipe.method
        written = _quantize(model, output, options, recipe, reason, observer)
    path = str(output / "model.gguf" if options.format == "gguf" else output)
    spec = with_dtype(load_spec(path), "float32")
    return QuantizeResult(
        model=model,
        path=path,
        output=str(output),
        method=method,
        method_reason=reason,
        written_bytes=written,
        memory_bytes=resident_weight_bytes(spec),
        seconds=perf_counter() - start_s,
    )


def check_options(output: Path, options: QuantizeOptions) -> None:
    """Raise BadInput or CannotRun for options that are wrong whatever the model is."""
    from ridgeline.compress.calibration import read_text
    from ridgeline.compress.writers.store import refuse_output

    refuse_output(output)
    if options.bits != 16:
        recipe_for(options)
        read_text(options.calibration_text)


def choose_recipe(model: str, options: QuantizeOptions) -> tuple[QuantizeRecipe, str]:
    """The recipe for this model, and why it is not the options' own.

    Where no method was named and activations of the shipped text cannot be measured, weights are
    rounded to nearest instead. Raises BadInput or BadModel.
    """
    from ridgeline.compress.calibration import why_not_calibrated

    recipe = recipe_for(options)
    needs_text = options.has_budget or options.calibration_flags
    if options.method is not None or not recipe.calibrated or needs_text or is_dummy(model):
        return recipe, ""
    obstacle = why_not_calibrated(model, load_spec(model), recipe)
    if not obstacle:
        return recipe, ""
    rounding = recipe_for(replace(options, method="rtn"))
    return rounding, f"{recipe.method} cannot calibrate: {obstacle}"


def _quantize(
    model: str,
    output: Path,
    options: QuantizeOptions,
    recipe: QuantizeRecipe,
    reason: str,
    observer: Observer,
) -> int:
    from ridgeline.compress.quantize_model import TableBits, describe, quantize_model

    observer(Message(text=f"{describe(recipe)}; {reason}" if reason else describe(recipe)))
    return quantize_model(
        model,
        recipe,
        output,
        bits=TableBits(options.lm_head_bits, options.embedding_bits),
        calibration=options.calibration_text,
        write=format_writer(options.format),
        on_progress=_reporter(observer),
        mixed=_mixed_precision(model, options, observer),
    )


def _reporter(observer: Observer) -> ProgressCallback:
    """Report the pipeline's progress to the observer."""

    def report(progress: QuantizeProgress) -> None:
        done = progress.layer + 1
        observer(
            StageAdvanced(
                stage=progress.unit,
                completed=done,
                total=progress.num_layers,
                detail=f"{progress.took_s:.1f} s",
                remaining_s=progress.left_s,
            )
        )
        if progress.note:
            observer(Message(text=f"{progress.unit} {done}: {progress.note}"))

    return report


def _mixed_precision(
    model: str, options: QuantizeOptions, observer: Observer
) -> MixedPrecision | None:
    """The bit budget, if the options have one."""
    from ridgeline.compress.methods.mixed_precision import MixedPrecision

    if not options.has_budget:
        return None
    if options.bits_budget is not None and options.step_budget is not None:
        raise BadInput(
            "--bits-budget cannot be combined with --step-budget", fix="give one of them"
        )
    if options.format not in MIXED_WIDTHS or options.numbers != "int":
        raise BadInput(
            "a budget needs a format that can mix several widths",
            value=f"--format {options.format} --numbers {options.numbers}",
            limit=", ".join(MIXED_WIDTHS),
        )
    if options.bits != 4 or options.method in ("smoothquant", "llm-int8", "hqq"):
        raise BadInput(
            "a budget chooses the bits itself",
            value=f"--bits {options.bits}, --method {options.method}",
            fix="leave --bits out; use --method rtn, gptq, awq or qat",
        )
    widths = MIXED_WIDTHS[options.format]
    if options.bits_budget is not None:
        if not 0 < options.bits_budget < inf:
            raise BadInput(
                "--bits-budget must be positive", value=options.bits_budget, limit="bits per weight"
            )
        return MixedPrecision(options.bits_budget, widths)
    assert options.step_budget is not None
    from ridgeline.workflows.quantize.step_budget import step_budget

    budget = step_budget(model, options.step_budget, options.lm_head_bits)
    observer(Message(text=str(budget)))
    return MixedPrecision(budget.bits, widths)


def recipe_for(options: QuantizeOptions) -> QuantizeRecipe:
    """The recipe that the options describe. Raises BadInput."""
    from ridgeline.compress.recipe import QuantizeRecipe, check

    method = options.method or _default_method(options)
    calibrates = method not in ("rtn", "hqq") or options.has_budget
    if not calibrates and options.calibration_flags:
        raise _unused(options.calibration_flags, f"with --method {method}: it reads no text")
    if options.steps is not None and method != "qat":
        raise BadInput(f"--steps has no effect with --method {method}, which does not train")
    if options.outlier_threshold is not None and method != "llm-int8":
        raise BadInput(
            f"--outlier-threshold has no effect with --method {method}, which keeps no outliers"
        )
    group_size = options.group_size
    if group_size is None and options.bits < 8:
        group_size = 128
    return check(
        QuantizeRecipe(
            method=method,
            bits=options.bits,
            group_size=group_size,
            zeros=options.zeros,
            numbers=options.numbers,
            rotate=options.rotate,
            num_windows=options.calibration_windows,
            window_tokens=256 if options.calibration_tokens is None else options.calibration_tokens,
            seed=options.seed,
            steps=200 if options.steps is None else options.steps,
            threshold=6.0 if options.outlier_threshold is None else options.outlier_threshold,
            scale_bits=SCALE_BITS.get((options.format, options.zeros), 11),
        )
    )


def _default_method(options: QuantizeOptions) -> QuantizeMethod:
    """GPTQ for integers of few bits, whose rounding costs quality; else rounding to nearest."""
    return "gptq" if options.numbers == "int" and options.bits < 8 else "rtn"


def format_writer(name: str) -> FormatWriter:
    """The writer of a checkpoint format."""
    module, _, attribute = FORMATS[name].partition(":")
    writer: FormatWriter = getattr(import_module(module), attribute)
    return writer


def _store_16_bits(model: str, output: Path, options: QuantizeOptions) -> int:
    """Pack the weights in 16 bits, unquantised."""
    from ridgeline.engine.checkpoints.write_packed import pack_model

    incompatible = {
        "--method": options.method not in (None, "rtn"),
        "--format": options.format != "ridgeline",
        "--rotate": options.rotate,
        "--bits-budget": options.bits_budget is not None,
        "--step-budget": options.step_budget is not None,
        "--numbers": options.numbers != "int",
        "--group-size": options.group_size is not None,
        "--asym": options.zeros,
        "--steps": options.steps is not None,
        "--outlier-threshold": options.outlier_threshold is not None,
        "--embedding-bits": options.embedding_bits is not None,
        **dict.fromkeys(options.calibration_flags, True),
    }
    for flag, given in incompatible.items():
        if given:
            raise BadInput(
                f"{flag} cannot be combined with --bits 16, which stores weights unquantised",
                fix=f"remove {flag}, or choose fewer bits",
            )
    return pack_model(model, _spec_in_16_bits(model), output)


def _spec_in_16_bits(model: str) -> ModelSpec:
    spec = with_dtype(load_spec(model), "float32")
    formats = dict.fromkeys(("layers.*.attention.*", "layers.*.mlp.*", "lm_head"), BF16)
    return apply_formats(spec, formats, "quantize --bits 16: as stored")


def _unused(flags: list[str], why: str) -> BadInput:
    names = ", ".join(flags)
    return BadInput(f"{names} has no effect {why}", fix=f"remove {names}")
