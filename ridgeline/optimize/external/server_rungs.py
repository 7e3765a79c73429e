"""Rungs that only one kind of server has: rungs/SERVER.toml, and parallelism within the devices."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import msgspec

from ridgeline.optimize.external.server_flags import ServerFlags
from ridgeline.optimize.ladder import Ladder, Rung, parse_rungs, setting_of
from ridgeline.optimize.server_settings import FLAGS, REPLACE, WHOLE_COMMAND

PARALLEL_FLAGS = {
    "vllm": ("--tensor-parallel-size", "--data-parallel-size"),
    "sglang": ("--tp-size", "--dp-size"),
    "trtllm": ("--tp_size", None),
    "tgi": ("--num-shard", None),
}
"""Server → its flags for tensor and data parallelism (None: one replica per server)."""


NAME_FLAGS = {
    "vllm": "--served-model-name",
    "sglang": "--served-model-name",
    "llama-server": "--alias",
}
"""Server → its flag for the name under which clients ask for the model."""


def candidate_model_rungs(
    server: str, command: str, model: str, names: Sequence[str]
) -> tuple[Rung, ...]:
    """One rung for each checkpoint that may take the place of `model`, a word of the command line.

    Clients keep asking for the model by its name.
    """
    name_flag = NAME_FLAGS.get(server)
    kept_name = {}
    if name_flag is not None and name_flag not in command:
        kept_name = {name_flag: model}
    return tuple(
        Rung(
            id=f"candidate-{number}",
            title="Another checkpoint",
            technique="",
            honesty="lossy",
            term="weight bytes and the arithmetic of their format",
            why="A checkpoint of the same model in another format.",
            hurts_when="The server widens its weights in every step, or has no kernels for them.",
            risk=2,
            complexity=1,
            variants=({FLAGS: {f"{REPLACE}{model}": name, **kept_name}},),
        )
        for number, name in enumerate(names, 1)
    )


def candidate_command_rungs(commands: Sequence[str]) -> tuple[Rung, ...]:
    """One rung for each command line that starts the model in another way."""
    return tuple(
        Rung(
            id=f"command-{number}",
            title="Another way to start it",
            technique="",
            honesty="exact",
            term="what the layout changes: prefill and decode apart, replicas behind a router",
            why="Prompts no longer delay decodes where separate servers compute them.",
            hurts_when="Keys and values travel between the servers, and the half with less work "
            "idles.",
            risk=1,
            complexity=2,
            variants=({FLAGS: {WHOLE_COMMAND: command}},),
        )
        for number, command in enumerate(commands, 1)
    )


def server_rungs(server: str) -> tuple[Rung, ...]:
    """The rungs of a server's table; none for a server without one."""
    table = files("ridgeline.optimize.external").joinpath("rungs").joinpath(f"{server}.toml")
    return parse_rungs(table.read_text(encoding="utf-8")) if table.is_file() else ()


def with_server_rungs(ladder: Ladder, flags: ServerFlags, num_devices: int | None) -> Ladder:
    """The rungs that a server has flags for, with its own and those of parallelism on its devices.

    Rungs of the ladder that change a setting for which the server has no flag, or to a value that
    it does not take, are left out.
    """
    own = (*server_rungs(flags.name), *parallel_rungs(flags.name, num_devices))
    known = {rung.id for rung in ladder.rungs}
    possible = (
        _with_draft_length(rung, flags)
        for rung in ladder.rungs
        if _settings_of(rung) <= {*flags.flags, FLAGS} and _has_values(rung, flags)
    )
    return msgspec.structs.replace(
        ladder, rungs=(*possible, *(rung for rung in own if rung.id not in known))
    )


def _with_draft_length(rung: Rung, flags: ServerFlags) -> Rung:
    """The rung with the server's number of drafts, where it switches speculation on without one."""
    drafts = rung.changes.get("speculative_config")
    if drafts is None or flags.draft_tokens is None:
        return rung
    drafts = {"num_speculative_tokens": flags.draft_tokens, **drafts}
    return msgspec.structs.replace(rung, changes={**rung.changes, "speculative_config": drafts})


def _has_values(rung: Rung, flags: ServerFlags) -> bool:
    """Whether the server takes the values of the changes that all variants make."""
    for name, value in rung.changes.items():
        known = flags.flags.get(name)
        if isinstance(value, dict):
            value = value.get("method")
        if isinstance(known, dict) and isinstance(value, str) and value not in known:
            return False
    return True


def _settings_of(rung: Rung) -> set[str]:
    """The settings that every variant of a rung changes."""
    shared = [set(variant) for variant in rung.variants] or [set()]
    return {setting_of(name) for name in set(rung.changes) | set.intersection(*shared)}


def parallel_rungs(server: str, num_devices: int | None) -> tuple[Rung, ...]:
    """One rung for all devices as replicas, and one for each larger tensor parallel size.

    Replicas come first: they need no communication. Tensor parallelism is for models that do not
    fit one device, and for a TPOT that one device cannot reach.
    """
    flags = PARALLEL_FLAGS.get(server)
    if flags is None or num_devices is None or num_devices < 2:
        return ()
    variants: list[dict[str, Any]] = []
    tp = 1
    while tp <= num_devices:
        replicas = num_devices // tp
        if flags[1] is not None:
            variants.append({FLAGS: {flags[0]: str(tp), flags[1]: str(replicas)}})
        elif tp > 1:
            variants.append({FLAGS: {flags[0]: str(tp)}})
        tp *= 2
    return (
        Rung(
            id=f"{server}-parallel",
            title="Tensor parallel and replicas",
            technique="",
            honesty="exact",
            term="device time per token: replicas multiply throughput, tensor parallelism shortens "
            "every step",
            why="Devices that are there and not used.",
            hurts_when="Tensor parallelism communicates in every layer; replicas share no cache.",
            risk=1,
            complexity=1,
            variants=tuple(variants),
        ),
    )
