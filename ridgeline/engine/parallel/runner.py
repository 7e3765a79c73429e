"""Rank 0's runner: tells the other ranks what it is about to compute, and computes its part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor

from ridgeline.engine.execution.runner import TorchRunner
from ridgeline.engine.execution.threads import StepThreads
from ridgeline.engine.parallel.layers.linears import VocabularyHead
from ridgeline.engine.parallel.messages import Command, ComputeLogits, RunStep, ScoreText
from ridgeline.engine.parallel.rank import RankModel
from ridgeline.engine.sampling.verify.verifier import Verifier
from ridgeline.engine.scheduler.plan import StepPlan, StepResult
from ridgeline.engine.structured_output.base import TokenMasks
from ridgeline.errors import RankFailed


class Announcer(Protocol):
    """Sends commands to the other ranks."""

    def announce(self, command: Command) -> None:
        """Send a command. Raises RankFailed if a rank is gone."""
        ...

    def explain(self, error: RankFailed) -> RankFailed:
        """The failure of a rank that made an exchange fail with `error`."""
        ...


class GroupRunner(TorchRunner):
    """A `TorchRunner` whose decoder computes one part of each layer, and samples alone."""

    def __init__(self, announcer: Announcer, *parts: Any) -> None:
        super().__init__(*parts)
        self._announcer = announcer

    def run(self, plan: StepPlan) -> StepResult:
        if plan.runs or plan.copies:
            self._announcer.announce(RunStep(plan))
        try:
            return super().run(plan)
        except RankFailed as error:
            raise self._announcer.explain(error) from error

    def states(self, tokens: Sequence[int]) -> Tensor:
        self._announcer.announce(ScoreText(tuple(tokens)))
        try:
            return super().states(tokens)
        except RankFailed as error:
            raise self._announcer.explain(error) from error

    def state_pieces(self, tokens: Sequence[int], piece_tokens: int) -> Iterator[Tensor]:
        """One piece: the other ranks compute a text without a stop."""
        yield self.states(tokens)

    def describe_graphs(self) -> str:
        return "no CUDA graphs: the ranks of a layout exchange tensors in every layer"


def make_runner(
    model: RankModel,
    announcer: Announcer,
    masks: TokenMasks | None,
    verifier: Verifier | None,
    threads: StepThreads | None,
) -> GroupRunner:
    """The runner of rank 0. The LM head asks the other places of the first stage for their part."""
    decoder = model.decoder
    if len(model.head_widths) > 1:
        decoder.lm_head = VocabularyHead(
            decoder.lm_head,
            model.head_widths,
            model.collectives,
            lambda num_rows: announcer.announce(ComputeLogits(num_rows)),
        )
    return GroupRunner(
        announcer, decoder, model.cache, model.attention, masks, verifier, None, threads
    )
