"""Trains small SentencePiece models and freezes how sentencepiece encodes odd texts with them.

`--peer` starts Python in an environment that has sentencepiece.

    python scripts/sentencepiece_vectors.py --peer ENV/bin/python --write
"""

from __future__ import annotations

import argparse
import base64
import json
import subprocess
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Any

from ridgeline.engine.tokenization.vocabulary_files import read_vocabulary_files
from scripts.odd_strings import odd_strings

VECTORS = Path("tests/engine/tokenization/sentencepiece_models.json")
FROZEN = 40
RULES = "FF21\t41\nFF22\t42\nFB01\t66 69\nA0\t20\n3000\t20\nD A\tA\n65 301\tE9\n"
"""Replacements, in sentencepiece's format: wide letters, a ligature, blanks, an accent."""

COMMON: dict[str, Any] = {"vocab_size": 500, "hard_vocab_limit": False, "num_threads": 1}
MODELS: dict[str, dict[str, Any]] = {
    "unigram": {"model_type": "unigram", "byte_fallback": True, "rules": RULES},
    "unigram-plain": {"model_type": "unigram", "remove_extra_whitespaces": False},
    "bpe-llama": {
        "model_type": "bpe",
        "byte_fallback": True,
        "split_digits": True,
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
    },
    "bpe-gemma": {
        "model_type": "bpe",
        "byte_fallback": True,
        "add_dummy_prefix": False,
        "remove_extra_whitespaces": False,
        "user_defined_symbols": ["\n", "\n\n", "<table>", "▁▁", "▁▁▁"],
        "control_symbols": ["<start_of_turn>"],
    },
}
PEER = """
import json, sys, sentencepiece
folder, name, settings, texts = json.load(sys.stdin)
rules = settings.pop("rules", None)
settings["normalization_rule_name"] = "identity"
if rules:
    open(f"{folder}/rules.tsv", "w").write(rules)
    del settings["normalization_rule_name"]
    settings["normalization_rule_tsv"] = f"{folder}/rules.tsv"
sentencepiece.SentencePieceTrainer.train(
    input=f"{folder}/text.txt", model_prefix=f"{folder}/{name}", minloglevel=2, **settings
)
model = sentencepiece.SentencePieceProcessor(model_file=f"{folder}/{name}.model")
print(json.dumps([model.encode(text) for text in texts]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", required=True, help="Python with sentencepiece")
    parser.add_argument("--count", type=int, default=2000, help="texts per model")
    parser.add_argument("--write", action="store_true", help=f"write {VECTORS}")
    chosen = parser.parse_args()
    text = (files("ridgeline") / "assets" / "heldout" / "docs.txt").read_text(encoding="utf-8")
    texts, frozen = odd_strings(chosen.count), {}
    for name, settings in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "text.txt").write_text(text, encoding="utf-8")
            asked = json.dumps([folder, name, COMMON | settings, texts])
            command = [chosen.peer, "-c", PEER]
            out = subprocess.run(command, input=asked, capture_output=True, check=True, text=True)
            ids: list[list[int]] = json.loads(out.stdout)
            own = Path(folder) / "own"
            own.mkdir()
            data = (Path(folder) / f"{name}.model").read_bytes()
            (own / "tokenizer.model").write_bytes(data)
            inner = read_vocabulary_files(own)
        read = [inner.encode(text, add_special_tokens=False).ids for text in texts]
        wrong = [i for i in range(len(texts)) if read[i] != ids[i]]
        print(f"{name}: {len(texts) - len(wrong)} of {len(texts)} texts equal")
        for i in wrong[:5]:
            print(f"  {texts[i]!r}: {inner.encode(texts[i], add_special_tokens=False).tokens}")
            print(f"  sentencepiece: {[inner.id_to_token(token) for token in ids[i]]}")
        frozen[name] = {
            "model": base64.b64encode(data).decode(),
            "texts": [[texts[i], ids[i]] for i in range(FROZEN)],
        }
    if chosen.write:
        VECTORS.write_text(json.dumps(frozen, ensure_ascii=True, indent=0) + "\n", "utf-8")


if __name__ == "__main__":
    main()
