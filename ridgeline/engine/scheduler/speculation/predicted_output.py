"""Predicted outputs: drafts from the text that a client expects to get back, mostly unchanged.

What. An edit of a document repeats most of it. The client sends the document along (OpenAI's
`prediction`); where the last tokens of the output occur in it, the tokens after them are drafted.
After a difference, drafting goes on from where the output and the prediction agree again, at or
behind the last match if possible.

Source. Inference with reference (LLMA, Yang et al. 2023, arXiv 2304.04487); OpenAI's Predicted
Outputs.

Invariant. Drafts are verified as any other, so the output has the tokens that it would have without
a prediction.

When it loses. Each rejected draft costs its rows: drafts become longer as long as they are right,
and shorter as soon as none of a draft is.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

_MATCHES = (8, 4, 2)  # tokens at the end of the output that are looked up, longest first
_FIRST_DEPTH, _MIN_DEPTH, _MAX_DEPTH = 8, 2, 32


class PredictedOutput:
    """The prediction for one sequence, and how far its output has followed it."""

    def __init__(self, prediction: Sequence[int]) -> None:
        self._tokens = tuple(prediction)
        self._packed = array("q", prediction).tobytes()
        self._place = 0  # in the prediction, after the latest match
        self._depth = _FIRST_DEPTH

    def draft(self, output: Sequence[int], max_drafts: int) -> tuple[int, ...]:
        """What the prediction says comes after `output`; empty where it says nothing."""
        place = self._find(output)
        if place is None:
            return ()
        self._place = place
        return self._tokens[place : place + min(self._depth, max_drafts)]

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Adapt the length of drafts to what became of the last one."""
        if num_accepted == num_drafted:
            self._depth = min(2 * self._depth, _MAX_DEPTH)
        elif not num_accepted:
            self._depth = max(self._depth // 2, _MIN_DEPTH)

    def _find(self, output: Sequence[int]) -> int | None:
        """The place after the longest match of the output's last tokens."""
        sizes = [size for size in _MATCHES if size <= len(output)] or [1]
        for size in sizes:
            tail = array("q", output[-size:]).tobytes()
            for start in (max(0, self._place - size), 0):
                at = self._packed.find(tail, 8 * start)
                while at % 8 and at >= 0:
                    at = self._packed.find(tail, at + 1)
                if at >= 0:
                    return at // 8 + size
        return None
