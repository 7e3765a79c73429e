"""How a running server says that it is set up: what changed between two runs, if anything did.

names.toml says where each server tells it: the path of a JSON document, or "/metrics#NAME" for the
labels of one line of its page. Only plain values are kept, those of nested
documents under `outer.inner`; a server that tells nothing has no settings, and nothing is assumed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from ridgeline.measure.client.http_connection import OK, HttpConnectionError, HttpConnectionPool
from ridgeline.measure.monitors.server_metrics import dialects, parse_page, server_of
from ridgeline.records import EngineInfo

ELSEWHERE = "elsewhere"
LONGEST = 200
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


async def info_of(wire: HttpConnectionPool, prefix: str, model: str) -> EngineInfo | None:
    """What the server at `wire` tells of its set-up; None where it tells nothing.

    Of somebody else's server only `model` and `settings` mean something: its `device` is ELSEWHERE.
    """
    page = await _get(wire, f"{prefix}/metrics")
    server = server_of(parse_page(page))
    for place in () if server is None else dialects()[server].get("config", ()):
        path, _, key = place.partition("#")
        text = page if path == "/metrics" else await _get(wire, prefix + path)
        document = _labels(text, key) if path == "/metrics" else _document(text)
        whole = _as_ours(document)
        if whole is not None:
            return whole
        settings = dict(_plain(document))
        if settings:
            return _elsewhere(model, settings)
    return None


async def _get(wire: HttpConnectionPool, path: str) -> str:
    try:
        reply = await wire.get(path)
    except HttpConnectionError:
        return ""
    return reply.body.decode("utf-8", "replace") if reply.status == OK else ""


def _document(text: str) -> Mapping[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError:
        return {}


def _as_ours(document: Mapping[str, Any]) -> EngineInfo | None:
    """Ridgeline's own document is an EngineInfo with other things beside it."""
    try:
        return msgspec.convert(document, EngineInfo)
    except msgspec.ValidationError:
        return None


def _labels(page: str, name: str) -> dict[str, str]:
    lines = (line for line in page.split("\n") if line.startswith(name + "{"))
    pairs = _LABEL.findall(next(lines, ""))
    return {key: value for key, value in pairs if value != "None"}


def _plain(document: Mapping[str, Any], outer: str = "") -> Iterator[tuple[str, object]]:
    for key, value in document.items():
        if isinstance(value, dict):
            yield from _plain(value, f"{outer}{key}.")
        elif isinstance(value, bool | int | float) or (
            isinstance(value, str) and len(value) <= LONGEST
        ):
            yield outer + key, value


def _elsewhere(model: str, settings: dict[str, object]) -> EngineInfo:
    return EngineInfo(
        model=model,
        settings=settings,
        derivations=dict.fromkeys(settings, "told by the server"),
        max_model_len=0,
        num_blocks=0,
        block_size=0,
        weight_bytes=0,
        kv_bytes_per_token=0,
        device=ELSEWHERE,
        compute_dtype="",
    )
