"""The rows of methods.toml, and what each could gain for a configuration."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

import msgspec

from ridgeline.workflows.explain.topics.cost_terms import TERMS, Facts


class Method(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row of methods.toml."""

    id: str
    does: str
    moves: str
    paper: str
    others: str
    hurts_when: str
    also: tuple[str, ...] = ()
    keeps: float | None = None
    left: str = ""
    narrows: bool = False
    ours: tuple[str, ...] = ()
    near: tuple[str, ...] = ()


@cache
def rows() -> Mapping[str, Method]:
    """The rows by id."""
    text = (
        files("ridgeline.workflows.explain.topics")
        .joinpath("methods.toml")
        .read_text(encoding="utf-8")
    )
    methods = msgspec.convert(tomllib.loads(text)["method"], tuple[Method, ...])
    return {method.id: method for method in methods}


def share_left(row: Method) -> str:
    """The share that the method leaves, and where the number comes from; "" where there is none."""
    return "" if row.keeps is None else f"{row.keeps:.0%}: {row.left}"


def gain_here(row: Method, facts: Facts) -> str:
    """The bound that the method moves, and how far; numbers in few bits gain nothing from fewer."""
    judge = TERMS[row.moves].judge
    if not row.narrows:
        return judge(facts, row.keeps)
    stored = _stored(row, facts)
    bits = _WIDE.get(stored)
    if bits is None:
        return f"{judge(facts, None)}; they are stored as {stored} already"
    return judge(facts, None if row.keeps is None else row.keeps * 16 / bits)


_WIDE: Mapping[str, int] = {
    "bfloat16": 16,
    "float16": 16,
    "float32": 32,
    "bf16": 16,
    "fp32": 32,  # kinds of formats
}


def _stored(row: Method, facts: Facts) -> str:
    """How the configuration stores what the method would: a dtype, or a kind of formats."""
    if row.moves == "kv":
        return str(facts["kv_cache_dtype"])
    kind = str(facts["model_weights"])
    return str(facts["model_compute_dtype"]) if kind == "dense" else kind
