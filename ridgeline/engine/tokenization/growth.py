"""How much longer than a text a tokenizer.json can make it, bounded before it is loaded.

The steps of a normaliser, pre-tokenizer or decoder run one after the other, so their factors
multiply: `Replace` writes its content for each match, `Prepend` once for each word, and ten steps
that double a text make a thousand times of it. Published tokenizers replace a character by at most
a few.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ridgeline.errors import BadModel

MAX_GROWTH = 64
MAX_STEPS = 256
MAX_TEMPLATE_PIECES = 256
_PARTS = ("normalizer", "pre_tokenizer", "decoder")


def check_growth(document: Mapping[str, Any]) -> None:
    """BadModel if a part of a tokenizer.json makes a text more than `MAX_GROWTH` times as long."""
    for part in _PARTS:
        growth = 1.0
        for count, step in enumerate(_steps(document.get(part), 0), 1):
            growth *= _factor(step)
            if growth > MAX_GROWTH or count > MAX_STEPS:
                raise BadModel(
                    f"the {part} of tokenizer.json makes texts too long, or has too many steps",
                    value=f"{growth:g} times after {count} steps",
                    limit=f"{MAX_GROWTH} times, {MAX_STEPS} steps",
                    fix="use the tokenizer that was published with the model",
                )
    for step in _steps(document.get("post_processor"), 0):
        for name in ("single", "pair"):
            pieces = step.get(name)
            if isinstance(pieces, list) and len(pieces) > MAX_TEMPLATE_PIECES:
                raise BadModel(
                    "the post_processor of tokenizer.json adds too many tokens to a text",
                    value=len(pieces),
                    limit=MAX_TEMPLATE_PIECES,
                    fix="use the tokenizer that was published with the model",
                )


def _steps(value: object, depth: int) -> Iterator[Mapping[str, Any]]:
    """Every step, also those of sequences within sequences."""
    if not isinstance(value, Mapping) or depth > MAX_STEPS:
        return
    yield value
    for children in value.values():
        if isinstance(children, list):
            for child in children:
                yield from _steps(child, depth + 1)


def _factor(step: Mapping[str, Any]) -> float:
    content = step.get("content", step.get("prepend"))
    if step.get("type") not in ("Replace", "Prepend") or not isinstance(content, str):
        return 1.0
    pattern = step.get("pattern")
    literal = pattern.get("String") if isinstance(pattern, Mapping) else None
    # A regular expression may match a single character, or nothing between two.
    length = len(literal) if isinstance(literal, str) and literal else 0.5
    grown = len(content.encode("utf-8", "surrogatepass")) / length
    return max(1.0, grown if step["type"] == "Replace" else 1.0 + len(content) / 8)
