"""The stock `openai` client against a real server on a loopback port."""

from __future__ import annotations

import asyncio

import httpx
import openai
import pytest

from ridgeline.config.server import ServerOptions
from ridgeline.serve.app import create_app
from tests.serve.fake_engine import ANSWER, MAX_MODEL_LEN, FakeEngine

pytestmark = pytest.mark.slow


@pytest.fixture
def client(served: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served}/v1", api_key="none", max_retries=0)


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "fake" and model.model_extra == {
        "root": "fake", "parent": None, "max_model_len": MAX_MODEL_LEN,
    }  # fmt: skip
    assert client.models.retrieve("fake").id == "fake"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt=["a", "b"], max_tokens=3, logprobs=1)
    assert [choice.text for choice in answer.choices] == [ANSWER[:3]] * 2
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[1].logprobs is not None
    assert answer.choices[1].logprobs.tokens == list(ANSWER[:3])
    assert answer.usage is not None and answer.usage.total_tokens == 8


def test_streamed_completion(client: openai.OpenAI) -> None:
    stream = client.completions.create(model="fake", prompt="a", max_tokens=5, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == ANSWER[:5]


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake",
        messages=[{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
        logprobs=True,
        top_logprobs=1,
        n=2,
    )
    assert [choice.message.content for choice in answer.choices] == [ANSWER] * 2
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


def test_streamed_chat(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "u"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == ANSWER
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == len(ANSWER)


def test_errors_raise_the_clients_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="fake", prompt="a", temperature=-1)
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.completions.create(model="gpt-9", prompt="a")
    with pytest.raises(openai.InternalServerError):
        client.completions.create(model="fake", prompt="!fail")
    with pytest.raises(openai.APIError, match="lost"):
        list(client.completions.create(model="fake", prompt="!fail", stream=True))


def test_responses(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="fake", input="hi", max_output_tokens=1000)
    assert answer.output_text == ANSWER and answer.status == "completed"
    assert answer.usage is not None and answer.usage.input_tokens_details.cached_tokens == 3
    texts, last = [], None
    for event in client.responses.create(model="fake", input="hi", stream=True):
        last = event
        if event.type == "response.output_text.delta":
            texts.append(event.delta)
    assert "".join(texts) == ANSWER
    assert last is not None and last.type == "response.completed"
    with client.responses.stream(model="fake", input="hi") as stream:
        assert stream.get_final_response().output_text == ANSWER


def test_embeddings(client: openai.OpenAI) -> None:
    answer = client.embeddings.create(model="fake", input=["ab", "c"])  # base64 on the wire
    assert [len(entry.embedding) for entry in answer.data] == [2, 2]


def test_rate_limit_raises_the_clients_exception() -> None:
    app = create_app(FakeEngine(), ServerOptions(requests_per_minute=1))
    transport = httpx.ASGITransport(app=app)

    async def complete_twice() -> None:
        async with httpx.AsyncClient(transport=transport) as http:
            client = openai.AsyncOpenAI(
                base_url="http://localhost/v1", api_key="none", max_retries=0, http_client=http
            )
            await client.completions.create(model="fake", prompt="x")
            with pytest.raises(openai.RateLimitError):
                await client.completions.create(model="fake", prompt="x")

    asyncio.run(complete_twice())
