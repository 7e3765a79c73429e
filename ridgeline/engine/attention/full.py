"""Self-attention of one whole sequence without a lasting cache, for scoring texts.

Shape legend: T tokens, H query heads, K key heads, G = H/K, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from torch import Tensor

from ridgeline.engine.attention.base import Attend, Attention, AttentionBackend
from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.attention.dense import KeySpan, attend_prefill, causal_mask, needs_scores
from ridgeline.engine.attention.kv_format import kv_format
from ridgeline.engine.attention.latent import LatentUp
from ridgeline.engine.attention.states import StateCache
from ridgeline.engine.scheduler.plan import Run
from ridgeline.modelspec.cost.kv_cache import has_states
from ridgeline.modelspec.cost.kv_layout import ONE_GROUP
from ridgeline.modelspec.format import KV_GROUP
from ridgeline.modelspec.model import ModelSpec


class FullAttention:
    """The `Attend` of a single sequence from position 0, without a cache.

    Keys and values are converted to the format of the model's cache and back, so that scores show
    the cost of a lossy cache.
    """

    def __init__(self, spec: ModelSpec, num_tokens: int, like: Tensor) -> None:
        self.format = kv_format(spec.kv_dtype)
        self.attend_text = _int4_attention() if spec.kv_dtype == "int4" else None
        self.attentions = tuple(layer.attention for layer in spec.layers)
        if has_states(spec):
            run = Run(0, 0, (0,) * num_tokens, (), None)
            self.states = StateCache(spec, 1, like.device).begin([run])
        kinds = {(KeySpan.of(a), needs_scores(a)) for a in self.attentions}
        self.masks = {
            kind: _mask(num_tokens, span=kind[0], explicit_scores=kind[1], like=like)
            for kind in kinds
        }

    def __call__(
        self, q_THD: Tensor, kv_T2KD: Tensor, layer: int, sinks_H: Tensor | None = None
    ) -> Tensor:
        attention = self.attentions[layer]
        if self.attend_text is not None:
            return self.attend_text(q_THD, kv_T2KD, attention, self.format, KV_GROUP, sinks_H)
        stored_T2KW = self.format.encode(kv_T2KD)
        k_KTD, v_KTD = self.format.decode(stored_T2KW, kv_T2KD.dtype).permute(1, 2, 0, 3)
        num_groups = attention.num_heads // attention.num_kv_heads
        q_TKGD = q_THD.view(-1, attention.num_kv_heads, num_groups, attention.head_dim)
        mask_TT = self.masks[KeySpan.of(attention), needs_scores(attention)]
        o_KGTD = attend_prefill(
            q_TKGD.permute(1, 2, 0, 3),
            k_KTD,
            v_KTD,
            mask_TT,
            attention.scale,
            attention.softcap,
            sinks_H,
        )
        return o_KGTD.permute(2, 0, 1, 3).flatten(1, 2)

    def attend_latent(self, q_THD: Tensor, rows_TW: Tensor, layer: int, up: LatentUp) -> Tensor:
        """o_THV in the expanded form."""
        attention = self.attentions[layer]
        stored_TW = self.format.decode(self.format.encode(rows_TW), rows_TW.dtype)
        k_HTD, v_HTV = up.expand(stored_TW)
        mask_TT = self.masks[KeySpan.of(attention), needs_scores(attention)]
        o_H1TV = attend_prefill(
            q_THD.transpose(0, 1).unsqueeze(1),
            k_HTD,
            v_HTV,
            mask_TT,
            attention.scale,
            attention.softcap,
        )
        return o_H1TV.squeeze(1).transpose(0, 1)


AttendRange = Callable[[int, int], Attend]
"""From the first and the end position of a part of a text to its `Attend`, in order."""


def self_attention(
    spec: ModelSpec, like: Tensor, cache: KvCache | None, attention: Attention | None
) -> Callable[[Sequence[int]], Attend]:
    """A function from the tokens of one text to its `Attend`.

    As `piecewise_attention` for the whole text, where that is possible. Otherwise it uses torch,
    with the dtype and device of `like`.
    """
    begin = piecewise_attention(spec, like, cache, attention)
    if begin is None:
        return lambda tokens: FullAttention(spec, len(tokens), like)
    return lambda tokens: begin(tokens)(0, len(tokens))


def piecewise_attention(
    spec: ModelSpec, like: Tensor, cache: KvCache | None, attention: Attention | None
) -> Callable[[Sequence[int]], AttendRange] | None:
    """A function from the tokens of one text to the `Attend` of each of its parts.

    It uses the same backend and a temporary cache of the same format as the steps do, so that
    scores include the kernel's rounding. None without `cache` and `attention`, and for layers that
    keep a state per sequence.
    """
    if cache is None or attention is None or has_states(spec):
        return None
    backend = getattr(attention, "backend", type(attention))  # an attention that wraps another
    size = cache.block_size
    dtype, format = cache.dtype, cache.format
    # Recent tokens in separate blocks (INT4) are found by two further tables; all are kept here.
    num_tables, layout = (3, cache.layout) if cache.recent else (1, ONE_GROUP)

    def begin(tokens: Sequence[int]) -> AttendRange:
        count = -(-len(tokens) // size)
        tables = [tuple(range(i * count, (i + 1) * count)) for i in range(num_tables)]
        sizes = (num_tables * count, size, dtype, like.device, format)
        whole = cast(AttentionBackend, backend)(spec, KvCache.allocate(spec, *sizes, layout=layout))
        blocks, windows = tables[0], tuple(tables[1:])

        def attend(start: int, end: int) -> Attend:
            part = tuple(tokens[start:end])
            return whole.prepare([Run(0, start, part, blocks, None, windows=windows)])

        return attend

    return begin


def _int4_attention() -> Callable[..., Tensor]:
    from ridgeline.engine.attention.int4.attention import attend_text

    return attend_text


def _mask(num_tokens: int, *, span: KeySpan, explicit_scores: bool, like: Tensor) -> Tensor | None:
    if not explicit_scores and span.first_seen(num_tokens - 1) == 0:
        return None
    return causal_mask(0, num_tokens, 0, num_tokens, span, like)
