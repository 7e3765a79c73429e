"""The integers of a decode step, packed into one buffer that is copied to the device at once.

    host, pinned ─one copy─▶ device: tokens R · positions R · slots R · lengths R
                    [· state slots R · versions to read R, to write R] [· adapters R] · tables R × C

The parts in brackets are those of models with recurrent layers, and of engines with adapters.

A buffer belongs to one bucket and keeps the tables of its last step: rows whose blocks did not
change since are not written again. The next step may be packed once the last one's tokens were
read, since its copy is over by then, or in another turn's buffer before.

Shape legend: R rows of the bucket, C columns of its block tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ridgeline.engine.adapters.registry import NO_ADAPTER
from ridgeline.engine.attention.states import StateCache
from ridgeline.engine.attention.tables import DecodeTables
from ridgeline.engine.execution.graphs.buckets import Bucket
from ridgeline.engine.scheduler.plan import Run, stored_runs


class StepInputs:
    """Buffers of one bucket: one on the device, and on the host one for each turn.

    A step that is packed while the device may still read the one before takes another turn. Padded
    rows decode token 0 at position 0 in `padding_block`.
    """

    def __init__(
        self,
        bucket: Bucket,
        block_size: int,
        padding_block: int,
        device: torch.device,
        states: StateCache | None = None,
        adapter_of: Callable[[Run], int] | None = None,
    ) -> None:
        rows, columns = bucket.rows, bucket.columns
        self.bucket, self.block_size, self.padding_block = bucket, block_size, padding_block
        self.states, self.adapter_of = states, adapter_of
        self.num_fields = 4 + 3 * (states is not None) + (adapter_of is not None)
        num_ints = rows * (self.num_fields + columns)
        self.device_ints = torch.empty(num_ints, dtype=torch.int32, device=device)
        self._turns: dict[int, HostInts] = {}
        fields_FR = self.device_ints[: self.num_fields * rows].view(-1, rows)
        self.tokens_R, self.positions_R = fields_FR[0], fields_FR[1]
        self.adapters_R, self.states_3R = fields_FR[-1], fields_FR[4:7]
        tables_RC = self.device_ints[self.num_fields * rows :].view(rows, columns)
        self.tables = DecodeTables(fields_FR[2], fields_FR[3], tables_RC)

    def fill(self, runs: Sequence[Run]) -> int:
        """Pack the rows of all runs and copy them; returns the number of rows."""
        num_rows = self.pack(runs)
        self.copy()
        return num_rows

    def pack(self, runs: Sequence[Run], turn: int = 0) -> int:
        """Pack the rows of all runs on the host; returns their number."""
        if turn not in self._turns:
            self._turns[turn] = HostInts(self)
        return self._turns[turn].pack(runs)

    def take_tokens(self, chosen_R: Tensor, num_rows: int) -> None:
        """Replace the first tokens, which name rows of `chosen_R`, by what these rows chose.

        A row that chose nothing (a negative token) feeds token 0.
        """
        tokens = self.tokens_R[:num_rows]
        tokens.copy_(chosen_R.index_select(0, tokens).clamp_(min=0))

    def copy(self, turn: int = 0) -> None:
        """Copy the packed integers to the device, asynchronously where memory is pinned."""
        self.device_ints.copy_(self._turns[turn].ints, non_blocking=True)


class HostInts:
    """The integers of a step on the host; rows of unchanged blocks are not written again."""

    def __init__(self, inputs: StepInputs) -> None:
        rows, columns = inputs.bucket.rows, inputs.bucket.columns
        self.bucket, self.block_size = inputs.bucket, inputs.block_size
        self.padding_block = inputs.padding_block
        self.states, self.adapter_of = inputs.states, inputs.adapter_of
        on_gpu, num_fields = inputs.device_ints.device.type == "cuda", inputs.num_fields
        self.ints = torch.zeros(rows * (num_fields + columns), dtype=torch.int32, pin_memory=on_gpu)
        packed = self.ints.numpy()
        self._fields = packed[: num_fields * rows].reshape(num_fields, rows)
        self._tables = packed[num_fields * rows :].reshape(rows, columns)
        self._tables[:] = self.padding_block
        self._blocks: list[tuple[int, ...]] = [()] * rows
        self._num_used = 0
        self._clear(0)

    def pack(self, runs: Sequence[Run]) -> int:
        """Write the rows of all runs; returns their number."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        size = self.block_size
        lengths: list[int] = []
        for run in stored_runs(runs, size):
            first, blocks = run.start, run.blocks
            for index in range(first, first + len(run.tokens)):
                self._write_table(len(slots), blocks)
                slots.append(blocks[index // size] * size + index % size)
                positions.append(index + run.num_dropped)
                lengths.append(index + 1)
            tokens.extend(run.tokens)
        num_rows = len(slots)
        if num_rows < self._num_used:
            self._clear(num_rows)
        self._num_used = num_rows
        fields = self._fields
        fields[0, :num_rows], fields[1, :num_rows] = tokens, positions
        fields[2, :num_rows] = slots
        fields[3, :num_rows] = lengths
        if self.states is not None:  # every run is one row
            for row, run in enumerate(runs):
                fields[4:7, row] = self.states.place_of(run)
        if self.adapter_of is not None:
            row = 0
            for run in runs:
                fields[-1, row : row + len(run.tokens)] = self.adapter_of(run)
                row += len(run.tokens)
        return num_rows

    def _write_table(self, row: int, blocks: tuple[int, ...]) -> None:
        written = self._blocks[row]
        if blocks is written or blocks == written:
            return
        # Blocks that slid out of a window are negative; no kernel reads them.
        kept = [max(0, block) for block in blocks[: self.bucket.columns]]
        self._tables[row, : len(kept)] = kept
        self._tables[row, len(kept) : len(written)] = self.padding_block
        self._blocks[row] = blocks

    def _clear(self, first: int) -> None:
        """Turn the rows from `first` on into padding."""
        fields = self._fields[:, first:]
        fields[0], fields[1] = 0, 0
        fields[2], fields[3] = self.padding_block * self.block_size, 1
        if self.states is not None:
            fields[4], fields[5:7] = self.states.padding_slot, 0
        if self.adapter_of is not None:
            fields[-1] = NO_ADAPTER
        self._tables[first:] = self.padding_block
        self._blocks[first:] = [()] * (self.bucket.rows - first)
