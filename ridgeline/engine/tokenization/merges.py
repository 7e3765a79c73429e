"""Merges of a byte-pair vocabulary that holds scores instead, as SentencePiece's does."""

from __future__ import annotations

from collections.abc import Mapping


def ranked_merges(pieces: Mapping[str, tuple[int, float]]) -> list[tuple[str, str]]:
    """Every way to put a piece together from two, best piece first.

    `pieces` maps texts to token id and score.
    """
    merges = []
    for piece, (_, score) in pieces.items():
        halves = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        known = [(a, b) for a, b in halves if a in pieces and b in pieces]
        known.sort(key=lambda pair: (pieces[pair[0]][0], pieces[pair[1]][0]))
        merges += [(score, pair) for pair in known]
    merges.sort(key=lambda merge: -merge[0])
    return [pair for _, pair in merges]
