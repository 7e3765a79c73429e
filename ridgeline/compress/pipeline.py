"""The loop of `ridgeline quantize`: one layer at a time, finished work on disk, the rest forgotten.

    for each layer:  watch what its products read  (calibrated methods only)
                     balance                       (awq, smoothquant)
                     round each weight             (rtn, hqq, gptq)
                     store the grids               (a kill loses one layer)
                     go through the rounded layer: the next one is calibrated on what it will see

In memory: one block dense, its Hessians, and the windows' hidden states. Deterministic: the same
checkpoint, recipe and text give the same grids, whether or not the run was interrupted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
import torch
from torch import Tensor

from ridgeline.compress.balance import Balanced, Site, choose_awq, choose_smooth, sites
from ridgeline.compress.calibration import windows
from ridgeline.compress.floats import code_fp8, code_nf4
from ridgeline.compress.gptq import round_gptq_or_rtn
from ridgeline.compress.hqq import round_hqq
from ridgeline.compress.lattice import Rounded
from ridgeline.compress.progress import Progress, Tell
from ridgeline.compress.recipe import Recipe
from ridgeline.compress.rotate import Rotated, rotated_spec
from ridgeline.compress.rtn import round_clipped, round_rtn
from ridgeline.compress.statistics import Stats
from ridgeline.compress.store import Store
from ridgeline.compress.walk import ProductKey, Walk
from ridgeline.engine.model.names import Part
from ridgeline.engine.model.pack import layer_products
from ridgeline.engine.model.weights import CheckpointWeights, Weights
from ridgeline.errors import BadModel, CannotRun
from ridgeline.spec.locate import is_dummy, model_path
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.rewrite import linears

_CHOOSERS = {"awq": choose_awq, "smoothquant": choose_smooth}


def fingerprint(model: str, recipe: Recipe, text: str) -> dict[str, Any]:
    """What a half-made run must share with the one that goes on with it."""
    source = model_path(model)
    weights = sorted((f.name, f.stat().st_size) for f in source.glob("*.safetensors"))
    config = hashlib.sha256((source / "config.json").read_bytes()).hexdigest()
    text_hash = hashlib.sha256(text.encode()).hexdigest() if recipe.calibrated else None
    return {
        "recipe": msgspec.to_builtins(recipe),
        "weights": [list(each) for each in weights],
        "config": config,
        "calibration": text_hash,
    }


@contextmanager
def source_of(model: str, spec: ModelSpec, recipe: Recipe) -> Iterator[tuple[ModelSpec, Weights]]:
    """The model to be rounded: its dense spec and weights, rotated if asked for."""
    if is_dummy(model):
        raise CannotRun("a dummy model has no weights to quantise", value=model)
    quantised = [p for p, linear in linears(spec).items() if linear.format.kind != "dense"]
    if quantised:
        raise CannotRun(
            "the model is quantised already", value=quantised[0], fix="name the original"
        )
    with torch.inference_mode(), CheckpointWeights(model_path(model), spec) as weights:
        if recipe.rotate:
            yield rotated_spec(spec), Rotated(weights, spec, recipe.seed)
        else:
            yield spec, weights


def quantise_layers(
    model: str,
    spec: ModelSpec,
    source: Weights,
    recipe: Recipe,
    folder: Path,
    text: str,
    tell: Tell,
) -> Store:
    """Every layer's grids, in `folder`; those that are there already are kept."""
    store = Store(folder, recipe, spec, source)
    walk = None
    if recipe.calibrated and not all(store.has(i) for i in range(len(spec.layers))):
        walk = Walk(spec, source, windows(model, text, recipe, spec.vocab_size))
    times: list[float] = []
    for index in range(len(spec.layers)):
        begun_s = perf_counter()
        fresh = not store.has(index)
        if fresh:
            _layer(spec, source, recipe, store, walk, index)
        if walk is not None and index + 1 < len(spec.layers):
            walk.go(store, index)
        took_s = perf_counter() - begun_s
        times += [took_s] if fresh else []
        left = len(spec.layers) - 1 - index
        left_s = left * sum(times) / len(times) if times else 0.0
        tell(
            Progress(
                layer=index,
                num_layers=len(spec.layers),
                took_s=took_s,
                left_s=left_s,
                note=store.note(index),
            )
        )
    return store


