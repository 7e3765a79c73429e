"""Log-probabilities in the API's three shapes: completions, chat, vLLM's `prompt_logprobs`.

All are the raw log-softmax before temperature, penalties and masks. The chosen token is always
among the listed ones, even where it is not among the top k. Minus infinity, which JSON cannot say,
is sent as -9999.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from ridgeline.records import TokenLogprobs

LOWEST = -9999.0
Positions = Sequence[TokenLogprobs | None]


class TokenNames(Protocol):
    """How a token is written."""

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def bytes_of(self, token: int, *, skip_special_tokens: bool = True) -> bytes: ...


class IdNames:
    """Tokens as `token_id:ID`, so that no two are written alike; their bytes stay theirs."""

    def __init__(self, tokenizer: TokenNames) -> None:
        self.bytes_of = tokenizer.bytes_of

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(f"token_id:{token}" for token in tokens)


class Offsets:
    """Where in a text that grows each token's begins, in characters. A token that is a part of a
    character begins where the character does: characters count once they are whole."""

    def __init__(self) -> None:
        self._num_chars = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def of(self, pieces: Iterable[bytes]) -> list[int]:
        """Of the tokens that come next, by their bytes."""
        offsets: list[int] = []
        for piece in pieces:
            offsets.append(self._num_chars)
            self._num_chars += len(self._decoder.decode(piece))
        return offsets

    def of_prompt(self, text: str, pieces: Sequence[bytes]) -> list[int]:
        """Of a prompt's tokens, with which a choice opens: the answer begins behind its `text`.
        What its tokens have before that (a begin mark, a blank) begins with it."""
        before = max(0, len(b"".join(pieces).decode("utf-8", "replace")) - len(text))
        offsets = [max(0, at - before) for at in self.of(pieces)]
        self._decoder.reset()
        self._num_chars = len(text)
        return offsets


def completion_logprobs(
    positions: Positions, names: Sequence[str], tokenizer: TokenNames, offsets: Sequence[int]
) -> dict[str, Any]:
    """`{tokens, token_logprobs, top_logprobs, text_offset}`; `names`: the tokens as `tokenizer`
    writes them; `offsets`: where in the text each begins, in characters.

    A None position (the first token of a prompt, which nothing predicts) gives nulls.
    """
    return {
        "tokens": list(names),
        "token_logprobs": [None if at is None else _number(at.logprob) for at in positions],
        "top_logprobs": [None if at is None else _as_map(at, tokenizer) for at in positions],
        "text_offset": list(offsets),
    }


def chat_logprobs(positions: Sequence[TokenLogprobs], tokenizer: TokenNames) -> dict[str, Any]:
    """`{content: [{token, logprob, bytes, top_logprobs}]}`."""
    content = [
        {
            **_entry(at.token, at.logprob, tokenizer),
            "top_logprobs": [_entry(token, value, tokenizer) for token, value in at.top],
        }
        for at in positions
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(positions: Positions, tokenizer: TokenNames) -> list[dict[str, Any] | None]:
    """vLLM's form: per prompt token a map of token id to `{logprob, rank, decoded_token}`."""
    return [None if at is None else _ranked(at, tokenizer) for at in positions]


def trimmed(at: TokenLogprobs | None, num_top: int) -> TokenLogprobs | None:
    """The position with only its `num_top` most likely tokens."""
    if at is None or len(at.top) <= num_top:
        return at
    return TokenLogprobs(at.token, at.logprob, at.rank, at.top[:num_top])


def _ranked(at: TokenLogprobs, tokenizer: TokenNames) -> dict[str, Any]:
    listed = [(token, value, rank) for rank, (token, value) in enumerate(at.top, 1)]
    if at.token not in {token for token, _ in at.top}:
        listed.insert(0, (at.token, at.logprob, at.rank))
    return {
        str(token): {
            "logprob": _number(value),
            "rank": rank,
            "decoded_token": _text(token, tokenizer),
        }
        for token, value, rank in listed
    }


def _as_map(at: TokenLogprobs, tokenizer: TokenNames) -> dict[str, float]:
    """Text → log-probability. Of two ids with the same text the likelier one stands."""
    best: dict[str, float] = {}
    for token, value in ((at.token, at.logprob), *at.top):
        text = _text(token, tokenizer)
        best[text] = max(best.get(text, LOWEST), _number(value))
    return best


def _entry(token: int, value: float, tokenizer: TokenNames) -> dict[str, Any]:
    own = tokenizer.bytes_of(token, skip_special_tokens=False)
    return {"token": _text(token, tokenizer), "logprob": _number(value), "bytes": list(own)}


def _text(token: int, tokenizer: TokenNames) -> str:
    return tokenizer.decode([token], skip_special_tokens=False)


def _number(value: float) -> float:
    return max(value, LOWEST)
