"""The tokenizer of a model directory: `tokenizer.json`, read by the `tokenizers` library.

No code of the model's directory is ever run: its chat template is rendered in a sandbox
(`chat.py`). A model without a tokenizer (random weights) takes and gives token ids only;
`NoTokenizer` says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ridgeline.engine.tokenization.chat import (
    Chat,
    ChatTemplate,
    JinjaTemplate,
    NoChatTemplate,
    load_chat_template,
)
from ridgeline.engine.tokenization.detokenize import (
    ByteDetokenizer,
    ByteTable,
    Detokenizer,
    NoText,
    PrefixDetokenizer,
)
from ridgeline.errors import BadInput, BadModel
from ridgeline.modelspec.checkpoints.gguf_header import is_gguf, read_gguf
from ridgeline.modelspec.checkpoints.load import read_json
from ridgeline.modelspec.checkpoints.locate import is_dummy, model_path

if TYPE_CHECKING:
    import tokenizers


class Tokenizer(Protocol):
    """Text to token ids and back."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. BadInput where there is no tokenizer or the text is not Unicode."""
        ...

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def bytes_of(self, token: int, *, skip_special_tokens: bool = True) -> bytes:
        """What one token adds to a text, which may be a part of a character."""
        ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Token ids of a conversation. BadInput where the model has no template or it objects.

        `variables` are the caller's own names for the template; see `ridgeline.engine.tokenization.chat`.
        """
        ...

    def detokenizer(
        self, prompt: Sequence[int], *, skip_special_tokens: bool = True
    ) -> Detokenizer:
        """Decode an answer to `prompt` token by token."""
        ...


_BYTE = re.compile("<0x([0-9A-F]{2})>")  # SentencePiece's, for bytes of characters it has not


def load_tokenizer(model: str) -> Tokenizer:
    """The tokenizer of a model directory or of "demo"; NoTokenizer where there is none."""
    if is_dummy(model):
        return NoTokenizer(model)
    if is_gguf(model):
        return _of_gguf(model)
    path = model_path(model)
    if not (path / "tokenizer.json").is_file():
        return NoTokenizer(model)
    return HfTokenizer(_read(path / "tokenizer.json"), load_chat_template(path))


def _of_gguf(model: str) -> Tokenizer:
    from ridgeline.engine.tokenization.gguf import template_names, tokenizer_of

    metadata = read_gguf(model).metadata
    if "tokenizer.ggml.tokens" not in metadata:
        return NoTokenizer(model)
    source = metadata.get("tokenizer.chat_template")
    try:
        inner, names = tokenizer_of(metadata), template_names(metadata)
    except BadModel:
        raise
    except Exception as error:  # the library raises bare Exception; metadata may hold anything
        what = f"{type(error).__name__}: {error}"
        raise BadModel("the tokenizer in the GGUF file cannot be read", value=what) from None
    return HfTokenizer(inner, NoChatTemplate() if source is None else JinjaTemplate(source, names))


def _read(file: Path) -> tokenizers.Tokenizer:
    import tokenizers

    read_json(file)  # missing, oversized and malformed files have their own errors
    try:
        inner = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise BadModel("tokenizer.json cannot be read", value=str(file), fix=str(error)) from None
    inner.no_truncation()
    inner.no_padding()
    return inner


class HfTokenizer:
    """See `Tokenizer`. `inner` is the library's object."""

    def __init__(self, inner: tokenizers.Tokenizer, template: ChatTemplate) -> None:
        self.inner, self._template = inner, template
        self._table = ByteTable(inner) if _is_byte_level(inner) else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise BadInput(
                "the prompt is not valid Unicode (lone surrogates)", fix="send text that is UTF-8"
            ) from None
        return list(self.inner.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self.inner.decode(list(tokens), skip_special_tokens=skip_special_tokens))

    def bytes_of(self, token: int, *, skip_special_tokens: bool = True) -> bytes:
        if self._table is not None:
            return self._table.of(token, skip_special_tokens=skip_special_tokens)
        piece = self.inner.id_to_token(token) or ""
        byte = _BYTE.fullmatch(piece)
        if byte is not None:
            return bytes([int(byte[1], 16)])
        text = self.decode([token], skip_special_tokens=skip_special_tokens)
        num_blanks = len(piece) - len(piece.lstrip("▁"))
        if num_blanks and not text.startswith("▁"):  # alone it is the first, which loses a blank
            text = " " * num_blanks + text.lstrip(" ")
        return text.encode("utf-8")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> list[int]:
        chat = Chat(
            messages, add_generation_prompt, tools, dict(variables or {}), continue_final_message
        )
        return self.encode(self._template.render(chat), add_special_tokens=False)  # it has its own

    def detokenizer(
        self, prompt: Sequence[int], *, skip_special_tokens: bool = True
    ) -> Detokenizer:
        if self._table is not None:
            return ByteDetokenizer(self._table, skip_special_tokens=skip_special_tokens)

        def decode(tokens: Sequence[int]) -> str:
            return self.decode(tokens, skip_special_tokens=skip_special_tokens)

        return PrefixDetokenizer(decode, prompt)


def _is_byte_level(inner: tokenizers.Tokenizer) -> bool:
    return type(inner.decoder).__name__ == "ByteLevel"


class NoTokenizer:
    """A model that speaks token ids only."""

    def __init__(self, model: str) -> None:
        self._model = model

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        raise BadInput(
            f"{self._model} has no tokenizer", fix="send the prompt as a list of token ids"
        )

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return ""

    def bytes_of(self, token: int, *, skip_special_tokens: bool = True) -> bytes:
        return b""

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> list[int]:
        return self.encode("")

    def detokenizer(
        self, prompt: Sequence[int], *, skip_special_tokens: bool = True
    ) -> Detokenizer:
        return NoText()
