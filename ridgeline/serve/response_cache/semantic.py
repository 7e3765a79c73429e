"""Stored answers by the meaning of the last user message; all else of a request must be equal.

An index over the answers of `ResponseCache`, which bounds it. An answer belongs to the question
that it was computed for: one that was given to another question is not stored again under that, so
that meanings do not drift from hit to hit.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ridgeline.config.server import ServerOptions
from ridgeline.errors import BadInput
from ridgeline.serve.engine_protocol import ServedEngine
from ridgeline.serve.generation.request import GenerationRequest, Question
from ridgeline.similarity import (
    MAX_QUESTION_TOKENS,
    SimilarityThreshold,
    VectorTable,
    calibrate,
    read_pairs,
)

if TYPE_CHECKING:
    from ridgeline.similarity import Vector


class ScopedVector(msgspec.Struct, frozen=True):
    """Where an answer may be found: questions of `scope` near `vector`."""

    scope: bytes
    vector: Vector

    @property
    def nbytes(self) -> int:
        return 2 * int(self.vector.nbytes) + 256  # it is also a row of its scope's matrix


def place_of(question: Question, request: GenerationRequest, model: str) -> ScopedVector:
    """Where the answer to a request may be found, and is put: its scope is all but the message."""
    sampling = request.sampling
    if sampling.greedy:
        sampling = msgspec.structs.replace(sampling, seed=None)
    fields = (model, request.scheduling.tenant, question.rest, sampling)
    scope = blake2b(msgspec.msgpack.encode(fields), digest_size=32).digest()
    return ScopedVector(scope, question.vector)


class SemanticIndex:
    """Keys of stored answers by scope and vector."""

    def __init__(self, calibration: SimilarityThreshold) -> None:
        self.calibration = calibration
        self._tables: dict[bytes, VectorTable] = {}
        self._scope_of: dict[bytes, bytes] = {}

    def __len__(self) -> int:
        return len(self._scope_of)

    def add(self, key: bytes, place: ScopedVector) -> None:
        """Let the answer `key` be found there."""
        self._tables.setdefault(place.scope, VectorTable()).add(key, place.vector)
        self._scope_of[key] = place.scope

    def drop(self, key: bytes) -> None:
        """Forget an answer, if it is here."""
        scope = self._scope_of.pop(key, None)
        if scope is not None:
            self._tables[scope].drop(key)
            if not len(self._tables[scope]):
                del self._tables[scope]

    def nearest(self, place: ScopedVector) -> tuple[bytes, float] | None:
        """The most similar answer of the scope and its similarity; None below the threshold."""
        table = self._tables.get(place.scope)
        if table is None:
            return None
        key, similarity = table.nearest(place.vector)
        return (key, similarity) if similarity >= self.calibration.threshold else None


def open_index(engine: ServedEngine, options: ServerOptions) -> SemanticIndex | None:
    """The index of a server, calibrated on its own model; None where similar answers are off.

    Embeds every text of the pairs. Raises BadInput or CannotRun where no threshold holds.
    """
    if options.semantic_cache_pairs is None:
        return None

    def embed(text: str) -> Sequence[float]:
        tokens = engine.tokenizer.encode(text)
        if not 0 < len(tokens) <= MAX_QUESTION_TOKENS:
            raise BadInput(
                "a text of --semantic-cache-pairs has a length that is not compared",
                value=f"{len(tokens)} tokens: {text[:60]}",
                fix=f"keep to 1 to {MAX_QUESTION_TOKENS} tokens",
            )
        return engine.embed(tokens, engine.info.pooling).result()

    pairs = read_pairs(Path(options.semantic_cache_pairs))
    return SemanticIndex(calibrate(pairs, embed, options.semantic_cache_max_false_hits))
