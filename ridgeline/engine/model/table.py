"""Embedding tables: plain rows, or rows of a packed weight that are unpacked on lookup.

What. A packed table is stored like a linear's weight (8 bits with a scale per token, 4 bits with a
scale per group of its row), so a tied LM head multiplies with the same table. There is no float
copy: a lookup unpacks only the rows it needs. A float32 table that doubles as the LM head of native
layers is stored in the order of the kernels too.

Invariant. A row has the same bits whatever is looked up along with it.

When it loses. An LM head stored separately (with other bits) makes it a second table. Rounding the
rows costs quality (docs/guides/quantise/index.md), and a packed row is interleaved with fifteen
others.

Shape legend: T tokens, V vocabulary, C hidden_size.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.engine.kernels.native_linear import NativeLinear, Packed


class EmbeddingTable(Protocol):
    """Maps tokens to embedding rows."""

    def rows(self, tokens_T: Tensor) -> Tensor:
        """The rows of the tokens, [..., C], in the dtype of the table."""
        ...

    @property
    def nbytes(self) -> int: ...

    @property
    def device(self) -> torch.device: ...


class PlainTable:
    """Unpacked rows, possibly narrower than the compute dtype."""

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
    """Rows of a packed weight as float32, on the CPU."""

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
