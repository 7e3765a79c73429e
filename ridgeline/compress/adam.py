"""Adam whose state is plain tensors, so that a checkpoint of a training is one safetensors file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ridgeline.compress.unfinished import open_tensors

BETAS, EPS = (0.9, 0.95), 1e-8
WARM_UP, LEAST = 0.05, 0.02  # share of the steps; of the rate


def scheduled_rate(peak: float, step: int, num_steps: int) -> float:
    """Linear warm-up, then a cosine to almost zero."""
    done = step / num_steps
    warm = min(1.0, (step + 1) / max(1.0, WARM_UP * num_steps))
    return peak * warm * max(LEAST, 0.5 * (1 + math.cos(math.pi * done)))


class AdamState:
    """Named parameters, their moments, and the number of updates so far."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.parameters, self.step = dict(parameters), 0
        self.moments = {
            f"{kind}.{name}": torch.zeros_like(p)
            for name, p in self.parameters.items()
            for kind in ("m", "v")
        }

    @torch.no_grad()
    def update(self, rate: float) -> None:
        """Apply the gradients, and forget them."""
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
        """Replace the checkpoint atomically: an interruption leaves the previous one."""
        tensors = {f"p.{name}": p.detach() for name, p in self.parameters.items()} | self.moments
        temporary = folder / "checkpoint.tmp"
        save_file(tensors, temporary, metadata={"step": str(self.step)})
        temporary.replace(folder / "checkpoint.safetensors")

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Continue from the checkpoint in `folder`, if there is one."""
        file = folder / "checkpoint.safetensors"
        if not file.is_file():
            return
        with open_tensors(file) as opened:
            self.step = int(opened.metadata()["step"])
            for name, p in self.parameters.items():
                p.copy_(opened.get_tensor(f"p.{name}"))
            for name, moment in self.moments.items():
                moment.copy_(opened.get_tensor(name))
