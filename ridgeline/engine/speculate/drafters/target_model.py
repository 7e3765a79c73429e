"""The target model for drafters that use its layers, cache or LM head.

Shape suffixes: T rows of a pass, S runs, C hidden_size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from ridgeline.engine.attention import build_attention
from ridgeline.engine.attention.base import Attention
from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.attention.full import FullAttention
from ridgeline.engine.execution.batch import make_batch
from ridgeline.engine.execution.greedy_fast_path import ReusedBuffer, make_native_greedy_path
from ridgeline.engine.execution.layers import layer_backend_of
from ridgeline.engine.model.decoder import Decoder
from ridgeline.engine.sampling.argmax_head import make_argmax_head
from ridgeline.engine.scheduler.plan import Run


@dataclass(frozen=True)
class TargetModel:
    """Weights and KV cache of the target, with the backends it runs on."""

    decoder: Decoder
    cache: KvCache
    attention_backend: str
    layer_backend: str

    def only(self, kept: Sequence[int]) -> TargetModel:
        """The same model with only the layers `kept`; neither weights nor cache are copied."""
        body, cache = self.decoder.body, self.cache
        spec = msgspec.structs.replace(body.spec, layers=tuple(body.spec.layers[i] for i in kept))
        blocks = tuple(body.blocks[i] for i in kept)
        body = dataclasses.replace(body, spec=spec, blocks=blocks)
        forward = layer_backend_of(self.layer_backend)(body)
        return TargetModel(
            Decoder(body, forward, self.decoder.lm_head, 0),
            cache.only(kept),
            self.attention_backend,
            self.layer_backend,
        )

    def attention(self) -> Attention:
        """Attention over the cache of the layers present."""
        return build_attention(self.attention_backend, self.decoder.spec, self.cache)


def last_hidden(decoder: Decoder, attention: Attention, runs: Sequence[Run]) -> Tensor:
    """Feed the runs; returns hidden states x_SC of the last row of each."""
    batch = make_batch(runs, decoder.device)
    x_TC = decoder.hidden(batch.tokens_T, batch.positions_T, batch.end, attention.prepare(runs))
    if len(x_TC) == len(runs):
        return x_TC
    lasts = torch.tensor([len(run.tokens) for run in runs]).cumsum(0) - 1
    return x_TC[lasts.to(x_TC.device)]


class LastTokens(Protocol):
    """Feed the runs; returns the most likely token after the last row of each, ignoring sampling
    parameters.
    """

    def __call__(self, runs: Sequence[Run]) -> list[int]: ...


def last_tokens_of(
    decoder: Decoder, attention: Attention, most_tokens: int | None = None
) -> LastTokens:
    """A `LastTokens` that avoids torch if layers, attention and head are native. `most_tokens`:
    restricts the vocabulary to its first entries.
    """
    likeliest = make_argmax_head(decoder, most_tokens)
    short = make_native_greedy_path(decoder.forward, attention, likeliest, ReusedBuffer())
    if short is not None:
        return short.last_tokens
    return lambda runs: likeliest(last_hidden(decoder, attention, runs))


def states(decoder: Decoder, tokens: Sequence[int]) -> Tensor:
    """Last hidden states x_TC of a whole text, without a cache."""
    tokens_T = torch.tensor(tokens, device=decoder.device)
    positions_T = torch.arange(len(tokens), device=decoder.device)
    like = torch.empty(0, dtype=decoder.compute_dtype, device=decoder.device)
    attend = FullAttention(decoder.spec, len(tokens), like)
    return decoder.hidden(tokens_T, positions_T, len(tokens), attend)
