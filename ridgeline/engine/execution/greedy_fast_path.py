"""A greedy step from its runs to its tokens, without one operator of torch.

What: where layers, attention and head are native and every run decodes by its first largest logit,
a step needs no tensor. Tokens and positions stand in one array, states and logits in memory that is
kept from step to step, and four native calls do the rest: the plan of the runs, the layers, the
head, the choice. What a step of few rows took outside its arithmetic was torch's own calls more
than anything else: tensors from buffers, slices, guards (benchmarks/bench_host.py).

A run with drafts has a row for each of them, and every row names its token: which drafts are right
is a comparison of whole numbers (`Verifier.named`). A drafter that computes wants the last row of
each run only (`last_tokens`).

Invariant: the tokens of the usual way (`TorchRunner`), bit for bit: the same calls on the same
memory.

When it loses: nowhere that it runs. Prompts and everybody who asks for more than the likeliest
token take the usual way.

Shapes: T rows of a step, C hidden_size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ridgeline.engine.attention.base import Attention
from ridgeline.engine.attention.native import NativeAttention
from ridgeline.engine.execution.batch import pack_rows
from ridgeline.engine.execution.layers.native import NativeForward
from ridgeline.engine.model.base import LayerForward
from ridgeline.engine.sampling.argmax_head import ArgmaxHead, NativeArgmax
from ridgeline.engine.scheduler.plan import Run


class StateBuffer(Protocol):
    """Memory for the states of a step."""

    def __call__(self, num_rows: int, width: int) -> Tensor:
        """At least so many rows of so many numbers."""
        ...


class ReusedBuffer:
    """The next step writes over it."""

    def __init__(self) -> None:
        self._states_TC = torch.empty((0, 0))

    def __call__(self, num_rows: int, width: int) -> Tensor:
        if num_rows > len(self._states_TC):
            self._states_TC = torch.empty((num_rows, width))
        return self._states_TC


def new_buffer(num_rows: int, width: int) -> Tensor:
    """Every step has its own, for whoever keeps states."""
    return torch.empty((num_rows, width))


class GreedyPath(Protocol):
    """The short way of a step."""

    def can_run(self, runs: Sequence[Run]) -> bool:
        """Whether it computes this step."""
        ...

    def __call__(self, runs: Sequence[Run]) -> tuple[list[int], Tensor]:
        """One token per row, and x_TC of the rows (in its room: what stands behind them means
        nothing). ArithmeticError where a row leaves no choice."""
        ...


class NoGreedyPath:
    """Every step takes the usual way."""

    def can_run(self, runs: Sequence[Run]) -> bool:
        return False

    def __call__(self, runs: Sequence[Run]) -> tuple[list[int], Tensor]:
        raise AssertionError("takes no step")


class NativeGreedyPath:
    """See the module's head. One step at a time."""

    def __init__(
        self,
        forward: NativeForward,
        attention: NativeAttention,
        argmax_head: NativeArgmax,
        room: StateBuffer,
    ) -> None:
        self._forward, self._attention, self.argmax_head = forward, attention, argmax_head
        self._room, self._width = room, forward.body.spec.hidden_size

    def can_run(self, runs: Sequence[Run]) -> bool:
        return all(run.is_argmax and run.prompt_logprobs is None for run in runs)

    def __call__(self, runs: Sequence[Run]) -> tuple[list[int], Tensor]:
        num_rows, states_TC = self._feed(runs)
        return self.argmax_head.from_memory(states_TC.data_ptr(), num_rows), states_TC

    def last_tokens(self, runs: Sequence[Run]) -> list[int]:
        """Feed the runs, whatever they ask for; the likeliest token after the last row of each."""
        num_rows, states_TC = self._feed(runs)
        at = states_TC.data_ptr()
        if num_rows > len(runs):
            _keep_lasts(at, [len(run.tokens) for run in runs], 4 * self._width)
        return self.argmax_head.from_memory(at, len(runs))

    def _feed(self, runs: Sequence[Run]) -> tuple[int, Tensor]:
        """The number of the runs' rows, and their states."""
        packed, end = pack_rows(runs)
        num_rows = len(packed) // 2
        tokens, states_TC = packed.buffer_info()[0], self._room(num_rows, self._width)
        plan = self._attention.plan(runs)
        forward = self._forward
        forward.begin(num_rows, tokens, tokens + 8 * num_rows, end, states_TC.data_ptr())
        forward.run_whole(self._attention, plan)
        return num_rows, states_TC


def _keep_lasts(at: int, counts: Sequence[int], row_bytes: int) -> None:
    """Move the last of every `counts[i]` rows to the front, one behind the other."""
    first = 0
    for place, count in enumerate(counts):
        first += count
        if first - 1 > place:
            ctypes.memmove(at + place * row_bytes, at + (first - 1) * row_bytes, row_bytes)


def make_native_greedy_path(
    forward: LayerForward, attention: Attention, argmax_head: ArgmaxHead, room: StateBuffer
) -> NativeGreedyPath | None:
    """The short way of these layers, this attention and this head, where all are native."""
    if not isinstance(forward, NativeForward) or not isinstance(attention, NativeAttention):
        return None
    if not isinstance(argmax_head, NativeArgmax):
        return None
    return NativeGreedyPath(forward, attention, argmax_head, room)


def make_greedy_path(
    forward: LayerForward, attention: Attention, argmax_head: ArgmaxHead, room: StateBuffer
) -> GreedyPath:
    """The same for a runner."""
    return make_native_greedy_path(forward, attention, argmax_head, room) or NoGreedyPath()
