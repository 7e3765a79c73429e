"""Which passages of a request are kept, and in which order.

Near duplicates are those whose sets of shingles (runs of SHINGLE words) overlap: the exact Jaccard
index, of which MinHash is an estimate for collections too large to compare; a request has hundreds
of passages. The canonical order depends on the texts alone, so that two requests with the same
passages, retrieved in different orders, have the same prompt up to the question.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from hashlib import blake2b

SHINGLE = 4
"""Words of a shingle: shorter ones are shared by unrelated texts."""
_WORD = re.compile(r"\w+")


def drop_duplicates(texts: Sequence[str], similarity: float = 1.0) -> list[int]:
    """Indices of the passages to keep, in order; the first of each set of duplicates stays.

    Passages that differ in white space only are duplicates; with a `similarity` below 1, also those
    whose shingles have at least that Jaccard index with those of a passage that is kept.
    """
    kept: list[int] = []
    seen: set[str] = set()
    owners: defaultdict[int, list[int]] = defaultdict(list)  # shingle -> kept passages with it
    sizes: dict[int, int] = {}
    for index, text in enumerate(texts):
        plain = " ".join(text.split())
        if plain in seen:
            continue
        seen.add(plain)
        if similarity < 1:
            own = shingles(text)
            shared = Counter(owner for shingle in own for owner in owners.get(shingle, ()))
            if any(n >= similarity * (len(own) + sizes[k] - n) for k, n in shared.items()):
                continue
            sizes[index] = len(own)
            for shingle in own:
                owners[shingle].append(index)
        kept.append(index)
    return kept


def shingles(text: str) -> frozenset[int]:
    """Hashes of the runs of SHINGLE words, in lower case; of all words of a shorter text."""
    words = _WORD.findall(text.lower())
    last = max(1, len(words) - SHINGLE + 1)
    return frozenset(hash(tuple(words[i : i + SHINGLE])) for i in range(last))


def canonical_order(texts: Sequence[str]) -> list[int]:
    """Indices in an order that the texts alone decide: that of their digests."""
    return sorted(range(len(texts)), key=lambda index: text_digest(texts[index]))


def text_digest(text: str) -> bytes:
    """A digest of the text, but for its white space."""
    return blake2b(" ".join(text.split()).encode(), digest_size=16).digest()
