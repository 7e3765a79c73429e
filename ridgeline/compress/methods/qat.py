"""Quantisation-aware training: weights and scales learn while the forward pass rounds them.

  ŵ = (round(v) - zero) · s₀ · exp(a)        v: a weight in steps of its grid, a: one per group

Training starts from a quantised model (GPTQ's); the original is the teacher, and the loss is the KL
divergence between their next-token distributions on the calibration text. Gradients pass straight
through rounding (Bengio et al., 2013, arXiv 1308.3432); scales are learnt by their logarithm, as in
LSQ (Esser et al., ICLR 2020, arXiv 1902.08153). `v` is counted in steps, so one learning rate fits
every layer: over a run a weight moves by a step or two.

The start is exactly GPTQ's: each `v` is the original weight on GPTQ's scale, moved close to the
integer that GPTQ chose. Starting nearer to the cell edges than `INSIDE` is worse: thousands of
weights would flip in the first steps regardless of their long-run gradients.

Invariant: the result is a grid like any other, with the same bits, groups and zero-points and no
cost at run time. Deterministic by seed, also after an interruption (a checkpoint holds weights,
moments and the step).

When it loses: time and memory; the whole model is trained at once, with 16 bytes per weight besides
the teacher. At 4 bits there is little left to gain.

Shape suffixes: T tokens, C hidden_size, V vocabulary, O outputs, I inputs, G groups.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from ridgeline.compress.calibration import TokenizedText
from ridgeline.compress.formats.lattice import Rounded, round_significant
from ridgeline.compress.progress import ProgressCallback, QuantizeProgress
from ridgeline.compress.recipe import QuantizeRecipe
from ridgeline.compress.training_model import TrainableSource, TrainingModel
from ridgeline.compress.unfinished import open_tensors
from ridgeline.compress.writers.store import LayerStore
from ridgeline.engine.checkpoints.load import DecoderBuilder
from ridgeline.engine.checkpoints.sources import WeightSource
from ridgeline.engine.checkpoints.tensor_names import Part
from ridgeline.engine.model.layers import ConcatLinear
from ridgeline.engine.quant.base import Linear
from ridgeline.engine.quant.grid import Grid
from ridgeline.errors import BadModel, CannotRun
from ridgeline.modelspec.model import LinearSpec, ModelSpec

GRID_RATE, SCALE_RATE = 0.015, 3e-3  # of Adam: in steps of the grid; in logarithms of a scale
WARM_UP = 10
WINDOWS = 4  # of a step
SAVE_EVERY = 25
BYTES_PER_WEIGHT = 24  # latent, gradient, two moments, teacher, and what a step makes of them
INSIDE = 0.25  # of a step: how far from the middle of its cell the start may lie


class LatentWeight:
    """A weight under training: `v_OI` in grid steps and `log_OG`, the scale's log factor; both are
    learnt.
    """

    __slots__ = ("_made_OI", "bias_O", "grid", "log_OG", "now_OI", "scale_OG", "v_OI", "zero_OG")

    def __init__(self, grid: Grid, original_OI: Tensor, bias_O: Tensor | None) -> None:
        self.grid, self.bias_O = grid, bias_O
        self.scale_OG = grid.scale_OG.clone()
        zero = torch.full_like(self.scale_OG, float(grid.middle))
        self.zero_OG = zero if grid.zero_OG is None else grid.zero_OG.float()
        q_OI = grid.q_OI.float()
        exact_OI = original_OI / self._wide(self.scale_OG) + self._wide(self.zero_OG)
        self.v_OI = q_OI + (exact_OI - q_OI).clamp(-INSIDE, INSIDE)
        self.log_OG = torch.zeros_like(self.scale_OG)
        self.v_OI.requires_grad_(True)
        self.log_OG.requires_grad_(True)

    def _wide(self, values_OG: Tensor) -> Tensor:
        size = self.grid.group_size
        return values_OG.repeat_interleave(size, 1)[:, : self.grid.q_OI.shape[1]]

    def dense(self) -> Tensor:
        """ŵ_OI, differentiable."""
        rounded_OI = self.v_OI + (self.v_OI.round() - self.v_OI).detach()
        q_OI = rounded_OI.clamp(0, 2**self.grid.bits - 1)
        scale_OG = self.scale_OG * self.log_OG.exp()
        return (q_OI - self._wide(self.zero_OG)) * self._wide(scale_OG)

    def result(self, scale_bits: int) -> Grid:
        """The resulting grid."""
        q_OI = self.v_OI.detach().round().clamp(0, 2**self.grid.bits - 1).to(torch.uint8)
        scale_OG = round_significant(self.scale_OG * self.log_OG.detach().exp(), scale_bits)
        return replace(self.grid, q_OI=q_OI, scale_OG=scale_OG)

    def begin(self) -> None:
        """Round once for all windows of a step."""
        self._made_OI = self.dense()
        self.now_OI = self._made_OI.detach().requires_grad_(True)

    def end(self) -> None:
        """Pass the windows' gradients on to the learnt tensors."""
        assert self.now_OI.grad is not None
        self._made_OI.backward(self.now_OI.grad)

    def __call__(self, x_TI: Tensor) -> Tensor:
        return F.linear(x_TI, self.now_OI, self.bias_O)

    @property
    def nbytes(self) -> int:
        return self.v_OI.nbytes


