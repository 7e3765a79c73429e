"""The gateway's web page: one HTML document without data, which reads `/ridgeline/fleet`."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from ridgeline.serve.web.page import inline_page, read_asset

_FOLDER = Path(__file__).parent


@cache
def fleet_page() -> tuple[bytes, str]:
    """The document, and the Content-Security-Policy under which a browser may run it."""
    script = (_FOLDER / "fleet.js").read_text(encoding="utf-8")
    document = (_FOLDER / "fleet.html").read_text(encoding="utf-8")
    return inline_page(document, read_asset("style.css"), {"SCRIPT": script})
