"""Decode steps as CUDA graphs: captured once per bucket, then one launch per step.

What. In eager mode the host launches some ten kernels per layer, each of which costs it more time
than a small layer takes on the GPU. A graph holds all of them, from the token ids to the first
largest logit of every row. A step copies its integers to the device (`StepInputs`), replays the
graph of its bucket, and waits once: for the tokens. Drafts are more rows of the same step, so they
are verified by the same graph.

A graph is captured when a step first needs its bucket, after one step in eager mode that compiles
and tunes kernels. All graphs share one pool of memory, since no two run at the same time. Rows
beyond those of the step are padding; they write to a block that no sequence has.

Invariant. The tokens equal those of eager mode: the same kernels on the same inputs. (Other rows of
a product may be tiled differently, so bits may differ between buckets, as they do between batches.)

When it loses. The first step of a bucket takes as long as three; each bucket keeps its outputs.
Prompts and steps of more than `MAX_ROWS` rows run eagerly.

Shape legend: R rows of a bucket, C hidden_size, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ridgeline.engine.adapters.registry import AdapterRegistry
from ridgeline.engine.attention.base import Attend, Attention
from ridgeline.engine.attention.states import StateCache, StatefulAttention, StatefulStep
from ridgeline.engine.attention.tables import TableAttention
from ridgeline.engine.execution.graphs.buckets import (
    MAX_ROWS,
    Bucket,
    column_sizes,
    row_sizes,
    smallest_fitting,
)
from ridgeline.engine.execution.graphs.inputs import StepInputs
from ridgeline.engine.kernels.triton import load, why_not
from ridgeline.engine.model.decoder import Decoder
from ridgeline.engine.model.moe import routed_experts
from ridgeline.engine.sampling.batched import no_token_error
from ridgeline.engine.scheduler.plan import Run, stored_runs

NO_TOKEN = -1


@dataclass(frozen=True)
class StepOutputs:
    """Of every row: the final states, the logits as the head computes them, the chosen token.

    A token is `NO_TOKEN` where the largest logit is not finite.
    """

    x_RC: Tensor
    logits_RV: Tensor
    tokens_R: Tensor


Replay = Callable[[], StepOutputs]


class Capture(Protocol):
    """Turns a function over fixed buffers into one that is cheap to repeat."""

    def __call__(self, compute: Callable[[], StepOutputs]) -> Replay: ...


def run_eagerly(compute: Callable[[], StepOutputs]) -> Replay:
    """Repeat by computing again: the reference, and what runs without CUDA."""
    return compute


class CudaCapture:
    """Captures CUDA graphs, all in one pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], StepOutputs]) -> Replay:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compute()  # compiles and tunes kernels, which a capture must not
            compute()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        capture = torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local")
        # After an error, torch.cuda.graph does not leave its stream: the outer context does.
        with torch.cuda.stream(torch.cuda.current_stream()), capture:
            outputs = compute()

        def replay() -> StepOutputs:
            graph.replay()
            return outputs

        return replay


@dataclass
class GraphCounts:
    """What was captured and replayed; `capture_s` includes compiling kernels."""

    num_graphs: int = 0
    num_replays: int = 0
    capture_s: float = 0.0
    by_bucket: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, float]:
        """The totals, under the names of the engine's counters."""
        return {
            "num_graphs": float(self.num_graphs),
            "num_graph_replays": float(self.num_replays),
            "graph_capture_s": self.capture_s,
        }


