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
        self.num_prompt, self.closest = num_prompt, math.inf
        self.sinks = self.window = 0
        if policy.method == "streaming":
            sinks = 4 if policy.sinks is None else policy.sinks
            self.sinks = math.ceil(sinks / block_size) * block_size
        elif policy.method in ("snapkv", "adakv"):
            self.window = 32 if policy.window is None else policy.window
        least = (
            self.sinks + self.window + block_size * (2 if policy.method in ("h2o", "adakv") else 1)
        )
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
        grouped = scores_HTT.unflatten(0, (num_kv_heads, -1))
        if self.policy.method == "h2o":
            seen = [self._heavy_hitters(scores_GTT) for scores_GTT in grouped]
        elif self.num_kept == self.num_prompt:
            return causal_TT.expand(num_kv_heads, -1, -1)
        else:
            kept = self._voted([self._votes(scores_GTT) for scores_GTT in grouped])
            seen = [self._after_prompt(causal_TT, own) for own in kept]
        return torch.stack(seen)

    @property
    def num_kept(self) -> int:
        """Tokens of the prompt that stay."""
        kept = self.num_prompt
        while kept > self.budget:
            kept -= self.block_size
        return kept

    def _votes(self, scores_GTT: Tensor) -> list[float]:
        """The pooled votes of the observation window for each token before it."""
        first, prompt = self.num_prompt - self.window, self.num_prompt
        votes = [0.0] * prompt
        for scores_TT in scores_GTT:
            for query in range(first, prompt):
                weights = scores_TT[query, : query + 1].softmax(0).tolist()
                for key, weight in enumerate(weights):
                    votes[key] += weight / len(scores_GTT)
        half = (5 if self.policy.pooling is None else self.policy.pooling) // 2
        padded = [0.0] * half + votes[:first] + [0.0] * half
        return [sum(padded[i : i + 2 * half + 1]) / (2 * half + 1) for i in range(first)]

    def _voted(self, votes: list[list[float]]) -> list[set[int]]:
        """What each head of a layer keeps of the prompt."""
        prompt, first = self.num_prompt, self.num_prompt - self.window
        window = set(range(first, prompt))
        if self.policy.method == "snapkv":
            return [self._largest(own, self.num_kept - self.window) | window for own in votes]
        size, num_heads = self.block_size, len(votes)
        end = prompt - self.num_kept % size  # the tokens behind it are kept by every head
        first = min(first, end)
        num_tiles, num_last = self.num_kept // size, end - first
        uniform = num_tiles * size - num_last
        ranked = sorted((-own[i], head, i) for head, own in enumerate(votes) for i in range(first))
        self._note_gap([-vote for vote, *_ in ranked], num_heads * uniform)
        wins = [head for _, head, _ in ranked[: num_heads * uniform]]
        shares = [
            (0.8 * wins.count(head) + 0.2 * uniform + num_last) / size for head in range(num_heads)
        ]
        least, most = max(1, math.ceil(num_last / size)), end // size
        tiles = [min(max(math.floor(share + 1e-12), least), most) for share in shares]
        while sum(tiles) < num_heads * num_tiles:
            open_heads = [h for h in range(num_heads) if tiles[h] < most]
            tiles[max(open_heads, key=lambda h: (shares[h] - tiles[h], -h))] += 1
        while sum(tiles) > num_heads * num_tiles:
            open_heads = [h for h in range(num_heads) if tiles[h] > least]
            tiles[max(open_heads, key=lambda h: (tiles[h] - shares[h], -h))] -= 1
        return [
            self._largest(own[:first], count * size - num_last) | set(range(first, prompt))
            for own, count in zip(votes, tiles, strict=True)
        ]

    def _after_prompt(self, causal_TT: Tensor, kept: set[int]) -> Tensor:
        seen_TT = causal_TT.clone()
        dropped = [i for i in range(self.num_prompt) if i not in kept]
        seen_TT[self.num_prompt :, dropped] = False
        return seen_TT

    def _heavy_hitters(self, scores_GTT: Tensor) -> Tensor:
        seen_TT = torch.zeros(self.length, self.length, dtype=torch.bool)
        kept: list[int] = []
        sums = [0.0] * self.length
        for query in range(self.length):
            target = len(kept)
            while query >= self.num_prompt and target + 1 > self.budget:
                target -= self.block_size
            if target < len(kept):
                latest = min(target, self.budget // 2)
                older = kept[: len(kept) - latest]
                chosen = self._largest([sums[key] for key in older], target - latest)
                kept = [older[i] for i in sorted(chosen)] + kept[len(kept) - latest :]
            kept = [*kept, query]
            seen_TT[query, kept] = True
            for scores_TT in scores_GTT:
                weights = scores_TT[query, kept].softmax(0).tolist()
                for key, weight in zip(kept, weights, strict=True):
                    sums[key] += weight / len(scores_GTT)
        return seen_TT

    def _largest(self, values: list[float], count: int) -> set[int]:
        """Indices of the largest values; of equal ones the first."""
        ranked = sorted(range(len(values)), key=lambda i: (-values[i], i))
        self._note_gap([values[i] for i in ranked], count)
        return set(ranked[:count])

    def _note_gap(self, ranked: list[float], count: int) -> None:
        """Remember how close the first value that was left out came to being chosen."""
        if 0 < count < len(ranked):
            self.closest = min(self.closest, ranked[count - 1] - ranked[count])

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
) -> tuple[Tensor, float]:
    """Float64 logits_SV from which each token of `output` was chosen.

    And the closest choice between two keys: one within rounding may be made otherwise.
    """
    tokens = [*prompt, *output[:-1]]
    attend = DenseEviction(decoder, policy, len(prompt), len(tokens), block_size)
    positions_T = torch.arange(len(tokens))
    with torch.inference_mode():
        x_TC = decoder.hidden(torch.tensor(tokens), positions_T, len(tokens), attend)
        return decoder.logits(x_TC[len(prompt) - 1 :]).double(), attend.closest
