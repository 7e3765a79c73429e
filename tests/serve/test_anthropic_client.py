"""The stock `anthropic` client drives the server."""

from __future__ import annotations

import json
from collections.abc import Iterator

import anthropic
import pytest

from ridgeline.config.server import ServerOptions
from ridgeline.serve.app import create_app
from tests.serve import fake_engine
from tests.serve.conftest import running
from tests.serve.fake_engine import ANSWER, FakeEngine

pytestmark = pytest.mark.slow

CALL = '<tool_call>{"name": "look", "arguments": {"place": "Paris"}}</tool_call>'
TOOL: dict[str, object] = {"name": "look", "input_schema": {"type": "object"}}
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def client() -> Iterator[anthropic.Anthropic]:
    options = ServerOptions(
        api_key="sesame", enable_auto_tool_choice=True, tool_call_parser="hermes"
    )
    with (
        running(create_app(FakeEngine(), options)) as url,
        anthropic.Anthropic(base_url=url, api_key="sesame", max_retries=0) as client,
    ):
        yield client


def test_create(client: anthropic.Anthropic) -> None:
    message = client.messages.create(model="fake", max_tokens=100, messages=MESSAGES)
    assert message.content[0].type == "text" and message.content[0].text == ANSWER
    assert message.stop_reason == "end_turn"
    assert message.usage.cache_read_input_tokens == 3
    cut = client.messages.create(model="fake", max_tokens=3, messages=MESSAGES)
    assert cut.stop_reason == "max_tokens" and cut.usage.output_tokens == 3


def test_models(client: anthropic.Anthropic) -> None:
    (model,) = client.models.list()
    assert (model.type, model.id, model.display_name) == ("model", "fake", "fake")
    assert client.models.retrieve("fake").created_at == model.created_at


def test_stream(client: anthropic.Anthropic) -> None:
    with client.messages.stream(model="fake", max_tokens=100, messages=MESSAGES) as stream:
        assert "".join(stream.text_stream) == ANSWER
        assert stream.get_final_message().usage.output_tokens == len(ANSWER)


def test_tools(client: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_engine, "ANSWER", f"Sure.\n{CALL}")
    with client.messages.stream(
        model="fake", max_tokens=200, messages=MESSAGES, tools=[TOOL]
    ) as stream:
        message = stream.get_final_message()
    assert [block.type for block in message.content] == ["text", "tool_use"]
    assert message.content[1].input == {"place": "Paris"} and message.stop_reason == "tool_use"
    answered = client.messages.create(
        model="fake",
        max_tokens=9,
        tools=[TOOL],
        messages=[
            *MESSAGES,
            {"role": "assistant", "content": [json.loads(b.to_json()) for b in message.content]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": message.content[1].id, "content": "sun"}
                ],
            },
        ],
    )
    assert answered.usage.output_tokens == 9


def test_count_tokens(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model="fake", messages=MESSAGES, system="S")
    assert counted.input_tokens == len("<system>S<user>hi<assistant>")


def test_errors_raise_the_clients_exceptions(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="gpt-9", max_tokens=1, messages=MESSAGES)
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(
            model="fake", max_tokens=1, messages=MESSAGES, extra_body={"temperature": -1}
        )
    unknown = client.with_options(api_key="wrong")
    with pytest.raises(anthropic.AuthenticationError):
        unknown.messages.create(model="fake", max_tokens=1, messages=MESSAGES)
