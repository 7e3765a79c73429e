"""`GET /` and the route that only the page reads, `GET /ridgeline/config`.

The page is one HTML document: style and script are inlined when the server starts, and a
Content-Security-Policy with their hashes forbids any other script, style or address. It contains no
data; its script reads that from routes that need a key, if keys are configured.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path, PurePath
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from typing_extensions import TypedDict

import ridgeline
from ridgeline.serve.auth.middleware import caller_of
from ridgeline.serve.generation.respond import json_response
from ridgeline.serve.openai.objects import NonNegative
from ridgeline.serve.openapi import error_responses, probe_responses
from ridgeline.serve.service import ServiceDep

_FOLDER = Path(__file__).parent
_ADDRESSES = ("disaggregation_host", "disaggregation_peers", "master_addr", "kv_tier_url")
_HIDDEN = "(hidden)"

page_router = APIRouter(tags=["Web"])
"""The page itself, which needs no key."""
router = APIRouter(tags=["Web"])


class ConfigResponse(TypedDict):
    """The engine as configured. `slo`: of requests that name no class.

    To keys that are not an administrator's, paths on the server's disk are shown without their
    folders, and addresses of its neighbours not at all.
    """

    version: str
    served_model_name: str
    slo: dict[str, Any] | None
    slo_classes: dict[str, Any]
    batches: bool
    model: str
    settings: dict[str, Any]
    derivations: dict[str, Any]
    max_model_len: NonNegative
    num_blocks: NonNegative
    block_size: NonNegative


class HtmlResponse(Response):
    """An HTML document."""

    media_type = "text/html; charset=utf-8"


@page_router.get(
    "/",
    summary="The web page",
    operation_id="page",
    response_class=HtmlResponse,
    responses=probe_responses(),
)
async def page() -> Response:
    document, policy = build_page()
    headers = {
        "content-security-policy": policy,
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
    }
    return HtmlResponse(document, headers=headers)


@router.get(
    "/ridgeline/config",
    summary="The engine as configured",
    operation_id="config",
    response_model=ConfigResponse,
    responses=error_responses(),
)
async def config(request: Request, service: ServiceDep) -> Response:
    slo = service.options.default_slo
    info = msgspec.to_builtins(service.engine.info)
    if not caller_of(request.scope).admin:
        info = without_locations(info)
    return json_response(
        {
            "version": ridgeline.__version__,
            "served_model_name": service.name,
            "slo": None if slo is None else msgspec.to_builtins(slo),
            "slo_classes": msgspec.to_builtins(service.slo_classes),
            "batches": service.has_batches,
            **info,
        }
    )


def without_locations(info: Mapping[str, Any]) -> dict[str, Any]:
    """The document of an EngineInfo, with neither paths nor addresses in any value or reason."""
    settings = info["settings"]
    addresses = {text for name in _ADDRESSES for text in _texts(settings.get(name)) if text}
    paths = {text for text in _texts([info["model"], settings]) if "/" in text} - addresses
    shown = {path: PurePath(path).name for path in paths} | dict.fromkeys(addresses, _HIDDEN)
    # The longest first: a folder may be the beginning of another path.
    names = sorted(shown, key=len, reverse=True)

    def hide(value: Any) -> Any:
        if isinstance(value, str):
            for name in names:
                value = value.replace(name, shown[name])
            return value
        if isinstance(value, Mapping):
            return {key: hide(inner) for key, inner in value.items()}
        return [hide(inner) for inner in value] if isinstance(value, list | tuple) else value

    return {key: hide(value) for key, value in info.items()}


def _texts(value: Any) -> Iterator[str]:
    """Every string in nested values."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(inner)


@cache
def build_page() -> tuple[bytes, str]:
    """The document, and the Content-Security-Policy under which a browser may run it."""
    script = "\n".join(read_asset(name) for name in ("markdown.js", "chat.js", "app.js"))
    scripts = {"VENDOR": read_asset("vendor/marked.umd.js"), "SCRIPT": f'"use strict";\n{script}'}
    return inline_page(read_asset("index.html"), read_asset("style.css"), scripts)


def inline_page(document: str, style: str, scripts: Mapping[str, str]) -> tuple[bytes, str]:
    """The document with style and scripts in the places of their names, and its policy."""
    for name, text in {"STYLE": style, **scripts}.items():
        document = document.replace(f"/*{name}*/", text)
    hashes = " ".join(f"'{_hash(script)}'" for script in scripts.values())
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {hashes}",
            f"style-src '{_hash(style)}'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
    return document.encode(), policy


def read_asset(name: str) -> str:
    """A file of the page's folder."""
    return (_FOLDER / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
