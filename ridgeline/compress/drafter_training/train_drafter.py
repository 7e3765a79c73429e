"""Train a drafter for a model: `ridgeline train-drafter`.

    text ─▶ windows ─▶ frozen model: states, distributions ─▶ student ─▶ loss ─▶ AdamW

The text is the model's own (sampled from it, given as tokens) and any other; what is learnt on both
are the model's distributions, not the text. Every so often weights, optimiser and step are written
beside the output; interrupted, the same command goes on there, and ends with the same drafter: the
windows of a step depend on seed and step alone.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ridgeline.compress.drafter_training.students import EagleStudent, MedusaStudent, Teacher
from ridgeline.engine.checkpoints.load import load_decoder
from ridgeline.engine.speculate.drafters.checkpoint import DrafterConfig, fingerprint, write_drafter
from ridgeline.engine.speculate.drafters.eagle import EagleShape
from ridgeline.errors import BadInput, CannotRun
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.checkpoints.locate import is_dummy
from ridgeline.modelspec.rewrite import with_dtype

Kind = Literal["medusa", "eagle"]
WARM_UP, LEAST = 0.05, 0.02  # share of the steps; of the rate
HELD_WINDOWS = 8  # kept from training, to measure acceptance on
BETAS, EPS = (0.9, 0.95), 1e-8


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """How to train. `batch`: windows per step, of `length` tokens each. `num_heads`: of medusa."""

    kind: Kind
    num_heads: int = 4
    steps: int = 400
    batch: int = 8
    length: int = 128
    rate: float = 2e-3
    seed: int = 0


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Where training is. `acceptance`: at each place, on windows kept apart, where it was just
    measured."""

    step: int
    loss: float
    took_s: float
    acceptance: tuple[float, ...] = ()


Tell = Callable[[Progress], None]


class Trained(msgspec.Struct, frozen=True):
    """What came out: bytes of the weights, and the acceptance at each place on windows kept
    apart."""

    nbytes: int
    acceptance: tuple[float, ...]


def teacher_of(model: str) -> Teacher:
    """The frozen model. Raises BadModel, CannotRun."""
    if is_dummy(model):
        raise CannotRun("a dummy model says nothing that could be learnt", value=model)
    spec = with_dtype(load_spec(model), "float32")
    decoder = load_decoder(
        model, spec, device="cpu", compute_dtype=torch.float32, layer_backend="torch"
    )
    return Teacher(decoder)


def train(
    teacher: Teacher,
    tokens: Sequence[int],
    recipe: Recipe,
    output: Path,
    tell: Tell,
    save_every_s: float = 15.0,
) -> Trained:
    """Train on `tokens` into `output`. Raises BadInput, CannotRun."""
    windows_NL = windows(tokens, recipe.length)
    student, config = make_student(teacher, recipe)
    run = _fingerprint(recipe, config.target, tokens)
    partial = output.with_name(output.name + ".partial")
    state = _State(student, recipe)
    if (partial / "run.json").is_file():
        state.load(partial, run)
    else:
        partial.mkdir(parents=True, exist_ok=True)
        (partial / "run.json").write_text(json.dumps(run), encoding="utf-8")
    held_NL, rest_NL = windows_NL[:HELD_WINDOWS], windows_NL[HELD_WINDOWS:]
    _steps(state, held_NL, rest_NL, tell, partial, save_every_s)
    found = acceptance(teacher, student, held_NL)
    made = {"recipe": msgspec.to_builtins(recipe), "tokens": len(tokens), "acceptance": found}
    config = msgspec.structs.replace(config, made=made)
    nbytes = write_drafter(output, config, student.tensors())
    shutil.rmtree(partial)
    return Trained(nbytes, tuple(found))


def check_enough(num_tokens: int, length: int) -> None:
    """BadInput where they make too few windows to train on, and to keep some apart."""
    if num_tokens // length < 4 * HELD_WINDOWS:
        raise BadInput(
            "the text is too short to train on",
            value=f"{num_tokens} tokens",
            limit=f"at least {4 * HELD_WINDOWS * length}",
            fix="give a longer --text, or more --own-tokens",
        )


def windows(tokens: Sequence[int], length: int) -> Tensor:
    """windows_NL of the text, in an order of their own. Raises BadInput where they are too few."""
    check_enough(len(tokens), length)
    count = len(tokens) // length
    found_NL = torch.tensor(tokens[: count * length]).view(count, length)
    return found_NL[torch.randperm(count, generator=torch.Generator().manual_seed(1))]


def make_student(
    teacher: Teacher, recipe: Recipe
) -> tuple[MedusaStudent | EagleStudent, DrafterConfig]:
    """An untrained drafter for the model, and its config."""
    spec = teacher.decoder.spec
    config = DrafterConfig(
        kind=recipe.kind,
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        target=fingerprint(teacher.decoder),
    )
    if recipe.kind == "medusa":
        config = msgspec.structs.replace(config, num_heads=recipe.num_heads)
        return MedusaStudent(teacher, recipe.num_heads), config
    last = spec.layers[-1]
    shape = EagleShape(
        num_heads=last.attention.num_heads,
        num_kv_heads=last.attention.num_kv_heads,
        head_dim=last.attention.head_dim,
        intermediate_size=last.mlp.gate.num_out,
        rope_theta=last.attention.rope.theta,
        norm_eps=spec.norm_eps,
    )
    config = msgspec.structs.replace(config, layer=msgspec.to_builtins(shape))
    return EagleStudent(teacher, shape, recipe.seed), config


