"""2:4 sparse linears: in 16 bits for GPUs (`linear`), in INT8 for CPUs (`int8`)."""

from ridgeline.engine.quant.sparse24.int8 import Int8Sparse24Linear, why_not_int8
from ridgeline.engine.quant.sparse24.linear import Sparse24Linear, stored_mask, why_not

__all__ = ["Int8Sparse24Linear", "Sparse24Linear", "stored_mask", "why_not", "why_not_int8"]
