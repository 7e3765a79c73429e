"""Calibration text: windows of the user's text or of the text shipped with this package.

The shipped text (`assets/calibration`) shares no file with the held-out text used to judge quality.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from ridgeline.compress.recipe import QuantizeRecipe
from ridgeline.engine.tokenization import bos_tokens, load_tokenizer
from ridgeline.errors import BadInput
from ridgeline.modelspec.model import ModelSpec

MOST_CHARACTERS = 20_000_000
MOST_HELD = 8


def shipped_text() -> str:
    """The shipped text: code and conversations."""
    folder = files("ridgeline") / "assets" / "calibration"
    chats = (folder / "chat.jsonl").read_text(encoding="utf-8").splitlines()
    lines = [
        f"{message['role']}: {message['content']}"
        for line in chats
        for message in json.loads(line)["messages"]
    ]
    return (folder / "code.txt").read_text(encoding="utf-8") + "\n\n".join(lines)


def read_text(file: Path | None) -> str:
    """The user's file, or the shipped text. Raises BadInput."""
    if file is None:
        return shipped_text()
    try:
        with file.open(encoding="utf-8") as text:  # a device or a pipe may never end
            return text.read(MOST_CHARACTERS)
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(
            "cannot read the calibration text", value=str(file), fix=str(error)
        ) from None


class TokenizedText(NamedTuple):
    """A text's tokens, and those that every window of it begins with: BOS, or none."""

    tokens: list[int]
    bos: list[int]

    def window(self, start: int, length: int) -> list[int]:
        """`length` tokens with BOS, from `start` of the text."""
        return [*self.bos, *self.tokens[start : start + length - len(self.bos)]]


def tokens_of(model: str, text: str) -> TokenizedText:
    """All tokens of the text, for training. `windows` has checked its length."""
    tokenizer = load_tokenizer(model)
    return TokenizedText(
        list(tokenizer.encode(text, add_special_tokens=False)), bos_tokens(tokenizer)
    )


def windows(model: str, text: str, recipe: QuantizeRecipe, vocab_size: int) -> list[list[int]]:
    """`num_windows` windows at positions drawn by the recipe's seed, as the model reads text.

    Each begins with BOS if the model's tokenizer adds it. Raises BadInput.
    """
    tokenized = _check_length(model, text, recipe, vocab_size)
    return _draw_windows(tokenized, [(0, len(tokenized.tokens))], recipe)


def why_not_calibrated(model: str, spec: ModelSpec, recipe: QuantizeRecipe) -> str:
    """Why activations of the shipped text cannot be measured; "" if they can.

    The model has no tokenizer, or one of another model, or parallel blocks, which the walk through
    layers cannot take in halves.
    """
    if any(layer.parallel for layer in spec.layers):
        return "blocks with parallel attention and MLP cannot be measured in halves"
    try:
        _check_length(model, shipped_text(), recipe, spec.vocab_size)
    except BadInput as error:
        return error.what
    return ""


class CalibrationSplit(NamedTuple):
    """Windows to learn from, and held-out windows that share no token of the text with them."""

    learnt: list[list[int]]
    held: list[list[int]]


def split_windows(
    model: str, text: str, recipe: QuantizeRecipe, vocab_size: int
) -> CalibrationSplit:
    """Like `windows`, with an eighth of the text (at least 1, at most 8 windows) held out at even
    distances.
    """
    tokenized, length = _check_length(model, text, recipe, vocab_size), recipe.window_tokens
    tokens = tokenized.tokens
    count = max(1, min(MOST_HELD, len(tokens) // (8 * length)))
    begins = [(2 * i + 1) * len(tokens) // (2 * count) - length // 2 for i in range(count)]
    edges = [0, *(edge for begin in begins for edge in (begin, begin + length)), len(tokens)]
    free = list(zip(edges[::2], edges[1::2], strict=True))
    held = [tokenized.window(begin, length) for begin in begins]
    return CalibrationSplit(_draw_windows(tokenized, free, recipe), held)


def _check_length(model: str, text: str, recipe: QuantizeRecipe, vocab_size: int) -> TokenizedText:
    tokenized = tokens_of(model, text)
    tokens = tokenized.tokens
    length = recipe.window_tokens
    if len(tokens) < 4 * length:
        raise BadInput(
            "the calibration text is too short",
            value=f"{len(tokens)} tokens",
            limit=f"at least {4 * length}: four windows of --calibration-tokens {length}",
        )
    _check_vocabulary(tokens, vocab_size)
    return tokenized


def _draw_windows(
    text: TokenizedText, free: Sequence[tuple[int, int]], recipe: QuantizeRecipe
) -> list[list[int]]:
    """`num_windows` windows within the ranges `free`, every position equally likely."""
    rng, length = random.Random(recipe.seed), recipe.window_tokens
    starts = [at for begin, end in free for at in range(begin, end - length + 1)]
    assert recipe.num_windows is not None, "an unchecked recipe"
    chosen = [starts[rng.randrange(len(starts))] for _ in range(recipe.num_windows)]
    return [text.window(start, length) for start in chosen]


def _check_vocabulary(tokens: Sequence[int], vocab_size: int) -> None:
    if max(tokens) >= vocab_size:
        raise BadInput(
            "the tokenizer knows tokens that the model lacks: they do not belong together",
            value=max(tokens),
            limit=f"{vocab_size} embeddings",
        )
