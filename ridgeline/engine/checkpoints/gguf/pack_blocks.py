"""GGUF's block types in the layout of the packed kernels: the file's numbers, nothing rounded.

  4 bits, groups of 32      Q4_0 · Q4_1 (minimum) · Q4_K (minimum, span of 256)
  8 bits, groups of 32      Q5_0 · Q8_0 · IQ4_NL · Q5_1 (minimum) · IQ4_XS (span of 256) ·
                            Q5_K (minimum, span of 256)
  8 bits, groups of 16      Q3_K, Q6_K (span of 256) · Q2_K (minimum, span of 256)

Each reader takes blocks of bytes [B, bytes] and returns codes [B, numbers], fp16 scales [B, 1] and
minima [B, 1], and int8 steps of both [B, groups of a block]. Other types are decoded to float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ridgeline.engine.checkpoints.gguf.decode_blocks import (
    IQ4,
    Bytes,
    iq4_xs_steps,
    nibbles,
    q2_bits,
    q3_k_parts,
    q5_bits,
    q5_k_bits,
    q6_bits,
    six_bits,
)
from ridgeline.engine.quant.blocks import Blocks
from ridgeline.modelspec.checkpoints.gguf_spec import computed_format

Halves = NDArray[np.float16]


class BlockParts(NamedTuple):
    """The fields of blocks: codes, scales, steps, minima and their steps."""

    q: NDArray[Any]
    scale: Halves
    step: NDArray[Any] | None = None
    low: Halves | None = None
    low_step: NDArray[Any] | None = None


def _half(blocks: Bytes, at: int) -> Halves:
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)


def _q2_k(b: Bytes) -> BlockParts:
    scales = b[:, :16]
    return BlockParts(q2_bits(b), _half(b, 80), scales & 15, -_half(b, 82), scales >> 4)


def _q3_k(b: Bytes) -> BlockParts:
    q, step = q3_k_parts(b)
    return BlockParts(q, _half(b, 108), step)


def _q4_k(b: Bytes) -> BlockParts:
    step, low = six_bits(b[:, 4:16])
    return BlockParts(nibbles(b[:, 16:], 32), _half(b, 0), step, -_half(b, 2), low)


def _q5_k(b: Bytes) -> BlockParts:
    step, low = six_bits(b[:, 4:16])
    return BlockParts(q5_k_bits(b), _half(b, 0), step, -_half(b, 2), low)


def _q6_k(b: Bytes) -> BlockParts:
    return BlockParts(q6_bits(b), _half(b, 208), np.ascontiguousarray(b[:, 192:208]).view(np.int8))


def _iq4(b: Bytes, at: int) -> NDArray[np.int8]:
    found: NDArray[np.int8] = np.array(IQ4, dtype=np.int8)[nibbles(b[:, at:])]
    return found


READERS: Mapping[str, Callable[[Bytes], BlockParts]] = {
    "Q4_0": lambda b: BlockParts(nibbles(b[:, 2:]), _half(b, 0)),
    "Q4_1": lambda b: BlockParts(nibbles(b[:, 4:]), _half(b, 0), None, _half(b, 2)),
    "Q5_0": lambda b: BlockParts(q5_bits(b, 2).astype(np.int8) - 16, _half(b, 0)),
    "Q5_1": lambda b: BlockParts(q5_bits(b, 4), _half(b, 0), None, _half(b, 2)),
    "Q8_0": lambda b: BlockParts(np.ascontiguousarray(b[:, 2:]).view(np.int8), _half(b, 0)),
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": lambda b: BlockParts(_iq4(b, 2), _half(b, 0)),
    "IQ4_XS": lambda b: BlockParts(_iq4(b, 8), _half(b, 0), iq4_xs_steps(b)),
}


def packed_blocks(kind: str, blocks: Bytes, num_out: int) -> Blocks:
    """A weight of `num_out` rows, in the layout of `kind`."""
    parts, format = READERS[kind](blocks), computed_format(kind)

    def table(values: NDArray[Any] | None, dtype: type[np.generic]) -> Tensor | None:
        if values is None:
            return None
        return torch.from_numpy(np.ascontiguousarray(values, dtype=dtype)).view(num_out, -1)

    q_OI = table(parts.q, np.uint8 if format.bits == 4 else np.int8)
    scale_OS = table(parts.scale, np.float16)
    assert q_OI is not None and scale_OS is not None
    return Blocks(
        format,
        q_OI,
        scale_OS,
        table(parts.step, np.int8),
        table(parts.low, np.float16),
        table(parts.low_step, np.int8),
    )
