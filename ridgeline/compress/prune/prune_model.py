"""Prunes a model into a folder, one layer at a time, with finished work on disk.

  choose the layers that remain            one walk through the original
  for each of them:
      attention:     observe W_o's inputs, drop heads, compensate; mask; advance
      feed-forward:  observe W_down's inputs, drop channels, compensate; mask; advance
      store what has changed               (an interruption loses one layer)

A layer is observed behind the pruned ones, so that it sees its real inputs. In memory: one block,
the Hessians of half of it, and the hidden states of all windows. Taylor importance alone holds the
whole model. Deterministic: the same checkpoint, recipe and text give the same weights, whether or
not the run was interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.compress.calibration import read_text, windows
from ridgeline.compress.free_memory import release_free_pages
from ridgeline.compress.layer_walk import HiddenStateWalk, observe_half
from ridgeline.compress.methods.rounding import check_finite
from ridgeline.compress.pipeline import UnmappedWeights, fingerprint, halves
from ridgeline.compress.progress import ProgressCallback, QuantizeProgress
from ridgeline.compress.prune import structure
from ridgeline.compress.prune.config_changes import config_changes
from ridgeline.compress.prune.masks import mask_weights
from ridgeline.compress.prune.pruned_layers import (
    EditedLayer,
    LayerView,
    PrunedLayers,
    store_choice,
    stored_choice,
)
from ridgeline.compress.prune.recipe import PruneRecipe, check
from ridgeline.compress.prune.report import PrunedLayerReport, PruningReport, write_report
from ridgeline.compress.prune.structure import PrunedShape, PrunedSpecs
from ridgeline.compress.prune.taylor import Scores, taylor_scores
from ridgeline.compress.recipe import QuantizeRecipe
from ridgeline.compress.writers.dense import DenseCheckpoint, write_dense
from ridgeline.compress.writers.store import (
    new_result,
    open_folder,
    publish_result,
    refuse_output,
)
from ridgeline.engine.checkpoints.sources import WeightSource
from ridgeline.engine.checkpoints.tensor_names import Part
from ridgeline.engine.dtype import DTYPES
from ridgeline.engine.model.decoder import final_logits
from ridgeline.engine.model.layers import make_norm
from ridgeline.errors import BadInput, CannotRun
from ridgeline.modelspec.checkpoints.gguf_header import is_gguf
from ridgeline.modelspec.checkpoints.json_files import read_json
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.checkpoints.locate import is_dummy, model_path
from ridgeline.modelspec.cost import has_states
from ridgeline.modelspec.cost.parameters import num_params
from ridgeline.modelspec.layer_inputs import refuse_special_layers
from ridgeline.modelspec.model import ModelSpec
from ridgeline.modelspec.rewrite import linears, with_dtype


class JudgedWindows(NamedTuple):
    """Windows to learn from, and held-out ones of the same length that judge the result."""

    learnt: Sequence[Sequence[int]]
    judged: Sequence[Sequence[int]]


def prune_model(
    model: str,
    recipe: PruneRecipe,
    output: Path,
    *,
    calibration: Path | None,
    judged: Sequence[Sequence[int]],
    sparse: bool,
    on_progress: ProgressCallback,
) -> PruningReport:
    """Prune `model` into `output`. `judged`: held-out windows of the recipe's length; `sparse`:
    store 2:4 masks compressed.

    Raises BadInput, BadModel, CannotRun. Nothing is left at `output` in that case, and finished
    layers stay next to it for a retry with the same command.
    """
    recipe = check(recipe)
    refuse_output(output)
    spec = prunable_spec(model)
    sizes = structure.pruned_sizes(spec, recipe)
    _refuse_pattern(spec, recipe, sizes, sparse)
    text = read_text(calibration)
    made = _made(model, recipe, text, sparse)
    drawn = QuantizeRecipe(
        num_windows=recipe.num_windows, window_tokens=recipe.window_tokens, seed=recipe.seed
    )
    pieces = JudgedWindows(windows(model, text, drawn, spec.vocab_size), judged)
    path = model_path(model)
    with (
        open_folder(output, made) as folder,
        torch.inference_mode(),
        UnmappedWeights(path, spec) as source,
    ):
        layers = _kept_layers(spec, source, recipe, pieces.learnt, folder)
        shape = PrunedShape(layers, *sizes)
        specs = structure.pruned_specs(spec, shape)
        changes = config_changes(read_json(path / "config.json"), spec, specs.narrow, shape)
        run = PruningRun(spec, specs, shape, source, recipe, folder, pieces)
        perplexity = run.prune_layers(on_progress)
        result = new_result(folder)
        checkpoint = DenseCheckpoint(path, specs.narrow, run.store, changes, sparse)
        written = write_dense(checkpoint, result)
        before = sum(entry.stat().st_size for entry in path.glob("*.safetensors"))
        report = PruningReport(
            source=model if not Path(model).exists() else str(Path(model).resolve()),
            dropped_layers=tuple(i for i in range(len(spec.layers)) if i not in layers),
            num_channels=(spec.layers[0].mlp.up.num_out, shape.num_channels),
            num_kv_heads=(spec.layers[0].attention.num_kv_heads, shape.num_kv_heads),
            num_params=(num_params(spec), num_params(specs.narrow)),
            num_bytes=(before, written),
            perplexity=perplexity,
            layers=tuple(run.store.report(index) for index in range(len(layers))),
            made=made,
        )
        write_report(result, report)
    publish_result(folder, output)
    return report


def prunable_spec(model: str) -> ModelSpec:
    """The spec of an unquantised checkpoint. Raises BadInput, BadModel, CannotRun."""
    if is_dummy(model):
        raise CannotRun("a dummy model has no weights to prune", value=model)
    if is_gguf(model):
        raise CannotRun(
            "a GGUF file is not pruned", value=model, fix="name its unquantised safetensors"
        )
    stored = load_spec(model)
    spec = with_dtype(stored, "float32")
    refuse_special_layers(spec, "prune")
    if has_states(spec):
        raise CannotRun("the walk through layers does not know gated delta nets", value=spec.family)
    packed = [path for path, linear in linears(spec).items() if linear.format.kind != "dense"]
    if packed or stored.rewrites:
        raise CannotRun(
            "the model is compressed already",
            value=packed[0] if packed else stored.rewrites[0],
            fix="name the original",
        )
    return spec


def _refuse_pattern(
    spec: ModelSpec, recipe: PruneRecipe, sizes: tuple[int, int], sparse: bool
) -> None:
    if sparse and recipe.pattern != "2:4":
        raise BadInput(
            "the format sparse-24 holds 2:4 masks alone",
            value=f"--sparsity {recipe.sparsity:g}",
            fix="use --sparsity 2:4, or --format dense",
        )
    if recipe.pattern == "2:4":
        inputs = {linear.num_in for linear in linears(spec).values()} | {sizes[0]}
        if odd := [size for size in sorted(inputs) if size % 4]:
            raise CannotRun("2:4 needs groups of four inputs", value=f"{odd[0]} inputs")


def _made(model: str, recipe: PruneRecipe, text: str, sparse: bool) -> dict[str, Any]:
    """What an interrupted run must share with the run that continues it."""
    common = fingerprint(model, QuantizeRecipe(method="gptq"), text)
    return {**common, "recipe": msgspec.to_builtins(recipe), "sparse": sparse}


def _kept_layers(
    spec: ModelSpec,
    source: WeightSource,
    recipe: PruneRecipe,
    learnt: Sequence[Sequence[int]],
    folder: Path,
) -> tuple[int, ...]:
    if not recipe.drop_layers:
        return tuple(range(len(spec.layers)))
    layers = stored_choice(folder, len(spec.layers))
    if layers is None:
        distances = layer_distances(spec, source, learnt)
        layers = structure.choose_layers(distances, recipe.drop_layers)
        store_choice(folder, layers)
    return layers


def layer_distances(
    spec: ModelSpec, source: WeightSource, learnt: Sequence[Sequence[int]]
) -> list[float]:
    """The mean angular distance between the input and the output of every layer."""
    walk = HiddenStateWalk(spec, source, learnt)
    found = []
    for index in range(len(spec.layers)):
        before = list(walk.states)
        walk.go(source, index, 0)
        walk.go(source, index, 1)
        angles = [
            structure.angular_distance(x_TC, y_TC)
            for x_TC, y_TC in zip(before, walk.states, strict=True)
        ]
        found.append(float(torch.cat(angles).mean()))
        release_free_pages()
    return found


def perplexity_of(
    spec: ModelSpec,
    weights: WeightSource,
    states: Sequence[Tensor],
    judged: Sequence[Sequence[int]],
) -> float:
    """The perplexity of windows, from their hidden states behind the last layer."""
    norm = make_norm(spec, weights.get(Part("norm", (spec.hidden_size,))), torch.float32)
    table = (spec.vocab_size, spec.hidden_size)
    head_VC = weights.get(Part("embed" if spec.tied_embeddings else "lm_head", table)).float()
    losses = []
    for x_TC, tokens in zip(states, judged, strict=True):
        logits_TV = final_logits(spec, F.linear(norm(x_TC[:-1]), head_VC))
        losses.append(F.cross_entropy(logits_TV, torch.tensor(tokens[1:])))
    return math.exp(min(700.0, float(torch.stack(losses).mean())))


class PruningRun:
    """One run over all layers that remain; `store` has the finished ones."""

    def __init__(
        self,
        spec: ModelSpec,
        specs: PrunedSpecs,
        shape: PrunedShape,
        source: WeightSource,
        recipe: PruneRecipe,
        folder: Path,
        pieces: JudgedWindows,
    ) -> None:
        self._spec, self._specs, self._shape, self._recipe = spec, specs, shape, recipe
        self._source, self._view = source, LayerView(source, shape.layers)
        self._learnt, self._judged = pieces
        self.store = PrunedLayers(folder, self._view)
        self._clean = HiddenStateWalk(spec, source, pieces.judged)
        self._clean_layer = 0
        everything = [*pieces.learnt, *pieces.judged]
        self._wide, self._middle, self._narrow = (
            HiddenStateWalk(part, self._view, everything) for part in specs
        )
        self._wide.states = self._middle.states = self._narrow.states
        self._dtype = DTYPES[spec.stored_dtype]
        self._scores: Scores = {}

    def prune_layers(self, on_progress: ProgressCallback) -> tuple[float, float]:
        """Prune what is not in the store yet; returns the perplexity before and after."""
        recipe, count = self._recipe, len(self._shape.layers)
        if recipe.importance == "taylor" and recipe.is_structured:
            self._scores = taylor_scores(self._specs.wide, self._view, self._learnt)
        times: list[float] = []
        for index in range(count):
            begun_s, fresh = perf_counter(), not self.store.has(index)
            if fresh:
                self._prune_layer(index)
            else:
                for half in (0, 1):
                    self._narrow.go(self.store, index, half)
            times += [perf_counter() - begun_s] if fresh else []
            report = self.store.report(index)
            on_progress(
                QuantizeProgress(
                    layer=index,
                    num_layers=count,
                    took_s=perf_counter() - begun_s,
                    left_s=(count - 1 - index) * sum(times) / max(1, len(times)),
                    note=report.note,
                )
            )
            release_free_pages()
        self._advance_clean(len(self._spec.layers))
        return (
            perplexity_of(self._spec, self._source, self._clean.states, self._judged),
            perplexity_of(self._specs.narrow, self._view, self._judged_states(), self._judged),
        )

    def _judged_states(self) -> list[Tensor]:
        return self._narrow.states[len(self._learnt) :]

    def _advance_clean(self, end: int) -> None:
        for index in range(self._clean_layer, end):
            self._clean.go(self._source, index, 0)
            self._clean.go(self._source, index, 1)
        self._clean_layer = max(self._clean_layer, end)

    def _prune_layer(self, index: int) -> None:
        now, notes = EditedLayer(self._view), list[str]()
        if self._recipe.drop_kv_heads:
            self._drop_heads(now, index)
        notes += self._mask_half(self._middle, now, index, 0)
        self._middle.go(now, index, 0)
        if self._recipe.drop_channels:
            self._drop_channels(now, index)
        notes += self._mask_half(self._narrow, now, index, 1)
        self._narrow.go(now, index, 1)
        original = self._shape.layers[index]
        self._advance_clean(original + 1)
        pairs = zip(self._judged_states(), self._clean.states, strict=True)
        gaps = [((x - y).norm(), y.norm()) for x, y in pairs]
        error = math.hypot(*(float(gap) for gap, _ in gaps))
        length = math.hypot(*(float(norm) for _, norm in gaps))
        report = PrunedLayerReport(
            original=original,
            error=error / length,
            zeros=self._zeros(now, index),
            note="; ".join(notes),
        )
        self.store.save(index, now.edits, report)

    def _zeros(self, now: EditedLayer, index: int) -> float:
        parts = [part for half in halves(self._specs.narrow, index) for part, _ in half]
        zeros = sum(int((now.get(part) == 0).sum()) for part in parts)
        return zeros / sum(math.prod(part.shape) for part in parts)

    def _drop_heads(self, now: EditedLayer, index: int) -> None:
        attention, recipe = self._specs.wide.layers[index].attention, self._recipe
        weight_OI, seen = self._observed(self._wide, now, index, "o")
        if recipe.importance == "taylor":
            score_G = self._scores["o", index]
        else:
            score_I = structure.column_scores(weight_OI, seen, recipe)
            score_G = structure.group_scores(score_I, attention)
        kept_G = structure.best(score_G, self._shape.num_kv_heads)
        tensors = {}
        for key in ("q", "k", "v"):
            linear = getattr(attention, key)
            tensors[key] = now.get(Part(key, (linear.num_out, linear.num_in), index))
            if linear.bias:
                bias = f"{key}.bias"
                tensors[bias] = now.get(Part(bias, (linear.num_out,), index))
        kept = structure.slice_heads(tensors, attention, kept_G)
        self._edit(now, kept)
        group = attention.num_heads // attention.num_kv_heads
        inputs_K = structure.head_rows(kept_G, group * attention.head_dim)
        self._edit(now, {"o": self._narrowed(weight_OI, inputs_K, seen.moment_II)})

    def _drop_channels(self, now: EditedLayer, index: int) -> None:
        mlp, recipe = self._specs.wide.layers[index].mlp, self._recipe
        weight_OI, seen = self._observed(self._middle, now, index, "down")
        score_I = self._scores.get(("down", index))
        if score_I is None:
            score_I = structure.column_scores(weight_OI, seen, recipe)
        kept_K = structure.best(score_I, self._shape.num_channels)
        for key in ("gate", "up") if mlp.gated else ("up",):
            linear = getattr(mlp, key)
            weight = now.get(Part(key, (linear.num_out, linear.num_in), index))
            self._edit(now, {key: weight[kept_K]})
            if linear.bias:
                bias = now.get(Part(f"{key}.bias", (linear.num_out,), index))
                self._edit(now, {f"{key}.bias": bias[kept_K]})
        self._edit(now, {"down": self._narrowed(weight_OI, kept_K, seen.moment_II)})

    def _observed(
        self, walk: HiddenStateWalk, now: EditedLayer, index: int, key: str
    ) -> tuple[Tensor, Any]:
        """The weight of W_o or W_down, and the statistics of its inputs."""
        half = 0 if key == "o" else 1
        stats = observe_half(
            walk, now, index, half, {key}, self._recipe.compensate, len(self._judged)
        )
        layer = walk.spec.layers[index]
        linear = layer.attention.o if key == "o" else layer.mlp.down
        part = Part(key, (linear.num_out, linear.num_in), index)
        weight_OI = now.get(part).float()
        check_finite(part, weight_OI)
        return weight_OI, stats[(key,), None]

    def _narrowed(self, weight_OI: Tensor, kept_K: Tensor, moment_II: Tensor | None) -> Tensor:
        if moment_II is None:
            return weight_OI[:, kept_K]
        return structure.compensate(weight_OI, moment_II, kept_K, self._recipe.damping)

    def _mask_half(
        self, walk: HiddenStateWalk, now: EditedLayer, index: int, half: int
    ) -> list[str]:
        recipe, notes = self._recipe, list[str]()
        if not recipe.sparsity:
            return notes
        members = halves(walk.spec, index)[half]
        stats = {}
        if recipe.method != "magnitude":
            keys = {part.key for part, _ in members}
            stats = observe_half(
                walk, now, index, half, keys, recipe.needs_moments, len(self._judged)
            )
        for key, group in groupby(members, lambda pair: pair[1]):
            parts = [part for part, _ in group]
            weights = [now.get(part).float() for part in parts]
            for part, weight_OI in zip(parts, weights, strict=True):
                check_finite(part, weight_OI)
            masked, note = mask_weights(weights, stats.get(key), recipe)
            notes += [f"{'+'.join(key[0])}: {note}"] if note else []
            for part, weight_OI in zip(parts, masked, strict=True):
                now.edits[part.key, part.expert] = weight_OI.to(self._dtype)
        return notes

    def _edit(self, now: EditedLayer, tensors: dict[str, Tensor]) -> None:
        for key, tensor in tensors.items():
            now.edits[key, None] = tensor.to(self._dtype)
