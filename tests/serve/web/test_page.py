"""The page in a browser, over the fake engine: chat, live metrics, batches, configuration."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from ridgeline.config.server import ServerOptions
from ridgeline.serve.app import create_app
from ridgeline.serve.server import listen, url_of
from tests.serve.batch.conftest import with_batches
from tests.serve.batch.helpers import jsonl, request
from tests.serve.fake_engine import ANSWER, FakeEngine

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = playwright.expect
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on the PATH: the page was not tried in a browser"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@contextlib.contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """The URL of an app that is served in a thread."""
    listener = listen(ServerOptions(port=0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", ws="none"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield url_of(listener)
    server.should_exit = True
    thread.join(timeout=10)
    listener.close()
    assert not thread.is_alive()


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with serving(with_batches(FakeEngine(), tmp_path / "batches.sqlite")) as address:
        yield address


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    """The open page; script errors and requests to other addresses fail the test."""
    context = browser.new_context()
    opened = context.new_page()
    problems: list[str] = []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on(
        "console",
        lambda message: problems.append(message.text) if message.type == "error" else None,
    )
    opened.on(
        "request",
        lambda request_: (
            None if request_.url.startswith(("blob:", url)) else problems.append(request_.url)
        ),
    )
    opened.goto(url)
    yield opened
    context.close()
    assert not problems, problems


@needs_browser
def test_chat_streams_and_shows_its_speed(page: Page) -> None:
    page.fill("#prompt", "hello <b>you</b>")
    page.press("#prompt", "Enter")
    expect(page.locator(".said.user")).to_have_text("hello <b>you</b>")
    expect(page.locator(".said.assistant > div").first).to_have_text(ANSWER)
    figures = page.locator(".figures")
    expect(figures).to_contain_text(f"{len(ANSWER)} tokens")
    for word in ("TTFT", "ms", "tok/s", "3 of"):
        expect(figures).to_contain_text(word)
    page.fill("#prompt", "!slow")
    page.press("#prompt", "Enter")
    page.click("#stop")
    expect(page.locator("#send")).to_be_visible()
    page.fill("#prompt", "!fail")
    page.press("#prompt", "Enter")
    expect(page.locator(".error")).to_contain_text("lost")
    page.click("#clear")
    expect(page.locator("#hello")).to_be_visible()


@needs_browser
def test_live_metrics_update_and_are_compared_with_the_slo(page: Page, url: str) -> None:
    page.click("text=Live")
    expect(page.locator("#tile-requests .big")).to_have_text("1")
    expect(page.locator("#tile-ttft .sub")).to_contain_text("no request")
    for _ in range(3):
        httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 5})
    expect(page.locator("#tile-ttft .chip")).to_have_text("met")
    expect(page.locator("#tile-requests .sub")).to_contain_text("3 finished")
    page.fill("#slo-ttft", "0.0001")
    expect(page.locator("#tile-ttft .chip")).to_have_text("missed")
    assert page.locator("#tile-speed .spark").count() == 1


@needs_browser
def test_hover_shows_a_sample_and_slo_classes_are_listed(browser: Browser) -> None:
    options = ServerOptions(slo_classes="chat=ttft:60000 tpot:60000;fast=ttft:0.0001")
    with serving(create_app(FakeEngine(), options)) as url:
        for slo_class in ("chat", "chat", "fast"):
            body = {"prompt": "a", "max_tokens": 5, "slo_class": slo_class}
            httpx.post(f"{url}/v1/completions", json=body).raise_for_status()
        opened = browser.new_page()
        opened.goto(f"{url}/#live")
        rows = opened.locator("#classes tbody tr")
        expect(rows.nth(0)).to_contain_text("ttft 60,000 ms · tpot 60,000 ms2100 %–")
        expect(rows.nth(1)).to_contain_text("ttft 1")
        box = opened.locator("#tile-requests .chart").bounding_box()
        assert box is not None
        opened.mouse.move(box["x"] + box["width"] - 1, box["y"] + box["height"] / 2)
        expect(opened.locator("#tile-requests .tip")).to_have_text("now: 1 running, 0 waiting")
        opened.mouse.move(0, 0)
        expect(opened.locator("#tile-requests .tip")).to_be_hidden()
        opened.close()


@needs_browser
def test_batches_are_created_followed_and_downloaded(page: Page, tmp_path: Path) -> None:
    page.click("text=Batches")
    expect(page.locator("#no-jobs")).to_be_visible()
    file = tmp_path / "in.jsonl"
    file.write_bytes(jsonl(*(request(f"line-{i}") for i in range(12))))
    page.set_input_files("#file", file)
    page.click("#start")
    job = page.locator(".job").first
    expect(job.locator(".chip")).to_have_text("completed", timeout=15_000)
    expect(job).to_contain_text("12 of 12 completed")
    with page.expect_download() as download:
        job.get_by_text("Results").click()
    assert download.value.suggested_filename.endswith("_output.jsonl")
    assert Path(download.value.path()).read_text().count("line-") == 12
    file.write_bytes(b"{\n")
    page.set_input_files("#file", file)
    page.click("#start")
    first = page.locator(".job").first
    expect(first.locator(".chip")).to_have_text("failed", timeout=15_000)
    expect(first.locator(".errors")).to_contain_text("line 1")


@needs_browser
def test_configuration_shows_reasons(page: Page) -> None:
    page.click("text=Configuration")
    row = page.locator("#settings tbody tr").first
    expect(row).to_contain_text("enable_prefix_caching")
    expect(row).to_contain_text("on")
    page.fill("#filter", "nothing like it")
    expect(page.locator("#settings tbody tr")).to_have_count(0)


@needs_browser
@pytest.mark.parametrize("width", [320, 390])
def test_values_of_long_settings_can_be_read_on_a_phone(page: Page, url: str, width: int) -> None:
    given = httpx.get(f"{url}/ridgeline/config").json()
    given["settings"] |= {"disaggregation_transfer_backend": "automatic", "model": "a/b/" * 40}
    given["derivations"] |= {"kv_cache_memory_bytes": "a_long_word_without_blanks_" * 6}
    page.route("**/ridgeline/config", lambda route: route.fulfill(json=given))
    page.set_viewport_size({"width": width, "height": 800})
    page.reload()
    page.click("text=Configuration")
    cells = page.locator("#settings tbody td")
    expect(cells.nth(1)).to_be_visible()
    for index in range(cells.count()):
        box = cells.nth(index).bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= width, index


@needs_browser
def test_page_asks_for_the_key(browser: Browser) -> None:
    with serving(create_app(FakeEngine(), ServerOptions(api_key="secret"))) as url:
        page = browser.new_page()
        page.goto(url)
        page.fill("#key", "secret")
        page.click("text=Continue")
        expect(page.locator("#model")).to_have_text("fake")
        page.click("text=Batches")
        expect(page.locator("#no-batches")).to_contain_text("--batch-store")
        page.close()
