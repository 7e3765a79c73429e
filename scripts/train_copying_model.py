"""Teach the demo model to repeat what it was shown, on a CPU: a model for measuring speculation.

    python scripts/train_copying_model.py --output build/copying [--minutes 20]
    python benchmarks/bench_speculation.py --model build/copying --workloads edit rename question

Code edits and questions on a document are answered by models that copy: most of the answer stands
in the prompt. The demo model does not, it is too little trained, and falls into repetitions of its
own; what prompt lookup gains on it says little of such work. This goes on training it for some
minutes on pieces of its training text followed by the same piece again: verbatim, with a name
renamed as a line before it says, with its beginning given. Half of what it sees is plain text. The
held-out modules, which the benchmark's prompts are cut from, are kept out of this as they were of
the demo's own training.
"""

from __future__ import annotations

import argparse
import random
import sys
import sysconfig
import time
from pathlib import Path

import torch
from demo_data import collect, default_docs
from demo_export import write_model
from demo_model import Optimiser, TinyLlama
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from train_demo_model import SHAPES, lr_scale

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

from bench_speculation import NAME, renamed

LENGTH, ROWS = 512, 8
RATES = 0.006, 0.002  # Muon's and AdamW's: the demo's own last ones were 0.012 and 0.004
HEADINGS = (
    "\n\n# The same again:\n",
    "\n\nIn short: ",
    "\n\n# Copy:\n",
    "\n\nOnce more:\n",
    "\n\n",
    "\n\n# As above:\n",
)


class Windows:
    """Windows of LENGTH + 1 tokens: plain text, or pieces and what is to be made of them."""

    def __init__(self, texts: list[str], tok: Tokenizer, seed: int) -> None:
        self.texts, self.tok, self.rng = texts, tok, random.Random(seed)
        self.weights = [len(text) for text in texts]
        self.names = sorted({name for text in texts[::7] for name in NAME.findall(text)})

    def piece(self, size: int) -> str:
        text = self.rng.choices(self.texts, self.weights)[0]
        at = self.rng.randrange(max(1, len(text) - size))
        return text[at : at + size]

    def shown_twice(self) -> str:
        piece = self.piece(self.rng.randrange(150, 900))
        if self.rng.random() < 0.3:
            heading, again = renamed(piece, self.rng.choice(self.names))
        else:
            heading, again = self.rng.choice(HEADINGS), piece
        return f"{piece}{heading}{again}<|endoftext|>"

    def ids(self) -> list[int]:
        found: list[int] = []
        copies = self.rng.random() < 0.5
        while len(found) < LENGTH + 1:
            text = self.shown_twice() if copies else self.piece(4 * LENGTH)
            found += self.tok.encode(text, add_special_tokens=False).ids
        return found[: LENGTH + 1]

    def batch(self) -> tuple[Tensor, Tensor]:
        ids = torch.tensor([self.ids() for _ in range(ROWS)])
        return ids[:, :-1], ids[:, 1:]


@torch.no_grad()
def copied(model: TinyLlama, tok: Tokenizer, heldout: Path) -> float:
    """Share of the tokens of a second showing that the model names, on held-out code."""
    text = (heldout / "code.txt").read_text()
    right = seen = 0
    for at in range(0, 16 * 600, 600):
        first = tok.encode(text[at : at + 500] + HEADINGS[0], add_special_tokens=False).ids
        again = tok.encode(text[at : at + 500], add_special_tokens=False).ids
        named = model.logits(torch.tensor([first + again]))[0].argmax(-1)[len(first) : -1]
        right += int((named == torch.tensor(again[1:])).sum())
        seen += len(named)
    return right / seen


def train(model: TinyLlama, windows: Windows, minutes: float, tok: Tokenizer, held: Path) -> None:
    opt = Optimiser(model, *RATES)
    began, step = time.monotonic(), 0
    while (progress := (time.monotonic() - began) / (60 * minutes)) < 1:
        ids, targets = windows.batch()
        loss = model(ids, targets)
        loss.backward()
        opt.step(lr_scale(progress))
        opt.zero_grad()
        step += 1
        if step % 50 == 0:
            share = f", copies {copied(model, tok, held):.1%}" if step % 200 == 0 else ""
            print(f"{step:6d} {progress:6.1%} loss {loss.item():.3f}{share}", flush=True)
    print(f"{step} steps of {LENGTH * ROWS} tokens, copies {copied(model, tok, held):.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--assets", type=Path, default=Path("ridgeline/assets"))
    parser.add_argument("--start", type=Path, help="go on from this directory (the demo model)")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_path("stdlib")))
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.set_flush_denormal(True)
    demo = given.assets / "demo"
    tok = Tokenizer.from_file(str(demo / "tokenizer.json"))
    model = TinyLlama(SHAPES["demo"])
    weights = load_file((given.start or demo) / "model.safetensors")
    model.load_state_dict({name: t.float() for name, t in weights.items()})
    items = collect(given.stdlib, default_docs())
    texts = [item.text for item in items if item.split == "train"]
    train(model, Windows(texts, tok, given.seed), given.minutes, tok, given.assets / "heldout")
    given.output.mkdir(parents=True, exist_ok=True)
    gap = write_model(model, demo, given.output)
    print(f"{given.output}: logits agree with transformers within {gap:.1e}")


if __name__ == "__main__":
    main()
