"""The teacher's next-token distributions on disk: its `k` most likely tokens at every position.

  OUT.partial/teacher-00002.safetensors   ids int32 [W, T, k] · logprobs float16 [W, T, k]

of windows 2·CHUNK … 3·CHUNK - 1. The teacher runs once and is not in memory during the training,
and an interruption loses one file's work. The probability of all other tokens is what the stored
ones leave.

Shape suffixes: W windows, T tokens, V vocabulary, K stored tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from ridgeline.compress.unfinished import open_tensors

CHUNK = 32  # windows of a file
LogitsOf = Callable[[Sequence[int]], Tensor]


class TopLogprobs(NamedTuple):
    """One window's most likely next tokens and their log-probabilities."""

    ids_TK: Tensor
    logprobs_TK: Tensor


class TeacherCache:
    """Reads the stored distributions, and adds those that are missing."""

    def __init__(self, folder: Path, windows_NT: Tensor, top_k: int) -> None:
        self._folder, self._windows_NT, self._top_k = folder, windows_NT, top_k

    def _file(self, chunk: int) -> Path:
        return self._folder / f"teacher-{chunk:05}.safetensors"

    def missing(self, num_windows: int) -> list[int]:
        """The files that the first `num_windows` windows need and that are not there."""
        return [c for c in range(-(-num_windows // CHUNK)) if not self._file(c).is_file()]

    def add(self, chunk: int, logits_of: LogitsOf) -> None:
        """Compute and store one file."""
        windows = self._windows_NT[chunk * CHUNK : (chunk + 1) * CHUNK]
        pairs = [self._top(logits_of(row.tolist())) for row in windows]
        ids, logprobs = (torch.stack(parts) for parts in zip(*pairs, strict=True))
        partial = self._file(chunk).with_suffix(".writing")
        save_file({"ids": ids.int(), "logprobs": logprobs.half()}, partial)
        partial.rename(self._file(chunk))

    def _top(self, logits_TV: Tensor) -> tuple[Tensor, Tensor]:
        logprobs_TV = torch.log_softmax(logits_TV.float(), -1)
        values_TK, ids_TK = logprobs_TV.topk(min(self._top_k, logits_TV.shape[1]), dim=-1)
        return ids_TK, values_TK

    def __getitem__(self, window: int) -> TopLogprobs:
        chunk, at = divmod(window, CHUNK)
        with open_tensors(self._file(chunk)) as file:
            ids_TK: Tensor = file.get_slice("ids")[at]
            logprobs_TK: Tensor = file.get_slice("logprobs")[at]
        return TopLogprobs(ids_TK.long(), logprobs_TK.float())
