"""Text from tokens, one token at a time, such that the pieces join to the text of the whole.

A token is not a piece of text: a character may span several tokens (an emoji is up to four bytes),
and the first token of a window may lose its space. Two ways:

    ByteDetokenizer    for byte-level vocabularies (GPT-2, Llama 3, Qwen, the demo model): every
    token
                       *is* some bytes, so an incremental UTF-8 decoder gives exactly what decoding
                       the whole gives, whatever the tokens are, at one lookup per token.
    PrefixDetokenizer  for all others (SentencePiece: Llama 2, Mistral, Gemma): decode a short
    window
                       with and without the new token and emit the difference once it no longer
                       ends in half a character (the prefix-offset method of vLLM and TGI).

Invariants: a piece never ends in half a character; the pieces and `flush` join to the full decode
(the prefix method: for outputs that are valid UTF-8; a run of bytes that never becomes a character
is let go after `_MAX_PENDING` tokens as replacement characters, lest the window grow for ever).
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import tokenizers

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_PENDING = 8  # a character has at most four bytes, and a token at least one
_TAILS = (6, 7, 8, 9)  # how many prompt tokens to try as context: one of four begins a character


class Detokenizer(Protocol):
    """`push` each token; `flush` at the end gives what is still held back."""

    def push(self, token: int) -> str: ...

    def flush(self) -> str: ...


class NoText:
    """For models without a tokenizer."""

    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class ByteTable:
    """Bytes of each token of a byte-level vocabulary, looked up once each.

    GPT-2's vocabularies write each byte as one printable character; a token with any other
    character (some added tokens) stands for itself. Ids that the vocabulary lacks (padding of the
    embedding) are empty.
    """

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner
        self._byte_of = _bytes_by_character()
        self._known: dict[int, bytes] = {}
        self._whole: tuple[dict[int, str], dict[int, str]] = {}, {}
        added = inner.get_added_tokens_decoder()
        self._special = frozenset(token for token, entry in added.items() if entry.special)

    def whole(self, *, skip_special_tokens: bool) -> dict[int, str]:
        """Text of tokens that are whole characters, as far as somebody has noted it here."""
        return self._whole[skip_special_tokens]

    def of(self, token: int, *, skip_special_tokens: bool) -> bytes:
        if skip_special_tokens and token in self._special:
            return b""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._look_up(token)
        return found

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

    Most tokens are whole characters: between characters such a token always reads the same, so that
    its text is decoded once and then looked up.
    """

    def __init__(self, table: ByteTable, *, skip_special_tokens: bool) -> None:
        self._table, self._skip = table, skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._whole = table.whole(skip_special_tokens=skip_special_tokens)
        self._is_between = True  # no half character is held back

    def push(self, token: int) -> str:
        if self._is_between and (known := self._whole.get(token)) is not None:
            return known
        return self._decode(token)

    def _decode(self, token: int) -> str:
        text = self._decoder.decode(self._table.of(token, skip_special_tokens=self._skip))
        was_between, self._is_between = self._is_between, not self._decoder.getstate()[0]
        if was_between and self._is_between:
            self._whole[token] = text
        return text

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class PrefixDetokenizer:
    """Emits the difference of two decodes of a short window.

    tokens   … | prefix ………… | read ………… |
                 text is known  not yet emitted
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int]) -> None:
        self._decode = decode
        self._window = _tail(prompt, decode)
        self._num_read = len(self._window)

    def push(self, token: int) -> str:
        self._window.append(token)
        known = self._decode(self._window[: self._num_read])
        text = self._decode(self._window)
        pending = len(self._window) - self._num_read
        if len(text) <= len(known) or (text.endswith(_REPLACEMENT) and pending < _MAX_PENDING):
            return ""
        del self._window[: self._num_read]
        self._num_read = len(self._window)
        return text[len(known) :]

    def flush(self) -> str:
        known = self._decode(self._window[: self._num_read])
        return self._decode(self._window)[len(known) :]


def _tail(prompt: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[int]:
    """The end of the prompt: it decides whether the output's first space is kept.

    It must not begin within a character: every byte of the run would then count as invalid. So of
    four starts in a row the one that reads with the fewest replacement characters is taken (the
    prompt may hold some of its own).
    """
    tails = [prompt[-length:] for length in _TAILS]
    best = min(tails, key=lambda tail: decode(tail).count(_REPLACEMENT))
    return list(best)
