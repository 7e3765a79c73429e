"""What rank 0 and the other ranks say to each other, apart from tensors.

Rank 0 sends one `RankConfig`, then commands; a worker answers with `Loaded` once, and with `Fault`
when it cannot go on. Messages are msgpack in frames of a length and the bytes, on one socket per
worker. The end of the stream ends the worker.
"""

from __future__ import annotations

import socket
import struct
from typing import TypeVar

import msgspec

from ridgeline.engine.config import ResolvedSettings
from ridgeline.engine.scheduler.plan import StepPlan
from ridgeline.modelspec.model import ModelSpec
from ridgeline.modelspec.shard import NodeAddress, ParallelSizes, Shard

_LENGTH = struct.Struct("!I")
T = TypeVar("T")

TIMEOUT_S = 120.0
"""Seconds for which a rank waits for the others within an exchange."""


class RankConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a rank needs to load its part. `spec` is the whole model.

    `store` is where ranks meet (`ProcessCollectives.connect`), `segment` the descriptor of the
    memory that they share (None: they exchange by gloo, or by NCCL if `device` is a CUDA device);
    other names are those of `ResolvedSettings`.
    """

    rank: int
    sizes: ParallelSizes
    store: str
    segment: int | None
    nnodes: int
    master_addr: str | None
    timeout_s: float
    device: str
    model: str
    spec: ModelSpec
    dtype: str
    seed: int
    max_model_len: int
    max_num_seqs: int
    num_blocks: int
    block_size: int
    kv_cache_dtype: str
    attention_backend: str
    layer_backend: str
    num_threads: int
    num_threads_decode: int

    @property
    def shard(self) -> Shard:
        return Shard(sizes=self.sizes, rank=self.rank)

    @property
    def address(self) -> NodeAddress | None:
        """Where ranks of other nodes connect; None on one node."""
        return NodeAddress.parse(self.master_addr) if self.nnodes > 1 else None

    @property
    def divides_rows(self) -> bool:
        """Whether the places of a stage compute different rows of a step.

        Only native layers compute a row the same whatever it is computed with.
        """
        return self.sizes.context > 1 and self.layer_backend == "native"

    @property
    def rank_block_size(self) -> int:
        """Positions that this rank holds of a block."""
        return self.block_size // self.sizes.context


_SHARED = (
    "device",
    "model",
    "spec",
    "dtype",
    "seed",
    "max_model_len",
    "max_num_seqs",
    "num_blocks",
    "block_size",
    "attention_backend",
    "layer_backend",
    "num_threads",
    "num_threads_decode",
    "nnodes",
    "master_addr",
)


def rank_config(resolved: ResolvedSettings) -> RankConfig:
    """The configuration of rank 0; `store` and `segment` are still to be set."""
    return RankConfig(
        rank=0,
        sizes=resolved.parallel_sizes,
        store="",
        segment=None,
        timeout_s=TIMEOUT_S,
        kv_cache_dtype=resolved.kv_cache_dtype,
        **{name: getattr(resolved, name) for name in _SHARED},
    )


class RunStep(msgspec.Struct, frozen=True, tag="step"):
    """Compute the hidden states of a plan."""

    plan: StepPlan


class ComputeLogits(msgspec.Struct, frozen=True, tag="head"):
    """Take part in the LM head for rows that rank 0 broadcasts."""

    num_rows: int


class ScoreText(msgspec.Struct, frozen=True, tag="states"):
    """Compute the hidden states of one text, with a temporary cache."""

    tokens: tuple[int, ...]


Command = RunStep | ComputeLogits | ScoreText


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """A worker has its weights, of `nbytes` in memory."""

    nbytes: int


class Fault(msgspec.Struct, frozen=True, tag="fault"):
    """A worker ends because of an error.

    `kind` is the class of a UserError, "RankFailed" where it lost another rank, or empty.
    """

    text: str
    kind: str = ""


Report = Loaded | Fault


class Channel:
    """One end of the socket between rank 0 and a worker."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: msgspec.Struct) -> None:
        """Send one message. Raises OSError if the other end is gone."""
        self.send_encoded(self._encoder.encode(message))

    def send_encoded(self, body: bytes) -> None:
        """Send one message that is encoded already."""
        self.socket.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self, decoder: msgspec.msgpack.Decoder[T]) -> T | None:
        """The next message; None at the end of the stream."""
        header = self._read(_LENGTH.size)
        if header is None:
            return None
        body = self._read(_LENGTH.unpack(header)[0])
        return None if body is None else decoder.decode(body)

    def _read(self, size: int) -> bytes | None:
        data = bytearray()
        while len(data) < size:
            try:
                piece = self.socket.recv(size - len(data))
            except OSError:
                return None
            if not piece:
                return None
            data += piece
        return bytes(data)

    def close(self) -> None:
        self.socket.close()
