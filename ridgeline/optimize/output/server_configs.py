"""The kept configuration in the forms in which servers are deployed.

For the server that was tuned: docker compose, a Kubernetes Deployment, and its own configuration
file (YAML of vLLM and SGLang, LLM options of TensorRT-LLM, environment of TGI). For each other
server: a command line with the settings that both have, and a comment for each that it lacks. Every
form is read back by `read_back`, which tests hold against the command line.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from types import MappingProxyType
from typing import Any

import msgspec
import yaml

from ridgeline.config.settings import Settings, Speculative
from ridgeline.errors import DECODE_ERRORS, CannotRun
from ridgeline.optimize.external.server_flags import ServerFlags, load_server_flags
from ridgeline.optimize.external.server_rungs import PARALLEL_FLAGS
from ridgeline.optimize.output.flag_translation import lookup_words, translate_flags
from ridgeline.optimize.server_settings import flags_of

COMPOSE, KUBERNETES = "compose.yaml", "kubernetes.yaml"
OWN_FILES: Mapping[str, str] = MappingProxyType(
    {"vllm": "vllm.yaml", "sglang": "sglang.yaml", "trtllm": "trtllm.yaml", "tgi": "tgi.env"}
)
IMAGES: Mapping[str, str] = MappingProxyType(
    {
        "vllm": "vllm/vllm-openai",
        "sglang": "lmsysorg/sglang",
        "trtllm": "nvcr.io/nvidia/tensorrt-llm/release",
        "tgi": "ghcr.io/huggingface/text-generation-inference",
        "llama-server": "ghcr.io/ggml-org/llama.cpp:server-cuda",
    }
)
STARTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "vllm": ("vllm", "serve", "{model}"),
        "sglang": ("python", "-m", "sglang.launch_server", "--model-path", "{model}"),
        "trtllm": ("trtllm-serve", "{model}"),
        "tgi": ("text-generation-launcher", "--model-id", "{model}"),
        "llama-server": ("llama-server", "--model", "{model}"),
    }
)
DEPLOYMENT_FILES = (COMPOSE, KUBERNETES, *OWN_FILES.values(), *(f"{kind}.sh" for kind in STARTS))
"""Every file that `deployment_files` may write."""
_MEMORY = (
    "--gpu-memory-utilization",
    "--mem-fraction-static",
    "--kv_cache_free_gpu_memory_fraction",
    "--cuda-memory-fraction",
)
_MODEL_FLAGS = ("--model", "--model-path", "--model-id", "-m")
_TRTLLM_KEYS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "--max_batch_size": ("max_batch_size",),
        "--max_num_tokens": ("max_num_tokens",),
        "--max_seq_len": ("max_seq_len",),
        "--tp_size": ("tensor_parallel_size",),
        "--ep_size": ("moe_expert_parallel_size",),
        "--kv_cache_free_gpu_memory_fraction": ("kv_cache_config", "free_gpu_memory_fraction"),
        "--kv_cache_dtype": ("kv_cache_config", "dtype"),
    }
)


class TunedServer(msgspec.Struct, frozen=True, kw_only=True):
    """The server that was tuned: its kind, its command line from the program on, its model, and the
    settings that the search found."""

    kind: str
    words: tuple[str, ...]
    model: str
    settings: Settings

    @property
    def port(self) -> int:
        found = [b for a, b in zip(self.words, self.words[1:], strict=False) if a == "--port"]
        return int(found[-1]) if found and found[-1].isdigit() else 8000

    @property
    def num_gpus(self) -> int:
        """Devices of tensor and data parallelism."""
        number = 1
        for flag in PARALLEL_FLAGS.get(self.kind, ()):
            values = [b for a, b in zip(self.words, self.words[1:], strict=False) if a == flag]
            number *= int(values[-1]) if values and values[-1].isdigit() else 1
        return number


def program_words(words: Sequence[str], flags: ServerFlags) -> tuple[str, ...]:
    """The server's own command line, without what starts it (srun, env, a twin)."""
    places = [i for i, word in enumerate(words) if PurePath(word).name in flags.programs]
    if not places:
        return tuple(words)
    first = places[0]
    has_module = first >= 2 and words[first - 1] == "-m"
    return tuple(words[first - 2 if has_module else first :])


def deployment_files(server: TunedServer) -> dict[str, str]:
    """File name → text, of every form."""
    files = {COMPOSE: _compose(server), KUBERNETES: _kubernetes(server)}
    own = OWN_FILES.get(server.kind)
    if own is not None:
        files[own] = _own_file(server)
    for kind in STARTS:
        if kind != server.kind:
            files[f"{kind}.sh"] = _other(server, kind)
    return files


