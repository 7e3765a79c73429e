"""A greedy decode step from its runs to its tokens, without one operator of torch.

What: where layers, attention and head are native and every run decodes one token by its first
largest logit, a step needs no tensor. Tokens and positions stand in one array, states and logits in
memory that is kept from step to step, and four native calls do the rest: the plan of the runs, the
layers, the head, the choice. What a step of few rows took outside its arithmetic was torch's own
calls more than anything else: tensors from buffers, slices, guards (benchmarks/bench_host.py).

Invariant: the tokens of the usual way (`TorchRunner`), bit for bit: the same calls on the same
memory.

When it loses: nowhere that it runs. A drafter that reads hidden states, a witness, drafts, prompts
and everybody who asks for more than the likeliest token take the usual way.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

import torch

from ridgeline.engine.attention.base import Attention
from ridgeline.engine.attention.native import NativeAttention
from ridgeline.engine.core.plan import Run
from ridgeline.engine.forward.base import Forward
from ridgeline.engine.forward.native import NativeForward
from ridgeline.engine.sampling.likeliest import Likeliest, ThroughKeptLogits


class Greedy(Protocol):
    """The short way of a step."""

    def takes(self, runs: Sequence[Run]) -> bool:
        """Whether it computes this step."""
        ...

    def __call__(self, runs: Sequence[Run]) -> list[int]:
        """One token per run. ArithmeticError where a row leaves no choice."""
        ...


class NoGreedy:
    """Every step takes the usual way."""

    def takes(self, runs: Sequence[Run]) -> bool:
        return False

    def __call__(self, runs: Sequence[Run]) -> list[int]:
        raise AssertionError("takes no step")


class NativeGreedy:
    """See the module's head. One step at a time."""

    def __init__(
        self, forward: NativeForward, attention: NativeAttention, likeliest: ThroughKeptLogits
    ) -> None:
        self._forward, self._attention, self.likeliest = forward, attention, likeliest
        self._states_SC = torch.empty((0, forward.body.spec.hidden_size))

    def takes(self, runs: Sequence[Run]) -> bool:
        return all(
            len(run.tokens) == 1 and run.is_argmax and run.prompt_logprobs is None for run in runs
        )

    def __call__(self, runs: Sequence[Run]) -> list[int]:
        starts = [run.start for run in runs]
        packed = array("q", [run.tokens[0] for run in runs])
        packed.extend(starts)
        tokens, num_rows = packed.buffer_info()[0], len(starts)
        states = self._room(num_rows)
        plan = self._attention.plan(runs)
        forward = self._forward
        forward.begin(num_rows, tokens, tokens + 8 * num_rows, max(starts) + 1, states)
        forward.run_whole(self._attention, plan)
        return self.likeliest.at(states, num_rows)

    def _room(self, num_rows: int) -> int:
        """Where so many rows of states have room."""
        if num_rows > len(self._states_SC):
            self._states_SC = torch.empty((num_rows, self._states_SC.shape[1]))
        return self._states_SC.data_ptr()


def greedy_of(forward: Forward, attention: Attention, likeliest: Likeliest) -> Greedy:
    """The short way of these layers, this attention and this head."""
    if not isinstance(forward, NativeForward) or not isinstance(attention, NativeAttention):
        return NoGreedy()
    if not isinstance(likeliest, ThroughKeptLogits):
        return NoGreedy()
    return NativeGreedy(forward, attention, likeliest)
