"""`ridgeline quantize MODEL`: write its weights in fewer bits, as the engine or as others read
them."""

from __future__ import annotations

from math import inf
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from ridgeline.cli.params.invocation import Invocation
from ridgeline.config.improve import QuantizeFiles, QuantizeOptions
from ridgeline.config.rules import refuse
from ridgeline.errors import BadInput
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.cost import resident_weight_bytes
from ridgeline.modelspec.format import BF16
from ridgeline.modelspec.model import ModelSpec
from ridgeline.modelspec.rewrite import apply_formats, with_dtype

if TYPE_CHECKING:
    from ridgeline.compress.methods.mixed_precision import MixedPrecision
    from ridgeline.compress.quantize_model import FormatWriter
    from ridgeline.config.improve import QuantizeOptions
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
WIDTHS = {"ridgeline": (4, 8), "compressed-tensors": (3, 4, 8)}
"""What a budget chooses from: our packed form saves nothing by 3 bits."""
SCALE_BITS = {("compressed-tensors", False): 8, ("compressed-tensors", True): 8, ("gguf", True): 7}
"""(format, zero-points) → significant bits of a scale, where fp16's 11 would not be held exactly:
bfloat16 scales; GGUF's fp16 minima, which are scale times zero-point."""


def quantize(call: Invocation) -> int:
    """`ridgeline quantize`."""
    files = call.read(QuantizeFiles)
    return command(files.model, files.output, call.read(QuantizeOptions))


def command(model: str, output: Path, options: QuantizeOptions) -> int:
    """Calibrate, round, write; the exit code. Raises BadInput, BadModel, CannotRun."""
    begun = perf_counter()
    written = _bf16(model, output, options) if options.bits == 16 else _made(model, output, options)
    print(f"{model}: {written / 1e6:,.1f} MB in {output}, {perf_counter() - begun:.1f} s")
    made = str(output / "model.gguf" if options.format == "gguf" else output)
    spec = with_dtype(load_spec(made), "float32")
    print(f"  in memory when opened: {resident_weight_bytes(spec) / 1e6:,.1f} MB")
    print(f"Open it by its name: ridgeline serve {made}")
    return 0


def _made(model: str, output: Path, options: QuantizeOptions) -> int:
    from ridgeline.cli.render.quantize_progress import telling
    from ridgeline.compress.quantize_model import TableBits, describe, quantize_model
    from ridgeline.compress.writers.store import refuse_output

    refuse_output(output)  # before --step-budget measures
    recipe = recipe_for(options)
    print(f"  {describe(recipe)}")
    with telling() as tell:
        return quantize_model(
            model,
            recipe,
            output,
            bits=TableBits(options.lm_head_bits, options.embedding_bits),
            calibration=options.calibration_text,
            write=_writer(options.format),
            tell=tell,
            mixed=_mixed(model, options),
        )


def _mixed(model: str, options: QuantizeOptions) -> MixedPrecision | None:
    from ridgeline.compress.methods.mixed_precision import MixedPrecision

    if not options.has_budget:
        return None
    if options.bits_budget is not None and options.step_budget is not None:
        raise BadInput(
            "two budgets for the same widths", value="--bits-budget and --step-budget", fix="one"
        )
    if options.format not in WIDTHS or options.numbers != "int":
        raise BadInput("several widths in one model", value=options.format, limit=", ".join(WIDTHS))
    if options.bits != 4 or options.method in ("smoothquant", "llm-int8", "hqq"):
        raise BadInput(
            "a budget chooses the bits itself",
            value=f"--bits {options.bits}, --method {options.method}",
            fix="leave --bits out; use --method rtn, gptq, awq or qat",
        )
    if options.bits_budget is not None:
        if not 0 < options.bits_budget < inf:
            raise BadInput("--bits-budget", value=options.bits_budget, limit="bits per weight")
        return MixedPrecision(options.bits_budget, WIDTHS[options.format])
    assert options.step_budget is not None
    from ridgeline.workflows.planning.step_budget import step_budget

    found = step_budget(model, options.step_budget, options.lm_head_bits)
    print(f"  {found}")
    return MixedPrecision(found.bits, WIDTHS[options.format])


def recipe_for(options: QuantizeOptions) -> QuantizeRecipe:
    """The recipe of the flags. Raises BadInput."""
    from ridgeline.compress.recipe import QuantizeRecipe, check

    reads = options.method not in ("rtn", "hqq") or options.has_budget
    if not reads:
        refuse(options.calibration_flags, f"with --method {options.method}: it reads no text")
    if options.steps is not None and options.method != "qat":
        raise BadInput(f"--method {options.method} does not train", value="--steps")
    if options.outlier_threshold is not None and options.method != "llm-int8":
        raise BadInput(
            f"--method {options.method} keeps nothing apart", value="--outlier-threshold"
        )
    group_size = options.group_size
    if group_size is None and options.bits < 8:
        group_size = 128
    return check(
        QuantizeRecipe(
            method=options.method,
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


def _writer(name: str) -> FormatWriter:
    from importlib import import_module

    module, _, function = FORMATS[name].partition(":")
    writer: FormatWriter = getattr(import_module(module), function)
    return writer


def _bf16(model: str, output: Path, options: QuantizeOptions) -> int:
    from ridgeline.engine.checkpoints.write_packed import pack_model

    if options.method != "rtn" or options.format != "ridgeline" or options.rotate:
        raise BadInput(
            "16 bits are kept and not rounded: no method, no other format", value="--bits 16"
        )
    if options.has_budget or options.numbers != "int":
        raise BadInput(
            "--bits 16 stores every weight in 16 bits",
            value="--bits-budget, --step-budget, --numbers",
        )
    if options.group_size is not None or options.zeros:
        raise BadInput("groups and zero-points are for 3 and 4 bits", value="--bits 16")
    trained = {"--steps": options.steps, "--outlier-threshold": options.outlier_threshold}
    idle = [flag for flag, value in trained.items() if value is not None]
    refuse([*options.calibration_flags, *idle], "with --bits 16: nothing is rounded")
    if options.embedding_bits is not None:
        raise BadInput("--bits 16 keeps the embeddings as they are", value="--embedding-bits")
    return pack_model(model, _as_stored(model), output)


def _as_stored(model: str) -> ModelSpec:
    spec = with_dtype(load_spec(model), "float32")
    formats = dict.fromkeys(("layers.*.attention.*", "layers.*.mlp.*", "lm_head"), BF16)
    return apply_formats(spec, formats, "quantize --bits 16: as stored")
