"""Changes to logits before a token is chosen: logit bias, forbidden tokens, penalties.

Rows without any of these are left unchanged.

Shapes: S rows, P rows with penalties, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ridgeline.engine.scheduler.plan import SamplePoint


def is_plain(point: SamplePoint) -> bool:
    """True if the logits are used unchanged."""
    return not (point.forbids or point.sampling.logit_bias or point.sampling.has_penalties)


def apply_edits(logits_SV: Tensor, points: Sequence[SamplePoint]) -> Tensor:
    """The logits with bias, bans and penalties applied; the input itself if there are none."""
    if all(map(is_plain, points)):
        return logits_SV
    logits_SV = logits_SV.clone()
    _add_bias(logits_SV, points)
    _ban(logits_SV, points)
    _penalise(logits_SV, points)
    return logits_SV


def _add_bias(logits_SV: Tensor, points: Sequence[SamplePoint]) -> None:
    entries = [
        (row, *item)
        for row, point in enumerate(points)
        for item in point.sampling.logit_bias.items()
    ]
    if entries:
        rows, tokens, values = zip(*entries, strict=True)
        index = _index(logits_SV, rows), _index(logits_SV, tokens)
        logits_SV[index] += torch.tensor(values, dtype=logits_SV.dtype, device=logits_SV.device)


def _ban(logits_SV: Tensor, points: Sequence[SamplePoint]) -> None:
    for row, point in enumerate(points):
        if point.forced is not None:
            value = logits_SV[row, point.forced].item()
            logits_SV[row] = -torch.inf
            logits_SV[row, point.forced] = value
    entries = [
        (row, token)
        for row, point in enumerate(points)
        if point.forced is None
        for token in (*point.banned, *point.completing)
    ]
    if entries:
        rows, tokens = zip(*entries, strict=True)
        logits_SV[_index(logits_SV, rows), _index(logits_SV, tokens)] = -torch.inf


def _penalise(logits_SV: Tensor, points: Sequence[SamplePoint]) -> None:
    rows = [row for row, point in enumerate(points) if point.sampling.has_penalties]
    if not rows:
        return
    points = [points[row] for row in rows]
    row_P = _index(logits_SV, rows)
    logits_PV = logits_SV[row_P]
    seen_PV = _counts(logits_PV, [p.history for p in points]) > 0
    count_PV = _counts(logits_PV, [p.history[p.num_prompt :] for p in points])
    factor_PV = _column(logits_PV, [p.sampling.repetition_penalty for p in points])
    repeated_PV = torch.where(logits_PV > 0, logits_PV / factor_PV, logits_PV * factor_PV)
    logits_PV = torch.where(seen_PV, repeated_PV, logits_PV)
    logits_PV -= _column(logits_PV, [p.sampling.frequency_penalty for p in points]) * count_PV
    logits_PV -= _column(logits_PV, [p.sampling.presence_penalty for p in points]) * (count_PV > 0)
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
