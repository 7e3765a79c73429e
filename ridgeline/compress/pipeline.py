"""The loop of `ridgeline quantize`: one layer at a time, with finished work on disk.

  for each layer:  for its attention, then its feed-forward:
                       observe what its products read   (calibrated methods only)
                       repair                           (gptq, awq, qat)
                       balance                          (awq, smoothquant)
                       round each weight
                   store the grids                  (an interruption loses one layer)
                   advance through the rounded layer, so the next one sees its real inputs

In memory: one block dense (twice while its inputs are observed), the Hessians of half of it, and
the hidden states of all windows, rounded and original. Deterministic: the same checkpoint, recipe
and text give the same grids, whether or not the run was interrupted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
import torch
from torch import Tensor

from ridgeline.compress.calibration import split_windows
from ridgeline.compress.formats.lattice import Rounded
from ridgeline.compress.free_memory import release_free_pages
from ridgeline.compress.layer_walk import ATTENTION, HiddenStateWalk, PairedWalks, observe_inputs
from ridgeline.compress.methods.channel_balance import (
    BalancedWeights,
    BalanceSite,
    choose_awq,
    choose_smooth,
    sites,
)
from ridgeline.compress.methods.outliers import describe_outliers
from ridgeline.compress.methods.repair import Half, repair
from ridgeline.compress.methods.rotate import Rotated, rotated_spec
from ridgeline.compress.methods.rounding import ProductWeights, round_product
from ridgeline.compress.progress import ProgressCallback, QuantizeProgress
from ridgeline.compress.recipe import QuantizeRecipe
from ridgeline.compress.statistics import InputStats, ProductKey
from ridgeline.compress.writers.store import LayerStore
from ridgeline.engine.checkpoints.safetensors import open_tensors
from ridgeline.engine.checkpoints.sources import CheckpointWeights, PlainWeights, WeightSource
from ridgeline.engine.checkpoints.tensor_names import Part
from ridgeline.engine.checkpoints.write_packed import layer_products
from ridgeline.errors import CannotRun
from ridgeline.modelspec.checkpoints.locate import is_dummy, model_path
from ridgeline.modelspec.model import ModelSpec
from ridgeline.modelspec.rewrite import linears

_CHOOSERS = {"awq": choose_awq, "smoothquant": choose_smooth}

NUM_READ, READ_BYTES = 4096, 16 << 10  # of a large file of weights: 64 MiB


class UnmappedWeights(CheckpointWeights):
    """A checkpoint whose files are mapped for one tensor at a time.

    Pages of a mapped file count as the process's memory for as long as it stays mapped.
    """

    def __enter__(self) -> UnmappedWeights:
        return self

    def get(self, part: Part) -> Tensor:
        file = self.entries[self.located[part].name].file
        with open_tensors(file) as self.files[file]:
            found = super().get(part)
        del self.files[file]
        return found


def content_digest(file: Path) -> str:
    """A hash of a file's size and content: of all of it, or of samples evenly spread over a large
    file.

    Name and size alone do not change when weights are trained further.
    """
    size = file.stat().st_size
    num, length = (NUM_READ, READ_BYTES) if size > NUM_READ * READ_BYTES else (1, size)
    found = hashlib.sha256(str(size).encode())
    with file.open("rb") as opened:
        for i in range(num):
            opened.seek(size * i // num)
            found.update(opened.read(length))
    return found.hexdigest()


def fingerprint(model: str, recipe: QuantizeRecipe, text: str) -> dict[str, Any]:
    """What an interrupted run must share with the run that continues it."""
    source = model_path(model)
    weights = sorted((f.name, content_digest(f)) for f in source.glob("*.safetensors"))
    config = hashlib.sha256((source / "config.json").read_bytes()).hexdigest()
    text_hash = hashlib.sha256(text.encode()).hexdigest() if recipe.calibrated else None
    return {
        "recipe": msgspec.to_builtins(recipe),
        "weights": [list(weight) for weight in weights],
        "config": config,
        "calibration": text_hash,
    }


@contextmanager
def open_source(
    model: str, spec: ModelSpec, recipe: QuantizeRecipe
) -> Iterator[tuple[ModelSpec, WeightSource]]:
    """The model to be rounded: its dense spec and weights, rotated if the recipe says so."""
    if is_dummy(model):
        raise CannotRun("a dummy model has no weights to quantise", value=model)
    quantised = [p for p, linear in linears(spec).items() if linear.format.kind != "dense"]
    if quantised:
        raise CannotRun(
            "the model is quantised already", value=quantised[0], fix="name the original"
        )
    with torch.inference_mode(), UnmappedWeights(model_path(model), spec) as weights:
        if recipe.rotate:
            yield rotated_spec(spec), Rotated(weights, spec, recipe.seed)
        else:
            yield spec, weights


def quantise_layers(
    model: str,
    spec: ModelSpec,
    source: WeightSource,
    recipe: QuantizeRecipe,
    folder: Path,
    text: str,
    on_progress: ProgressCallback,
) -> LayerStore:
    """Quantise every layer into `folder`; layers already there are kept."""
    store = LayerStore(folder, recipe, spec, source)
    walks = None
    if recipe.calibrated and not all(store.has(i) for i in range(len(spec.layers))):
        text_pieces = split_windows(model, text, recipe, spec.vocab_size)
        clean = HiddenStateWalk(spec, source, [*text_pieces.learnt, *text_pieces.held])
        walks = PairedWalks(clean, clean.fork(), len(text_pieces.held))
    times: list[float] = []
    for index in range(len(spec.layers)):
        begun_s = perf_counter()
        fresh = not store.has(index)
        if fresh:
            _quantise_layer(spec, source, recipe, store, walks, index)
        elif walks is not None:
            _skip_layer(source, recipe, store, walks, index)
        took_s = perf_counter() - begun_s
        times += [took_s] if fresh else []
        left = len(spec.layers) - 1 - index
        left_s = left * sum(times) / len(times) if times else 0.0
        on_progress(
            QuantizeProgress(
                layer=index,
                num_layers=len(spec.layers),
                took_s=took_s,
                left_s=left_s,
                note=store.note(index),
            )
        )
    return store


def _quantise_layer(
    spec: ModelSpec,
    source: WeightSource,
    recipe: QuantizeRecipe,
    store: LayerStore,
    walks: PairedWalks | None,
    index: int,
) -> None:
    grids: dict[Part, Rounded] = {}
    kept: dict[Part, Tensor] = {}
    notes: list[str] = []
    for at, half in enumerate(halves(spec, index)):
        now = LayerInProgress(source, grids, kept)
        balanced, stats, added = _prepare_half(spec, source, now, recipe, walks, half, (index, at))
        notes += added
        for key, group in groupby(half, lambda pair: pair[1]):
            product = ProductWeights(key, {part: balanced.get(part).float() for part, _ in group})
            rounded, added = round_product(product, stats, recipe, spec.stored_dtype)
            grids |= rounded
            notes += added
        kept |= {part: balanced.get(part) for part in _edited_tensors(spec, balanced, half, index)}
        if walks is not None:
            walks.rounded.go(LayerInProgress(source, grids, kept), index, at)
    notes += describe_outliers(grids)
    store.save(index, grids, kept, "; ".join(notes))
    release_free_pages()


def _skip_layer(
    source: WeightSource, recipe: QuantizeRecipe, store: LayerStore, walks: PairedWalks, index: int
) -> None:
    """Advance through a layer that an interrupted run has finished."""
    for half in (0, 1):
        if recipe.compared:
            walks.clean.go(source, index, half)
        walks.rounded.go(store, index, half)


class LayerInProgress(PlainWeights):
    """A layer being rounded: its finished parts, and the rest unchanged."""

    def __init__(
        self, inner: WeightSource, grids: Mapping[Part, Rounded], kept: Mapping[Part, Tensor]
    ) -> None:
        self._inner, self._grids, self._kept = inner, grids, kept

    def get(self, part: Part) -> Tensor:
        if part in self._grids:
            return self._grids[part].dense()
        return self._kept[part] if part in self._kept else self._inner.get(part)


def halves(spec: ModelSpec, index: int) -> list[list[tuple[Part, ProductKey]]]:
    """The weights of a layer's attention and of its feed-forward."""
    weights = list(_weights_of(spec, index))
    attention = [weight for weight in weights if weight[0].key in ATTENTION]
    return [attention, [weight for weight in weights if weight not in attention]]


