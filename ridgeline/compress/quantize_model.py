"""Quantises a model by a recipe into a folder, layer by layer, and records how it was made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace

from ridgeline.compress.calibration import read_text, tokens_of, windows
from ridgeline.compress.methods.mixed_precision import MixedPrecision, choose_widths
from ridgeline.compress.methods.qat import train_quantised
from ridgeline.compress.methods.rounding import check_finite
from ridgeline.compress.pipeline import fingerprint, open_source, quantise_layers
from ridgeline.compress.progress import ProgressCallback
from ridgeline.compress.recipe import QuantizeRecipe, check
from ridgeline.compress.writers.store import (
    LayerStore,
    new_result,
    open_folder,
    publish_result,
    refuse_output,
)
from ridgeline.engine.checkpoints.sources import WeightSource
from ridgeline.engine.checkpoints.tensor_names import Part, parts
from ridgeline.engine.checkpoints.write_packed import write_packed
from ridgeline.engine.quant.outliers import OutlierSplit
from ridgeline.errors import CannotRun
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.checkpoints.locate import is_dummy, model_path
from ridgeline.modelspec.cost import has_states
from ridgeline.modelspec.format import BF16, INT8, Format, int4
from ridgeline.modelspec.layer_inputs import refuse_special_layers
from ridgeline.modelspec.model import ModelSpec
from ridgeline.modelspec.rewrite import apply_formats, linears, with_dtype

HOLDERS = {
    "int": "compressed-tensors, or gguf",
    "q4_k": "gguf",
    "q6_k": "gguf",
    "nf4": "bitsandbytes",
    "fp8-tensor": "compressed-tensors",
    "fp8-channel": "compressed-tensors",
    "fp8-block": "fp8",
}
"""Numbers → the `--format` that holds them."""
_ROWS = 4096  # of the head that are compared at once
LAYERS = ("layers.*.attention.*", "layers.*.mlp.*")


class TableFormats(NamedTuple):
    """How the LM head and the embedding table are stored; None: as in the checkpoint."""

    head: Format | None = None
    embed: Format | None = None


class TableBits(NamedTuple):
    """Bits of the LM head and of the embedding table; None: as in the checkpoint."""

    head: int | None = None
    embed: int | None = None


class WriteJob(NamedTuple):
    """A writer's input: the quantised model and where to put it."""

    source: Path
    spec: ModelSpec
    """Of the dense model (rotated, if it was)."""
    recipe: QuantizeRecipe
    weights: LayerStore
    tables: TableFormats
    folder: Path
    """Empty; becomes the output."""
    made: dict[str, Any]
    """How it was made, for the config."""


def _accept_any(source: Path, spec: ModelSpec) -> None:
    pass


class FormatWriter(NamedTuple):
    """A checkpoint format.

    `refuse` raises early for recipes that the format cannot hold, `check_source` for other files of
    the model that it needs; `write` returns the bytes written. `any_layers`: it holds delta nets
    and layers with inputs, too.
    """

    refuse: Callable[[ModelSpec, QuantizeRecipe, TableFormats], None]
    write: Callable[[WriteJob], int]
    check_source: Callable[[Path, ModelSpec], None] = _accept_any
    any_layers: bool = False


def quantize_model(
    model: str,
    recipe: QuantizeRecipe,
    output: Path,
    *,
    bits: TableBits | None = None,
    calibration: Path | None,
    write: FormatWriter,
    on_progress: ProgressCallback,
    mixed: MixedPrecision | None = None,
) -> int:
    """Quantise `model` into `output`; returns the bytes of its weights. `mixed`: bits by
    sensitivity.

    Raises BadInput, BadModel, CannotRun. Nothing is left at `output` in that case, and finished
    layers stay next to it for a retry with the same command.
    """
    recipe = check(recipe)
    refuse_output(output)  # before anything is measured, which may take as long as the making
    if is_dummy(model):
        raise CannotRun("a dummy model has no weights to quantise", value=model)
    stored = load_spec(model)
    _refuse_compressed(stored)
    dense = with_dtype(stored, "float32")
    if recipe.calibrated or recipe.rotate or mixed is not None or not write.any_layers:
        _refuse_unwalked(dense)
    text = read_text(calibration) if recipe.calibrated or mixed is not None else ""
    with open_source(model, dense, recipe) as (spec, source):
        tables = _tables(spec, bits or TableBits(), recipe)
        write.refuse(spec, recipe, tables)
        write.check_source(model_path(model), spec)
        _refuse_broken(spec, source)
        if tables.head is BF16 and (recipe.rotate or spec.stored_dtype != "bfloat16"):
            _refuse_inexact_head(spec, source, rotated=recipe.rotate)
        if mixed is not None:
            pieces = windows(model, text, recipe, spec.vocab_size)
            widths = choose_widths(spec, source, recipe, pieces, mixed, on_progress)
            recipe = replace(recipe, widths=widths)
            write.refuse(spec, recipe, tables)
        run = fingerprint(model, recipe, text)
        with open_folder(output, run) as folder:
            store = quantise_layers(model, spec, source, recipe, folder, text, on_progress)
            if recipe.method == "qat":
                tokens = tokens_of(model, text)
                store = train_quantised(spec, source, store, recipe, tokens, folder, on_progress)
            result = new_result(folder)
            job = WriteJob(model_path(model), spec, recipe, store, tables, result, {"made": run})
            written = write.write(job)
    publish_result(folder, output)
    return written


