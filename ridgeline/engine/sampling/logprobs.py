"""Raw log-probabilities of given tokens, for outputs and for prompts.

Shapes: P positions, V vocabulary, K the largest few, R rows with ties.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ridgeline.records import TokenLogprobs

_MAX_ELEMENTS = 1 << 24  # per chunk: limits the float32 copy of a long prompt's logits to 64 MiB


def token_logprobs(
    logits_PV: Tensor, tokens: Sequence[int] | Tensor, k: int
) -> list[TokenLogprobs]:
    """Log-softmax per position: that of its token, the token's rank, and the k largest.

    `tokens[p]` belongs to logits_PV[p]. Ties are broken by the lower token id, as in sampling.
    """
    tokens = tokens.tolist() if isinstance(tokens, Tensor) else tokens
    return list(_in_chunks(logits_PV, tokens, k))


def _in_chunks(logits_PV: Tensor, tokens: Sequence[int], k: int) -> Iterator[TokenLogprobs]:
    num_rows = max(1, _MAX_ELEMENTS // logits_PV.shape[1])
    for start in range(0, len(tokens), num_rows):
        yield from _chunk(
            logits_PV[start : start + num_rows].float(), tokens[start : start + num_rows], k
        )


def _chunk(logits_PV: Tensor, tokens: Sequence[int], k: int) -> Iterator[TokenLogprobs]:
    token_P1 = torch.tensor(tokens, device=logits_PV.device).unsqueeze(1)
    lse_P1 = logits_PV.logsumexp(1, keepdim=True)
    own_P1 = logits_PV.gather(1, token_P1)
    rank_P = _ranks(logits_PV, token_P1, own_P1)
    top_PK = _largest(logits_PV, min(k, logits_PV.shape[1]))
    value_PK = logits_PV.gather(1, top_PK) - lse_P1
    columns = (own_P1 - lse_P1).flatten().tolist(), rank_P.tolist()
    best = zip(top_PK.tolist(), value_PK.tolist(), strict=True)
    for token, own, rank, (ids, values) in zip(tokens, *columns, best, strict=True):
        yield TokenLogprobs(token, own, rank, tuple(zip(ids, values, strict=True)))


def _ranks(logits_PV: Tensor, token_P1: Tensor, own_P1: Tensor) -> Tensor:
    """1 + the number of tokens before it in the order (logit falling, id rising)."""
    larger_P = _count(logits_PV > own_P1)
    tied_P = _count(logits_PV >= own_P1) - larger_P != 1
    if bool(tied_P.any()):
        id_V = torch.arange(logits_PV.shape[1], device=logits_PV.device)
        is_before = (logits_PV[tied_P] == own_P1[tied_P]) & (id_V < token_P1[tied_P])
        larger_P[tied_P] += _count(is_before)
    return larger_P + 1


def _count(mask_PV: Tensor) -> Tensor:
    """How many are true in each row. On a CPU, numpy counts five times as fast as torch adds."""
    if mask_PV.device.type == "cpu":
        return torch.from_numpy(np.count_nonzero(mask_PV.numpy(), axis=1))
    return mask_PV.sum(1)


def _largest(logits_PV: Tensor, k: int) -> Tensor:
    """Token ids of the k largest logits.

    `topk` leaves the order of ties undefined, so rows with ties are sorted.
    """
    if k == 0:
        return torch.empty(len(logits_PV), 0, dtype=torch.int64, device=logits_PV.device)
    value_PK, id_PK = logits_PV.topk(min(k + 1, logits_PV.shape[1]))
    tied_P = (value_PK[:, 1:] == value_PK[:, :-1]).any(1)
    id_PK = id_PK[:, :k]
    if bool(tied_P.any()):
        order_RV = logits_PV[tied_P].sort(dim=1, descending=True, stable=True).indices
        id_PK[tied_P] = order_RV[:, :k]
    return id_PK
