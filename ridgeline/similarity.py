"""How similar two questions must be to share an answer: a threshold from pairs of known meaning.

The pairs are an operator's own: questions that mean the same, and questions that look alike and do
not. A candidate threshold is tried on every second question, each compared with all first questions
of the file. Of a different pair, a hit is a false one if its nearest neighbour is at least that
similar; of an equal pair, if that neighbour is not its own first question. The false hits of both
kinds are counted against the number of different pairs, which makes the bound the larger one.
Candidates are tried from the strictest on, and the last one is taken before the upper bound of the
false-hit rate passes the limit. As this is a sequence in a fixed order, no correction for the
number of candidates is needed, and no second set of pairs (fixed sequence testing: Angelopoulos et
al., "Learn then Test", arXiv 2110.01052).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import numpy as np

from ridgeline.errors import DECODE_ERRORS, BadInput, CannotRun
from ridgeline.stats import LEVEL, proportion_upper_bound

if TYPE_CHECKING:
    import numpy.typing as npt

    Vector: TypeAlias = npt.NDArray[np.float32]  # [D]

MAX_QUESTION_TOKENS = 512
"""Longer messages are not compared: one vector would say little about them."""
STEP = 0.0025
"""Between two candidate thresholds."""
SAME = 1e-6
"""Cosines this close are equal: sums are rounded differently by their place in a matrix."""

Embed: TypeAlias = Callable[[str], Sequence[float]]


class QuestionPair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Two messages, and whether the answer to one is an answer to the other."""

    a: str
    b: str
    equal: bool


class SimilarityThreshold(msgspec.Struct, frozen=True, kw_only=True):
    """A threshold on the cosine of two centred embeddings, and what it does on the pairs.

    `num_mistaken`: equal pairs that hit the answer to another question. `false_hit_bound`: upper
    bound of the false-hit rate, theirs included, one-sided with 95 % confidence. `centre`
    [D] is subtracted from every embedding: the embeddings of a language model share a large part.
    """

    threshold: float
    num_equal: int
    num_hits: int
    num_mistaken: int
    num_different: int
    num_false_hits: int
    false_hit_bound: float
    centre: tuple[float, ...]

    @property
    def false_hit_rate(self) -> float:
        """False hits of both kinds, per different pair."""
        return (self.num_false_hits + self.num_mistaken) / self.num_different

    def direction(self, embedding: Sequence[float]) -> Vector:
        """The centred embedding at length 1."""
        vectors_ND = unit_vectors(np.asarray([embedding]), np.asarray(self.centre))
        return vectors_ND.reshape(-1)

    def __str__(self) -> str:
        return (
            f"similarity >= {self.threshold:.4f}: {self.num_hits} of {self.num_equal} equal pairs "
            f"hit and {self.num_mistaken} get another's answer, {self.num_false_hits} of "
            f"{self.num_different} different ones hit (false-hit rate {self.false_hit_rate:.3f}, "
            f"<= {self.false_hit_bound:.3f} with {LEVEL:.0%} confidence)"
        )


class VectorTable:
    """Unit vectors by key."""

    def __init__(self) -> None:
        self._vectors: dict[bytes, Vector] = {}
        self._stacked: tuple[list[bytes], Vector] | None = None  # until a vector comes or goes

    def __len__(self) -> int:
        return len(self._vectors)

    def add(self, key: bytes, vector: Vector) -> None:
        """Add or replace a vector."""
        self._vectors[key], self._stacked = vector, None

    def drop(self, key: bytes) -> None:
        """Remove a vector. Raises KeyError."""
        del self._vectors[key]
        self._stacked = None

    def nearest(self, vector: Vector) -> tuple[bytes, float]:
        """The key of the largest cosine, and that; the table must not be empty."""
        if self._stacked is None:
            self._stacked = [*self._vectors], np.stack([*self._vectors.values()])
        keys, matrix_ND = self._stacked
        cosines = matrix_ND @ vector
        best = int(cosines.argmax())
        return keys[best], float(cosines[best])


def unit_vectors(
    embeddings_ND: npt.NDArray[np.floating], centre_D: npt.NDArray[np.floating]
) -> Vector:
    """Embeddings without their common part, each at length 1; float32 [N, D]."""
    centred = embeddings_ND.astype(np.float64) - centre_D
    lengths = np.linalg.norm(centred, axis=1, keepdims=True)
    return np.asarray(centred / np.maximum(lengths, 1e-12), np.float32)


