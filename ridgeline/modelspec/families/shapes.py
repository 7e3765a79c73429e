"""Published model shapes: `dummy:NAME` runs them with random weights, planning sizes them."""

from __future__ import annotations

import difflib
import re
import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

from ridgeline.errors import BadModel

_TUNED = re.compile(
    r"[-_.](instruct|it|chat|hf|base|fp8|awq|gptq|int4|int8|w4a16|w8a8|gguf|f16|bf16"
    r"|i?q[2-8]_(?:0|1|k(?:_[sml])?|xxs|xs|s|m|nl))$"
)


_PUBLISHED = re.compile(
    r"[-_.](instruct|it|chat|hf|base|thinking|reasoning|pytorch|\d{4}|v0\.\d|v\d"
    r"|terminus|exp|17b-(?:16|128)e|fp8|nvfp4|fp4|mxfp4|bf16|f16|static|dynamic|pertensor)$"
)
_SAME_SHAPE = {
    "deepseek-v3.2-speciale": "deepseek-v3.2",
    "glm-5.1": "glm-5",
    "glm-5.2": "glm-5",
    "glm-5.3": "glm-5",
    "kimi-k2.6": "kimi-k2.5",
    "kimi-k2.7-code": "kimi-k2.5",
    "llama-3.3-70b": "llama-3.1-70b",
    "llama-3-70b": "llama-3.1-70b",
    "mixtral-8x7b-v0.1": "mixtral-8x7b",
    "mixtral-8x22b-v0.1": "mixtral-8x22b",
    "minimax-m2.1": "minimax-m2",
    "minimax-m2.5": "minimax-m2",
    "minimax-m2.7": "minimax-m2",
    "qwen3-coder-30b-a3b": "qwen3-30b-a3b",
    "qwen3-coder-next": "qwen3-next-80b-a3b",
    "qwen3-vl-235b-a22b": "qwen3-235b-a22b",
    "qwen3-vl-30b-a3b": "qwen3-30b-a3b",
    "qwen3-vl-32b": "qwen3-32b",
    "qwen3.6-27b": "qwen3.5-27b",
    "qwen3.6-35b-a3b": "qwen3.5-35b-a3b",
}
"""Published models with the layers of another one: only their context or their training differ.

GLM-5.x, Kimi K2.x, Qwen3.6 and Qwen3-VL 235B were compared by the config.json files in
aiconfigurator-core 0.12.0 (2026-11-28); the others were not compared.
"""


_ON_HUB = re.compile(r"https://huggingface\.co/([^/]+/[^/]+)/")


@cache
def shape_table() -> dict[str, dict[str, Any]]:
    """Shapes that the engine runs, by name: config.json fields, and their `source`."""
    return _read("shapes.toml")


@cache
def planning_table() -> dict[str, dict[str, Any]]:
    """Shapes for planning only, by name: config.json fields, `source` and `params_b`."""
    return _read("planning_shapes.toml")


def _read(file: str) -> dict[str, dict[str, Any]]:
    path = files("ridgeline.modelspec.families").joinpath(file)
    return tomllib.loads(path.read_text(encoding="utf-8"))


def known_shapes() -> tuple[str, ...]:
    """Names of all published shapes."""
    return (*shape_table(), *planning_table())


def shape_of_repository(model: str) -> str | None:
    """The published shape that a repository's name stands for, also that of a tuned or quantised
    model: `meta-llama/Llama-3.1-8B-Instruct` and `Llama-3.1-8B-Q4_K_M.gguf` are the shape
    llama-3.1-8b. None if none does.
    """
    name = model.rsplit("/", 1)[-1].lower()
    while name not in known_shapes() and (tail := _TUNED.search(name)):
        name = name[: tail.start()]
    return name if name in known_shapes() else None


def shape_of_tuned(model: str) -> str | None:
    """The published shape of a repository whose layers it has: a tuned or dated version, or one in
    FP8 or FP4. None if none is known, and for names that say another format."""
    name = model.rsplit("/", 1)[-1].lower()
    name = name.removeprefix("meta-").removeprefix("nvidia-")
    known = known_shapes()
    while (base := _SAME_SHAPE.get(name, name)) not in known and (tail := _PUBLISHED.search(name)):
        name = name[: tail.start()]
    return base if base in known else None


def shape_config(name: str) -> dict[str, Any]:
    """The config.json fields of a shape that the engine runs; BadModel lists similar names."""
    table = shape_table()
    if name not in table:
        near = difflib.get_close_matches(name.lower(), table, n=5, cutoff=0.4)
        raise BadModel(
            "no published shape has this name",
            value=f"dummy:{name}",
            limit=f"similar: {', '.join(f'dummy:{n}' for n in near)}"
            if near
            else f"{len(table)} shapes",
            fix="choose one of these, or give a model directory"
            if near
            else "`ridgeline predict --list-models` lists them; or give a model directory",
        )
    return _config(table[name])


def planning_row(name: str) -> dict[str, Any]:
    """The row of any published shape; empty for an unknown name."""
    return shape_table().get(name) or planning_table().get(name) or {}


def hub_repository(name: str) -> str | None:
    """The Hugging Face repository of a published shape; None where its source is elsewhere."""
    source = _ON_HUB.match(str(planning_row(name).get("source", "")))
    return None if source is None else source[1]


def planning_config(name: str) -> dict[str, Any]:
    """The config.json fields of any published shape."""
    return _config(planning_row(name))


def _config(row: dict[str, Any]) -> dict[str, Any]:
    return {k: _with_nulls(v) for k, v in row.items() if k not in ("source", "params_b")}


def _with_nulls(value: Any) -> Any:
    # TOML has no null; the tables write "none".
    if isinstance(value, dict):
        return {key: _with_nulls(inner) for key, inner in value.items()}
    return None if value == "none" else value
