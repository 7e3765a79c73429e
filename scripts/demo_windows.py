"""What the demo models are trained on, window by window: the text, and text shown twice.

Models that edit code or answer questions on a document mostly repeat what stands in their prompt.
A model this small, trained on so little, does not find that out by itself: it is shown pieces of
its text followed by the same piece again: as it is, with a name renamed, without a line, from some
line on, or as a question and its answer. How often is `--repeats`, the share of such windows.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import torch
from demo_pairs import chat, fenced, render
from tokenizers import Tokenizer
from torch import Tensor

END_OF_TEXT = "<|endoftext|>"
NAME = re.compile(r"[A-Za-z_][A-Za-z_0-9]{3,}")
CHARACTERS_PER_TOKEN = 3.5
AGAIN = ("\n\n", "\n\n# Copy:\n", "\n\nOnce more:\n", "\n\n# As above:\n", "\n\n---\n\n")
QUOTED = ("\n\nIt says:\n", "\n\n# From above:\n", "\n\n> ", "\n\n[...]\n")
ASKED = ("Repeat this.", "Say it again:", "Copy this code.", "Write this once more, unchanged.")


@dataclass
class Windows:
    """Windows of a token stream, some of them of text shown twice.

    What comes depends on the seed and on how many windows were drawn only, so a resumed run sees
    the same. `drawn` counts those of `length`; another length starts a new permutation.
    """

    stream: np.ndarray
    seed: int
    repeats: float = 0.0
    tok: Tokenizer | None = None
    texts: list[str] = field(default_factory=list)
    drawn: int = 0
    length: int = 0

    def __post_init__(self) -> None:
        self.weights = [len(text) for text in self.texts]
        self.names = sorted({name for text in self.texts[::7] for name in NAME.findall(text)})
        self._order: tuple[tuple[int, int], np.ndarray] | None = None

    def batch(self, tokens: int, length: int) -> tuple[Tensor, Tensor]:
        """The next `tokens` in windows of `length`, and what follows each token."""
        if self.length != length:
            self.drawn, self.length = 0, length
        rows = range(self.drawn, self.drawn + tokens // length)
        self.drawn = rows.stop
        ids = torch.from_numpy(np.stack([self._window(row) for row in rows]))
        return ids[:, :-1], ids[:, 1:]

    def _window(self, row: int) -> np.ndarray:
        rng = random.Random(f"{self.seed}-{self.length}-{row}")
        if self.repeats and rng.random() < self.repeats:
            return self._shown_twice(rng)
        per_epoch = (len(self.stream) - self.length - 1) // self.length - 1
        epoch, index = divmod(row, per_epoch)
        offset = int(np.random.default_rng((self.seed, self.length, epoch)).integers(self.length))
        start = offset + int(self._permutation(epoch, per_epoch)[index]) * self.length
        return self.stream[start : start + self.length + 1].astype(np.int64)

    def _permutation(self, epoch: int, count: int) -> np.ndarray:
        """Cached, because drawing it again for every window would be wasteful."""
        key = (self.length, epoch)
        if self._order is None or self._order[0] != key:
            rng = np.random.default_rng((self.seed, *key, 1))
            self._order = key, rng.permutation(count)
        return self._order[1]

    def _shown_twice(self, rng: random.Random) -> np.ndarray:
        """A window filled with pieces and their transformations; the last piece is cut."""
        assert self.tok is not None
        most = int(self.length * CHARACTERS_PER_TOKEN * 0.45)
        found: list[int] = []
        while len(found) < self.length + 1:
            text = rng.choices(self.texts, self.weights)[0]
            size = rng.randrange(150, most)
            at = rng.randrange(max(1, len(text) - size))
            again = twice(text[at : at + size], self.names, rng) + END_OF_TEXT
            found += self.tok.encode(again, add_special_tokens=False).ids
        return np.asarray(found[: self.length + 1])


def twice(piece: str, names: list[str], rng: random.Random) -> str:
    """The piece, and the piece again in one of five ways."""
    kind = rng.random()
    lines = piece.splitlines(keepends=True)
    if kind < 0.35:
        return piece + rng.choice(AGAIN) + piece
    if kind < 0.6:
        heading, again = renamed(piece, rng.choice(names))
        return piece + heading + again
    if kind < 0.75 and len(lines) > 4:
        gone = rng.randrange(1, len(lines) - 1)
        heading = f"\n\n# Without `{lines[gone].strip()}`:\n"
        return piece + heading + "".join(lines[:gone] + lines[gone + 1 :])
    if kind < 0.9 and len(lines) > 4:
        return piece + rng.choice(QUOTED) + "".join(lines[rng.randrange(1, len(lines) // 2 + 1) :])
    return render(chat(f"{rng.choice(ASKED)}\n{fenced(piece)}", fenced(piece)))


def renamed(piece: str, new: str) -> tuple[str, str]:
    """A heading that asks for it, and the piece with its most frequent name called `new`."""
    found = Counter(NAME.findall(piece))
    old = found.most_common(1)[0][0] if found else "x"
    return f"\n\n# {old} renamed to {new}:\n", re.sub(rf"\b{old}\b", new, piece)


@torch.no_grad()
def copied(model: torch.nn.Module, tok: Tokenizer, text: str, heading: str = AGAIN[1]) -> float:
    """Share of the tokens of a second showing that the model names: pieces of 500 characters."""
    right = seen = 0
    for at in range(0, 16 * 600, 600):
        first = tok.encode(text[at : at + 500] + heading, add_special_tokens=False).ids
        again = tok.encode(text[at : at + 500], add_special_tokens=False).ids
        named = model.logits(torch.tensor([first + again]))[0].argmax(-1)[len(first) : -1]
        right += int((named == torch.tensor(again[1:])).sum())
        seen += len(named)
    return right / seen