class StudentBuilder(DecoderBuilder):
    """Builds blocks whose rounded weights are trained: `latents`, by part."""

    def __init__(self, spec: ModelSpec, weights: LayerStore, original: WeightSource) -> None:
        super().__init__(spec, TrainableSource(weights), torch.device("cpu"), torch.float32)
        self._store, self._original = weights, original
        self.latents: dict[Part, LatentWeight] = {}

    def _linear(
        self, keys: list[str], specs: list[LinearSpec], layer: int | None, expert: int | None = None
    ) -> Linear:
        latents = [
            latent
            for key, spec in zip(keys, specs, strict=True)
            if (latent := self._latent(key, spec, layer, expert)) is not None
        ]
        if not latents:
            return super()._linear(keys, specs, layer, expert)
        return latents[0] if len(latents) == 1 else ConcatLinear(latents)

    def _latent(
        self, key: str, spec: LinearSpec, layer: int | None, expert: int | None
    ) -> LatentWeight | None:
        part = Part(key, (spec.num_out, spec.num_in), layer, expert)
        grid = self._store.grid(part)
        if grid is None:
            return None
        bias = self._tensor(f"{key}.bias", (spec.num_out,), layer, expert) if spec.bias else None
        original_OI = self._original.get(part).clone().float()
        self.latents[part] = latent = LatentWeight(grid, original_OI, bias)
        return latent


def train_quantised(
    spec: ModelSpec,
    source: WeightSource,
    start: LayerStore,
    recipe: QuantizeRecipe,
    text: TokenizedText,
    folder: Path,
    on_progress: ProgressCallback,
) -> LayerStore:
    """Train the model in `start` on the token ids `text`; returns the trained layers in
    `folder`/tuned.

    Raises CannotRun if memory cannot hold the training, BadModel if it diverges.
    """
    target = folder / "tuned"
    target.mkdir(exist_ok=True)
    tuned = LayerStore(target, recipe, spec, start)
    if all(tuned.has(index) for index in range(len(spec.layers))):
        return tuned
    with torch.inference_mode(False), torch.enable_grad():
        builder = StudentBuilder(spec, start, source)
        student = TrainingModel(builder, recipe.window_tokens)
        _refuse_too_large(builder.latents)
        training = QatTraining(
            list(builder.latents.values()), recipe, folder / "training.safetensors"
        )
        teacher = TrainingModel(
            DecoderBuilder(spec, TrainableSource(source), torch.device("cpu"), torch.float32),
            recipe.window_tokens,
        )
        for step in training.run(student, teacher, text):
            on_progress(step)
    for index in range(len(spec.layers)):
        of_layer = {p: v for p, v in builder.latents.items() if p.layer == index}
        grids: dict[Part, Rounded] = {
            part: latent.result(recipe.scale_bits) for part, latent in of_layer.items()
        }
        tuned.save(index, grids, {}, start.note(index))
    return tuned


def _refuse_too_large(latents: dict[Part, LatentWeight]) -> None:
    needed = BYTES_PER_WEIGHT * sum(latent.v_OI.numel() for latent in latents.values())
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        raise CannotRun(
            "quantisation-aware training holds the whole model with its moments",
            value=f"{needed / 1e9:.1f} GB",
            limit=f"{there / 1e9:.1f} GB of memory",
            fix="use --method gptq",
        )


