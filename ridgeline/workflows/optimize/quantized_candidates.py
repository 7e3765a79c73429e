"""Weights made during a climb: `ridgeline quantize`'s own code, into a folder that is kept.

The folder's name says what it holds; a second climb, and `ridgeline serve`, find it there. What
cannot be done in the time that is left is refused after the first layer, and goes on where it was
the next time.

Calibrated on the workload's own prompts where the user brought them. The workloads that ship with
Ridgeline draw from the held-out text that quality is judged by, so that theirs is the shipped
calibration text.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import msgspec

from ridgeline.compress.calibration import read_text
from ridgeline.compress.pipeline import fingerprint
from ridgeline.compress.progress import Progress
from ridgeline.compress.quantize_model import RIDGELINE, make
from ridgeline.compress.recipe import METHODS, Recipe, check
from ridgeline.config.settings import Settings
from ridgeline.engine.tokenization import Tokenizer
from ridgeline.errors import BadInput, CannotRun
from ridgeline.hardware.probe import default_cache_dir
from ridgeline.optimize.environment import MakeWeights
from ridgeline.workflows.optimize.engine_environment import Tokenised

HELD_OUT = ("chat", "code", "chat-and-code")  # workloads drawn from the held-out text
BITS = {"int4": 4, "int8": 8}
NUM_PROMPTS = 256


def maker(workload: Tokenised, tokenizer: Tokenizer, folder: Path | None = None) -> MakeWeights:
    """Makes weights for settings whose `quantization` says in which format."""
    place = folder or default_cache_dir() / "made"

    def made(settings: Settings, method: str, allowed_s: float) -> Settings:
        recipe = _recipe(settings, method)
        text = _calibration(workload, tokenizer, place) if recipe.calibrated else None
        run = fingerprint(settings.model, recipe, read_text(text) if recipe.calibrated else "")
        told = hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()[:10]
        target = place / f"{Path(settings.model).name}-{settings.quantization}-{method}-{told}"
        if not (target / "config.json").is_file():
            _make(settings.model, recipe, target, text, allowed_s)
        return msgspec.structs.replace(settings, model=str(target), quantization=None)

    return made


def _recipe(settings: Settings, method: str) -> Recipe:
    bits = BITS.get(settings.quantization or "")
    if bits is None or method not in METHODS:
        raise BadInput("no weights can be made so", value=f"{settings.quantization}, {method}")
    group_size = 128 if bits < 8 else None
    return check(Recipe(method=method, bits=bits, group_size=group_size))


def _make(model: str, recipe: Recipe, target: Path, text: Path | None, allowed_s: float) -> None:
    def tell(progress: Progress) -> None:
        if progress.left_s > allowed_s:
            raise CannotRun(
                f"making the weights takes about {progress.took_s + progress.left_s:.0f} s more",
                limit=f"{allowed_s:.0f} s of the budget are left for it",
                fix="a longer --budget; what is finished is kept",
            )

    target.parent.mkdir(parents=True, exist_ok=True)
    make(model, recipe, target, calibration=text, write=RIDGELINE, tell=tell)


def _calibration(workload: Tokenised, tokenizer: Tokenizer, place: Path) -> Path | None:
    """A file of the workload's prompts; None for the shipped text."""
    if workload.name in HELD_OUT:
        return None
    prompts = [request.prompt for request in workload.sample(NUM_PROMPTS, 1)]
    text = "\n\n".join(tokenizer.decode(p) for p in prompts if isinstance(p, tuple))
    file = place / f"prompts-{hashlib.sha256(text.encode()).hexdigest()[:10]}.txt"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file
