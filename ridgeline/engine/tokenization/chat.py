"""Chat templates: conversations as prompt text, the same text that transformers renders.

Messages are first brought into the form that the template takes (`ridgeline.engine.tokenization.
template_traits`), so that no part of a conversation is lost without an error.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from ridgeline.engine.tokenization.jinja_environment import GLOBALS, compile_template
from ridgeline.engine.tokenization.template_traits import (
    CallTraits,
    Message,
    TemplateTraits,
    find_call_traits,
    find_traits,
    text_part,
)
from ridgeline.errors import BadInput, BadModel

_CONTINUED = "RidgelineContinuesHere "
"""Marks the end of the message to continue; its blank shows whether the template trims content."""
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate(Protocol):
    """Formats conversations for a model. `uses_tools`, `uses_calls`, `uses_documents`: whether it
    mentions theirs."""

    uses_tools: bool
    uses_calls: bool
    uses_documents: bool

    def render(self, chat: Chat) -> str:
        """The conversation as prompt text. Raises BadInput if the template rejects it."""
        ...


@dataclass(frozen=True, slots=True)
class Chat:
    """The conversation and the options a template is rendered with.

    `variables` are additional template variables of the caller (for example `enable_thinking`);
    they cannot override names that the renderer sets. With `continue_final_message` the text ends
    at the end of the last message's content, so that the model continues it.
    """

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool = True
    tools: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    continue_final_message: bool = False


class NoChatTemplate:
    """For models without a chat template."""

    uses_tools = uses_calls = uses_documents = False

    def render(self, chat: Chat) -> str:
        raise BadInput("the model has no chat template", fix="use text completion instead of chat")


class JinjaTemplate:
    """The Jinja chat templates of a model by name; `names` are the special tokens they may use.

    `tool_use` renders conversations with tools where there is one, `default` all others. Each is
    compiled on first use, so a broken template does not prevent text completion.
    """

    def __init__(self, sources: Mapping[str, str], names: Mapping[str, str]) -> None:
        self._sources, self._names = dict(sources), dict(names)
        self.uses_tools = any("tools" in source for source in sources.values())
        self.uses_calls = any("tool_calls" in source for source in sources.values())
        self.uses_documents = any("documents" in source for source in sources.values())
        self._compiled: dict[str, _Compiled] = {}

    def render(self, chat: Chat) -> str:
        return self._selected(chat).render(chat)

    def _selected(self, chat: Chat) -> _Compiled:
        name = "tool_use" if chat.tools is not None and "tool_use" in self._sources else "default"
        if name not in self._sources:
            raise BadModel(
                "the model has several chat templates and none is named default",
                value=", ".join(sorted(self._sources)),
                fix="rename one of them to default in its tokenizer_config.json",
            )
        if name not in self._compiled:
            self._compiled[name] = _Compiled(self._sources[name], self._names)
        return self._compiled[name]


class _Compiled:
    """One compiled template, and the message formats that it accepts."""

    def __init__(self, source: str, names: Mapping[str, str]) -> None:
        self._template, self._names = compile_template(source), names
        # A template that only copies the role was trained on "system", not on "developer".
        self._knows_developer = "developer" in source

    @cached_property
    def _traits(self) -> TemplateTraits:
        return find_traits(self._probe)

    @cached_property
    def _call_traits(self) -> CallTraits:
        return find_call_traits(self._probe, self._traits)

    def _probe(
        self, messages: Sequence[Message], tools: Sequence[Message] | None = None
    ) -> str | None:
        try:
            return self._render(Chat(messages, add_generation_prompt=False, tools=tools), messages)
        except BadInput:
            return None

    def render(self, chat: Chat) -> str:
        messages = [self._adapted(message) for message in chat.messages]
        if not chat.continue_final_message:
            return self._render(chat, messages)
        messages[-1] = _marked(messages[-1])
        return _before_mark(self._render(chat, messages))

    def _adapted(self, message: Mapping[str, Any]) -> Message:
        """The message in the form that the template takes; fields that are null are left out."""
        adapted = {key: value for key, value in message.items() if value is not None}
        reasoning = next((adapted[key] for key in _REASONING if key in adapted), None)
        if reasoning is not None:
            adapted = {"thinking": reasoning, **adapted, "reasoning_content": reasoning}
        if adapted.get("role") == "developer" and not self._knows_developer:
            adapted["role"] = "system"
        content = adapted.get("content")
        if isinstance(content, str) and not self._traits.takes_text:
            adapted["content"] = [text_part(content)]
        elif isinstance(content, list | tuple) and not self._traits.takes_parts:
            adapted["content"] = "\n".join(_text_of(part) for part in content)
        return self._with_calls(adapted) if adapted.get("tool_calls") else adapted

    def _with_calls(self, message: Message) -> Message:
        """A message that calls tools, with arguments and content as the template takes them."""
        traits = self._call_traits
        calls = [_call_for_template(call, traits.text_arguments) for call in message["tool_calls"]]
        if "content" not in message and traits.missing_content != "absent":
            message["content"] = None if traits.missing_content == "null" else ""
        return {**message, "tool_calls": calls}

    def _render(self, chat: Chat, messages: Sequence[Message]) -> str:
        from jinja2.exceptions import TemplateError

        own_variables = {
            **self._names,
            "messages": list(messages),
            "tools": None if chat.tools is None else list(chat.tools),
            "add_generation_prompt": chat.add_generation_prompt,
        }
        _check_variables(chat.variables, own_variables)
        try:
            return self._template.render({"documents": None, **chat.variables, **own_variables})
        except (RecursionError, MemoryError, AttributeError, AssertionError, NameError) as error:
            raise _rejected(type(error).__name__) from None
        except (TemplateError, TypeError, ValueError, KeyError, ArithmeticError) as error:
            raise _rejected(str(error) or type(error).__name__) from None


class ProtectedTexts:
    """Texts of a conversation whose special tokens must not be parsed: `texts` by their stand-ins.

    A template renders the stand-in, which it copies as it would copy the text; `is_special` tells
    whether a text has special tokens at all.
    """

    def __init__(self, is_special: Callable[[str], bool]) -> None:
        self._is_special, self.texts = is_special, dict[str, str]()
        self._nonce = secrets.token_hex(8)  # so that no text can name a stand-in

    def protect_message(self, message: Mapping[str, Any]) -> Message:
        """The message with stand-ins, unless an assistant or the system wrote it."""
        if message.get("role") not in ("user", "tool", "function"):
            return dict(message)
        return {key: self.protect(value) for key, value in message.items()}

    def protect(self, value: Any) -> Any:
        """The value with stand-ins for all texts in it that have special tokens."""
        if isinstance(value, str) and self._is_special(value):
            name = f"Text{self._nonce}Number{len(self.texts)}End"
            self.texts[name] = value
            return name
        if isinstance(value, Mapping):
            return {key: self.protect(part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [self.protect(part) for part in value]
        return value

    def split(self, rendered: str) -> list[tuple[str, bool]]:
        """A rendered conversation in pieces, with whether each is a protected text."""
        pieces = re.split(f"(Text{self._nonce}Number[0-9]+End)", rendered)
        return [(self.texts.get(piece, piece), piece in self.texts) for piece in pieces if piece]


def _text_of(part: object) -> str:
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise BadInput(
        "a content part is not text", value=str(kind), limit="text", fix="send text parts only"
    )


def _call_for_template(call: Mapping[str, Any], text_arguments: bool) -> Message:
    """A tool call with its arguments as JSON text, or as a value where they are JSON."""
    function = call.get("function", call)
    if not isinstance(function, Mapping):
        return dict(call)
    arguments = function.get("arguments", {})
    if text_arguments and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not text_arguments and isinstance(arguments, str):
        arguments = _parsed(arguments)
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


def _parsed(arguments: str) -> object:
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments


def _marked(message: Message) -> Message:
    """The message with the mark at the end of its content, or of its last text part."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + _CONTINUED}
    parts = list(content) if isinstance(content, list | tuple) else []
    for at in range(len(parts) - 1, -1, -1):
        if isinstance(parts[at], Mapping) and isinstance(parts[at].get("text"), str):
            parts[at] = {**parts[at], "text": parts[at]["text"] + _CONTINUED}
            return {**message, "content": parts}
    raise BadInput("the final message has no content to continue", fix="send its text so far")


def _before_mark(text: str) -> str:
    """The text up to the mark; without trailing white space where the template trims content."""
    at = text.rfind(_CONTINUED.strip())
    if at < 0:
        raise _rejected("it does not render the final message, which therefore cannot be continued")
    return text[:at] if text.startswith(_CONTINUED, at) else text[:at].rstrip()


def _check_variables(variables: Mapping[str, Any], own_variables: Mapping[str, Any]) -> None:
    """Reject variables that would override names of the renderer or the sandbox."""
    for name in variables:
        if name in own_variables or name in GLOBALS or not name.isidentifier() or len(name) > 64:
            raise BadInput(
                "chat_template_kwargs contains a reserved or invalid name",
                value=name[:64],
                fix="leave it out",
            )


def _rejected(why: str) -> BadInput:
    return BadInput(
        "the model's chat template rejects this conversation",
        limit=why[:500],
        fix="check the roles, the order and the contents of the messages",
    )
