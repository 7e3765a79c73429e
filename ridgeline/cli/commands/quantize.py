"""`ridgeline quantize MODEL`: write its weights in fewer bits, as the engine or as others read
them."""

from __future__ import annotations

from math import inf
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import msgspec

from ridgeline.cli.params.engine import refuse
from ridgeline.errors import BadInput
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.cost import resident_weight_bytes
from ridgeline.modelspec.format import BF16
from ridgeline.modelspec.model import ModelSpec
from ridgeline.modelspec.rewrite import apply_formats, with_dtype

if TYPE_CHECKING:
    from ridgeline.compress.methods.mixed_precision import MixedPrecision
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
WIDTHS = {"ridgeline": (4, 8), "compressed-tensors": (3, 4, 8)}
"""What a budget chooses from: our packed form saves nothing by 3 bits."""
SCALE_BITS = {("compressed-tensors", False): 8, ("compressed-tensors", True): 8, ("gguf", True): 7}
"""(format, zero-points) → significant bits of a scale, where fp16's 11 would not be held exactly:
bfloat16 scales; GGUF's fp16 minima, which are scale times zero-point."""


class Choices(msgspec.Struct, frozen=True, kw_only=True):
    """The flags. None: that the method or the bits decide."""

    method: str = "rtn"
    bits: int = 4
    group_size: int | None = None
    zeros: bool = False
    numbers: str = "int"
    rotate: bool = False
    lm_head_bits: int | None = None
    embedding_bits: int | None = None
    threshold: float | None = None
    format: str = "ridgeline"
    calibration: Path | None = None
    num_windows: int | None = None
    window_tokens: int | None = None
    seed: int = 0
    steps: int | None = None
    bits_budget: float | None = None
    step_budget_ms: float | None = None

    @property
    def of_the_text(self) -> list[str]:
        """The flags that say what is read, of those that were given."""
        given = {
            "--calibration": self.calibration,
            "--calibration-windows": self.num_windows,
            "--calibration-tokens": self.window_tokens,
        }
        return [flag for flag, value in given.items() if value is not None]

    @property
    def chooses_widths(self) -> bool:
        return self.bits_budget is not None or self.step_budget_ms is not None


def command(model: str, output: Path, choices: Choices) -> int:
    """Calibrate, round, write; the exit code. Raises BadInput, BadModel, CannotRun."""
    begun = perf_counter()
    written = _bf16(model, output, choices) if choices.bits == 16 else _made(model, output, choices)
    print(f"{model}: {written / 1e6:,.1f} MB in {output}, {perf_counter() - begun:.1f} s")
    made = str(output / "model.gguf" if choices.format == "gguf" else output)
    spec = with_dtype(load_spec(made), "float32")
    print(f"  in memory when opened: {resident_weight_bytes(spec) / 1e6:,.1f} MB")
    print(f"Open it by its name: ridgeline serve {made}")
    return 0


def _made(model: str, output: Path, choices: Choices) -> int:
    from ridgeline.cli.render.quantize_progress import telling
    from ridgeline.compress.quantize_model import TableBits, describe, quantize_model
    from ridgeline.compress.writers.store import refuse_output

    refuse_output(output)  # before --step-budget measures
    recipe = recipe_for(choices)
    print(f"  {describe(recipe)}")
    with telling() as tell:
        return quantize_model(
            model,
            recipe,
            output,
            bits=TableBits(choices.lm_head_bits, choices.embedding_bits),
            calibration=choices.calibration,
            write=_writer(choices.format),
            tell=tell,
            mixed=_mixed(model, choices),
        )


