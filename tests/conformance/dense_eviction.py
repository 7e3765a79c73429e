"""KV eviction by definition: attention over the whole text, with a mask for every layer and head.

Nothing is paged, moved or forgotten here: a query is kept from seeing what the policy has evicted.
Written from the papers' definitions, without the engine's arithmetic of blocks, except that tokens
are dropped in whole blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ridgeline.engine.model.decoder import Decoder
from ridgeline.records.kv_eviction import KvEviction


class DenseEviction:
    """The `Attend` of one text from position 0, of which the first `num_prompt` are the prompt."""

    def __init__(
        self, decoder: Decoder, policy: KvEviction, num_prompt: int, length: int, block_size: int
    ) -> None:
        self.layers = [layer.attention for layer in decoder.spec.layers]
        self.policy, self.block_size, self.length = policy, block_size, length
        self.num_prompt = num_prompt
        self.sinks = self.window = 0
        if policy.method == "streaming":
            sinks = 4 if policy.sinks is None else policy.sinks
            self.sinks = math.ceil(sinks / block_size) * block_size
        elif policy.method in ("snapkv", "adakv"):
            self.window = 32 if policy.window is None else policy.window
        least = self.sinks + self.window + block_size * (2 if policy.method == "h2o" else 1)
        self.budget = policy.budget_tokens(num_prompt, least) if policy.evicts else length

    def __call__(
        self, q_THD: Tensor, kv_T2KD: Tensor, layer: int, sinks_H: Tensor | None = None
    ) -> Tensor:
        attention = self.layers[layer]
        num_groups = attention.num_heads // attention.num_kv_heads
        k_TKD, v_TKD = kv_T2KD[:, 0].double(), kv_T2KD[:, 1].double()
        k_HTD = k_TKD.repeat_interleave(num_groups, 1).transpose(0, 1)
        v_HTD = v_TKD.repeat_interleave(num_groups, 1).transpose(0, 1)
        scores_HTT = q_THD.double().transpose(0, 1) @ k_HTD.mT * attention.scale
        causal_TT = torch.ones(self.length, self.length, dtype=torch.bool).tril()
        seen_KTT = self._seen(scores_HTT, causal_TT, attention.num_kv_heads)
        seen_HTT = seen_KTT.repeat_interleave(num_groups, 0)
        weights_HTT = scores_HTT.masked_fill(~seen_HTT, -math.inf).softmax(-1)
        return (weights_HTT @ v_HTD).transpose(0, 1).to(q_THD.dtype)

    def _seen(self, scores_HTT: Tensor, causal_TT: Tensor, num_kv_heads: int) -> Tensor:
        """Which keys each query sees, by key head."""
        if not self.policy.evicts:
            return causal_TT.expand(num_kv_heads, -1, -1)
        if self.policy.method == "streaming":
            return self._streaming(causal_TT).expand(num_kv_heads, -1, -1)
        raise AssertionError(self.policy.method)

    def _streaming(self, causal_TT: Tensor) -> Tensor:
        seen_TT = causal_TT.clone()
        for position in range(self.length):
            dropped = 0
            while position + 1 - dropped > self.budget:
                dropped += self.block_size
            seen_TT[position, self.sinks : self.sinks + dropped] = False
        return seen_TT


def logits_of(
    decoder: Decoder,
    policy: KvEviction,
    prompt: Sequence[int],
    output: Sequence[int],
    block_size: int,
) -> Tensor:
    """Float64 logits_SV from which each token of `output` was chosen."""
    tokens = [*prompt, *output[:-1]]
    attend = DenseEviction(decoder, policy, len(prompt), len(tokens), block_size)
    positions_T = torch.arange(len(tokens))
    with torch.inference_mode():
        x_TC = decoder.hidden(torch.tensor(tokens), positions_T, len(tokens), attend)
        return decoder.logits(x_TC[len(prompt) - 1 :]).double()
