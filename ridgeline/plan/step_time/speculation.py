"""The cost and yield of speculative decoding in predictions.

A step verifies γ draft tokens after each sequence's last token: it computes γ + 1 rows of each. If
each draft is accepted independently with probability α (Leviathan et al. 2023), a step yields

    E = 1 + α + α² + … + α^γ = (1 - α^(γ+1)) / (1 - α)

tokens per sequence on average. A draft model adds γ decode steps; n-gram lookup is modelled as
free. Speculation stops paying once steps are bound by arithmetic rather than by weight bandwidth.
The acceptance rate depends on the workload and should be measured.
"""

from __future__ import annotations

import msgspec

from ridgeline.config.settings import MAX_DRAFT_TOKENS
from ridgeline.errors import BadInput
from ridgeline.plan.step_time.replica import Replica, StepCost


class SpeculationModel(msgspec.Struct, frozen=True, kw_only=True):
    """`num_tokens` is γ, `acceptance` α. `draft`: the draft model's replica; None: lookup."""

    num_tokens: int
    acceptance: float
    draft: Replica | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.num_tokens <= MAX_DRAFT_TOKENS:
            raise BadInput(
                "the number of draft tokens per step is out of range",
                value=self.num_tokens,
                limit=f"1..{MAX_DRAFT_TOKENS}",
            )
        if not 0 <= self.acceptance <= 1:
            raise BadInput(
                "the acceptance rate of drafts must be a probability",
                value=self.acceptance,
                limit="0..1",
            )

    @property
    def tokens_per_step(self) -> float:
        """Expected tokens per sequence and step: the sum of α^i for i = 0..γ."""
        return sum(self.acceptance**i for i in range(self.num_tokens + 1))

    def verify(self, machine: Replica, batch: int, done: int) -> StepCost:
        """The step that verifies the drafts of `batch` sequences with `done` tokens each."""
        rows = self.num_tokens + 1
        return machine.uniform(batch, rows, done, sampled=batch * rows)

    def draft_s(self, batch: int, done: int) -> float:
        """Seconds of the draft model before one verification."""
        if self.draft is None:
            return 0.0
        return self.num_tokens * self.draft.uniform(batch, 1, done, sampled=batch).seconds

    def decode_s(self, machine: Replica, batch: int, done: int) -> float:
        """Seconds per token of each sequence."""
        step_s = self.verify(machine, batch, done).seconds + self.draft_s(batch, done)
        return step_s / self.tokens_per_step
