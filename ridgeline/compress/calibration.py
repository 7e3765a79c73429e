"""The text that activations are measured on: pieces of the user's own, or of the text shipped here.

The shipped text (`assets/calibration`) shares no file with the held-out text that quality is judged
by.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from ridgeline.compress.recipe import Recipe
from ridgeline.engine.text import load_tokenizer
from ridgeline.errors import BadInput

MOST_CHARACTERS = 20_000_000


def shipped_text() -> str:
    """Code and conversations."""
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
        return file.read_text(encoding="utf-8")[:MOST_CHARACTERS]
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(
            "cannot read the calibration text", value=str(file), fix=str(error)
        ) from None


def tokens_of(model: str, text: str) -> list[int]:
    """The whole text, for training; `windows` has checked it."""
    return list(load_tokenizer(model).encode(text))


def windows(model: str, text: str, recipe: Recipe, vocab_size: int) -> list[list[int]]:
    """`num_windows` pieces at places drawn by the recipe's seed. Raises BadInput."""
    tokens = load_tokenizer(model).encode(text)
    length = recipe.window_tokens
    if len(tokens) < 4 * length:
        raise BadInput(
            "the calibration text is too short",
            value=f"{len(tokens)} tokens",
            limit=f"at least {4 * length}: four windows of --calibration-tokens {length}",
        )
    _refuse_foreign(tokens, vocab_size)
    rng = random.Random(recipe.seed)
    starts = [rng.randrange(len(tokens) - length + 1) for _ in range(recipe.num_windows)]
    return [list(tokens[start : start + length]) for start in starts]


def _refuse_foreign(tokens: Sequence[int], vocab_size: int) -> None:
    if max(tokens) >= vocab_size:
        raise BadInput(
            "the tokenizer knows tokens that the model lacks: they do not belong together",
            value=max(tokens),
            limit=f"{vocab_size} embeddings",
        )
