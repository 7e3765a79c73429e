"""The page as a document: one file, a strict policy, no data without the key."""

from __future__ import annotations

from pathlib import Path

import httpx
import msgspec

from ridgeline.config.server import ServerOptions
from ridgeline.serve.app import create_app
from ridgeline.serve.auth.keys import new_key
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


async def test_only_administrators_see_where_files_and_neighbours_are(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    entries = [new_key("admin"), new_key("user")]
    keys.write_text(entries[0][1] + "admin = true\n" + entries[1][1])
    engine = FakeEngine()
    engine.info = msgspec.structs.replace(
        engine.info,
        model="/srv/secret/llama",
        settings={
            "model": "/srv/secret/llama",
            "kv_tier_dir": "/srv/secret",
            "kv_tier_url": "s3://bucket/blocks",
            "lora_modules": ["sql=/srv/secret/adapters/sql"],
            "speculative_config": {"model": "org/draft", "num_speculative_tokens": 3},
            "disaggregation_peers": ["10.1.2.3:*"],
            "block_size": 16,
        },
        derivations={"num_blocks": "24.0 MiB / 6.0 KiB", "dtype": "as in /srv/secret/llama"},
    )
    app = create_app(engine, ServerOptions(api_keys_file=str(keys)))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        whole, shown = [
            (await client.get("/ridgeline/config", headers={"x-api-key": key})).json()
            for key, _ in entries
        ]
        metrics = await client.get("/metrics", headers={"x-api-key": entries[1][0]})
    assert whole["settings"] == engine.info.settings and whole["model"] == "/srv/secret/llama"
    assert shown["model"] == shown["served_model_name"] == "llama"
    assert shown["settings"] == {
        "model": "llama",
        "kv_tier_dir": "secret",
        "kv_tier_url": "(hidden)",
        "lora_modules": ["sql"],
        "speculative_config": {"model": "draft", "num_speculative_tokens": 3},
        "disaggregation_peers": ["(hidden)"],
        "block_size": 16,
    }
    assert shown["derivations"] == {"num_blocks": "24.0 MiB / 6.0 KiB", "dtype": "as in llama"}
    assert metrics.status_code == 200 and "/srv" not in metrics.text
