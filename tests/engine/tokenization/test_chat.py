"""Tokenizer and chat template of a model directory, well-formed and not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ridgeline.engine.tokenization import NoTokenizer, load_tokenizer
from ridgeline.errors import BadInput, BadModel
from ridgeline.modelspec.checkpoints.locate import model_path

TALK = [{"role": "user", "content": "say <b>&"}, {"role": "assistant", "content": "ok"}]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The demo model without its weights, to be spoiled."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_path("demo") / name, tmp_path / name)
    return tmp_path


def with_template(directory: Path, template: object) -> Path:
    file = directory / "tokenizer_config.json"
    config = json.loads(file.read_text()) | {"chat_template": template}
    file.write_text(json.dumps(config))
    return directory


def rendered(directory: Path, talk: object = TALK) -> str:
    tokenizer = load_tokenizer(str(directory))
    return tokenizer.decode(tokenizer.apply_chat_template(talk), skip_special_tokens=False)


def test_the_demo_template_agrees_with_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(model_path("demo"))
    expected = theirs.apply_chat_template(TALK, add_generation_prompt=True, tokenize=True)
    found = load_tokenizer("demo").apply_chat_template(TALK)
    assert found == list(getattr(expected, "input_ids", expected))
    assert load_tokenizer("demo").encode("x = 1\n") == theirs.encode("x = 1\n")


def test_templates_may_use_the_helpers_of_transformers(directory: Path) -> None:
    template = (
        "{{ bos_token }}{% generation %}{% for m in messages %}"
        "{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}"
        "{% endgeneration %}"
        "{{ strftime_now('%Y') | length }}"
    )
    text = rendered(with_template(directory, [{"name": "default", "template": template}]))
    assert text == '<|endoftext|>{"role": "user", "content": "say <b>&"}4'


@pytest.mark.parametrize("template", [7, [1], [{"name": "default"}], {"default": "x"}])
def test_invalid_template_is_reported(directory: Path, template: object) -> None:
    with pytest.raises(BadModel, match="chat_template"):
        load_tokenizer(str(with_template(directory, template)))


def test_template_that_is_not_text_is_reported(directory: Path) -> None:
    (directory / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(BadModel, match="UTF-8"):
        load_tokenizer(str(directory))


def test_template_in_a_separate_file_takes_precedence(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("mine")
    assert rendered(directory) == "mine"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.getcwd() }}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content.nothing.more }}",
        "{{ 1 / 0 }}",
    ],
)
def test_sandbox_stops_templates_that_escape_or_raise(directory: Path, template: str) -> None:
    with pytest.raises(BadInput, match="chat template"):
        rendered(with_template(directory, template))


def test_broken_template_does_not_affect_text_completion(directory: Path) -> None:
    tokenizer = load_tokenizer(str(with_template(directory, "{% if %}")))
    assert tokenizer.encode("x")
    with pytest.raises(BadModel, match="not valid Jinja"):
        tokenizer.apply_chat_template(TALK)


def test_missing_template_is_reported(directory: Path) -> None:
    with pytest.raises(BadInput, match="no chat template"):
        rendered(with_template(directory, None))


def test_a_dummy_model_takes_token_ids_only() -> None:
    tokenizer = load_tokenizer("dummy:anything")
    assert isinstance(tokenizer, NoTokenizer)
    with pytest.raises(BadInput, match="list of token ids"):
        tokenizer.encode("hello")
    with pytest.raises(BadInput, match="no tokenizer"):
        tokenizer.apply_chat_template(TALK)
    assert tokenizer.decode([1, 2]) == ""
    assert tokenizer.detokenizer([]).push(3) == ""


def test_a_directory_without_tokenizer_takes_token_ids_only(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()
    assert isinstance(load_tokenizer(str(directory)), NoTokenizer)


@pytest.mark.parametrize("content", ["{}", "not json", '{"version": "1.0"}'])
def test_malformed_tokenizer_is_reported(directory: Path, content: str) -> None:
    (directory / "tokenizer.json").write_text(content)
    with pytest.raises(BadModel):
        load_tokenizer(str(directory))


def test_lone_surrogates_are_bad_input() -> None:
    with pytest.raises(BadInput, match="surrogates"):
        load_tokenizer("demo").encode("a\ud800b")


def test_truncation_set_in_tokenizer_json_is_ignored(directory: Path) -> None:
    file = directory / "tokenizer.json"
    config = json.loads(file.read_text())
    config["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    file.write_text(json.dumps(config))
    assert len(load_tokenizer(str(directory)).encode("one two three four five")) > 4


def test_template_arguments_cannot_replace_reserved_names(directory: Path) -> None:
    tokenizer = load_tokenizer(str(with_template(directory, "{{ mood }}{{ messages | length }}")))
    text = tokenizer.decode(tokenizer.apply_chat_template(TALK, variables={"mood": "calm"}))
    assert text == "calm2"
    for name in ("messages", "tools", "raise_exception", "range", "a b", "x" * 65):
        with pytest.raises(BadInput, match="chat_template_kwargs"):
            tokenizer.apply_chat_template(TALK, variables={name: 1})


def test_the_last_message_can_be_continued(directory: Path) -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
    tokenizer = load_tokenizer(str(with_template(directory, template)))
    tokens = tokenizer.apply_chat_template(TALK, continue_final_message=True)
    assert tokenizer.decode(tokens, skip_special_tokens=False) == "[user]say <b>&[end][assistant]ok"


def test_tools_reach_the_template(directory: Path) -> None:
    template = "{% for t in tools %}{{ t.function.name }};{% endfor %}"
    tokenizer = load_tokenizer(str(with_template(directory, template)))
    tokens = tokenizer.apply_chat_template(TALK, tools=[{"function": {"name": "look_up"}}])
    assert tokenizer.decode(tokens) == "look_up;"


@pytest.mark.parametrize(
    "body",
    [
        "{{ '<' + m.role + '>' + m['content'] + '\n' }}",
        "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
        "{{ '<' + m.role + '>' + m.content + '\n' }}",
        "<{{ m.role }}>{{ m.content | trim }}\n",
    ],
)
def test_null_content_next_to_calls_is_empty_where_the_template_ignores_calls(
    directory: Path, body: str
) -> None:
    template = "{% for m in messages %}" + body + "{% endfor %}"
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
    text = rendered(with_template(directory, template), [*talk, {"role": "user", "content": "b"}])
    assert text == "<user>a\n<assistant>\n<user>b\n"
