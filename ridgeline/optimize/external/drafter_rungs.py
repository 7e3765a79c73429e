"""Rungs of drafters that the user names: EAGLE heads, MTP layers, draft models.

Which head belongs to a model cannot be guessed, so `optimize --candidate-drafter` names it:
`eagle3:CHECKPOINT`, `eagle:CHECKPOINT`, `draft:CHECKPOINT`, or `mtp` for layers in the model's own
checkpoint. Drafts are verified by the model, so the rung claims to be exact, and its tokens are
compared with the incumbent's.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files

import msgspec

from ridgeline.errors import BadInput
from ridgeline.optimize.ladder import Rung
from ridgeline.optimize.server_settings import FLAGS

WITHOUT_CHECKPOINT = "mtp"
TITLES = {
    "eagle": "EAGLE head",
    "eagle3": "EAGLE-3 head",
    "mtp": "The model's own MTP layers",
    "draft": "Draft model",
}


class NamedDrafter(msgspec.Struct, frozen=True):
    """What drafts tokens: a method, and its checkpoint where it needs one."""

    method: str
    checkpoint: str = ""


class DrafterTable(msgspec.Struct, frozen=True):
    """drafters.toml: `depths` by method, and flags by server and method."""

    depths: dict[str, tuple[int, ...]]
    servers: dict[str, dict[str, dict[str, str]]]


@cache
def drafter_table() -> DrafterTable:
    """The flags of every server that takes drafters."""
    path = files("ridgeline.optimize.external").joinpath("drafters.toml")
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    depths = msgspec.convert(document.pop("depths"), dict[str, tuple[int, ...]])
    return DrafterTable(depths, msgspec.convert(document, dict[str, dict[str, dict[str, str]]]))


def parse_drafter(text: str) -> NamedDrafter:
    """`eagle3:CHECKPOINT`, `draft:CHECKPOINT` or `mtp`. Raises BadInput."""
    method, colon, checkpoint = text.partition(":")
    if method not in TITLES:
        raise BadInput(
            "--candidate-drafter names an unknown method", value=text, limit=", ".join(TITLES)
        )
    if (method == WITHOUT_CHECKPOINT) == bool(checkpoint) or (colon and not checkpoint):
        if method == WITHOUT_CHECKPOINT:
            problem, fix = "has its layers in the model's checkpoint", method
        else:
            problem, fix = "needs a checkpoint", f"{method}:CHECKPOINT"
        raise BadInput(f"--candidate-drafter: {method} {problem}", value=text, fix=fix)
    return NamedDrafter(method, checkpoint)


def drafter_rungs(server: str, texts: Sequence[str]) -> tuple[Rung, ...]:
    """One rung for each drafter, with a variant for each number of drafts. Raises BadInput."""
    return tuple(_rung(server, parse_drafter(text), number) for number, text in enumerate(texts, 1))


def drafter_flags(server: str) -> frozenset[str]:
    """Every flag by which a server is given a drafter."""
    return frozenset(
        flag for flags in drafter_table().servers.get(server, {}).values() for flag in flags
    )


def _rung(server: str, drafter: NamedDrafter, number: int) -> Rung:
    table = drafter_table()
    methods = table.servers.get(server, {})
    flags = methods.get(drafter.method)
    if flags is None:
        raise BadInput(
            f"{server} takes no such drafter by a flag",
            value=drafter.method,
            limit=", ".join(methods) or "none",
            fix="write a rung with the server's own flags, and give it with --ladder",
        )
    return Rung(
        id=f"drafter-{number}",
        title=TITLES[drafter.method],
        technique="draft-model-speculation" if drafter.method == "draft" else "",
        honesty="exact",
        term="steps per token, for the drafter's own steps and the rows that are verified",
        why="It was trained to continue as the model does, so more of its drafts are accepted than "
        "of copied text.",
        hurts_when="Batches are large: rows of rejected drafts cost arithmetic that requests need, "
        "and its weights and cache take memory from the KV cache.",
        risk=1,
        complexity=1,
        variants=tuple(
            {FLAGS: _filled(flags, drafter, num)} for num in table.depths[drafter.method]
        ),
    )


def _filled(flags: Mapping[str, str], drafter: NamedDrafter, num: int) -> dict[str, str]:
    values = {"{model}": drafter.checkpoint, "{num}": str(num), "{rows}": str(num + 1)}
    filled = dict(flags)
    for place, value in values.items():
        filled = {flag: text.replace(place, value) for flag, text in filled.items()}
    return filled
