"""Compares every pre-tokenizer of GGUF files with llama.cpp's and freezes what the tests compare.

The vocabulary is that of the model `demo`, with each value of `tokenizer.ggml.pre` in turn.
`--peer` starts Python in an environment that has llama-cpp-python.

    python scripts/gguf_vocab_vectors.py --peer ENV/bin/python --write
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import gguf

from ridgeline.compress.writers.gguf_tokenizer import tokenizer_metadata
from ridgeline.engine.tokenization.gguf import tokenizer_of
from ridgeline.engine.tokenization.gguf_patterns import PRE_TOKENIZERS
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.checkpoints.locate import model_path
from scripts.odd_strings import odd_strings

VECTORS = Path("tests/engine/tokenization/gguf_pre_tokenizers.json")
FROZEN = 24


def vocabulary(pre: str) -> dict[str, Any]:
    """The metadata of demo's tokenizer under another pre-tokenizer; defaults decide on BOS."""
    metadata = tokenizer_metadata(model_path("demo"), load_spec("demo"))
    metadata = {key: value for key, value in metadata.items() if "add_" not in key}
    return metadata | {"tokenizer.ggml.pre": pre, "tokenizer.ggml.bos_token_id": 1}


def write_vocabulary(path: Path, metadata: dict[str, Any]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif value:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", required=True, help="Python with llama-cpp-python")
    parser.add_argument("--count", type=int, default=500, help="texts per pre-tokenizer")
    parser.add_argument("--write", action="store_true", help=f"write {VECTORS}")
    chosen = parser.parse_args()
    texts = odd_strings(chosen.count)
    names = [name for name, words in PRE_TOKENIZERS.items() if words.byte_level]
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder) / f"{i}.gguf" for i, name in enumerate(names)}
        for name, path in files.items():
            write_vocabulary(path, vocabulary(name))
        request = {"vocabularies": [str(path) for path in files.values()], "texts": texts}
        oracle = Path(__file__).with_name("llama_cpp_oracle.py")
        raw = subprocess.run(
            [chosen.peer, str(oracle)],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    theirs = dict(zip(names, json.loads(raw)["vocabularies"], strict=True))
    bad = 0
    for name in names:
        inner = tokenizer_of(vocabulary(name))
        wrong = [
            (text, ids, ours)
            for text, ids in zip(texts, theirs[name], strict=True)
            if (ours := inner.encode(text).ids) != ids
        ]
        bad += len(wrong)
        if wrong:
            print(name, f"{len(wrong)} of {len(texts)} differ, first:", *map(repr, wrong[0]))
    print(f"{len(names)} pre-tokenizers, {len(texts)} texts each: {bad} differ")
    if chosen.write:
        write_vectors(texts[:FROZEN], {name: ids[:FROZEN] for name, ids in theirs.items()})


def write_vectors(texts: list[str], ids: dict[str, list[list[int]]]) -> None:
    """Each text once with its distinct encodings; a pre-tokenizer names one for each text."""
    distinct: list[list[list[int]]] = [[] for _ in texts]
    chosen: dict[str, list[int]] = {}
    for name, encoded in ids.items():
        for known, tokens in zip(distinct, encoded, strict=True):
            if tokens not in known:
                known.append(tokens)
        chosen[name] = [known.index(t) for known, t in zip(distinct, encoded, strict=True)]
    document = {"texts": texts, "encodings": distinct, "pre_tokenizers": chosen}
    VECTORS.write_text(json.dumps(document, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
