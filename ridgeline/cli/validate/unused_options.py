"""Flags that would change nothing beside what else was said: refused, for none is ever dropped in
silence.

Only what was typed counts. Where a rule needs more than two flags' names, the command has its own
(`flags.refuse`).
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from ridgeline.cli.params.engine import refuse

_OF_A_LOAD = {
    "random_prefix_len": ("random_input_len", "random_output_len"),
    "burstiness": ("request_rate", "sweep", "find_goodput"),
}
NEEDS: dict[str, dict[str, tuple[str, ...]]] = {
    "bench": _OF_A_LOAD,
    "diagnose": _OF_A_LOAD,
    "simulate": {
        "repair_s": ("mtbf_s",),
        "target_in_flight": ("autoscale",),
        "startup_s": ("autoscale",),
        "acceptance": ("num_speculative_tokens",),
        "num_workers": ("sweep",),
    },
    "cost": {
        "hit_rate": ("prefix",),
        "prefixes": ("prefix",),
        "spot_interruptions": ("spot_price",),
        "spot_lost_s": ("spot_price",),
        "owned_years": ("owned_dollars",),
        "watts": ("owned_dollars",),
        "dollars_per_kwh": ("owned_dollars",),
        "pue": ("owned_dollars",),
    },
}
"""By command: an option, and those of which one must be given for it to mean anything."""

_OF_A_POINT = (
    *("isl", "osl", "batch", "tp", "pp", "ep", "weight_dtype", "kv_dtype", "cached"),
    *("max_num_batched_tokens", "num_speculative_tokens", "acceptance", "draft_model"),
)
IDLE_BESIDE: dict[str, dict[str, tuple[str, ...]]] = {
    "bench": {"workload": ("random_input_len", "random_output_len")},
    "diagnose": {"workload": ("random_input_len", "random_output_len")},
    "predict": dict.fromkeys(_OF_A_POINT, ("input",)),  # each line says its own
    "simulate": {"isl": ("workload",), "osl": ("workload",), "rate": ("replay_speed",)},
    "cost": {"isl": ("workload",), "osl": ("workload",)},
}
"""By command: an option, and those in whose place it stands."""


def check_idle(command: str, given: Set[str], values: Mapping[str, Any]) -> None:
    """BadInput for the first flag that was `given` and would change nothing."""
    there = given | _swept(values)
    for name, partners in NEEDS.get(command, {}).items():
        if name in given and not there & {*partners}:
            refuse([_flag(name)], f"without {_flag(partners[0])}")
    for name, others in IDLE_BESIDE.get(command, {}).items():
        beside = [each for each in others if each in there]
        if name in given and beside:
            refuse([_flag(name)], f"beside {_flag(beside[0])}")


def _swept(values: Mapping[str, Any]) -> set[str]:
    """Settings that `simulate --sweep mtbf-s=3600,7200` gives."""
    sweep = values.get("sweep")
    named = sweep if isinstance(sweep, list) else []
    return {each.partition("=")[0].strip().replace("-", "_") for each in named}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
