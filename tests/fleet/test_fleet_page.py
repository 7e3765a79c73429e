"""The gateway's page in a browser: every figure can be seen, on narrow screens too."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import msgspec
import pytest

from ridgeline.fleet.page.document import fleet_page
from ridgeline.fleet.page.view import BackendView, FleetView

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

pytestmark = pytest.mark.slow

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
ADDRESS = "http://fleet.test/"
VIEW = FleetView(
    backends=tuple(
        BackendView(
            url=f"http://llm-server-{i}.llm-server.production.svc:8000",
            state="ready",
            arm="canary" if i else "stable",
            models=("owner/a-model-with-a-long-name",),
            in_flight=1234,
            queued_tokens=56789,
            prefill_tok_s=4321.5,
        )
        for i in range(3)
    ),
    models=("owner/a-model-with-a-long-name",),
    num_parked=2,
    num_suspects=0,
    oldest_s=0.25,
    wanted_replicas=4,
    counts={"requests": 10, "resumed": 1, "migrated": 0, "lost": 0},
    canary="rolled-back",
    canary_reasons=("its answers differ from the stable version's",),
)


def answer(route: Route) -> None:
    document, policy = fleet_page()
    if route.request.url.endswith("/ridgeline/fleet"):
        route.fulfill(body=msgspec.json.encode(VIEW), content_type="application/json")
    else:
        headers = {"content-security-policy": policy, "content-type": "text/html"}
        route.fulfill(body=document, headers=headers)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH")
@pytest.mark.parametrize("width", [1280, 390])
def test_every_figure_is_on_the_screen(width: int) -> None:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page: Page = browser.new_page(viewport={"width": width, "height": 900})
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
        page.route("**/*", answer)
        page.goto(ADDRESS)
        page.wait_for_selector("#backends td")
        ends = page.eval_on_selector_all(
            "#backends td, .tile", "found => found.map(e => e.getBoundingClientRect().right)"
        )
        assert len(ends) == 3 * 7 + 6 and 0 < max(ends) <= width
        texts = page.locator("#backends tbody tr").first.inner_text()
        for figure in ("1,234", "56,789", "4,321.5"):
            assert figure in texts
        assert "rolled-back" in page.locator("#canary").inner_text()
        browser.close()
    assert not problems, problems
