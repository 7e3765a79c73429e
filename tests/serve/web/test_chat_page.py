"""The chat of the page: Markdown, reasoning, editing, conversations that survive a reload."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.serve.web.test_page import browser, expect, needs_browser, page, url

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

__all__ = ["browser", "page", "url"]  # fixtures

MARKDOWN = """### Steps

1. **Install** it with `pip`
2. Read [the docs](https://example.com/docs), not [this](javascript:alert(1))

| a | b |
|---|--:|
| 1 | 2 |

```python
print("<b>hi</b>")
```

<script>window.hacked = true</script> <img src=x onerror="window.hacked = true">
"""


def sse(deltas: list[dict[str, Any]], finish: str = "stop") -> str:
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": finish})
    usage = {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14}
    chunks: list[dict[str, Any]] = [{"choices": [choice]} for choice in choices]
    lines = [json.dumps(chunk) for chunk in [*chunks, {"choices": [], "usage": usage}]]
    return "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"])


def answer_with(page: Page, body: str) -> list[dict[str, Any]]:
    """Answer every chat request with `body`; returns the requests as they come."""
    requests: list[dict[str, Any]] = []

    def fulfil(route: Route) -> None:
        requests.append(route.request.post_data_json)
        route.fulfill(content_type="text/event-stream", body=body)

    page.route("**/v1/chat/completions", fulfil)
    return requests


def send(page: Page, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    expect(page.locator("#send")).to_be_visible()


@needs_browser
def test_markdown_becomes_elements_and_html_stays_text(page: Page) -> None:
    answer_with(page, sse([{"content": MARKDOWN[:40]}, {"content": MARKDOWN[40:]}]))
    send(page, "how?")
    answer = page.locator(".answer")
    expect(answer.locator("h4")).to_have_text("Steps")
    expect(answer.locator("ol > li")).to_have_count(2)
    expect(answer.locator("ol strong")).to_have_text("Install")
    expect(answer.locator("td.align-right")).to_have_text("2")
    expect(answer.locator("pre code")).to_have_text('print("<b>hi</b>")')
    expect(answer.locator("a")).to_have_count(1)
    assert answer.locator("a").get_attribute("rel") == "noopener noreferrer"
    expect(answer).to_contain_text("<script>window.hacked = true</script>")
    assert answer.locator("script, img, b").count() == 0
    assert page.evaluate("window.hacked") is None


@needs_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_copy_button_covers_no_code(page: Page, width: int) -> None:
    """A line that is longer than the block scrolls next to the button, not under it."""
    page.set_viewport_size({"width": width, "height": 800})
    answer_with(page, sse([{"content": f"```python\n{'x = 1  # ' + 'long ' * 80}\n```\n"}]))
    send(page, "how?")
    block = page.locator(".answer .code")
    code, button = (block.locator(name).bounding_box() for name in ("pre", "button"))
    assert code is not None and button is not None
    assert code["x"] + code["width"] <= button["x"]
    assert block.locator("pre").evaluate("pre => pre.scrollWidth > pre.clientWidth")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@needs_browser
@pytest.mark.parametrize(
    "deltas",
    [
        [{"reasoning_content": "Let me think."}, {"content": "Four."}],
        [{"content": "<think>Let me"}, {"content": " think.</think>\n\nFour."}],
    ],
)
def test_reasoning_is_folded_and_not_sent_again(page: Page, deltas: list[dict[str, Any]]) -> None:
    requests = answer_with(page, sse(deltas))
    send(page, "2 + 2?")
    expect(page.locator(".answer")).to_have_text("Four.")
    expect(page.locator(".thought")).to_be_hidden()
    page.click(".reasoning summary")
    expect(page.locator(".thought")).to_have_text("Let me think.")
    send(page, "and 3 + 3?")
    contents = [message["content"] for message in requests[-1]["messages"]]
    assert contents == ["2 + 2?", "Four.", "and 3 + 3?"]


@needs_browser
def test_conversations_survive_a_reload_until_they_are_deleted(page: Page) -> None:
    send(page, "first chat")
    page.click("#clear")
    send(page, "second chat")
    page.reload()
    expect(page.locator(".said.user")).to_have_text("second chat")
    page.select_option("#history", label="first chat")
    expect(page.locator(".said.user")).to_have_text("first chat")
    page.click(".knobs summary")
    page.click("#delete")
    page.reload()
    expect(page.locator("#history option")).to_have_count(2)  # the heading, and the second chat


@needs_browser
def test_message_is_edited_and_answer_is_made_again(page: Page) -> None:
    requests = answer_with(page, sse([{"content": "Yes."}]))
    send(page, "one")
    send(page, "two")
    page.locator("[aria-label='Answer again']").click()
    expect(page.locator(".said")).to_have_count(4)
    assert [m["content"] for m in requests[-1]["messages"]] == ["one", "Yes.", "two"]
    page.locator("[aria-label=Edit]").first.click()
    expect(page.locator("#prompt")).to_have_value("one")
    page.press("#prompt", "Escape")
    expect(page.locator("#prompt")).to_have_value("")
    page.locator("[aria-label=Edit]").first.click()
    send(page, "uno")
    expect(page.locator(".said")).to_have_count(2)
    assert [m["content"] for m in requests[-1]["messages"]] == ["uno"]


@needs_browser
def test_answer_that_was_cut_off_says_so(page: Page) -> None:
    requests = answer_with(page, sse([{"content": "And so"}], finish="length"))
    send(page, "tell me")
    expect(page.locator(".notice")).to_contain_text("Cut off after 5 tokens")
    assert "max_tokens" not in requests[-1]
    page.click(".knobs summary")
    page.fill("#max-tokens", "7")
    send(page, "more")
    assert requests[-1]["max_tokens"] == 7


@needs_browser
@pytest.mark.parametrize("width", [320, 390, 1280])
def test_chat_fits_the_width(page: Page, width: int, tmp_path: Path) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    answer_with(page, sse([{"content": MARKDOWN}]))
    send(page, "a message of some length, to see where its bubble ends")
    measure: Callable[[str], Any] = page.evaluate
    assert measure("document.documentElement.scrollWidth") <= width
    for selector in ("#send", "#clear", "#history", ".knobs summary"):
        box = page.locator(selector).bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= width, selector
        assert box["width"] > 150 or selector != "#history", "its title can be read"


@needs_browser
def test_temperature_is_the_recommended_one_until_it_is_changed(page: Page) -> None:
    requests = answer_with(page, sse([{"content": "hi"}]))
    expect(page.locator("#temperature")).to_have_attribute("placeholder", "0.7")
    send(page, "how?")
    page.click(".knobs summary")
    page.fill("#temperature", "0")
    send(page, "and now?")
    assert [request["temperature"] for request in requests] == [0.7, 0]