def _layer(
    spec: ModelSpec, source: Weights, recipe: Recipe, store: Store, walk: Walk | None, index: int
) -> None:
    stats: Mapping[ProductKey, Stats] = {}
    if walk is not None:
        stats = walk.watch(source, index, moments=recipe.method in ("gptq", "awq", "qat"))
    balanced = Balanced(source, spec)
    if recipe.method in _CHOOSERS:
        stats = _balance(spec, balanced, recipe, stats, index)
    grids: dict[Part, Rounded] = {}
    notes: list[str] = []
    for part, key in _weights_of(spec, index):
        weight = balanced.get(part).float()
        _refuse_nonsense(part, weight)
        own = recipe.at(part.key, index, part.shape[1])
        grids[part], note = _round(weight, stats.get(key), own, spec.stored_dtype)
        notes += [f"{part}: {note}"] if note else []
    kept = {part: balanced.get(part) for part in _changed(spec, balanced, recipe, index)}
    store.save(index, grids, kept, "; ".join(notes))


def _balance(
    spec: ModelSpec,
    balanced: Balanced,
    recipe: Recipe,
    stats: Mapping[ProductKey, Stats],
    index: int,
) -> dict[ProductKey, Stats]:
    """Rescale every site; the statistics as they are afterwards."""
    found = dict(stats)
    shapes = {(part.key, part.expert): part for part, _ in _weights_of(spec, index)}
    for site in sites(spec.layers[index], index):
        seen = found[site.keys, site.expert]
        if seen.num_rows == 0:
            continue
        weights = [balanced.get(shapes[key, site.expert]).float() for key in site.keys]
        own = recipe.at(site.keys[0], index, weights[0].shape[1])
        scale_I = _choose(spec, site, weights, seen, own)
        balanced.apply(site, scale_I)
        found[site.keys, site.expert] = seen.divided(scale_I)
    return found


def _choose(
    spec: ModelSpec, site: Site, weights: list[Tensor], seen: Stats, recipe: Recipe
) -> Tensor:
    shared = spec.layers[site.layer].attention if site.before == "v" else None
    return _CHOOSERS[recipe.method](weights, seen, shared, recipe)


def _weights_of(spec: ModelSpec, index: int) -> Iterator[tuple[Part, ProductKey]]:
    """The weights of a layer that are rounded, each with the product that it belongs to."""
    for product in layer_products(spec.layers[index], index):
        if product.keys == ["router"]:
            continue
        for key, linear in zip(product.keys, product.specs, strict=True):
            part = Part(key, (linear.num_out, linear.num_in), index, product.expert)
            yield part, (tuple(product.keys), product.expert)


def _changed(spec: ModelSpec, balanced: Balanced, recipe: Recipe, index: int) -> list[Part]:
    """Tensors beside the weights that balancing has changed: norms, and biases of v and up."""
    changed = balanced.edited(index)
    for product in layer_products(spec.layers[index], index):
        for key, linear in zip(product.keys, product.specs, strict=True):
            if linear.bias:
                changed.append(Part(f"{key}.bias", (linear.num_out,), index, product.expert))
    return changed


def _round(
    weight_OI: Tensor, stats: Stats | None, recipe: Recipe, dtype: str
) -> tuple[Rounded, str | None]:
    if recipe.numbers == "nf4":
        return code_nf4(weight_OI, dtype), None
    if recipe.numbers.startswith("fp8"):
        return code_fp8(weight_OI, recipe.numbers), None
    if recipe.method in ("gptq", "qat"):  # what training starts from
        assert stats is not None
        return round_gptq_or_rtn(weight_OI, stats, recipe)
    if recipe.method == "awq" and stats is not None and recipe.bits < 8:
        return round_clipped(weight_OI, stats, recipe), None
    rounder = round_hqq if recipe.method == "hqq" else round_rtn
    return rounder(weight_OI, stats, recipe), None


def _refuse_nonsense(part: Part, weight: Tensor) -> None:
    if not torch.isfinite(weight).all():
        raise BadModel(
            f"the weight {part} holds NaN or infinite numbers",
            fix="fetch the checkpoint again; it cannot be quantised so",
        )
