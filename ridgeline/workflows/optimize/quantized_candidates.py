"""Quantise weights during an optimisation, into a folder that is kept.

The folder's name identifies its content; the next search, and `ridgeline serve`, find it there. A
conversion that does not fit the remaining time is refused after the first layer, and resumes from
there the next time.

Calibration text is the workload's own prompts. The workloads that ship with Ridgeline are drawn
from the held-out text that quality is judged by, so they use the shipped calibration text instead.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import msgspec

from ridgeline.compress.calibration import read_text
from ridgeline.compress.pipeline import fingerprint
from ridgeline.compress.progress import QuantizeProgress
from ridgeline.compress.quantize_model import RIDGELINE, quantize_model
from ridgeline.compress.recipe import METHODS, QuantizeRecipe, check
from ridgeline.config.settings import Settings
from ridgeline.engine.tokenization import Tokenizer
from ridgeline.errors import BadInput, CannotRun
from ridgeline.optimize.environment import MakeWeights
from ridgeline.paths import default_cache_dir
from ridgeline.workflows.load.tokenized_workload import TokenizedWorkload

HELDOUT_WORKLOADS = ("chat", "code", "chat-and-code")
BITS = {"int4": 4, "int8": 8}
NUM_PROMPTS = 256


def weight_maker(
    workload: TokenizedWorkload, tokenizer: Tokenizer, folder: Path | None = None
) -> MakeWeights:
    """A function that quantises weights to the format of the settings' `quantization`."""
    cache = folder or default_cache_dir() / "quantized"

    def make_weights(settings: Settings, method: str, allowed_s: float) -> Settings:
        recipe = recipe_of(settings, method)
        text = _calibration_file(workload, tokenizer, cache) if recipe.calibrated else None
        run = fingerprint(settings.model, recipe, read_text(text) if recipe.calibrated else "")
        digest = hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()[:10]
        target = cache / f"{Path(settings.model).name}-{settings.quantization}-{method}-{digest}"
        if not (target / "config.json").is_file():
            _quantize(settings.model, recipe, target, text, allowed_s)
        return msgspec.structs.replace(settings, model=str(target), quantization=None)

    return make_weights


def recipe_of(settings: Settings, method: str) -> QuantizeRecipe:
    """How a method makes weights of the settings' `quantization`. Raises BadInput."""
    bits = BITS.get(settings.quantization or "")
    if bits is None or method not in METHODS:
        raise BadInput(
            "weights cannot be quantised to this format by this method",
            value=f"{settings.quantization}, {method}",
        )
    return check(QuantizeRecipe(method=method, bits=bits, group_size=128 if bits < 8 else None))


def _quantize(
    model: str, recipe: QuantizeRecipe, target: Path, text: Path | None, allowed_s: float
) -> None:
    def check_time(progress: QuantizeProgress) -> None:
        if progress.left_s > allowed_s:
            total_s = progress.took_s + progress.left_s
            raise CannotRun(
                f"quantising the weights takes about {total_s:.0f} s more",
                limit=f"{allowed_s:.0f} s of the budget are left for it",
                fix="a longer --budget; finished layers are kept",
            )

    target.parent.mkdir(parents=True, exist_ok=True)
    quantize_model(model, recipe, target, calibration=text, write=RIDGELINE, on_progress=check_time)


def _calibration_file(
    workload: TokenizedWorkload, tokenizer: Tokenizer, cache: Path
) -> Path | None:
    """A file with the workload's prompts; None for the shipped text."""
    if workload.name in HELDOUT_WORKLOADS:
        return None
    prompts = [request.prompt for request in workload.sample(NUM_PROMPTS, 1)]
    text = "\n\n".join(tokenizer.decode(p) for p in prompts if isinstance(p, tuple))
    file = cache / f"prompts-{hashlib.sha256(text.encode()).hexdigest()[:10]}.txt"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file
