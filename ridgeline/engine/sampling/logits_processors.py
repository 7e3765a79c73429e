"""What changes logits before a token is chosen: logit bias, banned tokens, penalties.

Shapes: S rows, P rows with penalties, V vocabulary. Rows that ask for nothing are not touched.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ridgeline.engine.scheduler.plan import SamplePoint


def is_plain(at: SamplePoint) -> bool:
    """True where the logits are used as the model gave them."""
    return not (at.banned or at.sampling.logit_bias or at.sampling.has_penalties)


def apply_edits(logits_SV: Tensor, at: Sequence[SamplePoint]) -> Tensor:
    """The logits with every edit applied; the input itself where nobody asked for one."""
    if all(map(is_plain, at)):
        return logits_SV
    logits_SV = logits_SV.clone()
    _bias(logits_SV, at)
    _ban(logits_SV, at)
    _penalise(logits_SV, at)
    return logits_SV


def _bias(logits_SV: Tensor, at: Sequence[SamplePoint]) -> None:
    spots = [(row, *pair) for row, a in enumerate(at) for pair in a.sampling.logit_bias.items()]
    if spots:
        rows, tokens, values = zip(*spots, strict=True)
        index = _index(logits_SV, rows), _index(logits_SV, tokens)
        logits_SV[index] += torch.tensor(values, dtype=logits_SV.dtype, device=logits_SV.device)


def _ban(logits_SV: Tensor, at: Sequence[SamplePoint]) -> None:
    spots = [(row, token) for row, a in enumerate(at) for token in a.banned]
    if spots:
        rows, tokens = zip(*spots, strict=True)
        logits_SV[_index(logits_SV, rows), _index(logits_SV, tokens)] = -torch.inf


def _penalise(logits_SV: Tensor, at: Sequence[SamplePoint]) -> None:
    rows = [row for row, a in enumerate(at) if a.sampling.has_penalties]
    if not rows:
        return
    asked = [at[row] for row in rows]
    row_P = _index(logits_SV, rows)
    logits_PV = logits_SV[row_P]
    seen_PV = _counts(logits_PV, [a.history for a in asked]) > 0
    count_PV = _counts(logits_PV, [a.history[a.num_prompt :] for a in asked])
    factor_PV = _column(logits_PV, [a.sampling.repetition_penalty for a in asked])
    repeated_PV = torch.where(logits_PV > 0, logits_PV / factor_PV, logits_PV * factor_PV)
    logits_PV = torch.where(seen_PV, repeated_PV, logits_PV)
    logits_PV -= _column(logits_PV, [a.sampling.frequency_penalty for a in asked]) * count_PV
    logits_PV -= _column(logits_PV, [a.sampling.presence_penalty for a in asked]) * (count_PV > 0)
    logits_SV[row_P] = logits_PV


def _counts(logits_PV: Tensor, histories: Sequence[Sequence[int]]) -> Tensor:
    """How often each token occurs in each history: float [P, V]."""
    width = logits_PV.shape[1]
    flat = [row * width + token for row, tokens in enumerate(histories) for token in tokens]
    index = torch.tensor(flat, dtype=torch.int64, device=logits_PV.device)
    counts = torch.zeros(logits_PV.numel(), dtype=logits_PV.dtype, device=logits_PV.device)
    counts.index_add_(0, index, counts.new_ones(len(flat)))
    return counts.view_as(logits_PV)


def _column(like: Tensor, values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(1)


def _index(like: Tensor, values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=like.device)
