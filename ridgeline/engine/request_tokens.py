"""Texts in a request's sampling parameters as token ids of the model."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ridgeline.engine.scheduler.token_rules import open_thinking
from ridgeline.engine.tokenization import Tokenizer
from ridgeline.engine.tokenization.output import special_stops
from ridgeline.errors import BadInput
from ridgeline.records import Sampling, ThinkingLimit


def with_token_ids(sampling: Sampling, tokenizer: Tokenizer, prompt: Sequence[int]) -> Sampling:
    """The sampling with stop strings that are special tokens, bad words and the marks of the
    thinking as token ids."""
    changes: dict[str, object] = {}
    if stops := special_stops(sampling, tokenizer):
        changes["stop_token_ids"] = (*sampling.stop_token_ids, *stops)
    if sampling.bad_words:
        ids = (word_tokens(word, tokenizer) for word in sampling.bad_words)
        changes["bad_words_token_ids"] = tuple(dict.fromkeys(word for own in ids for word in own))
    if sampling.thinking_token_budget is not None:
        changes["thinking_limit"] = _thinking_limit(sampling, tokenizer, tuple(prompt))
    return msgspec.structs.replace(sampling, **changes) if changes else sampling


def word_tokens(word: str, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """A word at the start of a text and, if it is a token sequence of equal length there, after a
    space: as vLLM."""
    plain = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False))
    spaced = tuple(tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
    if not plain:
        raise BadInput("a bad word has no tokens", value=word, fix="remove it from bad_words")
    differs = spaced[0] != plain[0] and len(spaced) == len(plain)
    return [plain, spaced] if differs else [plain]


def _thinking_limit(
    sampling: Sampling, tokenizer: Tokenizer, prompt: tuple[int, ...]
) -> ThinkingLimit:
    assert sampling.thinking_token_budget is not None
    marks = sampling.thinking_marks
    start, end, forced_end = (
        tuple(tokenizer.encode(text, add_special_tokens=False))
        for text in (marks.start, marks.end, marks.forced_end)
    )
    limit = ThinkingLimit(sampling.thinking_token_budget, start, end, forced_end)
    num_open = open_thinking(limit, prompt)
    return msgspec.structs.replace(
        limit, num_open=0 if num_open is None and marks.is_open else num_open
    )
