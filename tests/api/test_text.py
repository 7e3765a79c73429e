"""`generate`, `stream` and `chat` with a model name and with an open engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import ridgeline
from ridgeline import Engine, Sampling
from ridgeline.errors import BadInput, BadModel

PROMPT = "def add(a, b):\n    return"
SMALL = 32 << 20


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.open("demo", kv_cache_memory_bytes=SMALL, num_threads=1) as opened:
        yield opened


def test_prompts_of_every_kind_are_answered(engine: Engine) -> None:
    greedy = Sampling(temperature=0.0, max_tokens=6)
    one = ridgeline.generate(engine, PROMPT, max_tokens=6)
    assert one.text == str(one) == engine.generate([PROMPT], greedy)[0].text
    two = ridgeline.generate(engine, [PROMPT, "import os"], max_tokens=6)
    assert two.texts[0] == one.text and len(two.texts) == 2
    messages = [{"role": "user", "content": "hi"}]
    answer = ridgeline.generate(engine, messages, max_tokens=6)
    prompt = engine.tokenizer.apply_chat_template(messages)
    assert answer.completions[0].prompt == tuple(prompt)


def test_model_name_opens_and_closes_an_engine() -> None:
    answer = ridgeline.generate("demo", PROMPT, max_tokens=4, kv_cache_memory_bytes=SMALL)
    assert answer.model == "demo" and answer.completions[0].usage.completion_tokens == 4


def test_sampling_keywords(engine: Engine) -> None:
    free = ridgeline.generate(engine, PROMPT, max_tokens=24)
    stopped = ridgeline.generate(engine, PROMPT, max_tokens=24, stop="\n")
    assert stopped.text == free.text.partition("\n")[0]
    assert stopped.completions[0].answers[0].stop_reason == "\n"
    chosen = Sampling(temperature=0.0, max_tokens=3, logprobs=1)
    assert ridgeline.generate(engine, PROMPT, sampling=chosen).completions[0].answers[0].logprobs
    with pytest.raises(BadInput, match="sampling replaces max_tokens"):
        ridgeline.generate(engine, PROMPT, sampling=chosen, max_tokens=4)


def test_generation_round_trips_and_escapes(engine: Engine, tmp_path: Path) -> None:
    from msgspec.structs import replace

    answer = ridgeline.generate(engine, PROMPT, max_tokens=4)
    saved = json.loads(answer.save(tmp_path / "answer.json").read_text())
    assert saved == json.loads(json.dumps(answer.to_dict()))
    assert saved["completions"][0]["answers"][0]["text"] == answer.text
    [completion] = answer.completions
    hostile = replace(completion.answers[0], text="<img onerror=x>")
    bad = replace(answer, completions=(replace(completion, answers=(hostile,)),))
    for page in (bad._repr_html_(), bad.save(tmp_path / "answer.html").read_text()):
        assert "<img" not in page and "&lt;img" in page
    with pytest.raises(BadInput, match="saved as JSON or HTML"):
        answer.save(tmp_path / "answer.txt")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": []}, "a prompt is a text"),
        ({"prompt": ["a", {"role": "user"}]}, "a list of dict and str"),
        ({"prompt": 5}, "a prompt is a text"),
        ({"temperature": "hot"}, "wrong sampling parameter: Expected `float`, got `str`"),
        ({"temperature": -1.0}, "temperature is out of range"),
        ({"max_tokens": 0}, "max_tokens is out of range"),
        ({"max_num_seq": 4}, "unknown option; got 'max_num_seq'"),
        ({"max_num_seqs": 0}, "max_num_seqs is out of range; got 0; limit: >= 1"),
        ({"batching": "magic"}, "batching has no such choice; got 'magic'"),
        ({"enable_prefix_caching": None}, "enable_prefix_caching must not be None"),
    ],
)
def test_wrong_values_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(BadInput) as caught:
        ridgeline.generate("demo", **{"prompt": PROMPT, **arguments})  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_unknown_models_and_settings_of_an_open_engine_are_refused(engine: Engine) -> None:
    with pytest.raises(BadModel):
        ridgeline.generate("no/such/model", PROMPT)
    with pytest.raises(BadInput, match="open engine; got 'seed'"):
        ridgeline.stream(engine, PROMPT, seed=1)
    with pytest.raises(BadInput, match="a model is a name or an open Engine; got 3"):
        ridgeline.chat(3)  # type: ignore[arg-type]


def test_stream_opens_the_model_when_it_is_read() -> None:
    with ridgeline.stream("demo", PROMPT, max_tokens=4, kv_cache_memory_bytes=SMALL) as pieces:
        assert "".join(pieces) == pieces.reply.text
    assert pieces.reply.usage.completion_tokens == 4
    missing = ridgeline.stream("no/such/model", PROMPT)
    with pytest.raises(BadModel):
        next(missing)


def test_chat_with_an_open_engine_leaves_it_open(engine: Engine) -> None:
    with ridgeline.chat(engine, system="Be brief.", max_tokens=6, temperature=0.0) as conversation:
        conversation.send("hello")
    assert [turn.role for turn in conversation.turns] == ["system", "user", "assistant"]
    assert engine.is_healthy()


def test_nothing_is_printed(engine: Engine, capfd: pytest.CaptureFixture[str]) -> None:
    ridgeline.generate("demo", PROMPT, max_tokens=2, kv_cache_memory_bytes=SMALL)
    list(ridgeline.stream(engine, PROMPT, max_tokens=2))
    assert capfd.readouterr() == ("", "")
