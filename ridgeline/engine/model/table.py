"""The embedding table: plain rows, or rows of a packed weight that are unpacked as they are read.

What: a packed table is stored as the kernels store a linear's weight (8 bits with a scale per
token, 4 bits with a scale per group of its row), so that a tied LM head multiplies with the very
table that tokens are looked up in. No copy in floats exists: a lookup unpacks the rows asked for.
A float32 table that is the LM head of native layers is kept in the kernels' order too.

Invariant: a row is the same bits whatever is looked up with it.

When it loses: an LM head that is kept apart (in other bits) is then a second table; rounding the
rows costs quality (docs/guides/quantise/index.md), and one packed row lies in the lines of sixteen.

Shape legend: T tokens, V vocabulary, C hidden_size.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.engine.kernels.native_linear import NativeLinear, Packed


class EmbeddingTable(Protocol):
    """Where tokens become rows."""

    def rows(self, tokens_T: Tensor) -> Tensor:
        """x of the tokens, [..., C], in the dtype that the table has."""
        ...

    @property
    def nbytes(self) -> int: ...

    @property
    def device(self) -> torch.device: ...


class PlainTable:
    """Rows as they are; maybe narrower than what is computed in."""

    __slots__ = ("embed_VC",)

    def __init__(self, embed_VC: Tensor) -> None:
        self.embed_VC = embed_VC

    def rows(self, tokens_T: Tensor) -> Tensor:
        return F.embedding(tokens_T, self.embed_VC)

    @property
    def nbytes(self) -> int:
        return self.embed_VC.nbytes

    @property
    def device(self) -> torch.device:
        return self.embed_VC.device


class PackedTable:
    """Rows of a packed weight, float32; on the CPU."""

    __slots__ = ("native",)

    def __init__(self, packed: Packed) -> None:
        self.native = NativeLinear(packed)

    def rows(self, tokens_T: Tensor) -> Tensor:
        flat_TC = self.native.rows(tokens_T.reshape(-1))
        return flat_TC.view(*tokens_T.shape, flat_TC.shape[-1])

    @property
    def nbytes(self) -> int:
        return self.native.nbytes

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")