class DecodeGraphs:
    """Computes whole decode steps from graphs; the runner's greedy path on a GPU.

    `max_len` is the longest sequence in tokens. The cache's last block is for padding. With
    `keep_states`, the states that a call returns stay valid after the next step. `recurrent` holds
    the states of recurrent layers (None: the model has none), `adapters` those that rows may use.
    """

    def __init__(
        self,
        decoder: Decoder,
        attention: TableAttention,
        max_len: int,
        capture: Capture,
        max_rows: int = MAX_ROWS,
        recurrent: StateCache | None = None,
        adapters: AdapterRegistry | None = None,
    ) -> None:
        self.recurrent, self._adapters = recurrent, adapters
        self._decoder, self._attention, self._capture = decoder, attention, capture
        self.max_len, self._block_size = max_len, attention.cache.block_size
        self._padding_block = attention.cache.num_blocks - 1
        self._rows = row_sizes(max_rows)
        self._columns = column_sizes(-(-max_len // self._block_size))
        self._graphs: dict[Bucket, tuple[StepInputs, Replay]] = {}
        self._host_tokens = torch.empty(
            self._rows[-1], dtype=torch.int32, pin_memory=decoder.device.type == "cuda"
        )
        self.counts = GraphCounts()
        self.keep_states, self.warm_up_s = False, 0.0
        # A graph keeps the address of these tables, so they must not grow afterwards.
        decoder.body.ropes.tables_up_to(max_len)

    @property
    def max_rows(self) -> int:
        """Rows of the largest bucket."""
        return self._rows[-1]

    def describe(self) -> str:
        """What is captured, and when."""
        return (
            f"CUDA graphs of up to {self._rows[-1]} rows, each captured when a step first needs it;"
            f" kernels compiled and {self.counts.num_graphs} captured in {self.warm_up_s:.1f} s"
        )

    def can_run(self, runs: Sequence[Run]) -> bool:
        """Whether the tokens of a step are the largest logits of all its rows."""
        return self.can_decode(runs) and all(run.is_argmax for run in runs)

    def can_decode(self, runs: Sequence[Run]) -> bool:
        """Whether every row of a step is followed by a sampled token."""
        num_rows = 0
        if self.recurrent is not None and any(run.start == 0 for run in runs):
            return False  # their states are cleared first
        for run in runs:
            if len(run.tokens) != run.max_outputs or run.prompt_logprobs is not None:
                return False
            num_rows += len(run.tokens)
        return 0 < num_rows <= self._rows[-1]

    @torch.inference_mode()
    def __call__(self, runs: Sequence[Run]) -> tuple[list[int], Tensor]:
        """One token per row, and the states x_TC; valid until the next step."""
        outputs, num_rows = self._replay(runs)
        host = self._host_tokens[:num_rows]
        host.copy_(outputs.tokens_R[:num_rows], non_blocking=True)
        self._wait()
        tokens: list[int] = host.tolist()
        if NO_TOKEN in tokens:
            raise no_token_error(tokens.index(NO_TOKEN))
        return tokens, self._states(outputs, num_rows)

    @torch.inference_mode()
    def logits(self, runs: Sequence[Run]) -> tuple[Tensor, Tensor]:
        """Float32 logits_TV and states x_TC of the rows; valid until the next step."""
        outputs, num_rows = self._replay(runs)
        return outputs.logits_RV[:num_rows].float(), self._states(outputs, num_rows)

    def _states(self, outputs: StepOutputs, num_rows: int) -> Tensor:
        x_TC = outputs.x_RC[:num_rows]
        return x_TC.clone() if self.keep_states else x_TC

    def replay_last(self, runs: Sequence[Run]) -> StepOutputs:
        """Repeat the last step of these runs' bucket without new inputs, to time it."""
        _, replay = self._graphs[self.bucket_of(runs)]
        return replay()

    def bucket_of(self, runs: Sequence[Run]) -> Bucket:
        """The smallest bucket that holds a step."""
        rows = smallest_fitting(self._rows, sum(len(run.tokens) for run in runs))
        stored = stored_runs(runs, self._block_size)
        last = max(run.start + len(run.tokens) - 1 for run in stored)
        columns = smallest_fitting(self._columns, last // self._block_size + 1)
        assert rows is not None and columns is not None, "can_decode was not asked"
        return Bucket(rows, columns)

    def _wait(self) -> None:
        if self._decoder.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def capture(self, runs: Sequence[Run]) -> tuple[StepInputs, Replay]:
        """The graph of a step's bucket, captured now if it was not before."""
        bucket = self.bucket_of(runs)
        if bucket not in self._graphs:
            self._graphs[bucket] = self._make(bucket, runs)
        return self._graphs[bucket]

    def _replay(self, runs: Sequence[Run]) -> tuple[StepOutputs, int]:
        inputs, replay = self.capture(runs)
        num_rows = inputs.fill(runs)
        self.counts.num_replays += 1
        return replay(), num_rows

    def _make(self, bucket: Bucket, runs: Sequence[Run]) -> tuple[StepInputs, Replay]:
        began_s = time.perf_counter()
        device = self._decoder.device
        recurrent, adapters = self.recurrent, self._adapters
        place_of = None if adapters is None else adapters.place_of
        sizes = self._block_size, self._padding_block
        inputs = StepInputs(bucket, *sizes, device, recurrent, place_of)
        inputs.fill(runs)
        step = self._attention.step(inputs.tables)

        def compute() -> StepOutputs:
            attend: Attend = step
            if recurrent is not None:
                attend = StatefulStep(step, recurrent.decoding(inputs.states_3R))
            of_rows = nullcontext() if adapters is None else adapters.of_rows(inputs.adapters_R)
            with of_rows:
                args = inputs.tokens_R, inputs.positions_R, self.max_len, attend
                x_RC = self._decoder.hidden(*args)
            logits_RV = self._decoder.head(x_RC)
            return StepOutputs(x_RC, logits_RV, first_largest(logits_RV))

        replay = self._capture(compute)
        took_s = time.perf_counter() - began_s
        self.counts.num_graphs += 1
        self.counts.capture_s += took_s
        self.counts.by_bucket[f"{bucket.rows}x{bucket.columns}"] = took_s
        return inputs, replay


def first_largest(logits_RV: Tensor) -> Tensor:
    """The first largest logit of each row, int32; `NO_TOKEN` where it is not finite."""
    if logits_RV.is_cuda and not why_not(logits_RV.device):
        token_R: Tensor = load("sampling").first_largest(logits_RV)
        return token_R
    largest_R, index_R = logits_RV.max(1)
    return index_R.where(largest_R.isfinite(), NO_TOKEN).int()


def why_no_graphs(decoder: Decoder, attention: Attention) -> str | None:
    """Why decode steps cannot be captured; None if they can."""
    if decoder.device.type != "cuda":
        return f"the device is {decoder.device.type}"
    tables, _ = _parts(attention)
    if not isinstance(tables, TableAttention):
        return "the attention backend has no block tables"
    if tables.why_not_captured:
        return tables.why_not_captured
    if not all(experts.has_fixed_shapes for experts in routed_experts(decoder.body.blocks)):
        return "the rows of each expert are counted on the host"
    return None


def make_decode_graphs(
    decoder: Decoder,
    attention: Attention,
    max_len: int,
    adapters: AdapterRegistry | None = None,
) -> DecodeGraphs | None:
    """Graphs of a decoder on a GPU; None where `why_no_graphs` has a reason."""
    if why_no_graphs(decoder, attention) is not None:
        return None
    tables, recurrent = _parts(attention)
    assert isinstance(tables, TableAttention)
    return DecodeGraphs(
        decoder, tables, max_len, CudaCapture(), recurrent=recurrent, adapters=adapters
    )


def _parts(attention: Attention) -> tuple[Attention, StateCache | None]:
    """The attention over keys, and the states of recurrent layers."""
    if isinstance(attention, StatefulAttention):
        return attention.inner, attention.states
    return attention, None
