"""Masks of models without a tokenizer or end-of-sequence token: token lists only, no grammars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ridgeline.engine.scheduler.plan import SamplePoint
from ridgeline.engine.structured_output.base import UnmaskedRows, needs_mask, restrict_to
from ridgeline.errors import CannotRun
from ridgeline.records import OutputGrammar

if TYPE_CHECKING:
    from torch import Tensor


class NoGrammars:
    """Applies lists of allowed tokens and rejects grammars with the reason `why`."""

    def __init__(self, why: str) -> None:
        self._why = why

    def warm_up(self) -> None:
        """Nothing is needed."""

    def prepare(self, structured: OutputGrammar) -> None:
        raise CannotRun(
            f"structured output cannot run here: {self._why}",
            value=structured.kind,
            fix="serve a model with a tokenizer and an end-of-sequence token",
        )

    def apply_in_time(
        self, logits_SV: Tensor, points: Sequence[SamplePoint], can_wait: Sequence[bool]
    ) -> UnmaskedRows:
        if needs_mask(points):
            restrict_to(logits_SV, points)
        return UnmaskedRows()

    def apply(self, logits_SV: Tensor, points: Sequence[SamplePoint]) -> Tensor:
        if not needs_mask(points):
            return logits_SV
        logits_SV = logits_SV.clone()
        restrict_to(logits_SV, points)
        return logits_SV
