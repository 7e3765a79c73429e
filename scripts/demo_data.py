"""Collect the demo model's data and train its tokenizer.

Everything comes from the Python distribution (PSF-2.0): the standard library's source as found
under ``sysconfig``'s stdlib path and, where the documentation package is installed, the manual's
reST sources.  Whole modules are kept out of training for the quality gate, together with their
tests, their manual pages and every chat pair mined from either.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import random
import re
import sysconfig
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
from demo_pairs import CHAT_TEMPLATE, Chat, code_chats, doc_chats, render, with_system
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SEED = 20240
END_OF_TEXT = "<|endoftext|>"
SPECIAL = (END_OF_TEXT, "<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
HELDOUT = frozenset(
    {
        "statistics",
        "pathlib",
        "configparser",
        "fractions",
        "heapq",
        "shlex",
        "csv",
        "queue",
        "sched",
        "json",
        "html",
        "tomllib",
    }
)
# Trained on, and so fit for calibrating quantisers, but never for judging them.
CALIBRATION = ("Lib/argparse.py", "Lib/contextlib.py", "Lib/asyncio/events.py")
SKIP_DIRS = {"site-packages", "pydoc_data", "encodings", "_bundled", "__pycache__", "dbm"}
TEST_DIRS = {"test", "tests", "idle_test", "tkinter_test", "testmock", "unittest/test"}
DOC_DIRS = ("library", "tutorial", "howto", "faq", "reference")
MAX_TEST_FILE = 60_000
TEST_BYTES = 2_000_000
CHAT_SHARE = 0.15
LICENSE_NOTE = """\
The text in this directory is taken from the Python standard library and its documentation.

Copyright (c) 2001-2023 Python Software Foundation; All Rights Reserved.
Licensed under the Python Software Foundation License Version 2 (PSF-2.0).
Full text: https://docs.python.org/3.11/license.html (also LICENSE.txt of any CPython release).
Changes: files are concatenated, and question/answer pairs were mined from docstrings, function
source and manual pages; the wording is otherwise the authors'.
"""


@dataclass
class Item:
    """One source file with where it came from and what it is used for."""

    rel: str
    text: str
    kind: str
    split: str = "train"

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


def is_heldout(rel: str) -> bool:
    """A path belongs to a held-out module: its source, its tests or its manual page."""
    for part in Path(rel).parts[1:]:
        stem = part.split(".")[0]
        if stem.removeprefix("test_") in HELDOUT:
            return True
    return False


def is_test(rel: str) -> bool:
    """Test code is plentiful and repetitive, so it is capped rather than taken whole."""
    parts = Path(rel).parts
    return bool(TEST_DIRS & set(parts)) or parts[-1].startswith("test_")


def is_table(text: str) -> bool:
    """Generated tables teach a small model nothing but digits."""
    dense = sum(c.isdigit() for c in text) + text.count("\\x") + text.count("\\u")
    return dense > 0.12 * len(text) or max(map(len, text.splitlines() or [""])) > 1000


def read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return None


def library_items(root: Path) -> list[Item]:
    """Standard-library modules and a capped, hash-ordered share of their tests."""
    items: list[Item] = []
    tests: list[Item] = []
    for path in sorted(root.rglob("*.py")):
        inner = path.relative_to(root)
        skip = SKIP_DIRS & set(inner.parts) or inner.name.startswith("_sysconfigdata")
        if skip or (inner.parts[0] == "lib2to3" and "data" in inner.parts):
            continue
        text = read_text(path)
        rel = f"Lib/{inner.as_posix()}"
        if text is None or len(text) < 200 or is_table(text):
            continue
        (tests if is_test(rel) else items).append(Item(rel, text, "code"))
    tests = [t for t in tests if len(t.text) <= MAX_TEST_FILE]
    tests.sort(key=lambda t: t.sha256)
    size = 0
    for test in tests:
        if is_heldout(test.rel) or size > TEST_BYTES:
            continue
        size += len(test.text)
        test.kind = "test"
        items.append(test)
    return items


def doc_items(root: Path) -> list[Item]:
    """The manual's reST sources; change logs are left out, they list rather than explain."""
    items = []
    for folder in DOC_DIRS:
        for path in sorted((root / folder).rglob("*.rst.txt")):
            text = read_text(path)
            if text and len(text) > 400 and not is_table(text):
                rel = f"Doc/{path.relative_to(root).as_posix()}".removesuffix(".txt")
                items.append(Item(rel, text, "doc"))
    return items


def collect(stdlib: Path, docs: Path | None) -> list[Item]:
    """All files, deduplicated by content, each with its split."""
    items = library_items(stdlib) + (doc_items(docs) if docs and docs.is_dir() else [])
    seen: set[str] = set()
    unique = []
    for item in items:
        if item.sha256 in seen:
            continue
        seen.add(item.sha256)
        item.split = "heldout" if is_heldout(item.rel) else "train"
        unique.append(item)
    return unique


def module_name(rel: str) -> str:
    """``Lib/email/message.py`` -> ``email.message``."""
    name = rel.removeprefix("Lib/").removesuffix(".py").replace("/", ".")
    return name.removesuffix(".__init__")


def mine(items: list[Item], rng: random.Random) -> list[Chat]:
    """Chat pairs from non-test items, in shuffled order."""
    chats: list[Chat] = []
    for item in items:
        if item.kind == "code":
            chats.extend(code_chats(module_name(item.rel), item.text, rng))
        elif item.kind == "doc":
            chats.extend(doc_chats(item.text, rng))
    unique = {json.dumps(c): c for c in chats}
    chats = with_system(list(unique.values()), rng)
    rng.shuffle(chats)
    budget = CHAT_SHARE / (1 - CHAT_SHARE) * sum(len(i.text) for i in items)
    sizes = accumulate(len(render(c)) for c in chats)
    return [c for c, size in zip(chats, sizes, strict=True) if size <= budget]


