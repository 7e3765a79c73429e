"""Storage formats of weight tensors, and the bytes that they occupy.

A quantisation is a rewrite of formats in the spec (`ridgeline.modelspec.rewrite`), so predictions
and runs always describe the same storage.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

import msgspec
from msgspec.structs import replace

BYTES_OF_DTYPE = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1, "int8": 1}

BYTES_OF_KV: Mapping[str, float] = BYTES_OF_DTYPE | {"fp8": 1, "int4": 0.5}
"""Bytes of a number in a KV cache. "fp8" is the engine's format, with scales; "float8_e4m3" that of
other engines, without."""

KV_GROUP = 32
"""INT4: tokens of a block that share the range of a key's channel, and channels that share that of
a value. A range takes 4 bytes."""

KV_SCALE_BYTES = {"int8": 4, "fp8": 4}
"""Extra bytes per key vector, and per value vector, of one head in an 8-bit KV cache."""

CODED_KV = (*KV_SCALE_BYTES, "int4")
"""Formats of a KV cache whose numbers are codes."""


WHOLE_KINDS = ("int4", "int8", "int8_sparse24", "blocks")
"""Formats with integer weights times scales, whose activations are quantised too."""

DIGITS: Mapping[str, int] = MappingProxyType({"int8": 1, "int16": 2, "float32": 3})
"""Precision of the activations that integer weights multiply → number of 8-bit rows that represent
one row of activations (native/linear/linear.h, DIGITS)."""

WIDE_BLOCK = 32
"""Wide inputs (16 or 32 bits) are stored in blocks of this many (native/linear/linear.h)."""


class Format(msgspec.Struct, frozen=True, kw_only=True):
    """Storage of a linear's weight.

    `kind` is the key of the linear registry (`ridgeline.engine.quant`): "dense", "int8", … `bits`
    per weight; `group_size` weights along the input axis share one scale (None: one scale per
    output row); `scale_bytes` per scale (0: no scales); `zero_bits` per zero-point. `mins`: each
    group also has a minimum, stored like its scale. `span`: this many inputs share a scale (and a
    minimum), which each group multiplies by an 8-bit step (0: groups have separate scales).
    `activations`: the dtype in which the product is computed. `ordered`: inputs are gathered into
    the order of the weights' groups before the product (GPTQ's act-order). `wide`: number of inputs
    stored separately in `wide_bits` (outlier columns, chosen when the model was quantised).
    `threshold`: inputs of at least this magnitude are multiplied as floats at run time (LLM.int8;
    0: none). `digits`: number of 8-bit rows that represent one row of activations (`DIGITS`).
    """

    kind: str = "dense"
    bits: float = 32
    group_size: int | None = None
    scale_bytes: int = 0
    zero_bits: float = 0
    mins: bool = False
    span: int = 0
    activations: str = "float32"
    ordered: bool = False
    wide: int = 0
    wide_bits: int = 16
    threshold: float = 0.0
    digits: int = 1

    @property
    def stored(self) -> Format:
        """The format of the weight alone, without the precision of the activations."""
        return replace(self, digits=1) if self.digits != 1 else self

    def nbytes(self, num_out: int, num_in: int) -> int:
        """Bytes of a [num_out, num_in] weight with its scales and zero-points.

        The last group of a row is stored whole, and so is the last block of wide inputs.
        """
        groups = -(-num_in // self.group_size) if self.group_size else 1
        num_in = groups * self.group_size if self.group_size else num_in
        spans, steps = (-(-num_in // self.span), groups) if self.span else (groups, 0)
        both = 2 if self.mins else 1
        zeros = groups * self.zero_bits / 8 if self.scale_bytes else 0
        scales = num_out * (both * (spans * self.scale_bytes + steps) + zeros)
        wide = num_out * -(-self.wide // WIDE_BLOCK) * WIDE_BLOCK * self.wide_bits / 8
        return int(num_out * num_in * self.bits / 8 + scales + wide)


def dense(dtype: str) -> Format:
    """Unquantised storage in `dtype`."""
    return Format(kind="dense", bits=BYTES_OF_DTYPE[dtype] * 8, activations=dtype)


INT8 = Format(kind="int8", bits=8, scale_bytes=4, activations="int8")
BF16 = Format(kind="bf16", bits=16, activations="float32")
FP32 = Format(kind="fp32", bits=32, activations="float32")
FP8 = Format(kind="float8_e4m3", bits=8, scale_bytes=4, activations="float8_e4m3")
"""One scale per output row. The engine decodes FP8 checkpoints to float32 by default."""
MXFP4 = Format(kind="mxfp4", bits=4, group_size=32, scale_bytes=1, activations="bfloat16")
"""Planning only: OCP microscaling FP4, one shared exponent per 32 weights."""
FP8_BLOCK = Format(
    kind="float8_block", bits=8, group_size=16_384, scale_bytes=4, activations="float8_e4m3"
)
"""Planning only: FP8 with a scale per block of 128 by 128 weights, as in DeepSeek-V3."""
NVFP4 = Format(kind="nvfp4", bits=4, group_size=16, scale_bytes=1, activations="float4")
"""Planning only: FP4 with an FP8 scale per 16 weights, multiplied by FP4."""
SPARSE24 = Format(kind="sparse24", bits=9, activations="bfloat16")
"""Half of the weights in 16 bits, and a bit per weight for their places."""
SPARSE24_INT8 = Format(kind="int8_sparse24", bits=5, scale_bytes=4, activations="int8")
"""Half of the weights in INT8, and a bit per weight for their places."""
NVFP4_WEIGHTS = Format(kind="nvfp4", bits=4, group_size=16, scale_bytes=1, activations="bfloat16")
"""The same weights, multiplied by activations as they are: those of Ridgeline's engine."""


