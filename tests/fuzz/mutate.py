"""Random changes of documents: of bytes, of texts, and of JSON values with a structure."""

from __future__ import annotations

import copy
import random
from typing import Any

ODD_TEXTS = (
    "", " ", "\x00", "a\x00b", "\ud800", "\u2028", "\ufeff", "🙂" * 3, "x" * 5000, "../../etc",
    "{{ 1 }}", "{% for %}", "-1", "1e999", "NaN", "null", "[" * 600, "a" * 70_000, "%s%n", "\r\n",
)  # fmt: skip
ODD_NUMBERS = (
    0, -1, 1, 2, 255, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63) - 1,
    10**30, 10**400, 0.5, -0.0, 1e-320, 1e308, float("inf"), float("-inf"), float("nan"),
)  # fmt: skip


def odd_value(rng: random.Random, depth: int = 0) -> Any:
    """A value of a random type, often at the edge of what a type holds."""
    kind = rng.randrange(8 if depth < 3 else 5)
    if kind == 0:
        return rng.choice((None, True, False))
    if kind in (1, 2):
        return rng.choice(ODD_NUMBERS)
    if kind in (3, 4):
        return rng.choice(ODD_TEXTS)
    if kind == 5:
        return [odd_value(rng, depth + 1) for _ in range(rng.choice((0, 1, 3)))]
    if kind == 6:
        return {str(rng.choice(ODD_TEXTS))[:50]: odd_value(rng, depth + 1) for _ in range(2)}
    return nested(rng.choice((20, 200)), rng.random() < 0.5)


def nested(depth: int, as_list: bool) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if as_list else {"a": value}
    return value


def mutate_json(rng: random.Random, document: Any, pool: list[Any] | None = None) -> Any:
    """A copy in which one to three places are changed. `pool`: further values to insert."""
    document = copy.deepcopy(document)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        document = _change(rng, document, pool or [])
    return document


def _change(rng: random.Random, document: Any, pool: list[Any]) -> Any:
    places = list(_places(document))
    if not places:
        return odd_value(rng)
    parent, key = rng.choice(places)
    action = rng.randrange(7)
    if action == 0:
        del parent[key]
    elif action == 1 and isinstance(parent, dict):
        parent[str(rng.choice(ODD_TEXTS))[:30]] = parent[key]
    elif action == 2 and isinstance(parent, list):
        parent.extend([parent[key]] * rng.choice((1, 50)))
    elif action == 3:
        other, name = rng.choice(places)
        if isinstance(other, dict) == isinstance(name, str) and _has(other, name):
            parent[key] = copy.deepcopy(other[name])
    elif action == 4 and isinstance(parent[key], str):
        parent[key] = mutate_text(rng, parent[key])
    elif action == 5 and pool:
        parent[key] = copy.deepcopy(rng.choice(pool))
    else:
        parent[key] = odd_value(rng)
    return document


def _has(container: Any, key: Any) -> bool:
    return key in container if isinstance(container, dict) else key < len(container)


def _places(value: Any) -> Any:
    """Every (container, key) of a document; of long lists the first few."""
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())[:60]
    elif isinstance(value, list):
        items = list(enumerate(value[:8]))
    for key, child in items:
        yield value, key
        yield from _places(child)


def mutate_text(rng: random.Random, text: str) -> str:
    if not text:
        return rng.choice(ODD_TEXTS)
    begin = rng.randrange(len(text))
    end = min(len(text), begin + rng.choice((1, 1, 4, 30)))
    middle = rng.choice(
        ("", text[begin:end] * 3, rng.choice(ODD_TEXTS), chr(rng.randrange(1, 128)))
    )
    return text[:begin] + middle + text[end:]


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """Flip, cut, repeat, insert, or overwrite lengths with extreme numbers."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(out) + 1)
        action = rng.randrange(6)
        if action == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif action == 1:
            del out[at : at + rng.choice((1, 4, 8, 100))]
        elif action == 2:
            out[at:at] = out[at : at + rng.choice((1, 8, 64))]
        elif action == 3:
            size = rng.choice((1, 2, 4, 8))
            out[at : at + size] = rng.choice((0, 1, 2**31, 2**63, 2**64 - 1)).to_bytes(8, "little")[
                :size
            ]
        elif action == 4:
            out[at:at] = rng.randbytes(rng.choice((1, 4, 16)))
        else:
            del out[at:]
    return bytes(out)