# ---- containers --------------------------------------------------------------------------------


def _image(server: TunedServer) -> str:
    return IMAGES.get(server.kind, server.kind)


def _compose(server: TunedServer) -> str:
    service: dict[str, Any] = {
        "image": _image(server),
        "entrypoint": list(server.words[:1]),
        "command": list(server.words[1:]),
        "ports": [f"{server.port}:{server.port}"],
        "ipc": "host",
        "deploy": {
            "resources": {
                "reservations": {
                    "devices": [
                        {"driver": "nvidia", "count": server.num_gpus, "capabilities": ["gpu"]}
                    ]
                }
            }
        },
    }
    head = "# Pin the image to the version that was tuned, and mount the model.\n"
    return head + _yaml({"services": {"llm": service}})


def _kubernetes(server: TunedServer) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", PurePath(server.model).name.lower()).strip("-") or "llm"
    labels = {"app.kubernetes.io/name": name[:50].strip("-")}
    container = {
        "name": "server",
        "image": _image(server),
        "command": list(server.words[:1]),
        "args": list(server.words[1:]),
        "ports": [{"containerPort": server.port}],
        "resources": {"limits": {"nvidia.com/gpu": server.num_gpus}},
    }
    document = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": labels["app.kubernetes.io/name"], "labels": labels},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}},
        },
    }
    head = (
        "# Pin the image to the version that was tuned, and add a volume for the model, probes and "
        "your node selector.\n"
    )
    return head + _yaml(document)


# ---- configuration files -----------------------------------------------------------------------


def _own_file(server: TunedServer) -> str:
    model, pairs = split_command(server.words, server.kind)
    if server.kind == "tgi":
        lines = [f"MODEL_ID={model}", *(f"{_env(flag)}={value}" for flag, value in pairs)]
        return "\n".join(lines) + "\n"
    if server.kind == "trtllm":
        return _trtllm_yaml(model, pairs)
    key = "model" if server.kind == "vllm" else "model-path"
    document: dict[str, Any] = {key: model}
    for flag, value in pairs:
        document[flag.removeprefix("--")] = _typed(value)
    start = "vllm serve" if server.kind == "vllm" else "python -m sglang.launch_server"
    return f"# {start} --config {OWN_FILES[server.kind]}\n{_yaml(document)}"


def _trtllm_yaml(model: str, pairs: Sequence[tuple[str, str]]) -> str:
    document: dict[str, Any] = {}
    left = []
    for flag, value in pairs:
        keys = _TRTLLM_KEYS.get(flag)
        if keys is None:
            left += [flag, *([value] if value != "true" else [])]
            continue
        place = document
        for key in keys[:-1]:
            place = place.setdefault(key, {})
        place[keys[-1]] = _typed(value)
    command = ["trtllm-serve", model, *left, "--extra_llm_api_options", OWN_FILES["trtllm"]]
    return f"# {shlex.join(command)}\n{_yaml(document)}"


def split_command(words: Sequence[str], kind: str) -> tuple[str, list[tuple[str, str]]]:
    """The model and the flags of a server's command line; "true" for a switch."""
    rest = list(words)
    head: list[str] = []
    while rest and not rest[0].startswith("--"):  # the program, and a model without a flag
        head.append(rest.pop(0))
    programs = (*load_server_flags()[kind].programs, "serve", "python", "-m")
    model = head[-1] if head and PurePath(head[-1]).name not in programs else ""
    pairs: list[tuple[str, str]] = []
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        if not equals:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        if flag in _MODEL_FLAGS:
            model = value
        else:
            pairs.append((flag, value))
    return model, pairs


