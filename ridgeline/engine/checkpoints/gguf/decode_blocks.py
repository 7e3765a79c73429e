"""Decodes GGUF's block types to float32 exactly as gguf-py does (ggml's `dequantize_row_*`).

Each function takes blocks of bytes [B, bytes] and returns numbers [B, numbers]. Types that no
kernel holds (IQ1 to IQ3, TQ, NVFP4) are decoded by the `gguf` package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_MX4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _half(blocks: Bytes, at: int) -> Floats:
    """The fp16 at byte `at`, [B, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _shifted(blocks: Bytes, per_row: int, shifts: range, mask: int) -> Bytes:
    """Bit fields: rows of `per_row` bytes, each repeated per shift; [B, numbers]."""
    rows = blocks.reshape(len(blocks), -1, 1, per_row)
    steps = np.array(list(shifts), dtype=np.uint8).reshape(1, 1, -1, 1)
    fields: Bytes = (rows >> steps) & np.uint8(mask)
    return fields.reshape(len(blocks), -1)


def nibbles(blocks: Bytes, per_row: int = 16) -> Bytes:
    """Low nibbles of `per_row` bytes, then their high ones."""
    return _shifted(blocks, per_row, range(0, 8, 4), 15)


def _bits(blocks: Bytes) -> Bytes:
    """The 32 bits of 4 bytes, lowest first."""
    return np.unpackbits(np.ascontiguousarray(blocks), axis=1, bitorder="little")


def _q4_0(b: Bytes) -> Floats:
    return _half(b, 0) * (nibbles(b[:, 2:]).astype(np.int8) - 8).astype(np.float32)


def _q4_1(b: Bytes) -> Floats:
    return _half(b, 0) * nibbles(b[:, 4:]).astype(np.float32) + _half(b, 2)


def q5_bits(b: Bytes, at: int) -> Bytes:
    """The 5-bit numbers of Q5_0 and Q5_1: high bits from byte `at`, then the nibbles."""
    return nibbles(b[:, at + 4 :]) | (_bits(b[:, at : at + 4]) << np.uint8(4))


def _q5_0(b: Bytes) -> Floats:
    return _half(b, 0) * (q5_bits(b, 2).astype(np.int8) - 16).astype(np.float32)


def _q5_1(b: Bytes) -> Floats:
    return _half(b, 0) * q5_bits(b, 4).astype(np.float32) + _half(b, 2)


def _q8_0(b: Bytes) -> Floats:
    return _half(b, 0) * np.ascontiguousarray(b[:, 2:]).view(np.int8).astype(np.float32)


def _sub_blocks(q: NDArray[Any], scale: Floats, low: Floats | None = None) -> Floats:
    """q · scale (- low), one scale per sub-block: [B, S] over [B, numbers]."""
    parts = q.reshape(len(q), scale.shape[1], -1).astype(np.float32)
    out = parts * scale[:, :, None]
    whole: Floats = (out if low is None else out - low[:, :, None]).reshape(len(q), -1)
    return whole


def q2_bits(b: Bytes) -> Bytes:
    """The 2-bit numbers of Q2_K."""
    return _shifted(b[:, 16:80], 32, range(0, 8, 2), 3)


def _q2_k(b: Bytes) -> Floats:
    scales, d, low = b[:, :16], _half(b, 80), _half(b, 82)
    return _sub_blocks(
        q2_bits(b), d * (scales & 15).astype(np.float32), low * (scales >> 4).astype(np.float32)
    )


def q3_k_parts(b: Bytes) -> tuple[NDArray[np.int8], NDArray[np.int8]]:
    """Numbers of Q3_K, -4..3, and the scales of its groups, -32..31."""
    low = nibbles(b[:, 96:104], 8)
    high = _shifted(b[:, 104:108], 4, range(0, 8, 2), 3)
    scale = (low | (high << np.uint8(4))).astype(np.int8) - 32
    top = _shifted(b[:, :32], 32, range(8), 1) ^ np.uint8(1)
    q = _shifted(b[:, 32:96], 32, range(0, 8, 2), 3).astype(np.int8)
    return q - (top << np.uint8(2)).astype(np.int8), scale


def _q3_k(b: Bytes) -> Floats:
    q, scale = q3_k_parts(b)
    return _sub_blocks(q, _half(b, 108) * scale.astype(np.float32))


def six_bits(b: Bytes) -> tuple[Bytes, Bytes]:
    """Scales and minima of Q4_K and Q5_K, six bits each, from 12 bytes."""
    d, m, both = b[:, 0:4], b[:, 4:8], b[:, 8:12]
    scale = np.concatenate([d & 0x3F, (both & 0x0F) | ((d >> 2) & 0x30)], axis=1)
    low = np.concatenate([m & 0x3F, (both >> 4) | ((m >> 2) & 0x30)], axis=1)
    return scale, low


def _six_bit_scales(b: Bytes) -> tuple[Floats, Floats]:
    scale, low = six_bits(b[:, 4:16])
    return _half(b, 0) * scale.astype(np.float32), _half(b, 2) * low.astype(np.float32)


def _q4_k(b: Bytes) -> Floats:
    return _sub_blocks(nibbles(b[:, 16:], 32), *_six_bit_scales(b))


def q5_k_bits(b: Bytes) -> Bytes:
    """The 5-bit numbers of Q5_K."""
    return nibbles(b[:, 48:], 32) | (_shifted(b[:, 16:48], 32, range(8), 1) << np.uint8(4))


def _q5_k(b: Bytes) -> Floats:
    return _sub_blocks(q5_k_bits(b), *_six_bit_scales(b))


def q6_bits(b: Bytes) -> NDArray[np.int8]:
    """Numbers of Q6_K, -32..31."""
    high = _shifted(b[:, 128:192], 32, range(0, 8, 2), 3)
    whole: NDArray[np.int8] = (nibbles(b[:, :128], 64) | (high << np.uint8(4))).astype(np.int8) - 32
    return whole


def _q6_k(b: Bytes) -> Floats:
    scale = np.ascontiguousarray(b[:, 192:208]).view(np.int8).astype(np.float32)
    return _sub_blocks(q6_bits(b), _half(b, 208) * scale)


def _iq4_nl(b: Bytes) -> Floats:
    return _half(b, 0) * np.array(IQ4, dtype=np.float32)[nibbles(b[:, 2:])]


def iq4_xs_steps(b: Bytes) -> NDArray[np.int8]:
    """The scales of IQ4_XS's groups, -32..31."""
    words = np.ascontiguousarray(b[:, 2:4]).view(np.uint16)
    high = (words >> np.arange(0, 16, 2, dtype=np.uint16)) & 3
    low = np.stack([b[:, 4:8] & 15, b[:, 4:8] >> 4], axis=2).reshape(len(b), 8)
    steps: NDArray[np.int8] = (low | (high.astype(np.uint8) << np.uint8(4))).astype(np.int8) - 32
    return steps


def _iq4_xs(b: Bytes) -> Floats:
    scale = iq4_xs_steps(b)
    values = np.array(IQ4, dtype=np.float32)[nibbles(b[:, 8:])]
    return _sub_blocks(values, _half(b, 0) * scale.astype(np.float32))


def _mxfp4(b: Bytes) -> Floats:
    e = b[:, :1].astype(np.uint32)
    power = np.where(e < 2, np.uint32(0x00200000) << e, (e - 1) << np.uint32(23)).astype(np.uint32)
    return power.view(np.float32) * np.array(_MX4, dtype=np.float32)[nibbles(b[:, 1:])]


DECODERS: Mapping[str, Callable[[Bytes], Floats]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}


def decode_blocks(kind: str, blocks: Bytes) -> Floats:
    """Numbers [B, numbers] of blocks; the types with large codebooks by the `gguf` package."""
    if kind in DECODERS:
        with np.errstate(invalid="ignore", over="ignore"):
            return DECODERS[kind](blocks)
    from gguf import GGMLQuantizationType, quants

    found: Floats = quants.dequantize(blocks, GGMLQuantizationType[kind])
    return found
