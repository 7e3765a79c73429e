"""Tokenizers: `tokenizer.json` or older files of a model directory, or that inside a GGUF file.

No code from the model directory is ever executed: the chat template is rendered in a sandbox. A
model without a readable tokenizer accepts and yields token ids only (`NoTokenizer`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ridgeline.engine.tokenization.chat import (
    Chat,
    ChatTemplate,
    NoChatTemplate,
    ProtectedTexts,
)
from ridgeline.engine.tokenization.detokenize import (
    ByteDetokenizer,
    ByteTable,
    Detokenizer,
    NoText,
    PrefixDetokenizer,
)
from ridgeline.engine.tokenization.growth import check_growth
from ridgeline.engine.tokenization.template_files import load_chat_template
from ridgeline.engine.tokenization.template_process import ProcessTemplate
from ridgeline.engine.tokenization.vocabulary_files import UnreadTokenizer, read_vocabulary_files
from ridgeline.errors import BadInput, BadModel
from ridgeline.modelspec.checkpoints.gguf_header import is_gguf, read_gguf
from ridgeline.modelspec.checkpoints.json_files import file_errors, read_json
from ridgeline.modelspec.checkpoints.locate import is_dummy, model_path

if TYPE_CHECKING:
    import tokenizers


class Tokenizer(Protocol):
    """Converts text to token ids and back."""

    @property
    def max_token_chars(self) -> int:
        """Characters of text that one token stands for at most."""
        ...

    @property
    def template_uses_tools(self) -> bool:
        """Whether the chat template mentions the tools of a request."""
        ...

    @property
    def template_uses_calls(self) -> bool:
        """Whether the chat template mentions the tool calls of a conversation."""
        ...

    @property
    def template_uses_documents(self) -> bool:
        """Whether the chat template mentions the documents of a request."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Long texts are tokenised without holding the GIL.

        Raises BadInput without a tokenizer, or if the text is not valid Unicode or too long.
        """
        ...

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `tokens`. Long lists are decoded without holding the GIL."""
        ...

    def bytes_of(self, token: int, *, skip_special_tokens: bool = True) -> bytes:
        """The bytes that one token adds to a text, possibly only a part of a character."""
        ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        parse_special: bool = True,
    ) -> list[int]:
        """Token ids of a conversation.

        `variables` are additional variables for the template, which writes special tokens itself;
        `add_special_tokens` adds the tokenizer's. Without `parse_special`, special tokens that
        users, tools and documents write are text. Raises BadInput if the model has no chat template
        or the template rejects the conversation.
        """
        ...

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """The id of each special token, by its text."""
        ...

    def special_token_id(self, text: str) -> int | None:
        """The id of the special token that is written `text`; None if there is none."""
        ...

    def detokenizer(
        self,
        prompt: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        shown_special_tokens: Sequence[str] = (),
    ) -> Detokenizer:
        """A detokeniser for an answer to `prompt`.

        `shown_special_tokens` are not skipped.
        """
        ...


_PLACEHOLDER = re.compile("(?i)image|audio|video|vision")
MAX_TEXT_TOKENS = 1 << 20
"""Of one text; more than the longest context."""
_LONG_TOKENS = 1000
_MIN_TOKEN_CHARS = 16  # of an unknown word, or blanks that a normaliser drops
_BYTE = re.compile("<0x([0-9A-F]{2})>")  # SentencePiece's tokens for single bytes


@file_errors()
def load_tokenizer(model: str) -> Tokenizer:
    """The tokenizer of a model directory, a GGUF file or "demo".

    NoTokenizer, with the reason, if there is none that can be read; BadModel if its files are
    malformed.
    """
    if is_dummy(model):
        return NoTokenizer(model, "its weights are random")
    if is_gguf(model):
        return _from_gguf(model)
    path = model_path(model)
    if (path / "tokenizer.json").is_file():
        return HfTokenizer(_read(path / "tokenizer.json"), load_chat_template(path))
    try:
        return HfTokenizer(read_vocabulary_files(path), load_chat_template(path))
    except UnreadTokenizer as reason:
        return NoTokenizer(model, str(reason))


