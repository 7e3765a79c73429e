"""The documents of a request after its context reduction, and what that saved."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from fastapi import Request

from ridgeline.serve.context.compress import compress_texts
from ridgeline.serve.context.passages import canonical_order, drop_duplicates
from ridgeline.serve.context.selection import KeepUnit
from ridgeline.serve.generation.prompt_reader import in_thread_if_long
from ridgeline.serve.generation.request import RequestOptions
from ridgeline.serve.service import Service

CONTEXT_HEADER = "x-ridgeline-context-reduction"
"""Documents kept of those sent, and their tokens."""


class ContextReduction(msgspec.Struct, frozen=True, kw_only=True):
    """What is done to documents. `similarity`: from which on two are duplicates; 1: only equal
    ones, None: none. `keep_ratio`: tokens to keep of each; 1: all."""

    similarity: float | None
    is_ordered: bool
    keep_ratio: float
    unit: KeepUnit


class ReducedDocuments(msgspec.Struct, frozen=True):
    """Indices of the documents that are kept, in order, and their texts."""

    indices: list[int]
    texts: list[str]
    header: dict[str, str]


async def reduce_documents(
    service: Service,
    request: Request,
    texts: Sequence[str],
    reduction: ContextReduction,
    options: RequestOptions,
) -> ReducedDocuments:
    """Drop duplicates, order, compress: in that order. Counts what was saved."""
    size = sum(map(len, texts))
    indices = await in_thread_if_long(size, lambda: _kept(texts, reduction))
    kept = [texts[index] for index in indices]
    if reduction.keep_ratio < 1:
        ratio, unit = reduction.keep_ratio, reduction.unit
        kept = await compress_texts(service, request, kept, ratio, unit, options)
    before, after = await in_thread_if_long(
        size, lambda: (_num_tokens(service, texts), _num_tokens(service, kept))
    )
    service.metrics.count_reduced(len(texts) - len(kept), before - after)
    value = f"documents={len(kept)}/{len(texts)}; tokens={after}/{before}"
    return ReducedDocuments(indices, kept, {CONTEXT_HEADER: value})


def _kept(texts: Sequence[str], reduction: ContextReduction) -> list[int]:
    indices = [*range(len(texts))]
    if reduction.similarity is not None:
        indices = drop_duplicates(texts, reduction.similarity)
    if reduction.is_ordered:
        order = canonical_order([texts[index] for index in indices])
        indices = [indices[position] for position in order]
    return indices


def _num_tokens(service: Service, texts: Sequence[str]) -> int:
    encode = service.engine.tokenizer.encode
    return sum(len(encode(text, add_special_tokens=False)) for text in texts)
