"""2:4 sparse linears in 16 bits (see `linear`)."""

from ridgeline.engine.quant.sparse24.linear import Sparse24Linear, stored_mask, why_not

__all__ = ["Sparse24Linear", "stored_mask", "why_not"]
