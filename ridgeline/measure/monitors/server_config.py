"""The configuration that a running server reports, to see what changed between two runs.

metric_names.toml lists where each server reports it: the path of a JSON document, or
"/metrics#NAME" for the labels of a metric. Only plain values are kept, those of nested documents as
`outer.inner`. A server that reports nothing has no settings; nothing is assumed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from ridgeline.errors import DECODE_ERRORS
from ridgeline.measure.client.http_connection import OK, HttpConnectionError, HttpConnectionPool
from ridgeline.measure.monitors.server_metrics import identify_server, metric_names, parse_page
from ridgeline.records import EngineInfo

ELSEWHERE = "elsewhere"
MAX_VALUE_CHARS = 200
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


async def fetch_engine_info(pool: HttpConnectionPool, prefix: str, model: str) -> EngineInfo | None:
    """The configuration of the server at `prefix`; None if it reports none.

    For servers other than Ridgeline, only `model` and `settings` are known; `device` is ELSEWHERE.
    """
    page = await _get(pool, f"{prefix}/metrics")
    server = identify_server(parse_page(page))
    for place in () if server is None else metric_names()[server].get("config", ()):
        path, _, key = place.partition("#")
        text = page if path == "/metrics" else await _get(pool, prefix + path)
        document = _labels(text, key) if path == "/metrics" else _document(text)
        info = _engine_info(document)
        if info is not None:
            return info
        settings = dict(_plain(document))
        if settings:
            return _elsewhere(model, settings | _twin(page))
    return _elsewhere(model, _twin(page)) if _twin(page) else None


def _twin(page: str) -> dict[str, object]:
    """`twin`: the devices that the server says it only models; empty for any other server."""
    device = _labels(page, "ridgeline_twin").get("device")
    return {} if device is None else {"twin": device}


async def _get(pool: HttpConnectionPool, path: str) -> str:
    try:
        reply = await pool.get(path)
    except HttpConnectionError:
        return ""
    return reply.body.decode("utf-8", "replace") if reply.status == OK else ""


def _document(text: str) -> Mapping[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except DECODE_ERRORS:
        return {}


def _engine_info(document: Mapping[str, Any]) -> EngineInfo | None:
    """The document of a Ridgeline server, an EngineInfo with further fields; else None."""
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
            isinstance(value, str) and len(value) <= MAX_VALUE_CHARS
        ):
            yield outer + key, value


def _elsewhere(model: str, settings: dict[str, object]) -> EngineInfo:
    return EngineInfo(
        model=model,
        settings=settings,
        derivations=dict.fromkeys(settings, "reported by the server"),
        max_model_len=0,
        num_blocks=0,
        block_size=0,
        weight_bytes=0,
        kv_bytes_per_token=0,
        device=ELSEWHERE,
        compute_dtype="",
    )