def _steps(
    state: _State,
    held_NL: Tensor,
    rest_NL: Tensor,
    tell: Tell,
    partial: Path,
    save_every_s: float,
) -> None:
    recipe, student, saved_s = state.recipe, state.student, perf_counter()
    teacher = student.teacher
    look_every = max(1, recipe.steps // 10)
    while state.step < recipe.steps:
        begun_s = perf_counter()
        random = torch.Generator().manual_seed(recipe.seed * 1_000_003 + state.step)
        picked = torch.randint(len(rest_NL), (recipe.batch,), generator=random)
        sharp = state.step / recipe.steps
        loss, _ = student.losses(teacher(rest_NL[picked]), sharp)
        if not math.isfinite(loss.item()):
            raise CannotRun("training diverged", value=f"loss {loss.item()}", fix="lower --rate")
        loss.backward()  # type: ignore[no-untyped-call]
        state.update(rate_at(recipe, state.step))
        looks = state.step % look_every == 0
        told = tuple(acceptance(teacher, student, held_NL)) if looks else ()
        took_s = perf_counter() - begun_s
        tell(Progress(step=state.step, loss=loss.item(), took_s=took_s, acceptance=told))
        if perf_counter() - saved_s > save_every_s:
            state.save(partial)
            saved_s = perf_counter()


def rate_at(recipe: Recipe, step: int) -> float:
    """Linear warm-up, then a cosine down to almost nothing."""
    done = step / recipe.steps
    warm = min(1.0, (step + 1) / max(1.0, WARM_UP * recipe.steps))
    return recipe.rate * warm * max(LEAST, 0.5 * (1 + math.cos(math.pi * done)))


@torch.no_grad()
def acceptance(
    teacher: Teacher, student: MedusaStudent | EagleStudent, windows_NL: Tensor
) -> list[float]:
    """The mean chance that a drawn draft is accepted, place by place."""
    _, chances = student.losses(teacher(windows_NL), 0.0)
    return [round(float(chance), 4) for chance in chances]


class _State:
    """AdamW's moments and the step, as plain tensors: a checkpoint is one safetensors file."""

    def __init__(self, student: MedusaStudent | EagleStudent, recipe: Recipe) -> None:
        self.student, self.recipe, self.step = student, recipe, 0
        self.parameters = dict(student.named_parameters())
        self.moments = {
            f"{kind}.{name}": torch.zeros_like(p)
            for name, p in self.parameters.items()
            for kind in ("m", "v")
        }

    @torch.no_grad()
    def update(self, rate: float) -> None:
        self.step += 1
        first, second = BETAS
        for name, p in self.parameters.items():
            assert p.grad is not None
            m, v = self.moments[f"m.{name}"], self.moments[f"v.{name}"]
            m.lerp_(p.grad, 1 - first)
            v.lerp_(p.grad.square(), 1 - second)
            scale = (v / (1 - second**self.step)).sqrt_().add_(EPS)
            p.addcdiv_(m / (1 - first**self.step), scale, value=-rate)
            p.grad = None

    def save(self, folder: Path) -> None:
        """Replaced as a whole: a kill leaves the one before."""
        tensors = {f"p.{name}": p.detach() for name, p in self.parameters.items()} | self.moments
        temporary = folder / "checkpoint.tmp"
        save_file(tensors, temporary, metadata={"step": str(self.step)})
        temporary.replace(folder / "checkpoint.safetensors")

    @torch.no_grad()
    def load(self, folder: Path, run: Mapping[str, Any]) -> None:
        """Go on with an interrupted run, where it has come to a checkpoint. BadInput: another's."""
        try:
            found = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        except ValueError:
            found = None
        if found != run:
            raise BadInput(
                "another training run was interrupted there",
                value=str(folder),
                fix="finish it with its own flags, or delete the folder",
            )
        file = folder / "checkpoint.safetensors"
        if not file.is_file():
            return
        with safe_open(file, framework="pt") as opened:
            self.step = int(opened.metadata()["step"])
            for name, p in self.parameters.items():
                p.copy_(opened.get_tensor(f"p.{name}"))
            for name, moment in self.moments.items():
                moment.copy_(opened.get_tensor(name))


def _fingerprint(recipe: Recipe, target: str, tokens: Sequence[int]) -> dict[str, Any]:
    """What an interrupted run must share with the one that goes on."""
    text = hashlib.sha256(torch.tensor(tokens).numpy().tobytes()).hexdigest()
    return {"recipe": msgspec.to_builtins(recipe), "target": target, "text": text}