def _env(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_").upper()


def _typed(text: str) -> Any:
    """A number or a bool as such; anything else, JSON too, as text."""
    try:
        value = json.loads(text)
    except DECODE_ERRORS:
        return text
    return value if isinstance(value, bool | int | float) else text


def _yaml(document: object) -> str:
    return str(yaml.safe_dump(document, sort_keys=False, width=1000, allow_unicode=True))


# ---- other servers -----------------------------------------------------------------------------


def _other(server: TunedServer, kind: str) -> str:
    """A command line of another server, with comments on the settings that it lacks."""
    flags = load_server_flags()[kind]
    words = [word.replace("{model}", server.model) for word in STARTS[kind]]
    notes = [
        f"Translated from the settings found on {server.kind}; measure before you rely on it.",
    ]
    defaults = msgspec.convert({"model": server.model, **flags.defaults}, Settings, strict=False)
    for name in sorted(flags.flags.keys() | _set_names(server.settings)):
        value, default = getattr(server.settings, name), getattr(defaults, name)
        if value is None or value == default or name == "model":
            continue
        start = msgspec.structs.replace(defaults)
        try:
            words += flags.words(msgspec.structs.replace(start, **{name: value}), start)
        except CannotRun:
            drafts = _lookup(value, kind, server.kind)
            words += drafts or []
            if drafts is None:
                notes.append(f"{name}={_shown(value)}: {kind} has no flag for it.")
    words += _other_words(server, kind, notes)
    comments = "".join(f"# {note}\n" for note in notes)
    return f"#!/bin/sh\n{comments}exec {shlex.join(words)}\n"


def _set_names(settings: Settings) -> set[str]:
    """Performance settings that a search of servers changes."""
    names = {name for flags in load_server_flags().values() for name in flags.flags}
    return {name for name in names if getattr(settings, name) is not None}


def _lookup(value: object, kind: str, server: str) -> list[str] | None:
    """The other server's flags for n-gram speculation, where they are no setting of it."""
    if not isinstance(value, Speculative) or value.method != "ngram":
        return None
    drafts = value.num_speculative_tokens or load_server_flags()[server].draft_tokens
    return None if drafts is None else lookup_words(kind, drafts)


def _other_words(server: TunedServer, kind: str, notes: list[str]) -> list[str]:
    """Parallelism and flags in the other server's words; a note for every flag that it lacks."""
    own = PARALLEL_FLAGS.get(server.kind, (None, None))
    other = PARALLEL_FLAGS.get(kind, (None, None))
    names = dict(zip(own, other, strict=True))
    words: list[str] = []
    rest: list[tuple[str, str]] = []
    for flag, value in flags_of(server.settings):
        translated = names.get(flag)
        if translated is None:
            rest.append((flag, value))
        else:
            words += [translated, value]
    sizes = dict(flags_of(server.settings))
    replicas, tp = (sizes.get(str(flag), "1") for flag in (own[1], own[0]))
    more, left = translate_flags(rest, server.kind, kind, int(tp) if replicas == "1" else None)
    for flag, value in left:
        why = f"no equal flag of {kind} is known"
        if flag in _MEMORY:
            why = f"{kind} divides memory in another way, so that the number says nothing there"
        notes.append(f"{flag} {value}".rstrip() + f": {why}.")
    return [*words, *more]


def _shown(value: object) -> str:
    return str(msgspec.to_builtins(value))


# ---- reading back ------------------------------------------------------------------------------


def read_back(kind: str, name: str, text: str) -> list[str]:
    """The command line that a written file stands for; the inverse of `deployment_files`."""
    if name.endswith(".sh"):
        line = next(row for row in text.splitlines() if row.startswith("exec "))
        return shlex.split(line)[1:]
    if name == COMPOSE:
        service = yaml.safe_load(text)["services"]["llm"]
        return [*service["entrypoint"], *service["command"]]
    if name == KUBERNETES:
        [container] = yaml.safe_load(text)["spec"]["template"]["spec"]["containers"]
        return [*container["command"], *container["args"]]
    if kind == "tgi":
        pairs = dict(row.split("=", 1) for row in text.splitlines())
        model = pairs.pop("MODEL_ID")
        flags = {f"--{key.lower().replace('_', '-')}": value for key, value in pairs.items()}
    else:
        model, flags = _read_yaml(kind, text)
    words = [word.replace("{model}", model) for word in STARTS[kind]]
    for flag, value in flags.items():
        words += [flag] if value == "true" else [flag, value]
    return words


def _read_yaml(kind: str, text: str) -> tuple[str, dict[str, str]]:
    document: dict[str, Any] = yaml.safe_load(text) or {}
    if kind == "trtllm":
        command = shlex.split(text.splitlines()[0].removeprefix("# "))
        model, pairs = split_command(command, kind)
        flags = {flag: value for flag, value in pairs if flag != "--extra_llm_api_options"}
        for flag, keys in _TRTLLM_KEYS.items():
            value: Any = document
            for key in keys:
                value = value.get(key) if isinstance(value, dict) else None
            if value is not None:
                flags[flag] = str(value)
        return model, flags
    model = document.pop("model" if kind == "vllm" else "model-path")
    shown = {True: "true", False: "false"}
    return model, {
        f"--{key}": shown[value] if isinstance(value, bool) else str(value)
        for key, value in document.items()
    }