def read_pairs(path: Path) -> list[QuestionPair]:
    """The pairs of a JSONL file. Raises BadInput, which names the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        message = "the file of --semantic-cache-pairs cannot be read"
        raise BadInput(message, value=str(error)) from None
    pairs = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                pairs.append(msgspec.json.decode(line, type=QuestionPair))
            except DECODE_ERRORS as error:
                raise BadInput(
                    f"line {number} of --semantic-cache-pairs is no pair of questions",
                    value=str(error),
                    fix='write one JSON object a line: {"a": "…", "b": "…", "equal": true}',
                ) from None
    return pairs


def calibrate(pairs: Sequence[QuestionPair], embed: Embed, max_rate: float) -> SimilarityThreshold:
    """The lowest threshold whose false-hit rate is at most `max_rate` with 95 % confidence.

    Raises BadInput for too few pairs, CannotRun where no threshold within the limit has a hit.
    """
    same = [pair for pair in pairs if pair.equal]
    different = [pair for pair in pairs if not pair.equal]
    needed = math.ceil(math.log(1 - LEVEL) / math.log1p(-max_rate))
    if len(different) < needed or not same:
        raise BadInput(
            "--semantic-cache-pairs has too few pairs for --semantic-cache-max-false-hits "
            f"{max_rate:g}",
            value=f"{len(same)} equal and {len(different)} different pairs",
            fix=f"give at least one equal and {needed} different ones: no false hit among fewer "
            "shows such a rate",
        )
    vectors = {text: embed(text) for pair in pairs for text in (pair.a, pair.b)}
    centre = np.mean([vectors[text] for pair in same for text in (pair.a, pair.b)], axis=0)
    false = _nearest(different, pairs, vectors, centre)
    right, wrong = _hits_of_equal(same, pairs, vectors, centre)
    best: tuple[float, int, float] | None = None
    for step in range(math.ceil(2 / STEP)):
        threshold = 1 - step * STEP
        num_false = int(np.count_nonzero(false >= threshold))
        num_all = num_false + int(np.count_nonzero(wrong >= threshold))
        bound = proportion_upper_bound(min(num_all, len(different)), len(different))
        if bound > max_rate:
            break
        best = threshold, num_false, bound
    num_hits = 0 if best is None else int(np.count_nonzero(right >= best[0]))
    if best is None or not num_hits:
        raise CannotRun(
            "no similarity of this model's embeddings tells the equal from the different pairs of "
            f"--semantic-cache-pairs with a false-hit rate of at most {max_rate:g}: the semantic "
            "cache would never hit",
            fix="leave --semantic-cache-pairs out; exact answers are cached without it",
        )
    return SimilarityThreshold(
        threshold=best[0],
        num_equal=len(same),
        num_hits=num_hits,
        num_mistaken=int(np.count_nonzero(wrong >= best[0])),
        num_different=len(different),
        num_false_hits=best[1],
        false_hit_bound=best[2],
        centre=tuple(centre.tolist()),
    )


def similarities(
    queries: Sequence[str],
    stored: Sequence[str],
    vectors: dict[str, Sequence[float]],
    centre_D: npt.NDArray[np.floating],
) -> npt.NDArray[np.float32]:
    """Cosine of every query with every stored text; float32 [queries, stored]."""
    left, right = (
        unit_vectors(np.asarray([vectors[text] for text in texts]), centre_D)
        for texts in (queries, stored)
    )
    return np.asarray(left @ right.T, np.float32)


def _nearest(
    queries: Sequence[QuestionPair],
    stored: Sequence[QuestionPair],
    vectors: dict[str, Sequence[float]],
    centre_D: npt.NDArray[np.floating],
) -> npt.NDArray[np.float32]:
    """The highest similarity of each second text with any first text of the file."""
    first = [pair.a for pair in stored]
    table = similarities([pair.b for pair in queries], first, vectors, centre_D)
    return np.asarray(table.max(axis=1), np.float32)


def _hits_of_equal(
    queries: Sequence[QuestionPair],
    stored: Sequence[QuestionPair],
    vectors: dict[str, Sequence[float]],
    centre_D: npt.NDArray[np.floating],
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """(right, wrong): the similarity of each second text with its own first one where none is
    nearer, and with the nearest other one where that is nearer; elsewhere below every cosine."""
    first = [pair.a for pair in stored]
    table = similarities([pair.b for pair in queries], first, vectors, centre_D)
    is_own = np.array([[text == pair.a for text in first] for pair in queries])
    own, other = (np.where(mask, table, -2).max(axis=1) for mask in (is_own, ~is_own))
    is_right = own >= other - SAME  # the same text may stand in several pairs
    right, wrong = np.where(is_right, own, -2), np.where(is_right, -2, other)
    return np.asarray(right, np.float32), np.asarray(wrong, np.float32)