def _prepare_half(
    spec: ModelSpec,
    source: WeightSource,
    now: WeightSource,
    recipe: QuantizeRecipe,
    walks: PairedWalks | None,
    half: Half,
    place: tuple[int, int],
) -> tuple[BalancedWeights, Mapping[ProductKey, InputStats], list[str]]:
    """Half a layer, repaired and balanced for rounding, with its updated statistics and notes."""
    if walks is None:
        return BalancedWeights(source, spec), {}, []
    keys = {part.key for part, _ in half}
    watched = observe_inputs(walks, source, now, *place, keys, recipe.compared)
    release_free_pages()
    aimed = repair(source, half, watched, recipe.repair, recipe.damping)
    release_free_pages()
    balanced, stats = (
        BalancedWeights(LayerInProgress(source, {}, aimed.weights), spec),
        watched.stats,
    )
    if recipe.method in _CHOOSERS:
        stats = balance(spec, balanced, recipe, stats, half, place[0])
    return balanced, stats, aimed.notes


def balance(
    spec: ModelSpec,
    balanced: BalancedWeights,
    recipe: QuantizeRecipe,
    stats: Mapping[ProductKey, InputStats],
    half: Half,
    index: int,
) -> dict[ProductKey, InputStats]:
    """Rescale every site of the half; returns the updated statistics."""
    found = dict(stats)
    shapes = {(part.key, part.expert): part for part, _ in half}
    for site in sites(spec.layers[index], index):
        if (site.keys[0], site.expert) not in shapes:
            continue
        seen = found[site.keys, site.expert]
        if seen.num_rows == 0:
            continue
        weights = [balanced.get(shapes[key, site.expert]).float() for key in site.keys]
        own = recipe.at(site.keys[0], index, weights[0].shape[1])
        scale_I = _choose_scale(spec, site, weights, seen, own)
        balanced.apply(site, scale_I)
        found[site.keys, site.expert] = seen.divided(scale_I)
    return found


