"""The texts and questions that quality is judged by, tokenised for a model."""

from __future__ import annotations

import random
from importlib.resources import files

import msgspec

from ridgeline.engine.tokenization import Tokenizer, bos_tokens
from ridgeline.errors import BadInput
from ridgeline.optimize import quality
from ridgeline.optimize.quality import Task

WINDOW_KINDS = ("code", "prose", "code", "chat")
"""The kinds of text that the held-out windows cycle through."""


def heldout_texts() -> dict[str, str]:
    """The held-out text by kind; twice as much code as of the others."""
    folder = files("ridgeline") / "assets" / "heldout"
    names = {"code": "code.txt", "prose": "docs.txt"}
    texts = {kind: (folder / name).read_text(encoding="utf-8") for kind, name in names.items()}
    lines = (folder / "chat.jsonl").read_text(encoding="utf-8").splitlines()
    chats = [msgspec.json.decode(line)["messages"] for line in lines]
    transcripts = ("\n\n".join(f"{m['role']}: {m['content']}" for m in chat) for chat in chats)
    return {**texts, "chat": "\n\n".join(transcripts)}


def heldout_pieces(num_chars: int, limit: int) -> tuple[str, ...]:
    """Pieces of the held-out texts, their kinds alternating, each kind in random order."""
    kinds = []
    for kind, text in sorted(heldout_texts().items()):
        starts = list(range(0, len(text) - num_chars, num_chars))
        random.Random(kind).shuffle(starts)
        kinds.append([text[start : start + num_chars] for start in starts])
    pieces = [piece for row in zip(*kinds, strict=False) for piece in row]
    return tuple(pieces[: limit - limit % len(kinds)])


def heldout_windows(
    tokenizer: Tokenizer, length: int, seed: int = 0
) -> tuple[tuple[int, ...], ...]:
    """Windows of `length` tokens, their kinds in the order of `WINDOW_KINDS`.

    Each begins with BOS if the tokenizer adds it to a text. Raises BadInput if the model has no
    tokenizer.
    """
    bos = bos_tokens(tokenizer)
    tokens = {
        kind: tokenizer.encode(text, add_special_tokens=False)
        for kind, text in heldout_texts().items()
    }
    half = len(tokens["code"]) // 2
    sources = (tokens["code"][:half], tokens["prose"], tokens["code"][half:], tokens["chat"])
    windows = quality.cut_windows(sources, length - len(bos), seed)
    return tuple((*bos, *window) for window in windows)


def quality_tasks(tokenizer: Tokenizer) -> tuple[Task, ...]:
    """The multiple-choice questions; none for a model without a tokenizer."""
    try:
        return quality.make_tasks(tokenizer.encode)
    except BadInput:
        return ()
