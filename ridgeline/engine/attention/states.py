"""States of recurrent layers: what a sequence keeps next to its KV cache.

A gated delta net does not look back at keys: each of its layers keeps, per sequence, the last
inputs of its convolution and one matrix per head. The scheduler gives every running sequence a
slot; a slot holds two versions of the state, each with the number of tokens that it has seen. A run
reads the version that has seen `run.start` tokens and writes the other one. So a failed step can be
repeated, and a state that does not fit its run is an error and never a wrong answer.

Invariants. A run from position 0 begins with zeros, whatever the slot held. A sequence that was
preempted begins again from 0. No state is shared: such models have no prefix hits.

Shape legend: S slots, W width of the convolution, T its size, H heads, K key size, V value size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ridgeline.engine.attention.base import Attend, Attention
from ridgeline.engine.scheduler.plan import Run
from ridgeline.errors import CannotRun
from ridgeline.modelspec.model import DeltaSpec, ModelSpec

STATE_VERSIONS = 2
"""Of a sequence's state: before and after its latest run."""


@dataclass(frozen=True)
class RunStates:
    """Runs of equal length: their rows, and where their states are read and written.

    `new` are the places of runs that begin with zeros; `places` the same as (slot, version to read,
    version to write, whether it begins with zeros), or None where the host does not know them.
    """

    rows: Tensor
    read: tuple[Tensor, Tensor]
    write: tuple[Tensor, Tensor]
    new: Tensor
    places: tuple[tuple[int, int, int, bool], ...] | None


class LayerStates:
    """The states of one layer in every version, float32."""

    def __init__(self, delta: DeltaSpec, num_slots: int, device: torch.device | str) -> None:
        slots, memory = (STATE_VERSIONS, num_slots), (delta.key_dim, delta.value_dim)
        self.conv = torch.zeros((*slots, delta.conv_width, delta.conv_size - 1), device=device)
        self.memory = torch.zeros((*slots, delta.num_value_heads, *memory), device=device)

    def read_conv(self, runs: RunStates) -> Tensor:
        """conv_SWT of the runs, before their tokens."""
        return _begun(self.conv[runs.read], runs)

    def read_memory(self, runs: RunStates) -> Tensor:
        """memory_SHKV of the runs, before their tokens."""
        return _begun(self.memory[runs.read], runs)

    def write_conv(self, runs: RunStates, conv_SWT: Tensor) -> None:
        """Store the last inputs of the convolution after the runs' tokens."""
        self.conv[runs.write] = conv_SWT

    def write_memory(self, runs: RunStates, memory_SHKV: Tensor) -> None:
        """Store the matrices after the runs' tokens."""
        self.memory[runs.write] = memory_SHKV

    def memories(self, runs: RunStates) -> Iterator[tuple[Tensor, Tensor]]:
        """Views of each run's matrices: to be read, and to be written.

        They are one view where a run begins with zeros.
        """
        assert runs.places is not None
        for slot, read, write, is_new in runs.places:
            before_HKV = self.memory[read, slot]
            yield before_HKV.zero_() if is_new else before_HKV, self.memory[write, slot]


def _begun(states: Tensor, runs: RunStates) -> Tensor:
    if len(runs.new):
        states[runs.new] = 0.0
    return states


@dataclass(frozen=True)
class StepStates:
    """The states of one step: one-token runs together (None: there are none), others singly."""

    layers: tuple[LayerStates | None, ...]
    decodes: RunStates | None
    prompts: tuple[RunStates, ...]

    def of(self, layer: int) -> LayerStates:
        """The states of a recurrent layer."""
        states = self.layers[layer]
        assert states is not None, "a layer without states"
        return states


class StateAttend(Protocol):
    """An `Attend` of a step that has states."""

    states: StepStates


class StateCache:
    """The states of every recurrent layer for `num_slots` sequences, and a slot for padding."""

    def __init__(self, spec: ModelSpec, num_slots: int, device: torch.device | str) -> None:
        self.padding_slot = num_slots
        self.layers = tuple(
            None if delta is None else LayerStates(delta, num_slots + 1, device)
            for delta in (layer.attention.delta for layer in spec.layers)
        )
        self.device = device
        self._seen = [[-1, -1] for _ in range(num_slots)]  # tokens of each version, by slot

    def begin(self, runs: Sequence[Run]) -> StepStates:
        """The states of a step with these runs, whose rows are in order."""
        first, singles, prompts = 0, [], []
        for run in runs:
            place = (first, *self._versions(run))
            if len(run.tokens) == 1:
                singles.append(place)
            else:
                rows = torch.arange(first, first + len(run.tokens), device=self.device)
                prompts.append(self._run_states([place], rows))
            first += len(run.tokens)
        rows = torch.tensor([row for row, *_ in singles], device=self.device)
        decodes = self._run_states(singles, rows) if singles else None
        return StepStates(self.layers, decodes, tuple(prompts))

    def place_of(self, run: Run) -> tuple[int, int, int]:
        """(slot, version to read, version to write) of a run that continues a sequence."""
        assert run.start > 0, "its states would have to be cleared"
        return self._versions(run)[:3]

    def decoding(self, places_3R: Tensor) -> StepStates:
        """The states of a step of one-token runs whose `place_of` is on the device, as integers."""
        slots, reads, writes = places_3R.long()
        rows, none = torch.arange(places_3R.shape[1], device=self.device), slots[:0]
        runs = RunStates(rows, (reads, slots), (writes, slots), none, None)
        return StepStates(self.layers, runs, ())

    def _versions(self, run: Run) -> tuple[int, int, int, bool]:
        """(slot, version to read, version to write, whether the run begins with zeros)."""
        if run.num_drafts or run.branches:
            raise CannotRun("a recurrent layer cannot take back the drafts that are rejected")
        seen, slot = self._seen[run.state_slot], run.state_slot
        end = run.start + len(run.tokens)
        if run.start == 0:
            seen[:] = end, -1
            return slot, 0, 0, True
        if run.start not in seen:
            raise CannotRun(
                "the state of this sequence is lost", value=f"{run.start} tokens", limit=str(seen)
            )
        read = seen.index(run.start)
        seen[1 - read] = end
        return slot, read, 1 - read, False

    def _run_states(
        self, places: Sequence[tuple[int, int, int, int, bool]], rows: Tensor
    ) -> RunStates:
        _, slots, reads, writes, are_new = (
            torch.tensor(column, device=self.device) for column in zip(*places, strict=True)
        )
        return RunStates(
            rows,
            (reads, slots),
            (writes, slots),
            are_new.nonzero().flatten(),
            tuple(place[1:] for place in places),
        )


class StatefulAttention:
    """An attention backend for models that have recurrent layers, too."""

    def __init__(self, inner: Attention, states: StateCache) -> None:
        self.inner, self.states = inner, states

    def prepare(self, runs: Sequence[Run]) -> StatefulStep:
        return StatefulStep(self.inner.prepare(runs), self.states.begin(runs))


class StatefulStep:
    """The `Attend` of one step, with the states of its runs."""

    def __init__(self, inner: Attend, states: StepStates) -> None:
        self.inner, self.states = inner, states

    def __call__(
        self, q_THD: Tensor, kv_T2KD: Tensor, layer: int, sinks_H: Tensor | None = None
    ) -> Tensor:
        return self.inner(q_THD, kv_T2KD, layer, sinks_H)