def train_tokenizer(texts: list[str], vocab: int) -> Tokenizer:
    """Byte-level BPE: no unknowns, and Python's indentation becomes single tokens."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tok.train_from_iterator(texts, trainer)
    return tok


def tokenizer_config() -> dict:
    """What ``PreTrainedTokenizerFast`` needs to load the tokenizer and apply the template."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": list(SPECIAL[1:]),
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }


def stream(tok: Tokenizer, texts: list[str]) -> np.ndarray:
    """One token stream, documents parted by the end-of-text token."""
    end = tok.token_to_id(END_OF_TEXT)
    ids: list[int] = []
    for enc in tok.encode_batch(texts, add_special_tokens=False):
        ids.extend(enc.ids)
        ids.append(end)
    return np.asarray(ids, dtype=np.uint16)


def overlap(heldout: str, train: str) -> float:
    """Share of long held-out lines that also occur in training text: what leaked anyway."""
    known = {ln.strip() for ln in train.splitlines()}
    lines = [ln.strip() for ln in heldout.splitlines() if len(ln.strip()) >= 40]
    return sum(ln in known for ln in lines) / max(1, len(lines))


def write_chats(path: Path, chats: list[Chat]) -> None:
    path.write_text("".join(json.dumps({"messages": c}) + "\n" for c in chats))


def take(texts: list[str], limit: int) -> str:
    """Concatenate whole texts up to about ``limit`` characters."""
    out, size = [], 0
    for text in texts:
        if size + len(text) <= limit or not out:
            out.append(text[:limit])
            size += len(text)
    return "\n\n".join(out)


def write_assets(assets: Path, items: list[Item], chats: dict[str, list[Chat]]) -> None:
    """Held-out text for the quality gate, and calibration text disjoint from it."""
    held = assets / "heldout"
    cal = assets / "calibration"
    for folder in (held, cal):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "LICENSE").write_text(LICENSE_NOTE)
    code = [i.text for i in items if i.split == "heldout" and i.kind == "code"]
    docs = [i.text for i in items if i.split == "heldout" and i.kind == "doc"]
    (held / "code.txt").write_text(take(code, 260_000))
    (held / "docs.txt").write_text(take(docs, 100_000))
    write_chats(held / "chat.jsonl", chats["heldout"][:150])
    code = [i.text for i in items if i.rel in CALIBRATION]
    (cal / "code.txt").write_text(take(code, 150_000))
    write_chats(cal / "chat.jsonl", chats["train"][:100])


def manifest(items: list[Item], docs: list[str], chats: dict[str, list[Chat]]) -> dict:
    """Every file with its hash and split, and the measurements of the split."""
    train = "\n".join(i.text for i in items if i.split == "train")
    held = "\n".join(i.text for i in items if i.split == "heldout" and i.kind == "code")
    files = [
        {"path": i.rel, "sha256": i.sha256, "bytes": len(i.text.encode()), "kind": i.kind,
         "split": i.split} for i in items
    ]  # fmt: skip
    return {
        "source": f"CPython {platform.python_version()} standard library and 3.11 manual",
        "license": "PSF-2.0",
        "seed": SEED,
        "heldout_modules": sorted(HELDOUT),
        "calibration": list(CALIBRATION),
        "heldout_line_overlap": round(overlap(held, train), 4),
        "chats": {name: len(c) for name, c in chats.items()},
        "train_bytes": sum(len(d.encode()) for d in docs),
        "train_chat_bytes": sum(len(render(c).encode()) for c in chats["train"]),
        "files": files,
    }


def default_docs() -> Path:
    """Where Debian's documentation package puts the reST sources."""
    version = ".".join(platform.python_version_tuple()[:2])
    return Path(f"/usr/share/doc/python{version}/html/_sources")


def prepare(work: Path, assets: Path, vocab: int, stdlib: Path, docs: Path | None) -> dict:
    """Run the whole data stage; returns the manifest."""
    rng = random.Random(SEED)
    items = collect(stdlib, docs)
    chats = {s: mine([i for i in items if i.split == s], rng) for s in ("train", "heldout")}
    texts = [i.text for i in items if i.split == "train"]
    texts += [render(c) for c in chats["train"]]
    rng.shuffle(texts)
    info = manifest(items, texts, chats)
    write_assets(assets, items, chats)
    work.mkdir(parents=True, exist_ok=True)
    tok = train_tokenizer([re.sub(r"<\|\w+\|>", "", t) for t in texts], vocab)
    tok.save(str(work / "tokenizer.json"))
    (work / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(), indent=2) + "\n")
    ids = stream(tok, texts)
    ids.tofile(work / "train.u16")
    info.update(train_tokens=len(ids), vocab=tok.get_vocab_size())
    for asset in sorted((*assets.glob("heldout/*"), *assets.glob("calibration/*"))):
        digest = hashlib.sha256(asset.read_bytes()).hexdigest()
        info.setdefault("assets", {})[f"{asset.parent.name}/{asset.name}"] = digest
    (work / "manifest.json").write_text(json.dumps(info, indent=1) + "\n")
    return info


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="scratch directory")
    parser.add_argument("--assets", type=Path, default=Path("ridgeline/assets"))
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_path("stdlib")))
    parser.add_argument("--docs", type=Path, default=default_docs())
    args = parser.parse_args()
    info = prepare(args.work, args.assets, args.vocab, args.stdlib, args.docs)
    print(json.dumps({k: v for k, v in info.items() if k != "files"}, indent=1))


if __name__ == "__main__":
    main()
