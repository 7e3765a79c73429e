"""Chat templates render the text that transformers renders, for the idioms of popular families."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ridgeline.engine.tokenization.chat import Chat, JinjaTemplate
from ridgeline.engine.tokenization.template_files import load_chat_template
from ridgeline.errors import BadInput
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.checkpoints.locate import model_path
from tests.engine.tokenization.template_idioms import PART_IDIOMS, TEXT_IDIOMS, TOOL_IDIOMS

pytestmark = pytest.mark.slow

IDIOMS = {**TEXT_IDIOMS, **PART_IDIOMS, **TOOL_IDIOMS}
NAMES = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "sep_token": "<sep>",
    "cls_token": "<cls>",
    "image_token": "<image>",
}
USER: dict[str, Any] = {"role": "user", "content": "Ünïcode <b>&amp; \"quotes\" 'x' 日本 \n"}
ASSISTANT: dict[str, Any] = {"role": "assistant", "content": " Yes.\n"}
SYSTEM: dict[str, Any] = {"role": "system", "content": " Be brief. "}
THINKING = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes.", "reasoning": "well"}
TALKS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "system": [SYSTEM, USER],
    "turns": [USER, ASSISTANT, USER, ASSISTANT],
    "system-turns": [SYSTEM, USER, ASSISTANT, USER],
    "thinking": [USER, THINKING, USER],
    "same-role": [USER, USER],
    "assistant-first": [ASSISTANT, USER],
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Finds a wörd.",
            "parameters": {
                "type": "object",
                "properties": {"word": {"type": "string"}, "n": {"type": "integer"}},
                "required": ["word"],
            },
        },
    }
]
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "look_up", "arguments": {"word": 'hé"llo', "n": 3}},
}
CALLED: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "name": "look_up", "content": "a greeting"}


@cache
def tokenizer_of_transformers() -> Any:
    transformers = pytest.importorskip("transformers")
    file = model_path("demo") / "tokenizer.json"
    return transformers.PreTrainedTokenizerFast(tokenizer_file=str(file), **NAMES)


def theirs(source: object, talk: list[dict[str, Any]], **options: Any) -> str | None:
    """What transformers renders; None if the template rejects the conversation."""
    tokenizer = tokenizer_of_transformers()
    tokenizer.chat_template = source
    try:
        return str(tokenizer.apply_chat_template(talk, tokenize=False, **options))
    except Exception:  # whatever the template or the library raises
        return None


def ours(source: object, talk: list[dict[str, Any]], **options: Any) -> str | None:
    sources = source if isinstance(source, dict) else {"default": source}
    names = {"add_generation_prompt", "tools", "continue_final_message"}
    fields = {name: options.pop(name) for name in names & set(options)}
    chat = Chat(talk, **{"add_generation_prompt": False, **fields}, variables=options)
    try:
        return JinjaTemplate(sources, NAMES).render(chat)
    except BadInput:
        return None


def test_at_least_forty_idioms_are_compared() -> None:
    assert len(IDIOMS) >= 40


@pytest.mark.parametrize("name", TEXT_IDIOMS | TOOL_IDIOMS)
def test_conversations_render_as_in_transformers(name: str) -> None:
    rendered = 0
    for talk in TALKS.values():
        for opened in (False, True):
            expected = theirs(IDIOMS[name], talk, add_generation_prompt=opened)
            assert ours(IDIOMS[name], talk, add_generation_prompt=opened) == expected
            rendered += expected is not None
    assert rendered >= 4


@pytest.mark.parametrize("name", PART_IDIOMS)
def test_content_parts_render_as_in_transformers(name: str) -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    as_parts = [
        [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in talk]
        for talk in TALKS.values()
    ]
    as_parts.append([{"role": "user", "content": parts}])
    for talk in as_parts:
        expected = theirs(PART_IDIOMS[name], talk, add_generation_prompt=True)
        assert ours(PART_IDIOMS[name], talk, add_generation_prompt=True) == expected


@pytest.mark.parametrize("name", PART_IDIOMS)
def test_text_reaches_templates_that_loop_over_parts(name: str) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a question"}]}]
    text = [{"role": "user", "content": "a question"}]
    assert ours(PART_IDIOMS[name], text) == theirs(PART_IDIOMS[name], parts)


@pytest.mark.parametrize("name", TEXT_IDIOMS)
def test_parts_reach_templates_that_take_text(name: str) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    joined = ours(TEXT_IDIOMS[name], [{"role": "user", "content": "one\ntwo"}])
    assert ours(TEXT_IDIOMS[name], [{"role": "user", "content": parts}]) == joined


@pytest.mark.parametrize("name", TOOL_IDIOMS)
@pytest.mark.parametrize("enable_thinking", [True, False])
def test_tools_and_calls_render_as_in_transformers(name: str, enable_thinking: bool) -> None:
    talk = [USER, CALLED, RESULT]
    options: dict[str, Any] = {"tools": TOOLS, "add_generation_prompt": True}
    expected = theirs(TOOL_IDIOMS[name], talk, enable_thinking=enable_thinking, **options)
    assert expected is not None
    assert ours(TOOL_IDIOMS[name], talk, enable_thinking=enable_thinking, **options) == expected
    assert "None" not in expected


@pytest.mark.parametrize("name", TOOL_IDIOMS)
def test_arguments_as_json_text_render_as_the_object(name: str) -> None:
    function = {"name": "look_up", "arguments": json.dumps(CALL["function"]["arguments"])}
    as_text = {**CALLED, "tool_calls": [{**CALL, "function": function}]}
    expected = ours(TOOL_IDIOMS[name], [USER, CALLED, RESULT], tools=TOOLS)
    assert ours(TOOL_IDIOMS[name], [USER, as_text, RESULT], tools=TOOLS) == expected


CONTINUED = [
    "The answer is ",
    "```json\n",
    "end",
    "",
    "\n",
    "x",
    "assistant",
    " lead",
    "a\n\nb ",
    "<|im_end|>",
]


@pytest.mark.parametrize("name", ["chatml", "llama2", "llama3", "gemma", "phi3", "zephyr", "olmo2"])
@pytest.mark.parametrize("content", CONTINUED)
def test_the_final_message_is_continued_as_in_transformers(name: str, content: str) -> None:
    talk = [USER, {"role": "assistant", "content": content}]
    expected = theirs(IDIOMS[name], talk, continue_final_message=True)
    assert expected is not None
    assert ours(IDIOMS[name], talk, continue_final_message=True) == expected


def test_named_templates_are_chosen_as_in_transformers() -> None:
    sources = {"default": TEXT_IDIOMS["chatml"], "tool_use": TOOL_IDIOMS["hermes"]}
    for tools in (None, TOOLS):
        assert ours(sources, [USER], tools=tools) == theirs(sources, [USER], tools=tools)


def test_developer_messages_become_system_messages_where_the_role_is_unknown() -> None:
    developer = {"role": "developer", "content": "SECRET"}
    for name in ("phi4", "qwen3", "command-r"):
        rendered = ours(IDIOMS[name], [developer, USER])
        assert rendered is not None and "SECRET" in rendered
        assert rendered == ours(IDIOMS[name], [{**developer, "role": "system"}, USER])
    assert "developer" in str(ours(IDIOMS["gpt-oss"], [developer, USER]))
    assert ours(IDIOMS["gemma"], [developer, USER]) is None


def test_templates_that_join_arguments_as_text_get_json_text() -> None:
    source = (
        "{% for m in messages %}{% if m['role'] == 'assistant' and m['content'] is none %}"
        "{% for t in m['tool_calls'] %}{{ '<call>' + t['function']['name'] + '\n' + "
        "t['function']['arguments'] + '</call>' }}{% endfor %}"
        "{% elif m['role'] != 'assistant' %}{{ m['content'] }}{% else %}{{ m['content'] }}{% endif "
        "%}"
        "{% endfor %}"
    )
    rendered = ours(source, [USER, CALLED, RESULT], tools=TOOLS)
    assert rendered is not None
    assert json.loads(rendered.split("look_up\n")[1].split("</call>")[0]) == {
        "word": 'hé"llo',
        "n": 3,
    }


def test_content_that_is_no_text_is_refused_by_templates_that_take_text() -> None:
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(BadInput, match="image_url"):
        JinjaTemplate({"default": TEXT_IDIOMS["chatml"]}, NAMES).render(
            Chat([{"role": "user", "content": image}])
        )


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The demo model without its weights and with a template that names every special token."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_path("demo") / name, tmp_path / name)
    template = "{{ bos_token }}|{{ eos_token }}|{{ sep_token }}|{{ cls_token }}|{{ image_token }}"
    (tmp_path / "chat_template.jinja").write_text(template)
    return tmp_path


def configure(directory: Path, changes: dict[str, Any], legacy: dict[str, Any] | None) -> None:
    file = directory / "tokenizer_config.json"
    config = {k: v for k, v in json.loads(file.read_text()).items() if not k.endswith("_token")}
    file.write_text(json.dumps({**config, **changes}))
    if legacy is not None:
        (directory / "special_tokens_map.json").write_text(json.dumps(legacy))


CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "config": (
        {"bos_token": "<|b|>", "eos_token": {"__type": "AddedToken", "content": "<|e|>"}},
        None,
    ),
    "map": ({}, {"bos_token": "<|b|>", "eos_token": {"content": "<|e|>", "lstrip": False}}),
    "map wins": ({"bos_token": "<|old|>"}, {"bos_token": "<|b|>", "sep_token": "<|s|>"}),
    "decoder wins": (
        {
            "bos_token": "<|b|>",
            "added_tokens_decoder": {
                "0": {
                    "content": "<|endoftext|>",
                    "lstrip": False,
                    "normalized": False,
                    "rstrip": False,
                    "single_word": False,
                    "special": True,
                }
            },
        },
        {"bos_token": "<|x|>", "sep_token": "<|s|>"},
    ),
    "extra": ({"extra_special_tokens": {"image_token": "<|image|>"}, "cls_token": "<|c|>"}, None),
    "model specific": ({"image_token": "<|image|>"}, None),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_special_tokens_are_those_of_transformers(directory: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    configure(directory, *CONFIGS[name])
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    expected = tokenizer.apply_chat_template([USER], tokenize=False)
    assert load_chat_template(directory).render(Chat([USER])) == expected


def test_templates_in_the_additional_folder_are_read_as_in_transformers(directory: Path) -> None:
    transformers = pytest.importorskip("transformers")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text(TOOL_IDIOMS["hermes"])
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    for tools in (None, TOOLS):
        expected = tokenizer.apply_chat_template([USER], tools=tools, tokenize=False)
        chat = Chat([USER], add_generation_prompt=False, tools=tools)
        assert load_chat_template(directory).render(chat) == expected


def test_the_eos_token_of_the_tokenizer_ends_answers(directory: Path) -> None:
    ends = load_spec(str(directory)).eos_token_ids
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    other = next(t for t in tokenizer["added_tokens"] if t["id"] not in ends)
    configure(directory, {"eos_token": other["content"]}, None)
    assert set(load_spec(str(directory)).eos_token_ids) == {*ends, other["id"]}
