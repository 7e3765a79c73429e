"""Chunks that are only text are written around their text: the bytes are those of whole chunks."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.records import Finished, Sampling, Token, Usage
from ridgeline.serve.config import Caps, ServerOptions
from ridgeline.serve.generation.collect import Tally
from ridgeline.serve.generation.respond import OpenAiVoice, UsageWanted, Wording
from ridgeline.serve.generation.stream import Job, Update
from ridgeline.serve.openai.chat_stream import ChatVoice
from ridgeline.serve.openai.completion_stream import CompletionVoice
from ridgeline.serve.openai.sampling_params import Prompt
from ridgeline.serve.openai.schemas import ChatRequest, CompletionRequest, read
from ridgeline.serve.output_parsers.select import dialect_of
from tests.serve.fake_engine import CharTokenizer

JOB = Job(
    id="cmpl-1", prompts=[Prompt(text="a", tokens=(97,))], sampling=Sampling(n=2, max_tokens=9)
)
TALLY = cast("Tally", None)  # usage is not asked for
USAGE = Usage(prompt_tokens=1, cached_tokens=0, completion_tokens=1)


def completion(**asked: Any) -> Wording:
    request = read(CompletionRequest, msgspec.json.encode({"prompt": "a", **asked}))
    return CompletionVoice(request, JOB, CharTokenizer())


def chat(reasoning: str | None = None, **asked: Any) -> Wording:
    body = {"messages": [{"role": "user", "content": "a"}], **asked}
    request = read(ChatRequest, msgspec.json.encode(body))
    dialect = dialect_of(request, ServerOptions(reasoning_parser=reasoning), Caps())
    return ChatVoice(request, JOB, CharTokenizer(), dialect)


def update(choice: int, text: str, *, ends: bool = False) -> Update:
    token = Token(request_id="cmpl-1", index=choice, token=97, text=text, at_s=0.0)
    end = Finished(request_id="cmpl-1", index=choice, reason="stop", at_s=0.0, usage=USAGE)
    return Update(choice=choice, token=token, finished=end if ends else None)


class Slow:
    """A wording whose short way is closed."""

    def __init__(self, inner: Wording) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def only_text(self, _update: Update) -> str | None:
        return None


def voice(wording: Wording, *, always: bool = False) -> OpenAiVoice:
    made = OpenAiVoice(wording, JOB, 'a "model"\\', UsageWanted(always=always))
    made._envelope = msgspec.structs.replace(made._envelope, created=7)
    return made


@pytest.mark.parametrize("make", [completion, chat])
@given(texts=st.lists(st.text(max_size=6) | st.sampled_from(['"', "\\", "\0", "\n\n", "</s>"])))
def test_a_stream_has_the_same_bytes_either_way(make: Any, texts: list[str]) -> None:
    short, whole = voice(make()), voice(cast("Wording", Slow(make())))
    last = len(texts) - 1
    for place, text in enumerate(texts):
        for choice in (0, 1):
            told = update(choice, text, ends=place == last)
            brief = None if told.finished else short.brief(choice, text)
            news = short.news(told, TALLY) if brief is None else [brief]
            assert news == whole.news(told, TALLY)
            assert (brief is None) == (place < 2 or place == last)


@pytest.mark.parametrize(
    "wording",
    [
        completion(logprobs=1),
        completion(return_token_ids=True),
        chat(logprobs=True),
        chat(return_token_ids=True),
        chat("think"),
    ],
)
def test_whoever_wants_more_than_text_gets_whole_chunks(wording: Wording) -> None:
    plain, made = update(0, "b"), voice(wording)
    for _ in range(3):
        made.news(plain, TALLY)
    assert wording.only_text(plain) is None and made.brief(0, "b") is None


def test_usage_in_every_chunk_is_told_in_every_chunk() -> None:
    class Counted:
        def usage(self) -> dict[str, int]:
            return {"total_tokens": 1}

    made = voice(completion(), always=True)
    for _ in range(3):
        assert b"total_tokens" in made.news(update(0, "b"), cast("Tally", Counted()))[0]
    assert made.brief(0, "b") is None


def test_opening_and_ending_are_whole_chunks() -> None:
    for wording in (completion(), chat()):
        assert wording.only_text(update(0, "b")) is None
        wording.chunks(update(0, "b"))
        assert wording.only_text(update(0, "b")) == "b"
        assert wording.only_text(update(1, "b")) is None
        assert wording.only_text(update(0, "b", ends=True)) is None
