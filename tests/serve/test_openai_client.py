"""The stock `openai` client against a real server on a loopback port."""

from __future__ import annotations

import openai
import pytest

from tests.serve.fake_engine import ANSWER, MAX_MODEL_LEN


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


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="fake", prompt="a", temperature=-1)
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.completions.create(model="gpt-9", prompt="a")
    with pytest.raises(openai.InternalServerError):
        client.completions.create(model="fake", prompt="!fail")
    with pytest.raises(openai.APIError, match="lost"):
        list(client.completions.create(model="fake", prompt="!fail", stream=True))
