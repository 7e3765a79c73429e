"""The page as a document: one file, a strict policy, no data without the key."""

from __future__ import annotations

from pathlib import Path

import httpx

from ridgeline.config.server import ServerOptions
from ridgeline.serve.app import create_app
from ridgeline.serve.web import page
from ridgeline.serve.web.page import build_page
from tests.serve.fake_engine import FakeEngine


async def test_page_is_one_document_with_a_strict_policy() -> None:
    app = create_app(FakeEngine(), ServerOptions(api_key="secret"))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        reply = await client.get("/")
        policy = reply.headers["content-security-policy"]
        assert reply.status_code == 200 and "default-src 'none'" in policy
        assert "unsafe" not in policy and policy.count("sha256-") == 3
        assert (await client.get("/ridgeline/config")).status_code == 401
    text = build_page()[0].decode()
    assert not any(f"/*{part}*/" in text for part in ("STYLE", "VENDOR", "SCRIPT"))
    vendor = Path(page.__file__).with_name("vendor") / "marked.umd.js"  # its comments name its site
    outside = text.replace("http://www.w3.org/2000/svg", "").replace(vendor.read_text("utf-8"), "")
    assert "http://" not in outside and "https://" not in outside, "the page works offline"
    assert "innerHTML" not in text, "text is never inserted as markup"
