"""What the runner offers to others: observers of the hidden states that a step computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ridgeline.engine.scheduler.plan import Run


class HiddenStatesObserver(Protocol):
    """Called by the runner after every step, once the step's tokens are chosen."""

    def observe(self, runs: Sequence[Run], num_outputs: Sequence[int], x_TC: Tensor) -> None:
        """Show the final hidden states of a step.

        `x_TC` holds the rows of all runs, one run after the other. `num_outputs[i]` is the number
        of tokens run i produced: with drafts, one more than were accepted.
        """
        ...


class NoObserver:
    """Ignores the hidden states."""

    def observe(self, runs: Sequence[Run], num_outputs: Sequence[int], x_TC: Tensor) -> None:
        pass
