"""Greedy fast path: a step from its runs to its tokens without a single torch operator.

What. If layers, attention and LM head are native and every run is decided by its first largest
logit, a step needs no tensor. Tokens and positions are in one array, states and logits in memory
that is reused from step to step, and four native calls do the rest: planning the runs, the layers,
the head, the argmax. In small steps, most of the time outside the arithmetic was spent in torch
calls: tensors from buffers, slices, checks (benchmarks/bench_host.py).

A run with drafts has one row per draft, and every row yields a token, so checking which drafts are
right is an integer comparison (`Verifier.accept_argmax`). A model-based drafter needs only the last
row of each run (`last_tokens`).

Invariant. The tokens equal those of the general path (`TorchRunner`) bit for bit, because the same
calls work on the same memory.

When it loses. Nowhere that it runs. Prompts, and requests that need more than the argmax, take the
general path.

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
    """Provides memory for the states of a step."""

    def __call__(self, num_rows: int, width: int) -> Tensor:
        """A float32 tensor of at least [num_rows, width]."""
        ...


class ReusedBuffer:
    """One buffer, overwritten by every step."""

    def __init__(self) -> None:
        self._states_TC = torch.empty((0, 0))

    def __call__(self, num_rows: int, width: int) -> Tensor:
        if num_rows > len(self._states_TC):
            self._states_TC = torch.empty((num_rows, width))
        return self._states_TC


def new_buffer(num_rows: int, width: int) -> Tensor:
    """A new buffer for every step, for callers that keep the states."""
    return torch.empty((num_rows, width))


class GreedyPath(Protocol):
    """Computes whole steps of greedy runs."""

    def can_run(self, runs: Sequence[Run]) -> bool:
        """Whether this path can compute a step of these runs."""
        ...

    def __call__(self, runs: Sequence[Run]) -> tuple[list[int], Tensor]:
        """One token per row, and the states x_TC of the rows.

        The tensor may have more rows, whose content is undefined. Raises ArithmeticError if a row's
        largest logit is not finite.
        """
        ...


class NoGreedyPath:
    """Leaves every step to the general path."""

    def can_run(self, runs: Sequence[Run]) -> bool:
        return False

    def __call__(self, runs: Sequence[Run]) -> tuple[list[int], Tensor]:
        raise AssertionError("can_run is False for every step")


class NativeGreedyPath:
    """The fast path over native layers, attention and head. One step at a time."""

    def __init__(
        self,
        forward: NativeForward,
        attention: NativeAttention,
        argmax_head: NativeArgmax,
        buffer: StateBuffer,
    ) -> None:
        self._forward, self._attention, self.argmax_head = forward, attention, argmax_head
        self._buffer, self._width = buffer, forward.body.spec.hidden_size

    def can_run(self, runs: Sequence[Run]) -> bool:
        return all(run.is_argmax and run.prompt_logprobs is None for run in runs)

    def __call__(self, runs: Sequence[Run]) -> tuple[list[int], Tensor]:
        num_rows, states_TC = self._feed(runs)
        return self.argmax_head.from_memory(states_TC.data_ptr(), num_rows), states_TC

    def last_tokens(self, runs: Sequence[Run]) -> list[int]:
        """Feed any runs and return the argmax token after the last row of each."""
        num_rows, states_TC = self._feed(runs)
        address = states_TC.data_ptr()
        if num_rows > len(runs):
            _move_last_rows(address, [len(run.tokens) for run in runs], 4 * self._width)
        return self.argmax_head.from_memory(address, len(runs))

    def _feed(self, runs: Sequence[Run]) -> tuple[int, Tensor]:
        """Run the layers; returns the number of rows and their states."""
        packed, end = pack_rows(runs)
        num_rows = len(packed) // 2
        tokens, states_TC = packed.buffer_info()[0], self._buffer(num_rows, self._width)
        plans = self._attention.plans(runs)
        forward = self._forward
        forward.begin(num_rows, tokens, tokens + 8 * num_rows, end, states_TC.data_ptr())
        forward.run_whole(self._attention, plans)
        return num_rows, states_TC


def _move_last_rows(address: int, counts: Sequence[int], row_bytes: int) -> None:
    """Move the last of every `counts[i]` rows to the front, contiguously."""
    first = 0
    for place, count in enumerate(counts):
        first += count
        if first - 1 > place:
            source = address + (first - 1) * row_bytes
            ctypes.memmove(address + place * row_bytes, source, row_bytes)


def make_native_greedy_path(
    forward: LayerForward, attention: Attention, argmax_head: ArgmaxHead, buffer: StateBuffer
) -> NativeGreedyPath | None:
    """The native fast path; None unless layers, attention and head are all native."""
    if not isinstance(forward, NativeForward) or not isinstance(attention, NativeAttention):
        return None
    if not isinstance(argmax_head, NativeArgmax):
        return None
    return NativeGreedyPath(forward, attention, argmax_head, buffer)


def make_greedy_path(
    forward: LayerForward, attention: Attention, argmax_head: ArgmaxHead, buffer: StateBuffer
) -> GreedyPath:
    """The native fast path, or one that leaves every step to the general path."""
    return make_native_greedy_path(forward, attention, argmax_head, buffer) or NoGreedyPath()
