"""Weight formats that the planner can serve a model in, and the bytes that a model takes in them.

Unlike the formats of a spec, which are those of Ridgeline's kernels, these model what engines in
general do under the name of a dtype. Only the layers' linears and experts take a weight format;
LM head, embeddings and norms stay in 16 (or 32) bits, as in other engines. In a routed model mxfp4
applies to the experts only: attention, shared experts, router and activations keep their dtype, as
in gpt-oss. Scales are counted: 4 bytes per output row for fp8 and int8, 2 bytes per group of 128
weights for int4, 1 byte per 32 for mxfp4.
A device without an arithmetic peak for a format unpacks the weights and computes in bfloat16.

Checkpoints come in further formats: `intN-gM` and `intN-row` (weight-only, a scale per group or
row; with `-experts`, only the experts are quantised), `float8_e4m3-bN` (blocks), `nvfp4`, `nf4`,
`gguf-B` and `mixed-B` (B bits per weight on average, scales included), 2:4 sparse weights in 16
bits (`sparse24`) and in INT8 (`int8_sparse24`), whose products count at the dense rate, and
`llm-int8`: INT8 with one input in sixteen in 16 bits too, the most that `ridgeline quantize` keeps
apart.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

import msgspec
from msgspec.structs import replace

from ridgeline.errors import BadInput
from ridgeline.modelspec.cost.parameters import (
    count_layers,
    dense_linears,
    mlp_linears,
    num_params,
)
from ridgeline.modelspec.cost.step import CostModel, cost_model
from ridgeline.modelspec.format import (
    BYTES_OF_DTYPE,
    FP8,
    FP8_BLOCK,
    INT4,
    INT8,
    MXFP4,
    NVFP4,
    SPARSE24,
    SPARSE24_INT8,
    Format,
    dense,
)
from ridgeline.modelspec.model import ModelSpec

WIDE_DTYPES = ("bfloat16", "float16", "float32")
KV_DTYPES = (*BYTES_OF_DTYPE, "int4")
SHORT_DTYPES = MappingProxyType({"bfloat16": "bf16", "float16": "fp16", "float8_e4m3": "fp8"})
"""The names by which reports call dtypes."""


class ServingFormat(msgspec.Struct, frozen=True, kw_only=True):
    """A weight format and the dtypes of its products, fastest first; the first one for which the
    device has a peak is used.

    `experts_only`: in a routed model only the experts take it. `blocks`: products rescale their
    sums for each block of weights.
    """

    format: Format
    computed_in: tuple[str, ...]
    experts_only: bool = False
    blocks: bool = False

    def nbytes(self, weights: float, outputs: float) -> float:
        """Bytes of `weights` numbers in matrices with `outputs` rows together, scales included."""
        group_size = self.format.group_size
        scales = outputs if group_size is None else weights / group_size
        return weights * self.format.bits / 8 + scales * self.format.scale_bytes


SERVING_FORMATS: Mapping[str, ServingFormat] = MappingProxyType(
    {
        "float32": ServingFormat(format=dense("float32"), computed_in=("float32",)),
        "bfloat16": ServingFormat(format=dense("bfloat16"), computed_in=WIDE_DTYPES),
        "float16": ServingFormat(format=dense("float16"), computed_in=WIDE_DTYPES),
        "float8_e4m3": ServingFormat(format=FP8, computed_in=("float8_e4m3", *WIDE_DTYPES)),
        "float8_block": ServingFormat(
            format=FP8_BLOCK, computed_in=("float8_e4m3", *WIDE_DTYPES), blocks=True
        ),
        "int8": ServingFormat(format=INT8, computed_in=("int8", *WIDE_DTYPES)),
        "int4": ServingFormat(format=INT4, computed_in=WIDE_DTYPES),
        "mxfp4": ServingFormat(
            format=MXFP4, computed_in=("float4", *WIDE_DTYPES), experts_only=True
        ),
        "nvfp4": ServingFormat(format=NVFP4, computed_in=("float4", *WIDE_DTYPES)),
        "nf4": ServingFormat(
            format=Format(kind="nf4", bits=4, group_size=64, scale_bytes=4),
            computed_in=WIDE_DTYPES,
        ),
        "sparse24": ServingFormat(format=SPARSE24, computed_in=WIDE_DTYPES),
        "int8_sparse24": ServingFormat(format=SPARSE24_INT8, computed_in=("int8", *WIDE_DTYPES)),
        "llm-int8": ServingFormat(
            format=Format(kind="llm-int8", bits=8 + 16 / 16, scale_bytes=4),
            computed_in=("int8", *WIDE_DTYPES),
        ),
    }
)
_INTEGERS = re.compile(r"int([2-8])-(?:row|g([1-9]\d*))(-experts)?")
_FP8_BLOCKS = re.compile(r"float8_e4m3-b([1-9]\d*)")
_MEAN_BITS = re.compile(r"gguf-(\d+\.\d\d)|mixed-([2-8](?:\.\d+)?)")
_SHORT_NAMES = MappingProxyType(
    {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3", "fp4": "mxfp4"}
    | {"fp8-block": "float8_block", "fp8_block": "float8_block"}
    | {"int8_wo": "int8-row", "int4_wo": "int4", "w4a16_mxfp4": "mxfp4", "int8-wo": "int8-row"}
    | {"int4-wo": "int4", "sparse-24": "sparse24", "sparse-24-int8": "int8_sparse24"}
)


def serving_format(name: str) -> ServingFormat:
    """The format of this full name, listed or made of its parts. Raises BadInput."""
    if name in SERVING_FORMATS:
        return SERVING_FORMATS[name]
    if match := _INTEGERS.fullmatch(name):
        group = None if match[2] is None else int(match[2])
        made = Format(kind=name, bits=int(match[1]), group_size=group, scale_bytes=2)
        return ServingFormat(
            format=made, computed_in=WIDE_DTYPES, experts_only=match[3] is not None
        )
    if match := _FP8_BLOCKS.fullmatch(name):
        made = Format(kind=name, bits=8, group_size=int(match[1]), scale_bytes=0)
        return ServingFormat(format=made, computed_in=("float8_e4m3", *WIDE_DTYPES), blocks=True)
    if match := _MEAN_BITS.fullmatch(name):
        made = Format(kind=name, bits=float(match[1] or match[2]))
    else:
        raise BadInput("unknown weight dtype", value=name, limit=", ".join(SERVING_FORMATS))
    return ServingFormat(format=made, computed_in=WIDE_DTYPES)


def parse_weight_dtype(name: str) -> str:
    """The full name of a weight format. Raises BadInput that lists them for an unknown one."""
    full = _SHORT_NAMES.get(name.lower(), name.lower())
    serving_format(full)
    return full


def parse_kv_dtype(name: str) -> str:
    """The full name of a KV cache dtype. Raises BadInput that lists them for an unknown one."""
    return _full_name("KV cache dtype", name, KV_DTYPES)


def _full_name(what: str, name: str, known: tuple[str, ...]) -> str:
    full = _SHORT_NAMES.get(name.lower(), name.lower())
    if full not in known:
        raise BadInput(f"unknown {what}", value=name, limit=", ".join(known))
    return full


def quantised_as(spec: ModelSpec) -> str | None:
    """The format that the checkpoint's weights are quantised in; None if they are not."""
    kinds = {
        linear.format.kind
        for layer in count_layers(spec)
        for linear in (*dense_linears(layer), *mlp_linears(layer.mlp))
    } - {"dense"}
    return min(kinds) if kinds else None


