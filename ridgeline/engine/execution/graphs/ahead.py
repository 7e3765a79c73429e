"""Asynchronous scheduling: the next decode step is on the device before the last one is read.

    device   │ step N          │ step N + 1      │ step N + 2
    host     │ launch N + 1    │ commit N, plan N + 1, launch N + 2 │ commit N + 1, …

What. A decode step feeds one token of every sequence, the one that the step before has chosen. So
step N + 1 can be launched while step N runs: its rows, positions and slots follow from those of
step N, and its tokens are read from the outputs of step N on the device. While the device computes
it, the host commits step N, answers requests, and plans step N + 1. The device does not wait for
any of that, and there is one copy of integers to it for each step.

Invariant. The tokens are those of the synchronous loop. A launched step is used only if the plan
that the scheduler then makes agrees with it, row by row: the same sequence at the same position in
the same blocks, feeding the token that step N gave. Sequences that have ended meanwhile are left
out. A step that does not agree is dropped, and the plan is computed as if it had not been there;
what it wrote lies at positions that the plan writes again, or in blocks that hold no known token.

When it loses. Steps after which a prompt joins, a sequence is preempted, or a request needs more
than the largest logit: the step launched ahead is dropped, and the device computed it in vain. A
sequence that enters a block that it does not have yet ends the chain for one step.

Shape legend: R rows of a bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from msgspec.structs import replace
from torch import Tensor

from ridgeline.engine.execution.graphs.decode import NO_TOKEN, DecodeGraphs, StepOutputs
from ridgeline.engine.sampling.batched import no_token_error
from ridgeline.engine.scheduler.plan import Run


class DeviceQueue(Protocol):
    """Work that a device does in order, apart from the host."""

    def submit(self, work: Callable[[], None]) -> Callable[[], None]:
        """Enqueue `work`; the result waits until it is done, and raises what it raised."""
        ...


class CudaQueue:
    """The current CUDA stream: launches return at once, and an event marks the end."""

    def submit(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        event = torch.cuda.Event()
        event.record()
        return event.synchronize


@dataclass
class AheadCounts:
    """Steps launched ahead, and of those, how many a plan used and how many were dropped."""

    num_launched: int = 0
    num_used: int = 0
    num_dropped: int = 0

    def as_dict(self) -> dict[str, float]:
        """The totals, under the names of the engine's counters."""
        return {
            "num_steps_launched_ahead": float(self.num_launched),
            "num_steps_used_ahead": float(self.num_used),
            "num_steps_dropped_ahead": float(self.num_dropped),
        }


@dataclass(frozen=True)
class _Launched:
    """A step on the device: its runs, without tokens if they were not known, and its outputs."""

    runs: tuple[Run, ...]
    outputs: list[StepOutputs]
    host_tokens: Tensor
    wait: Callable[[], None]