class QatTraining:
    """Adam over the latent weights; continues from its checkpoint file if there is one."""

    def __init__(self, latents: list[LatentWeight], recipe: QuantizeRecipe, file: Path) -> None:
        self._latents, self._recipe, self._file = latents, recipe, file
        self._optimizer = torch.optim.Adam(
            [
                {"params": [latent.v_OI for latent in latents], "rate": GRID_RATE},
                {"params": [latent.log_OG for latent in latents], "rate": SCALE_RATE},
            ],
            betas=(0.9, 0.95),
        )
        self._done = self._restored() if file.is_file() else 0

    def run(
        self, student: TrainingModel, teacher: TrainingModel, text: TokenizedText
    ) -> Iterator[QuantizeProgress]:
        """Train to the end, yielding progress step by step."""
        num_steps, times = self._recipe.steps, list[float]()
        for step in range(self._done, num_steps):
            begun_s = perf_counter()
            for group in self._optimizer.param_groups:
                group["lr"] = group["rate"] * learning_rate_share(step, num_steps)
            loss = self._step(student, teacher, self._windows(step, text))
            if not math.isfinite(loss):
                raise BadModel("the training diverged", value=loss, fix="use --method gptq")
            times.append(perf_counter() - begun_s)
            if (step + 1) % SAVE_EVERY == 0:
                self._save(step + 1)
            yield QuantizeProgress(
                unit="step",
                layer=step,
                num_layers=num_steps,
                took_s=times[-1],
                left_s=(num_steps - step - 1) * sum(times) / len(times),
                note=f"KL {loss:.4f}" if (step + 1) % SAVE_EVERY == 0 else "",
            )

    def _windows(self, step: int, text: TokenizedText) -> list[list[int]]:
        rng, length = random.Random(f"{self._recipe.seed}/{step}"), self._recipe.window_tokens
        starts = [rng.randrange(len(text.tokens) - length + 1) for _ in range(WINDOWS)]
        return [text.window(start, length) for start in starts]

    def _step(
        self, student: TrainingModel, teacher: TrainingModel, windows: Sequence[Sequence[int]]
    ) -> float:
        self._optimizer.zero_grad()
        for latent in self._latents:
            latent.begin()
        total = 0.0
        for tokens in windows:
            with torch.no_grad():
                truth_TV = teacher(tokens)
            loss = F.kl_div(student(tokens), truth_TV, reduction="batchmean", log_target=True)
            (loss / len(windows)).backward()
            total += float(loss.detach())
        for latent in self._latents:
            latent.end()
        self._optimizer.step()
        return total / len(windows)

    def _save(self, step: int) -> None:
        tensors = {}
        for index, latent in enumerate(self._latents):
            for name, value in (("v", latent.v_OI), ("log", latent.log_OG)):
                state = self._optimizer.state[value]
                tensors[f"{index}.{name}"] = value.detach()
                tensors[f"{index}.{name}.mean"] = state["exp_avg"]
                tensors[f"{index}.{name}.square"] = state["exp_avg_sq"]
        partial = self._file.with_suffix(".writing")
        save_file(tensors, partial, metadata={"step": str(step)})
        partial.rename(self._file)

    def _restored(self) -> int:
        with open_tensors(self._file) as file:
            step = int((file.metadata() or {})["step"])
            for index, latent in enumerate(self._latents):
                for name, value in (("v", latent.v_OI), ("log", latent.log_OG)):
                    with torch.no_grad():
                        value.copy_(file.get_tensor(f"{index}.{name}"))
                    self._optimizer.state[value] = {
                        "step": torch.tensor(float(step)),
                        "exp_avg": file.get_tensor(f"{index}.{name}.mean").clone(),
                        "exp_avg_sq": file.get_tensor(f"{index}.{name}.square").clone(),
                    }
        return step


def learning_rate_share(step: int, num_steps: int) -> float:
    """Share of the learning rate: a warm-up, then a cosine to zero."""
    up = min(1.0, (step + 1) / WARM_UP)
    return up * 0.5 * (1 + math.cos(math.pi * step / num_steps))
