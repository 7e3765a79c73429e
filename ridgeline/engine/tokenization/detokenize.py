"""Incremental detokenisation: text from tokens, one token at a time.

A token is not a piece of text: a character may span several tokens (an emoji has up to four bytes),
and the first token of a window may lose its space. There are two methods:

    ByteDetokenizer    For byte-level vocabularies (GPT-2, Llama 3, Qwen, the demo model). Every
                       token *is* a sequence of bytes, so incremental UTF-8 decoding yields exactly
                       the text of decoding everything at once, with one lookup per token.
    PrefixDetokenizer  For all others (SentencePiece: Llama 2, Mistral, Gemma). Decodes a short
                       window with and without the new token and emits the difference once it does
                       not end in half a character (the prefix-offset method of vLLM and TGI).

Invariants. A piece never ends in half a character. The pieces and `flush` concatenate to the full
decode; for the prefix method, if the output is valid UTF-8. (Bytes that never form a character are
emitted as replacement characters after `_MAX_PENDING` tokens, so that the window stays bounded.)
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import tokenizers

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_PENDING = 8  # a character has at most four bytes, and a token at least one
_TAILS = (6, 7, 8, 9)  # numbers of prompt tokens to try as context: one of them starts a character


class Detokenizer(Protocol):
    """Decodes one output token by token."""

    def push(self, token: int) -> str:
        """The text that the token completes."""
        ...

    def flush(self) -> str:
        """The text still held back at the end."""
        ...


class NoText:
    """For models without a tokenizer."""

    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class ByteTable:
    """The bytes of each token of a byte-level vocabulary, each looked up once.

    GPT-2's vocabularies write each byte as one printable character. A token with any other
    character (some added tokens) stands for itself. Ids that the vocabulary lacks (padding of the
    embedding) are empty.
    """

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner
        self._byte_of = _bytes_by_character()
        self._bytes: dict[int, bytes] = {}
        self._texts: tuple[dict[int, str], dict[int, str]] = {}, {}
        added = inner.get_added_tokens_decoder()
        self._special = frozenset(token for token, entry in added.items() if entry.special)

    def text_cache(self, *, skip_special_tokens: bool) -> dict[int, str]:
        """A cache, shared by all detokenisers, of the texts of tokens that are whole characters."""
        return self._texts[skip_special_tokens]

    def bytes_of(self, token: int, *, skip_special_tokens: bool) -> bytes:
        """The bytes of a token; empty for special tokens if they are skipped."""
        if skip_special_tokens and token in self._special:
            return b""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._look_up(token)
        return known

    def _look_up(self, token: int) -> bytes:
        text = self._inner.id_to_token(token)
        if text is None:
            return b""
        mapped = [self._byte_of.get(character) for character in text]
        if any(byte is None for byte in mapped):
            return str(text).encode("utf-8")
        return bytes(byte for byte in mapped if byte is not None)


def _bytes_by_character() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 bytes stand for themselves, the rest follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + place): byte for place, byte in enumerate(others)
    }


class ByteDetokenizer:
    """Exact for any sequence of tokens; holds back at most three bytes.

    Most tokens consist of whole characters. After a complete character, such a token always has the
    same text, which is decoded once and then looked up. `shown`: special tokens that are not
    skipped.
    """

    def __init__(
        self, table: ByteTable, *, skip_special_tokens: bool, shown: Collection[int] = ()
    ) -> None:
        self._table, self._skip, self._shown = table, skip_special_tokens, shown
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        shared = table.text_cache(skip_special_tokens=skip_special_tokens)
        self._texts = {} if shown else shared
        self._at_boundary = True  # no incomplete character is held back

    def push(self, token: int) -> str:
        if self._at_boundary and (known := self._texts.get(token)) is not None:
            return known
        skips = self._skip and token not in self._shown
        text = self._decoder.decode(self._table.bytes_of(token, skip_special_tokens=skips))
        was_at_boundary, self._at_boundary = self._at_boundary, not self._decoder.getstate()[0]
        if was_at_boundary and self._at_boundary:
            self._texts[token] = text
        return text

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class PrefixDetokenizer:
    """Emits the difference between two decodes of a short window.

    tokens   … | prefix ………… | read ………… |
                 text is known  not yet emitted

    `skipped`: special tokens that are not in the text; `decode` shows them.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        prompt: Sequence[int],
        skipped: Collection[int] = (),
    ) -> None:
        self._decode, self._skipped = decode, skipped
        self._window = _tail(prompt, decode, skipped)
        self._num_read = len(self._window)

    def push(self, token: int) -> str:
        if token in self._skipped:
            return ""
        self._window.append(token)
        known = self._decode(self._window[: self._num_read])
        text = self._decode(self._window)
        pending = len(self._window) - self._num_read
        if len(text) <= len(known) and pending > _MAX_PENDING:
            del self._window[self._num_read]  # a token without text, e.g. one of no meaning
        if len(text) <= len(known) or (text.endswith(_REPLACEMENT) and pending < _MAX_PENDING):
            return ""
        del self._window[: self._num_read]
        self._num_read = len(self._window)
        return text[len(known) :]

    def flush(self) -> str:
        known = self._decode(self._window[: self._num_read])
        self._num_read = len(self._window)
        return self._decode(self._window)[len(known) :]


def _tail(
    prompt: Sequence[int], decode: Callable[[Sequence[int]], str], skipped: Collection[int]
) -> list[int]:
    """The end of the prompt, which determines whether the output's first space is kept.

    It must not begin within a character, because then every byte of it would count as invalid. So
    of four consecutive starts, the one that decodes with the fewest replacement characters is used
    (the prompt itself may contain some).
    """
    tails = [[t for t in prompt[-length:] if t not in skipped] for length in _TAILS]
    return min(tails, key=lambda tail: decode(tail).count(_REPLACEMENT))
