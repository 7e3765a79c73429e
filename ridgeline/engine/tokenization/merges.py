"""Merges of a byte-pair vocabulary that holds scores instead, as SentencePiece's does."""

from __future__ import annotations

from collections.abc import Mapping

from ridgeline.errors import BadModel

MAX_PIECE_CHARS = 1024
"""Of one piece. Published vocabularies have pieces of up to 128 characters; finding the merges of a
piece takes the square of its length."""


def ranked_merges(pieces: Mapping[str, tuple[int, float]]) -> list[tuple[str, str]]:
    """Every way to put a piece together from two, best piece first.

    `pieces` maps texts to token id and score. Raises BadModel for a piece that is too long.
    """
    longest = max(pieces, key=len, default="")
    if len(longest) > MAX_PIECE_CHARS:
        raise BadModel(
            f"the vocabulary has a piece of {len(longest)} characters",
            value=longest[:20],
            limit=f"{MAX_PIECE_CHARS} characters",
            fix="use the tokenizer that was published with the model",
        )
    merges = []
    for piece, (_, score) in pieces.items():
        halves = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        known = [(a, b) for a, b in halves if a in pieces and b in pieces]
        known.sort(key=lambda pair: (pieces[pair[0]][0], pieces[pair[1]][0]))
        merges += [(score, pair) for pair in known]
    merges.sort(key=lambda merge: -merge[0])
    return [pair for _, pair in merges]