def _mixed(model: str, choices: Choices) -> MixedPrecision | None:
    from ridgeline.compress.methods.mixed_precision import MixedPrecision

    if not choices.chooses_widths:
        return None
    if choices.bits_budget is not None and choices.step_budget_ms is not None:
        raise BadInput(
            "two budgets for the same widths", value="--bits-budget and --step-budget", fix="one"
        )
    if choices.format not in WIDTHS or choices.numbers != "int":
        raise BadInput("several widths in one model", value=choices.format, limit=", ".join(WIDTHS))
    if choices.bits != 4 or choices.method in ("smoothquant", "llm-int8", "hqq"):
        raise BadInput(
            "a budget chooses the bits itself",
            value=f"--bits {choices.bits}, --method {choices.method}",
            fix="leave --bits out; use --method rtn, gptq, awq or qat",
        )
    if choices.bits_budget is not None:
        if not 0 < choices.bits_budget < inf:
            raise BadInput("--bits-budget", value=choices.bits_budget, limit="bits per weight")
        return MixedPrecision(choices.bits_budget, WIDTHS[choices.format])
    assert choices.step_budget_ms is not None
    from ridgeline.workflows.planning.step_budget import step_budget

    found = step_budget(model, choices.step_budget_ms, choices.lm_head_bits)
    print(f"  {found}")
    return MixedPrecision(found.bits, WIDTHS[choices.format])


def recipe_for(choices: Choices) -> QuantizeRecipe:
    """The recipe of the flags. Raises BadInput."""
    from ridgeline.compress.recipe import QuantizeRecipe, check

    reads = choices.method not in ("rtn", "hqq") or choices.chooses_widths
    if not reads:
        refuse(choices.of_the_text, f"with --method {choices.method}: it reads no text")
    if choices.steps is not None and choices.method != "qat":
        raise BadInput(f"--method {choices.method} does not train", value="--steps")
    if choices.threshold is not None and choices.method != "llm-int8":
        raise BadInput(
            f"--method {choices.method} keeps nothing apart", value="--outlier-threshold"
        )
    group_size = choices.group_size
    if group_size is None and choices.bits < 8:
        group_size = 128
    return check(
        QuantizeRecipe(
            method=choices.method,  # type: ignore[arg-type]
            bits=choices.bits,
            group_size=group_size,
            zeros=choices.zeros,
            numbers=choices.numbers,  # type: ignore[arg-type]
            rotate=choices.rotate,
            num_windows=choices.num_windows,
            window_tokens=256 if choices.window_tokens is None else choices.window_tokens,
            seed=choices.seed,
            steps=200 if choices.steps is None else choices.steps,
            threshold=6.0 if choices.threshold is None else choices.threshold,
            scale_bits=SCALE_BITS.get((choices.format, choices.zeros), 11),
        )
    )


def _writer(name: str) -> FormatWriter:
    from importlib import import_module

    module, _, function = FORMATS[name].partition(":")
    writer: FormatWriter = getattr(import_module(module), function)
    return writer


def _bf16(model: str, output: Path, choices: Choices) -> int:
    from ridgeline.engine.checkpoints.write_packed import pack_model

    if choices.method != "rtn" or choices.format != "ridgeline" or choices.rotate:
        raise BadInput(
            "16 bits are kept and not rounded: no method, no other format", value="--bits 16"
        )
    if choices.chooses_widths or choices.numbers != "int":
        raise BadInput(
            "--bits 16 stores every weight in 16 bits",
            value="--bits-budget, --step-budget, --numbers",
        )
    if choices.group_size is not None or choices.zeros:
        raise BadInput("groups and zero-points are for 3 and 4 bits", value="--bits 16")
    trained = {"--steps": choices.steps, "--outlier-threshold": choices.threshold}
    idle = [flag for flag, value in trained.items() if value is not None]
    refuse([*choices.of_the_text, *idle], "with --bits 16: nothing is rounded")
    if choices.embedding_bits is not None:
        raise BadInput("--bits 16 keeps the embeddings as they are", value="--embedding-bits")
    return pack_model(model, _as_stored(model), output)


def _as_stored(model: str) -> ModelSpec:
    spec = with_dtype(load_spec(model), "float32")
    formats = dict.fromkeys(("layers.*.attention.*", "layers.*.mlp.*", "lm_head"), BF16)
    return apply_formats(spec, formats, "quantize --bits 16: as stored")
