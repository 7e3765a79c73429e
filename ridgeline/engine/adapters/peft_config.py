"""Reads a PEFT `adapter_config.json`; whatever would change the arithmetic is refused by name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.errors import BadModel, CannotRun
from ridgeline.modelspec.checkpoints.json_files import read_json

CONFIG_FILE = "adapter_config.json"

_EMPTY: tuple[Any, ...] = (None, False, [], {}, "")
_IRRELEVANT = frozenset((
    "auto_mapping", "base_model_name_or_path", "exclude_modules", "inference_mode",
    "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout", "r",
    "peft_type", "peft_version", "revision", "target_modules", "task_type", "use_rslora", "bias",
    "corda_config", "eva_config", "loftq_config", "qalora_group_size", "runtime_config",
    "ensure_weight_tying",
))  # fmt: skip
"""Fields that are read elsewhere, or that only matter while an adapter is trained."""
_CHANGES_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")
"""Initialisations that also change the base model's weights."""


class AdapterConfig(msgspec.Struct, frozen=True):
    """An adapter adds B·A·`scale` to the weight of each of its modules; A has `rank` rows."""

    rank: int
    scale: float


def read_adapter_config(directory: Path) -> AdapterConfig:
    """The rank and the scale.

    Raises BadModel for a malformed file, CannotRun for unsupported fields (DoRA, modules_to_save,
    biases, …).
    """
    fields = read_json(directory / CONFIG_FILE)
    if fields.get("peft_type") != "LORA":
        raise _unsupported("peft_type", fields.get("peft_type"), "LORA")
    if fields.get("bias", "none") != "none":
        raise _unsupported("bias", fields["bias"], "none")
    if fields.get("task_type") not in (None, "CAUSAL_LM"):
        raise _unsupported("task_type", fields["task_type"], "CAUSAL_LM")
    initial = fields.get("init_lora_weights")
    if isinstance(initial, str) and initial.lower().startswith(_CHANGES_BASE):
        raise _unsupported("init_lora_weights", initial, "those that leave the base as it is")
    for name, value in fields.items():
        if name not in _IRRELEVANT and value not in _EMPTY:
            raise _unsupported(name, value, "left out")
    rank, alpha = fields.get("r"), fields.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise BadModel(f"{CONFIG_FILE}: r is not a rank", value=str(rank), limit="an integer >= 1")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise BadModel(f"{CONFIG_FILE}: lora_alpha is not a number", value=str(alpha))
    root = math.sqrt(rank) if fields.get("use_rslora") is True else rank
    return AdapterConfig(rank, alpha / root)


def _unsupported(name: str, value: Any, limit: str) -> CannotRun:
    return CannotRun(
        f"the adapter's {name} is not supported",
        value=str(value)[:80],
        limit=limit,
        fix="merge the adapter into its base model, and serve that",
    )
