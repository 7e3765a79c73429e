"""Log-probabilities in the API's three shapes: completions, chat, vLLM's `prompt_logprobs`.

All are the raw log-softmax before temperature, penalties and masks. The chosen token is always
listed, even if it is not among the top k. Minus infinity, which JSON cannot express, is -9999.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol

from ridgeline.records import TokenLogprobs
from ridgeline.serve.openai.objects import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)

MIN_LOGPROB = -9999.0
Positions = Sequence[TokenLogprobs | None]


class TokenDecoder(Protocol):
    """How a token is written in a response."""

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def bytes_of(self, token: int, *, skip_special_tokens: bool = True) -> bytes: ...


class TokenIdDecoder:
    """Tokens as `token_id:ID`, so that no two are written alike; their bytes are unchanged."""

    def __init__(self, tokenizer: TokenDecoder) -> None:
        self.bytes_of = tokenizer.bytes_of

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(f"token_id:{token}" for token in tokens)


class TextOffsets:
    """Where each token of a growing text begins, in characters. A token that is a part of a
    character begins where the character does."""

    def __init__(self) -> None:
        self._num_chars = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, pieces: Iterable[bytes]) -> list[int]:
        """Offsets of the tokens that come next, by their bytes."""
        offsets: list[int] = []
        for piece in pieces:
            offsets.append(self._num_chars)
            self._num_chars += len(self._decoder.decode(piece))
        return offsets

    def add_prompt(self, text: str, pieces: Sequence[bytes]) -> list[int]:
        """Offsets of the tokens of a prompt that opens the text, as `text`. What its tokens have
        in excess at the front (a begin-of-text mark, a space) is at offset 0."""
        num_excess = max(0, len(b"".join(pieces).decode("utf-8", "replace")) - len(text))
        offsets = [max(0, offset - num_excess) for offset in self.add(pieces)]
        self._decoder.reset()
        self._num_chars = len(text)
        return offsets


def completion_logprobs(
    positions: Positions, texts: Sequence[str], decoder: TokenDecoder, offsets: Sequence[int]
) -> CompletionLogprobs:
    """`texts`: the tokens as `decoder` writes them; `offsets`: where each begins, in characters.

    A None position (the first token of a prompt, which nothing predicts) gives nulls.
    """
    return {
        "tokens": list(texts),
        "token_logprobs": [None if at is None else _finite(at.logprob) for at in positions],
        "top_logprobs": [None if at is None else _by_text(at, decoder) for at in positions],
        "text_offset": list(offsets),
    }


def chat_logprobs(positions: Sequence[TokenLogprobs], decoder: TokenDecoder) -> ChatLogprobs:
    return {
        "content": [
            {
                **_top_logprob(at.token, at.logprob, decoder),
                "top_logprobs": [_top_logprob(token, value, decoder) for token, value in at.top],
            }
            for at in positions
        ],
        "refusal": None,
    }


def prompt_logprobs(positions: Positions, decoder: TokenDecoder) -> PromptLogprobs:
    """vLLM's form: per prompt token, candidates by token id."""
    return [None if at is None else _by_token_id(at, decoder) for at in positions]


def limit_top(at: TokenLogprobs | None, num_top: int) -> TokenLogprobs | None:
    """The position with only its `num_top` most likely tokens."""
    if at is None or len(at.top) <= num_top:
        return at
    return TokenLogprobs(at.token, at.logprob, at.rank, at.top[:num_top])


def _by_token_id(at: TokenLogprobs, decoder: TokenDecoder) -> dict[str, PromptLogprob]:
    candidates = [(token, value, rank) for rank, (token, value) in enumerate(at.top, 1)]
    if at.token not in {token for token, _ in at.top}:
        candidates.insert(0, (at.token, at.logprob, at.rank))
    return {
        str(token): {
            "logprob": _finite(value),
            "rank": rank,
            "decoded_token": _text(token, decoder),
        }
        for token, value, rank in candidates
    }


def _by_text(at: TokenLogprobs, decoder: TokenDecoder) -> dict[str, float]:
    """Candidates by text; of two ids with the same text, the likelier one."""
    best: dict[str, float] = {}
    for token, value in ((at.token, at.logprob), *at.top):
        text = _text(token, decoder)
        best[text] = max(best.get(text, MIN_LOGPROB), _finite(value))
    return best


def _top_logprob(token: int, value: float, decoder: TokenDecoder) -> TopLogprob:
    data = decoder.bytes_of(token, skip_special_tokens=False)
    return {"token": _text(token, decoder), "logprob": _finite(value), "bytes": list(data)}


def _text(token: int, decoder: TokenDecoder) -> str:
    return decoder.decode([token], skip_special_tokens=False)


def _finite(value: float) -> float:
    return max(value, MIN_LOGPROB)
