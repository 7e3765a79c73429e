"""A conversation: what it remembers, what it forgets, and its record."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ridgeline import Engine, Sampling
from ridgeline.errors import BadInput
from ridgeline.modelspec.checkpoints.locate import model_path
from ridgeline.workflows.text.conversation import Conversation
from ridgeline.workflows.text.transcript import Turn

GREEDY = Sampling(temperature=0.0, max_tokens=12, ignore_eos=True)
ENDLESS = Sampling(temperature=0.0, max_tokens=1500, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.open("demo", kv_cache_memory_bytes=32 << 20, num_threads=1) as opened:
        yield opened


def test_the_model_sees_all_earlier_turns(engine: Engine) -> None:
    conversation = Conversation(engine, system="Be brief.", sampling=GREEDY)
    first = conversation.send("write a loop")
    second = conversation.send("and a test")
    roles = [turn.role for turn in conversation.turns]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    assert conversation.turns[2] == Turn("assistant", first.text)
    messages = [{"role": t.role, "content": t.content} for t in conversation.turns[:-1]]
    prompt = engine.tokenizer.apply_chat_template(messages)
    [expected] = engine.generate([prompt], GREEDY)
    assert second.text == expected.text
    assert second.usage.prompt_tokens == len(prompt)
    assert second.usage.cached_tokens > 0


def test_streamed_reply_is_the_one_that_is_sent(engine: Engine) -> None:
    sent = Conversation(engine, sampling=GREEDY).send("hello")
    conversation = Conversation(engine, sampling=GREEDY)
    with conversation.stream("hello") as stream:
        assert "".join(stream) == sent.text
    assert conversation.turns[-1].content == sent.text


async def test_reply_can_be_read_asynchronously(engine: Engine) -> None:
    conversation = Conversation(engine, sampling=GREEDY)
    async with conversation.stream("hello") as stream:
        text = "".join([piece async for piece in stream])
    assert conversation.turns == (Turn("user", "hello"), Turn("assistant", text))


def test_reply_that_is_cut_off_is_remembered_as_far_as_it_came(engine: Engine) -> None:
    conversation = Conversation(engine, sampling=ENDLESS)
    with conversation.stream("hello") as stream:
        pieces = [next(stream), next(stream)]
    assert conversation.turns[-1] == Turn("assistant", "".join(pieces))
    assert stream.reply.finish_reason == "abort"


def test_one_reply_at_a_time(engine: Engine) -> None:
    conversation = Conversation(engine, sampling=ENDLESS)
    with conversation.stream("hello") as stream:
        next(stream)
        with pytest.raises(BadInput, match="still being streamed"):
            conversation.send("again")
    conversation.sampling = GREEDY
    assert conversation.send("again").finish_reason == "length"


def test_stream_that_was_superseded_is_not_remembered(engine: Engine) -> None:
    conversation = Conversation(engine, sampling=GREEDY)
    unread = conversation.stream("first")
    conversation.send("second")
    assert list(unread)
    assert [turn.content for turn in conversation.turns if turn.role == "user"] == ["second"]


def test_failed_message_is_forgotten(engine: Engine) -> None:
    conversation = Conversation(engine, sampling=GREEDY)
    conversation.send("hello")
    before = conversation.turns
    with pytest.raises(BadInput):
        conversation.send("word " * 5000)
    with pytest.raises(BadInput, match="message is empty"):
        conversation.send("")
    assert conversation.turns == before and conversation.send("again").text


def test_reset_keeps_the_system_prompt(engine: Engine) -> None:
    conversation = Conversation(engine, system="Be brief.", sampling=GREEDY)
    conversation.send("hello")
    conversation.reset()
    assert conversation.turns == (Turn("system", "Be brief."),)
    assert conversation.transcript.replies == ()


def test_transcript_saves_and_escapes(engine: Engine, tmp_path: Path) -> None:
    conversation = Conversation(engine, system="<script>alert(1)</script>", sampling=GREEDY)
    reply = conversation.send("hello")
    saved = json.loads(conversation.save(tmp_path / "chat.json").read_text())
    assert saved == json.loads(json.dumps(conversation.to_dict()))
    assert saved["turns"][-1] == {"role": "assistant", "content": reply.text}
    assert saved["replies"][0]["usage"]["completion_tokens"] == 12
    page = conversation.save(tmp_path / "chat.html").read_text()
    assert "<script>" not in page and "&lt;script&gt;" in page
    assert "<script>" not in conversation._repr_html_()


def test_only_its_own_engine_is_closed(engine: Engine) -> None:
    with Conversation(engine, sampling=GREEDY):
        pass
    assert engine.is_healthy()
    own = Engine.open("demo", kv_cache_memory_bytes=32 << 20)
    with Conversation(own, close_engine=True):
        assert own.is_healthy()
    assert not own.is_healthy()


def test_model_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(model_path("demo"), model)
    config = json.loads((model / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    with Engine.open(str(model), kv_cache_memory_bytes=32 << 20) as plain:
        conversation = Conversation(plain)
        with pytest.raises(BadInput, match="no chat template"):
            conversation.send("hello")
        assert conversation.turns == ()