def int4(group_size: int = 128, *, zeros: bool = False) -> Format:
    """4-bit weights with an fp16 scale (and, with `zeros`, a zero-point) per group of inputs."""
    return Format(
        kind="int4",
        bits=4,
        group_size=group_size,
        scale_bytes=2,
        zero_bits=8 if zeros else 0,
        activations="int8",
    )


INT4 = int4()


def blocks(bits: int, group_size: int, *, mins: bool = False, span: int = 0) -> Format:
    """4 or 8 bits in groups: GGUF's block layouts, and group quantisation at 5 to 8 bits.

    Each group has an fp16 scale and, with `mins`, a minimum; with `span`, these are shared by
    `span` inputs and each group has an 8-bit step.
    """
    return Format(
        kind="blocks",
        bits=bits,
        group_size=group_size,
        scale_bytes=2,
        mins=mins,
        span=span,
        activations="int8",
    )


def blocks_of_all(formats: Collection[Format]) -> Format:
    """The block format that represents weights of all `formats` (block formats, or int4 without
    zero-points) exactly."""
    group = min(format.group_size or 0 for format in formats)
    span = min(format.span or format.group_size or 0 for format in formats)
    mins = {format.mins for format in formats}
    narrow = len(mins) == 1 and all(format.bits == 4 for format in formats)
    stepped = any(format.span for format in formats)
    return blocks(4 if narrow else 8, group, mins=any(mins), span=span if stepped else 0)


KERNEL_GROUPS = (128, 64, 32)


def kernel_group(bits: int, group_size: int, num_in: int) -> int | None:
    """The largest group size supported by the kernels that divides `group_size`; None if none does.

    Groups of 16 are supported above 4 bits only. One group may be wider than the row.
    """
    known = KERNEL_GROUPS if bits <= 4 else (*KERNEL_GROUPS, 16)
    if group_size >= num_in and group_size not in known:
        return KERNEL_GROUPS[0]
    return next((group for group in known if group_size % group == 0), None)


def format_for(bits: int, group_size: int, num_in: int, zeros: bool) -> Format:
    """The format in which integer weights with this grid are computed: a packed format if one
    represents them exactly, else dense float32."""
    if bits == 8 and group_size >= num_in and not zeros:
        return INT8
    group = kernel_group(bits, group_size, num_in)
    if group is None or (bits > 4 and zeros):
        return dense("float32")
    return int4(group, zeros=zeros) if bits <= 4 else blocks(8, group)