class StepsAhead:
    """Runs greedy decode steps, each with the next one behind it.

    Steps take turns with two buffers of pinned memory: the integers of one step are packed while
    the device still reads those of the other. They share the graphs, because the device does one
    step after the other: a step reads what the one before has chosen, then overwrites it.
    """

    def __init__(self, graphs: DecodeGraphs, queue: DeviceQueue, block_size: int) -> None:
        self._graphs, self._queue, self._block_size = graphs, queue, block_size
        pinned = torch.cuda.is_available()
        self._host_tokens = tuple(
            torch.empty(graphs.max_rows, dtype=torch.int32, pin_memory=pinned) for _ in range(2)
        )
        self._turn = 0
        self._next: _Launched | None = None
        self._last_tokens: dict[int, int] = {}
        self.counts = AheadCounts()

    def can_run(self, runs: Sequence[Run]) -> bool:
        """Whether a step is one that can have another launched behind it."""
        return self._graphs.can_run(runs) and not any(
            run.num_drafts or run.windows or run.eviction is not None or run.adapter for run in runs
        )

    def run(self, runs: Sequence[Run]) -> tuple[list[int], Tensor]:
        """One token per row and the states x_TC, and behind it the launch of the next step.

        The states are overwritten by that step unless the graphs keep states.
        """
        ahead, self._next = self._next, None
        rows = None if ahead is None else self._rows_of(ahead, runs)
        if ahead is not None and rows is not None:
            self.counts.num_used += 1
            step = ahead
        else:
            self._drop(ahead)
            step = self._launch(tuple(runs), None)
            rows = list(range(len(runs)))
        following = self._following(runs, rows)
        if following is not None:
            self._next = self._launch(following, step)
            self.counts.num_launched += 1
        step.wait()
        tokens: list[int] = step.host_tokens[: len(step.runs)].tolist()
        chosen = [tokens[row] for row in rows]
        if NO_TOKEN in chosen:
            self.forget()
            raise no_token_error(chosen.index(NO_TOKEN))
        self._last_tokens = {run.seq_id: token for run, token in zip(runs, chosen, strict=True)}
        x_RC = step.outputs[0].x_RC
        in_order = not self._graphs.keep_states or rows == list(range(len(runs)))
        return chosen, x_RC[: len(runs)] if in_order else x_RC[rows]

    def forget(self) -> None:
        """Drop the step launched ahead, if there is one: other work follows on the device."""
        ahead, self._next = self._next, None
        self._drop(ahead)

    def _drop(self, ahead: _Launched | None) -> None:
        if ahead is not None:
            self.counts.num_dropped += 1
            ahead.wait()  # its buffers are free again, and no error of it is met later

    def _rows_of(self, ahead: _Launched, runs: Sequence[Run]) -> list[int] | None:
        """The row of each run in a step launched ahead; None if one is not in it as planned."""
        place = {run.seq_id: row for row, run in enumerate(ahead.runs)}
        rows = []
        for run in runs:
            row = place.get(run.seq_id)
            if row is None or not self._agrees(ahead.runs[row], run):
                return None
            rows.append(row)
        return rows

    def _agrees(self, predicted: Run, run: Run) -> bool:
        """Whether a row was computed as planned: same place, same blocks, the token of the last
        step."""
        needed = run.start // self._block_size + 1
        return (
            run.is_argmax
            and not run.num_drafts
            and run.prompt_logprobs is None
            and run.start == predicted.start
            and run.blocks[:needed] == predicted.blocks[:needed]
            and run.adapter == predicted.adapter
            and run.tokens == (self._last_tokens.get(run.seq_id),)
        )

    def _following(self, runs: Sequence[Run], rows: Sequence[int]) -> tuple[Run, ...] | None:
        """The next step of the same sequences; None if one has no place for it.

        The token of a run is not known: in its place stands the row of the step before whose
        outcome it is.
        """
        following = []
        for run, row in zip(runs, rows, strict=True):
            start = run.start + 1
            if start >= self._graphs.max_len or start // self._block_size >= len(run.blocks):
                return None
            following.append(replace(run, start=start, tokens=(row,)))
        return tuple(following)

    def _launch(self, runs: tuple[Run, ...], before: _Launched | None) -> _Launched:
        """Put a step on the device; with `before`, it feeds the tokens that this step chooses."""
        graphs, turn = self._graphs, self._turn
        host_tokens, self._turn = self._host_tokens[turn], 1 - turn
        inputs, replay = graphs.capture(runs)
        num_rows = inputs.pack(runs, turn)
        outputs: list[StepOutputs] = []

        @torch.inference_mode()
        def compute() -> None:
            inputs.copy(turn)
            if before is not None:
                inputs.take_tokens(before.outputs[0].tokens_R, num_rows)
            own = replay()
            kept = own.x_RC.clone() if graphs.keep_states else own.x_RC
            outputs.append(StepOutputs(kept, own.logits_RV, own.tokens_R))
            host_tokens[:num_rows].copy_(own.tokens_R[:num_rows], non_blocking=True)

        wait = self._queue.submit(compute)
        graphs.counts.num_replays += 1
        return _Launched(runs, outputs, host_tokens, wait)


def why_no_steps_ahead(
    graphs: DecodeGraphs | None, why_no_graphs: str, *, drafts: bool, moves_blocks: str
) -> str | None:
    """Why no step can be launched ahead; None if it can.

    `drafts`: whether the engine speculates. `moves_blocks`: what moves blocks of the KV cache
    between steps, empty if nothing does.
    """
    if drafts:
        return "drafts follow from the tokens of the step before"
    if moves_blocks:
        return f"{moves_blocks} moves blocks that a step launched ahead may write to"
    if graphs is not None and graphs.recurrent is not None:
        return "states of recurrent layers alternate between two versions, one step at a time"
    return why_no_graphs if graphs is None else None
