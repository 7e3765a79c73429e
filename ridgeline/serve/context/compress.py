"""Score texts with the served model, and keep their most informative parts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from fastapi import Request

from ridgeline.records import Sampling
from ridgeline.serve.auth.middleware import caller_of
from ridgeline.serve.context.passages import text_digest
from ridgeline.serve.context.selection import KeepUnit, ScoredUnit, select_units, split_units
from ridgeline.serve.generation.collect import collect
from ridgeline.serve.generation.disconnect import cancel_on_disconnect
from ridgeline.serve.generation.prompt_reader import in_thread_if_long
from ridgeline.serve.generation.request import RequestOptions, TokenPrompt
from ridgeline.serve.generation.resume import LOG_KEY, SCOPE_KEY
from ridgeline.serve.service import Service

MAX_WINDOW = 1024
"""Tokens that are scored in one prompt: further ones add little to what the model can predict."""


async def compress_texts(
    service: Service,
    request: Request,
    texts: Sequence[str],
    keep_ratio: float,
    unit: KeepUnit,
    options: RequestOptions,
) -> list[str]:
    """The texts with at least `keep_ratio` of their tokens each.

    Texts that were compressed before for the tenant are taken from memory; all others are scored as
    prompts, which are scheduled and charged like any.
    """
    tenant = caller_of(request.scope).tenant(options.cache_salt)
    keys = [(tenant, keep_ratio, unit, text_digest(text)) for text in texts]
    memory = service.compressed_texts
    known = {key: memory.find(key) for key in keys}
    new = [index for index, key in enumerate(keys) if known[key] is None and texts[index].strip()]
    if new:
        size = sum(len(texts[index]) for index in new)
        encode = service.engine.tokenizer.encode
        parts = [split_units(texts[index], unit) for index in new]
        tokens = await in_thread_if_long(
            size,
            lambda: [[encode(part, add_special_tokens=False) for part in own] for own in parts],
        )
        scores = await _score(service, request, tokens, options)
        for index, own, scored in zip(new, parts, scores, strict=True):
            kept = "".join(own[i] for i in select_units(scored, keep_ratio)).strip()
            known[keys[index]] = kept
            memory.store(keys[index], kept)
    return [known[key] or text for key, text in zip(keys, texts, strict=True)]


async def _score(
    service: Service,
    request: Request,
    texts: Sequence[Sequence[Sequence[int]]],
    options: RequestOptions,
) -> list[list[ScoredUnit]]:
    """Log-probabilities of every unit of every text. Long texts are scored in windows."""
    window = min(MAX_WINDOW, service.engine.info.max_model_len - 1)
    flat = [tuple(chain.from_iterable(units)) for units in texts]
    prompts = [
        TokenPrompt(tokens[at : at + window])
        for tokens in flat
        for at in range(0, len(tokens), window)
    ]
    sampling = Sampling(temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    # a request that continues another one's answer continues none of these
    scope = {name: v for name, v in request.scope.items() if name not in (SCOPE_KEY, LOG_KEY)}
    own = Request(scope, request.receive)
    stream = service.submit(
        own, "context", prompts, sampling, options, streamed=False, score_only=True
    )
    async with cancel_on_disconnect(request.receive):
        choices = await collect(stream)
    logprobs: list[float | None] = []
    for choice in choices:
        logprobs += [None if token is None else token.logprob for token in choice.prompt_logprobs]
    position = 0
    scored = []
    for units in texts:
        own_units = []
        for unit in units:
            own_units.append(ScoredUnit(tuple(logprobs[position : position + len(unit)])))
            position += len(unit)
        scored.append(own_units)
    return scored