def _from_gguf(model: str) -> Tokenizer:
    from ridgeline.engine.tokenization.gguf import (
        chat_templates,
        template_names,
        tokenizer_of,
        why_unsupported,
    )

    metadata = read_gguf(model).metadata
    if "tokenizer.ggml.tokens" not in metadata:
        return NoTokenizer(model, "the GGUF file holds none")
    reason = why_unsupported(metadata)
    if reason is not None:
        return NoTokenizer(model, reason)
    templates = chat_templates(metadata)
    try:
        inner, names = tokenizer_of(metadata), template_names(metadata)
    except BadModel:
        raise
    except Exception as error:  # the library raises bare Exception, and metadata may be anything
        what = f"{type(error).__name__}: {error}"
        raise BadModel("the tokenizer in the GGUF file cannot be read", value=what) from None
    return HfTokenizer(inner, ProcessTemplate(templates, names) if templates else NoChatTemplate())


def check_tokenizer(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Compare a tokenizer with the rows of its model's embedding.

    Warns if the model has no readable tokenizer. Raises BadModel if the tokenizer has ids that the
    embedding lacks; placeholders of images and the like, which text models keep from their
    multimodal siblings, may lie beyond it.
    """
    if isinstance(tokenizer, NoTokenizer):
        if not is_dummy(tokenizer.model):
            logging.getLogger("ridgeline").warning(
                "%s accepts token ids only: %s", tokenizer.model, tokenizer.reason
            )
        return
    assert isinstance(tokenizer, HfTokenizer)
    if tokenizer.max_token_id < vocab_size:
        return
    largest = max(
        (token, text)
        for text, token in tokenizer.inner.get_vocab(with_added_tokens=True).items()
        if token < vocab_size or not _PLACEHOLDER.search(text)
    )
    if largest[0] >= vocab_size:
        raise BadModel(
            "the tokenizer knows tokens that the model lacks: they do not belong together",
            value=f"token {largest[0]} ({largest[1][:40]})",
            limit=f"{vocab_size} embedding rows",
            fix="use the tokenizer that was published with these weights",
        )


def bos_tokens(tokenizer: Tokenizer) -> list[int]:
    """The tokens that stand before every text that this tokenizer encodes: BOS, or none.

    Windows cut out of a longer text need them as well: a model that was trained with BOS predicts
    badly without it. Raises BadInput without a tokenizer.
    """
    plain = tokenizer.encode("a", add_special_tokens=False)
    whole = tokenizer.encode("a")
    starts = range(len(whole) - len(plain) + 1)
    at = next((at for at in starts if whole[at : at + len(plain)] == plain), 0)
    return whole[:at]


def _read(file: Path) -> tokenizers.Tokenizer:
    import tokenizers

    check_growth(read_json(file))
    try:
        inner = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise BadModel("tokenizer.json cannot be read", value=str(file), fix=str(error)) from None
    inner.no_truncation()
    inner.no_padding()
    return inner


class HfTokenizer:
    """A tokenizer of the `tokenizers` library, `inner`, with a chat template."""

    def __init__(self, inner: tokenizers.Tokenizer, template: ChatTemplate) -> None:
        self.inner, self._template = inner, template
        self.template_uses_tools = template.uses_tools
        self.template_uses_calls = template.uses_calls
        self.template_uses_documents = template.uses_documents
        self._table = ByteTable(inner) if _is_byte_level(inner) else None
        vocabulary = inner.get_vocab(with_added_tokens=True)
        self.max_token_id = max(vocabulary.values(), default=-1)
        # A vocabulary's pieces write blanks and bytes as one character each, at least.
        self.max_token_chars = max([_MIN_TOKEN_CHARS, *map(len, vocabulary)])

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._encode(self.inner, text, add_special_tokens)

    def _encode(
        self, inner: tokenizers.Tokenizer, text: str, add_special_tokens: bool
    ) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise BadInput(
                "the prompt is not valid Unicode (lone surrogates)", fix="send text that is UTF-8"
            ) from None
        try:
            # Unlike `encode`, this releases the GIL.
            encoding = inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # the library raises bare Exception, and panics of Rust
            raise BadInput(
                "the model's tokenizer failed on this text", value=str(error)[:200], fix="change it"
            ) from None
        if len(encoding) > MAX_TEXT_TOKENS:
            raise BadInput(
                "the text has too many tokens",
                value=len(encoding),
                limit=MAX_TEXT_TOKENS,
                fix="send a shorter text",
            )
        return list(encoding.ids)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        given = list(tokens)
        if len(given) < _LONG_TOKENS:
            return str(self.inner.decode(given, skip_special_tokens=skip_special_tokens))
        # Unlike `decode`, this releases the GIL.
        texts = self.inner.decode_batch([given], skip_special_tokens=skip_special_tokens)
        return str(texts[0])

    def bytes_of(self, token: int, *, skip_special_tokens: bool = True) -> bytes:
        if self._table is not None:
            return self._table.bytes_of(token, skip_special_tokens=skip_special_tokens)
        piece = self.inner.id_to_token(token) or ""
        byte = _BYTE.fullmatch(piece)
        if byte is not None:
            return bytes([int(byte[1], 16)])
        text = self.decode([token], skip_special_tokens=skip_special_tokens)
        num_spaces = len(piece) - len(piece.lstrip("▁"))
        if num_spaces and not text.startswith("▁"):  # as the first token it loses a space
            text = " " * num_spaces + text.lstrip(" ")
        return text.encode("utf-8")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        parse_special: bool = True,
    ) -> list[int]:
        protected = ProtectedTexts(self._has_special_tokens)
        given = dict(variables or {})
        if not parse_special:
            messages = [protected.protect_message(message) for message in messages]
            given = {k: protected.protect(v) if k == "documents" else v for k, v in given.items()}
        chat = Chat(messages, add_generation_prompt, tools, given, continue_final_message)
        text = self._template.render(chat)
        if not protected.texts:
            return self.encode(text, add_special_tokens=add_special_tokens)
        tokens = bos_tokens(self) if add_special_tokens else []
        for piece, is_protected in protected.split(text):
            tokens += self._encode(self._plain if is_protected else self.inner, piece, False)
        return tokens

    def _has_special_tokens(self, text: str) -> bool:
        return not self._special_ids.isdisjoint(self.encode(text, add_special_tokens=False))

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(self.special_tokens.values())

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """The tokenizer, but special tokens in a text are tokenised as any other text."""
        import tokenizers

        plain = tokenizers.Tokenizer.from_str(self.inner.to_str())
        plain.encode_special_tokens = True
        return plain

    def special_token_id(self, text: str) -> int | None:
        return self.special_tokens.get(text)

    def detokenizer(
        self,
        prompt: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        shown_special_tokens: Sequence[str] = (),
    ) -> Detokenizer:
        special = self.special_tokens
        shown = {special[text] for text in shown_special_tokens if text in special}
        if self._table is not None:
            return ByteDetokenizer(
                self._table, skip_special_tokens=skip_special_tokens, shown=shown
            )
        skipped = self._special_ids - shown if skip_special_tokens else frozenset()
        return PrefixDetokenizer(partial(self.decode, skip_special_tokens=False), prompt, skipped)

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        added = self.inner.get_added_tokens_decoder()
        return {entry.content: token for token, entry in added.items() if entry.special}


def _is_byte_level(inner: tokenizers.Tokenizer) -> bool:
    return type(inner.decoder).__name__ == "ByteLevel"


class NoTokenizer:
    """For models that accept and yield token ids only; `reason` says why."""

    def __init__(self, model: str, reason: str) -> None:
        self.model, self.reason = model, reason

    @property
    def max_token_chars(self) -> int:
        return 1

    @property
    def template_uses_tools(self) -> bool:
        return False

    @property
    def template_uses_calls(self) -> bool:
        return False

    @property
    def template_uses_documents(self) -> bool:
        return False

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        raise BadInput(
            f"the model has no tokenizer ({self.reason})",
            fix="send the prompt as a list of token ids",
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
        add_special_tokens: bool = False,
        parse_special: bool = True,
    ) -> list[int]:
        return self.encode("")

    @property
    def special_tokens(self) -> Mapping[str, int]:
        return {}

    def special_token_id(self, text: str) -> int | None:
        return None

    def detokenizer(
        self,
        prompt: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        shown_special_tokens: Sequence[str] = (),
    ) -> Detokenizer:
        return NoText()