def _choose_scale(
    spec: ModelSpec,
    site: BalanceSite,
    weights: list[Tensor],
    seen: InputStats,
    recipe: QuantizeRecipe,
) -> Tensor:
    shared = spec.layers[site.layer].attention if site.before == "v" else None
    return _CHOOSERS[recipe.method](weights, seen, shared, recipe)


def _weights_of(spec: ModelSpec, index: int) -> Iterator[tuple[Part, ProductKey]]:
    """The weights of a layer that are rounded, each with its product."""
    for product in layer_products(spec.layers[index], index):
        if product.keys[0].endswith("router"):
            continue
        for key, linear in zip(product.keys, product.specs, strict=True):
            part = Part(key, (linear.num_out, linear.num_in), index, product.expert)
            yield part, (tuple(product.keys), product.expert)


def _edited_tensors(
    spec: ModelSpec, balanced: BalancedWeights, half: Half, index: int
) -> list[Part]:
    """Tensors other than the weights that balancing has changed: norms, biases of v and up."""
    changed = balanced.edited(index)
    products = {key for _, key in half}
    for product in layer_products(spec.layers[index], index):
        if (tuple(product.keys), product.expert) not in products:
            continue
        for key, linear in zip(product.keys, product.specs, strict=True):
            if linear.bias:
                changed.append(Part(f"{key}.bias", (linear.num_out,), index, product.expert))
    return changed