def dense_format(spec: ModelSpec, weight_dtype: str, rest_dtype: str) -> ServingFormat:
    """The format of the linears that every token uses."""
    chosen = serving_format(weight_dtype)
    routed = any(layer.mlp.num_experts for layer in count_layers(spec))
    return serving_format(rest_dtype) if chosen.experts_only and routed else chosen


def serving_cost(
    spec: ModelSpec, weight_dtype: str, rest_dtype: str, head_dtype: str, kv_dtype: str
) -> CostModel:
    """The cost model of a spec served in these formats.

    `rest_dtype` holds what is not quantised: norms, biases and position tables.
    """
    model = cost_model(replace(spec, kv_dtype=kv_dtype))
    every_token = dense_format(spec, weight_dtype, rest_dtype)
    fixed = every_token.nbytes(model.linear_params, model.linear_outputs)
    fixed += _rest_params(spec, model) * serving_format(rest_dtype).format.bits / 8
    expert = serving_format(weight_dtype)
    return replace(
        model,
        fixed_weight_bytes=fixed,
        head_weight_bytes=table_bytes_in(spec, head_dtype),
        experts=tuple(
            replace(
                group, expert_bytes=group.num_layers * expert.nbytes(group.params, group.outputs)
            )
            for group in model.experts
        ),
    )


def _rest_params(spec: ModelSpec, model: CostModel) -> int:
    """Parameters outside of linears' weights, experts, embedding table and LM head."""
    tables = (1 if spec.tied_embeddings else 2) * spec.vocab_size * spec.hidden_size
    routed = sum(g.num_layers * g.num_experts * g.params for g in model.experts)
    return num_params(spec) - tables - model.linear_params - routed


def table_bytes_in(spec: ModelSpec, dtype: str) -> float:
    """Bytes of the embedding table, or of the LM head, in a serving format."""
    return serving_format(dtype).nbytes(spec.vocab_size * spec.hidden_size, spec.vocab_size)


def checkpoint_bytes(spec: ModelSpec) -> float:
    """Bytes of the published weight files, regardless of the format they are served in."""
    stored = spec.stored_dtype
    model = serving_cost(spec, quantised_as(spec) or stored, stored, stored, spec.kv_dtype)
    routed = sum(group.num_experts * group.expert_bytes for group in model.experts)
    num_tables = 1 if spec.tied_embeddings else 2
    return model.fixed_weight_bytes + routed + num_tables * table_bytes_in(spec, stored)
