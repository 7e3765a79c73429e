"""Weight and KV formats for sizing: bytes per number, and the dtype that the products run in.

Only the layers' linears and experts take a weight format; the LM head, embeddings, router-sized
rest and norms stay in 16 (or 32) bits, as every engine leaves them. Of a routed model mxfp4 takes
the experts alone: attention, shared experts and router stay as they are, as in gpt-oss, and so do
activations. Scales are counted: one of 4 bytes per output row for fp8 and int8, one of 2 bytes per
group of 128 for int4, one byte per 32 for mxfp4. A device without a rate for a format's own
products computes in bfloat16 after unpacking.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from ridgeline.errors import BadInput


class WeightFormat(msgspec.Struct, frozen=True, kw_only=True):
    """`bits` per weight; `group_size` weights share `scale_bytes` (None: a whole row does).

    `computed_in`: dtypes of the product, best first; the device's first known one is used.
    `spares_shared`: of a routed model only the experts take it.
    """

    bits: int
    computed_in: tuple[str, ...]
    group_size: int | None = None
    scale_bytes: int = 0
    spares_shared: bool = False

    def nbytes(self, params: float, rows: float) -> float:
        """Bytes of `params` weights in `rows` output rows, scales included."""
        scales = rows if self.group_size is None else params / self.group_size
        return params * self.bits / 8 + scales * self.scale_bytes


WIDE = ("bfloat16", "float16", "float32")
WEIGHTS: Mapping[str, WeightFormat] = MappingProxyType(
    {
        "float32": WeightFormat(bits=32, computed_in=("float32",)),
        "bfloat16": WeightFormat(bits=16, computed_in=WIDE),
        "float16": WeightFormat(bits=16, computed_in=WIDE),
        "float8_e4m3": WeightFormat(bits=8, computed_in=("float8_e4m3", *WIDE), scale_bytes=4),
        "int8": WeightFormat(bits=8, computed_in=("int8", *WIDE), scale_bytes=4),
        "int4": WeightFormat(bits=4, computed_in=WIDE, group_size=128, scale_bytes=2),
        "mxfp4": WeightFormat(
            bits=4,
            computed_in=("float4", *WIDE),
            group_size=32,
            scale_bytes=1,
            spares_shared=True,
        ),
    }
)
KV_BYTES: Mapping[str, int] = MappingProxyType(
    {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1, "int8": 1}
)
KV_ROW_SCALE_BYTES: Mapping[str, int] = MappingProxyType({"int8": 4})
_SHORT = MappingProxyType(
    {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3", "fp4": "mxfp4"}
)


def weight_dtype(name: str) -> str:
    """The full name of a weight format; BadInput lists them."""
    return _known("weight dtype", name, tuple(WEIGHTS))


def kv_dtype(name: str) -> str:
    """The full name of a KV cache dtype; BadInput lists them."""
    return _known("KV cache dtype", name, tuple(KV_BYTES))


def _known(what: str, name: str, known: tuple[str, ...]) -> str:
    full = _SHORT.get(name.lower(), name.lower())
    if full not in known:
        raise BadInput(f"unknown {what}", value=name, limit=", ".join(known))
    return full