def _refuse_unwalked(spec: ModelSpec) -> None:
    """Raise CannotRun for layers that the walk through layers, and most formats, do not know."""
    fix = "quantise while loading (--quantization int8 or int4), or --method rtn --format gguf"
    refuse_special_layers(spec, "quantize", fix)
    if has_states(spec):
        raise CannotRun(
            "the walk through layers does not know gated delta nets", value=spec.family, fix=fix
        )


def _refuse_compressed(stored: ModelSpec) -> None:
    """Raise CannotRun for weights that are dense in memory but stored in another form (2:4)."""
    is_dense = all(linear.format.kind == "dense" for linear in linears(stored).values())
    if is_dense and stored.rewrites:
        raise CannotRun(
            "quantize reads weights that are stored dense",
            value=stored.rewrites[0],
            fix="name the model before compression (`ridgeline prune --format dense` writes one), "
            "or quantise while loading: --quantization int8 or int4",
        )


def _refuse_broken(spec: ModelSpec, source: WeightSource) -> None:
    """Raise BadModel for tables, norms and biases that contain NaN or infinity, before any work.

    Weights to be rounded are checked when they are read.
    """
    for part in parts(spec):
        if part.layer is None or len(part.shape) == 1:
            check_finite(part, source.get(part))


def _refuse_inexact_head(spec: ModelSpec, source: WeightSource, *, rotated: bool) -> None:
    """Raise CannotRun for an LM head that bfloat16 would round, before the layers are computed."""
    key = "embed" if spec.tied_embeddings else "lm_head"
    head_VC = source.get(Part(key, (spec.vocab_size, spec.hidden_size)))
    for rows in torch.split(head_VC, _ROWS):
        if not torch.equal(rows.to(torch.bfloat16).to(rows.dtype), rows):
            raise CannotRun(
                "--lm-head-bits 16 would round the LM head",
                value="rotated weights" if rotated else spec.stored_dtype,
                fix="leave it out: the head then stays as it is stored",
            )


def _tables(spec: ModelSpec, bits: TableBits, recipe: QuantizeRecipe) -> TableFormats:
    """Formats of the tables; one for both if they are tied and no separate head was requested."""
    group = recipe.group_size or 128
    kinds = {4: int4(group, zeros=recipe.zeros), 8: INT8, 16: BF16}
    head = bits.head
    if head is None and bits.embed is not None and spec.tied_embeddings:
        head = bits.embed
    if head is None and spec.stored_dtype == "bfloat16" and not recipe.rotate:
        head = 16
    return TableFormats(
        None if head is None else kinds[head], None if bits.embed is None else kinds[bits.embed]
    )


def _write_ridgeline(job: WriteJob) -> int:
    """Ridgeline's packed form, in the order in which kernels read it."""
    formats: dict[str, Format] = dict.fromkeys(LAYERS, job.recipe.format())
    if job.recipe.widths or job.recipe.method == "llm-int8":
        formats = dict(_formats_by_path(job))
    if job.tables.head is not None:
        formats["lm_head"] = job.tables.head
    spec = apply_formats(job.spec, formats, f"quantize --method {job.recipe.method}")
    spec = replace(spec, embed_format=job.tables.embed)
    return write_packed(job.source, spec, job.weights, job.folder, job.made)


def _formats_by_path(job: WriteJob) -> Iterator[tuple[str, Format]]:
    """Formats of weights that differ, in bits or in the number of separated inputs."""
    for path, linear in linears(job.spec).items():
        if path == "lm_head" or path.endswith("router"):
            continue
        _, layer, _, key = path.split(".")
        routed = job.spec.layers[int(layer)].mlp.router is not None and ".mlp." in path
        part = Part(f"expert_{key}" if routed else key, (), int(layer), 0 if routed else None)
        weight = job.weights.rounded(part)
        own = job.recipe.at(part.key, part.layer, linear.num_in).format()
        if isinstance(weight, OutlierSplit):
            bits = 8 * weight.wide_OW.element_size()
            own = replace(own, wide=len(weight.columns_W), wide_bits=bits)
        yield path, own


def _accept_all(spec: ModelSpec, recipe: QuantizeRecipe, tables: TableFormats) -> None:
    if recipe.numbers != "int" or recipe.bits == 5:
        raise CannotRun(
            "no kernel here multiplies such numbers: they are for other formats",
            value=recipe.numbers if recipe.numbers != "int" else f"{recipe.bits} bits",
            fix=f"use --format {HOLDERS[recipe.numbers]}",
        )


RIDGELINE = FormatWriter(_accept_all, _write_ridgeline)


def describe(recipe: QuantizeRecipe) -> str:
    """The recipe on one line."""
    grouped = "per row" if recipe.group_size is None else f"groups of {recipe.group_size}"
    kind = "with zero-points" if recipe.zeros else "symmetric"
    seed = f", seed {recipe.seed}" if recipe.calibrated else ""
    turned = ", rotated" if recipe.rotate else ""
    if recipe.numbers != "int":
        return f"{recipe.method}, {recipe.numbers}{turned}{seed}"
    if recipe.method == "llm-int8":
        return f"llm-int8, 8 bits, inputs that reach {recipe.threshold:g} kept apart{turned}{seed}"
    if recipe.widths:
        counts = Counter(recipe.widths.values())
        widths = ", ".join(f"{counts[bits]} of {bits} bits" for bits in sorted(counts))
        return f"{recipe.method}, weights: {widths}, {kind}{turned}{seed}"
    return f"{recipe.method}, {recipe.bits} bits, {grouped}, {kind}{turned}{seed}"
