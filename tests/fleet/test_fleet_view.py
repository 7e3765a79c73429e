"""What a gateway shows of its fleet: the record, the web page, `fleet top`."""

from __future__ import annotations

import asyncio
import io
import json
import re
from typing import Any

import httpx
import msgspec
import pytest
from rich.console import Console

from ridgeline.cli.render.measure.fleet import fleet_screen
from ridgeline.fleet.page.document import fleet_page
from ridgeline.fleet.page.view import BackendView, FleetView
from tests.fleet.scripted import ScriptedBackend, gateway_over


async def answer(
    backend: ScriptedBackend, body: dict[str, Any], writer: asyncio.StreamWriter
) -> None:
    writer.write(
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
    )


async def test_view_has_every_backend_and_what_was_counted() -> None:
    one, other = ScriptedBackend(answer), ScriptedBackend(answer)
    async with gateway_over(one, other) as http:
        for _ in range(3):
            await http.post("/v1/completions", json={"model": "m", "prompt": "x"})
        view = msgspec.json.decode((await http.get("/ridgeline/fleet")).content, type=FleetView)
    assert [backend.url for backend in view.backends] == [one.url, other.url]
    assert view.models == ("m",) and view.counts["requests"] == 3 and view.canary == ""
    assert sum(backend.in_flight for backend in view.backends) == 0


async def test_view_needs_the_key_and_the_page_none() -> None:
    async with gateway_over(ScriptedBackend(answer), api_key="k" * 20) as http:
        assert (await http.get("/ridgeline/fleet")).status_code == 401
        key = {"authorization": "Bearer " + "k" * 20}
        assert (await http.get("/ridgeline/fleet", headers=key)).status_code == 200
        page: httpx.Response = await http.get("/")
    assert page.status_code == 200 and "text/html" in page.headers["content-type"]
    assert "default-src 'none'" in page.headers["content-security-policy"]


def test_page_runs_only_its_own_script_and_reads_only_its_gateway() -> None:
    document, policy = fleet_page()
    assert b"/*SCRIPT*/" not in document and b"/*STYLE*/" not in document
    assert len(re.findall(rb"<script>", document)) == 1
    assert policy.count("sha256-") == 2 and "connect-src 'self'" in policy
    assert b"innerHTML" not in document and b"http://" not in document.replace(
        b"http://www.w3.org", b""
    )


def view(**changes: Any) -> FleetView:
    backend = BackendView(
        url="http://a:1",
        state="ready",
        arm="stable",
        models=("m",),
        in_flight=3,
        queued_tokens=12345,
        prefill_tok_s=0.0,
    )
    base = FleetView(
        backends=(backend,),
        models=("m",),
        num_parked=2,
        num_suspects=0,
        oldest_s=0.25,
        wanted_replicas=4,
        counts={"requests": 10, "resumed": 1, "lost": 0},
    )
    return msgspec.structs.replace(base, **changes)


@pytest.mark.parametrize(
    ("shown", "texts"),
    [
        (view(), ["1 of 1 ready, 4 wanted", "2 parked", "12,345", "10 requests", "http://a:1"]),
        (view(canary="rolled-back"), ["canary rolled-back"]),
        (None, ["the gateway at http://g does not answer"]),
    ],
)
def test_top_shows_load_and_totals(shown: FleetView | None, texts: list[str]) -> None:
    screen = io.StringIO()
    Console(file=screen, width=120).print(fleet_screen(shown, "http://g"))
    text = screen.getvalue()
    for part in texts:
        assert part in text, (part, text)


def test_view_is_json() -> None:
    assert json.loads(msgspec.json.encode(view()))["backends"][0]["in_flight"] == 3
