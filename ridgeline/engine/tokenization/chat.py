"""Chat templates: Jinja text from the model directory, rendered in a sandbox.

A template is untrusted code. It runs in jinja2's ImmutableSandboxedEnvironment: no attributes that
begin with an underscore, no changes to its arguments, no imports. It may use the names that Hugging
Face's templates expect.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from ridgeline.errors import BadInput, BadModel
from ridgeline.modelspec.checkpoints.load import read_json

if TYPE_CHECKING:
    import jinja2

_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
_MAX_TEMPLATE_BYTES = 1_000_000
_GLOBALS = frozenset(
    ("raise_exception", "strftime_now", "range", "dict", "lipsum", "cycler", "joiner", "namespace")
)


class ChatTemplate(Protocol):
    """Formats conversations for a model."""

    def render(self, chat: Chat) -> str:
        """The conversation as prompt text. Raises BadInput if the template rejects it."""
        ...


@dataclass(frozen=True, slots=True)
class Chat:
    """The conversation and the options a template is rendered with.

    `variables` are additional template variables of the caller (for example `enable_thinking`); they
    cannot override names that the renderer sets. With `continue_final_message` the text ends at the
    end of the last message's content, so that the model continues it.
    """

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool = True
    tools: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    continue_final_message: bool = False


class NoChatTemplate:
    """For models without a chat template."""

    def render(self, chat: Chat) -> str:
        raise BadInput("the model has no chat template", fix="use text completion instead of chat")


class JinjaTemplate:
    """A Jinja chat template; `names` are the special tokens it may use.

    `source` is compiled on first use, so a broken template does not prevent text completion.
    """

    def __init__(self, source: str, names: Mapping[str, str]) -> None:
        self._source, self._names = source, dict(names)
        self._compiled: jinja2.Template | None = None

    def render(self, chat: Chat) -> str:
        from jinja2.exceptions import TemplateError

        self._compiled = self._compiled or _compile(self._source)
        own_variables = {
            **self._names,
            "messages": list(chat.messages),
            "tools": None if chat.tools is None else list(chat.tools),
            "documents": None,
            "add_generation_prompt": chat.add_generation_prompt,
        }
        _check_variables(chat.variables, own_variables)
        try:
            text = self._compiled.render({**chat.variables, **own_variables})
        except (TemplateError, TypeError, ValueError, KeyError, ArithmeticError) as error:
            raise _rejected(str(error) or type(error).__name__) from None
        except (RecursionError, MemoryError, AttributeError) as error:
            raise _rejected(type(error).__name__) from None
        return _truncate(text, chat.messages[-1]) if chat.continue_final_message else text


def _check_variables(variables: Mapping[str, Any], own_variables: Mapping[str, Any]) -> None:
    """Reject variables that would override names of the renderer or the sandbox."""
    for name in variables:
        if name in own_variables or name in _GLOBALS or not name.isidentifier() or len(name) > 64:
            raise BadInput(
                "chat_template_kwargs contains a reserved or invalid name",
                value=name[:64],
                fix="leave it out",
            )


def _truncate(text: str, last: Mapping[str, Any]) -> str:
    """The text up to the end of the last message's content."""
    content = str(last.get("content") or "").strip()
    at = text.rfind(content) if content else -1
    if at < 0:
        raise _rejected("its output does not contain the last message, so that cannot be continued")
    return text[: at + len(content)]


def _rejected(why: str) -> BadInput:
    return BadInput(
        "the model's chat template rejects this conversation",
        limit=why[:500],
        fix="check the roles, the order and the contents of the messages",
    )


def load_chat_template(path: Path) -> ChatTemplate:
    """Load `chat_template.jinja`, or else the template in tokenizer_config.json ("default" of several)."""
    config = _config(path)
    source = _source(path, config)
    if source is None:
        return NoChatTemplate()
    named = {name: _content(config.get(name)) for name in _TOKENS}
    return JinjaTemplate(source, {name: text for name, text in named.items() if text is not None})


def _config(path: Path) -> dict[str, Any]:
    file = path / "tokenizer_config.json"
    return read_json(file) if file.is_file() else {}


def _source(path: Path, config: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        if file.stat().st_size > _MAX_TEMPLATE_BYTES:
            raise BadModel("the chat template is too large", value=str(file))
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise BadModel("the chat template is not valid UTF-8", value=str(error)) from None
    try:
        return msgspec.convert(config, _Templates).default()
    except msgspec.ValidationError as error:
        raise BadModel(f"tokenizer_config.json of {path}: {error}") from None


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _Templates(msgspec.Struct):
    """The templates in tokenizer_config.json: one, or several with names."""

    chat_template: str | list[_NamedTemplate] | None = None

    def default(self) -> str | None:
        if not isinstance(self.chat_template, list):
            return self.chat_template
        return next((t.template for t in self.chat_template if t.name == "default"), None)


def _content(token: object) -> str | None:
    """The text of a special token, which is a string or an object with a content."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _compile(source: str) -> jinja2.Template:
    from jinja2 import nodes
    from jinja2.exceptions import TemplateSyntaxError
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """`{% generation %}` marks text to train on; for inference it is replaced by its body."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now}
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise BadModel("the model's chat template is not valid Jinja", fix=str(error)) from None


def _to_json(value: object, indent: int | None = None) -> str:
    """JSON without jinja's HTML escaping."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    from jinja2.exceptions import TemplateError

    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)
