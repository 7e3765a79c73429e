"""How keys and values are stored in the cache: a family of three, one row [W] per (token, head).

    float32, bfloat16, float16   row = D numbers                             W = D
    int8                         row = D codes + 128, then one float32 scale W = D + 4 bytes

INT8 keeps each key and each value of a head with a scale of its own: x ≈ code · scale, with
scale = max|x| / 127 over the D numbers of that token and head, and code = x / scale rounded half to
even. Codes are stored plus 128, as unsigned bytes: those widen to words by a mask and a shift,
where signed ones need shuffles. The scale stands in the row it belongs to, so that whatever moves
blocks (copy-on-write, prefix sharing) moves it too.

Paper: per-token quantisation of the KV cache as in KVQuant (Hooper et al. 2024, arXiv 2401.18079)
and KIVI (Liu et al. 2024, arXiv 2402.02750), at 8 bits, where keys need no channel-wise scales.

Invariant: what a position holds depends on that token's key or value alone; writing it again gives
the same bytes. Lossy, except where the format is the dtype of the computation.

When it loses: in quality where keys have strong outliers; in time for prompts with the torch
backend, which widens rows before use (benchmarks/bench_attention.py has the figures).

Shape legend: X any leading axes, D head_dim, W numbers of a stored row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ridgeline.engine.model.dtype import DTYPES

SCALE_BYTES = 4
MAX_CODE = 127
OFFSET = 128  # added to codes as stored
SMALLEST = 1e-30  # below it a row is stored as zeros: 127 / max|x| must stay finite


class KvFormat(Protocol):
    """Storage of one (token, head) row."""

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def width(self, head_dim: int) -> int:
        """Numbers of `dtype` in a stored row."""
        ...

    def encode(self, x_XD: Tensor) -> Tensor:
        """stored_XW of keys or values."""
        ...

    def decode(self, stored_XW: Tensor, dtype: torch.dtype) -> Tensor:
        """x_XD in `dtype`."""
        ...


@dataclass(frozen=True)
class PlainKv:
    """Numbers as they are, in a float dtype."""

    dtype: torch.dtype

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def width(self, head_dim: int) -> int:
        return head_dim

    def encode(self, x_XD: Tensor) -> Tensor:
        return x_XD.to(self.dtype)

    def decode(self, stored_XW: Tensor, dtype: torch.dtype) -> Tensor:
        return stored_XW.to(dtype)


@dataclass(frozen=True)
class Int8Kv:
    """See the module's head."""

    name: str = "int8"
    dtype: torch.dtype = torch.int8

    def width(self, head_dim: int) -> int:
        return head_dim + SCALE_BYTES

    def encode(self, x_XD: Tensor) -> Tensor:
        x_XD = x_XD.float()
        top_X1 = x_XD.abs().amax(dim=-1, keepdim=True)
        inverse_X1 = torch.where(top_X1 > SMALLEST, MAX_CODE / top_X1, 0.0)
        codes_XD = (x_XD * inverse_X1).round_().add_(OFFSET).to(torch.uint8).view(torch.int8)
        return torch.cat([codes_XD, (top_X1 / MAX_CODE).view(torch.int8)], dim=-1)

    def decode(self, stored_XW: Tensor, dtype: torch.dtype) -> Tensor:
        codes_XD = stored_XW[..., :-SCALE_BYTES].view(torch.uint8).float().sub_(OFFSET)
        scale_X1 = stored_XW[..., -SCALE_BYTES:].contiguous().view(torch.float32)
        return (codes_XD * scale_X1).to(dtype)


def kv_format(name: str) -> KvFormat:
    """The format of that name: a float dtype's, or "int8"."""
    return Int8Kv() if name == "int8" else PlainKv(DTYPES[name])
