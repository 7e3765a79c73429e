"""`GET /` and what the page reads beside the public API: `GET /ridgeline/config`.

The page is one HTML document: style and script are put into it when the server starts, and a
Content-Security-Policy that names their hashes forbids every other script, style or address. It
holds no data; all of that comes over routes that want the key where there is one.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

import ridgeline
from ridgeline.records import Slo
from ridgeline.serve.engine_protocol import ServedEngine
from ridgeline.serve.generation.event_stream import encode

_HERE = Path(__file__).parent


def add_page(
    app: Starlette,
    engine: ServedEngine,
    name: str,
    slo: Slo | None = None,
    classes: Mapping[str, Slo] | None = None,
) -> None:
    """Give `app` the page. `slo`: what its live figures are judged by (None: the reader says);
    `classes`: what each class of requests is promised."""
    page, policy = build()
    headers = {
        "content-security-policy": policy,
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }

    async def index(_request: Request) -> Response:
        return Response(page, media_type="text/html; charset=utf-8", headers=headers)

    async def config(request: Request) -> Response:
        told = {
            "version": ridgeline.__version__,
            "served_model_name": name,
            "slo": None if slo is None else msgspec.to_builtins(slo),
            "slo_classes": msgspec.to_builtins(dict(classes or {})),
            "batches": any(getattr(r, "path", "") == "/v1/batches" for r in request.app.routes),
            **msgspec.to_builtins(engine.info),
        }
        return Response(encode(told), media_type="application/json")

    app.add_route("/", index, methods=["GET"])
    app.add_route("/ridgeline/config", config, methods=["GET"])


def build() -> tuple[bytes, str]:
    """The document, and the policy under which a browser may run it."""
    style, script = (_read(name) for name in ("style.css", "app.js"))
    page = _read("index.html").replace("/*STYLE*/", style).replace("/*SCRIPT*/", script)
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src '{_hash(script)}'",
            f"style-src '{_hash(style)}'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
    return page.encode(), policy


def _read(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
