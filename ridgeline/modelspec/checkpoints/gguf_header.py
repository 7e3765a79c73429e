"""Reads and validates a GGUF header, and derives the spec of the model that the file holds.

    "GGUF" · version u32 (2, 3) · tensors u64 · keys u64 · keys, values · tensor table · pad · data

Every length and offset is checked against the file before it is used. No torch here; the data is
decoded in `ridgeline.engine.checkpoints.gguf.weights`. (Format: github.com/ggml-org/ggml, docs/gguf.md.)
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from ridgeline.errors import BadModel
from ridgeline.modelspec.checkpoints.gguf_tokens import end_of_generation, special_id
from ridgeline.modelspec.checkpoints.locate import is_dummy, local_path
from ridgeline.modelspec.families.config_fields import ConfigFields
from ridgeline.modelspec.families.layer_kinds import num_layers
from ridgeline.modelspec.families.registry import spec_from_config
from ridgeline.modelspec.format import Format, blocks, blocks_of_all, dense
from ridgeline.modelspec.model import LinearSpec, ModelSpec
from ridgeline.modelspec.rewrite import linears, map_linears

_AGAIN = "the file is damaged or half downloaded; fetch it again"
_MAX_COUNT = 100_000_000
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9

TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
}  # fmt: skip
"""Type number → type name, weights per block, bytes per block."""


class GgufTensor(msgspec.Struct, frozen=True):
    """One tensor: the name of its type, its shape [outputs, inputs], and its byte range."""

    kind: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Gguf(msgspec.Struct, frozen=True):
    """The contents of a GGUF header."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def is_gguf(name: str) -> bool:
    """Whether the model is a GGUF file, by its path or in the cache of downloads."""
    return not is_dummy(name) and local_path(name).suffix == ".gguf"


def read_gguf(name: str) -> Gguf:
    """Read a file's header. Raises BadModel if the file is missing, empty or malformed."""
    path = local_path(name)
    if not path.is_file():
        raise BadModel("there is no such GGUF file", value=name)
    with path.open("rb") as stream:
        try:
            data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise BadModel("the GGUF file is empty", value=name) from None
    with data:
        return _Header(path, data).read()


class _Header:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, 0

    def read(self) -> Gguf:
        if self._take(4) != b"GGUF":
            raise BadModel("this is not a GGUF file", value=str(self._path))
        version = self._number("<I")
        if version not in (2, 3):
            raise BadModel("unknown GGUF version", value=version, limit="2, 3")
        num_tensors, num_keys = self._count(), self._count()
        metadata = {}
        for _ in range(num_keys):
            key = self._string()
            metadata[key] = self._value(self._number("<I"))
        table = [self._entry() for _ in range(num_tensors)]
        alignment = int(metadata.get("general.alignment", 32))
        start = -(-self._at // max(1, alignment)) * max(1, alignment)
        placed = {
            name: self._placed(shape, kind, start + offset) for name, shape, kind, offset in table
        }
        return Gguf(self._path, metadata, placed)

    def _take(self, count: int) -> bytes:
        if count < 0 or self._at + count > len(self._data):
            raise BadModel("the GGUF header exceeds the file", value=str(self._path), fix=_AGAIN)
        self._at += count
        return self._data[self._at - count : self._at]

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _count(self) -> int:
        count = int(self._number("<Q"))
        if count > _MAX_COUNT:
            raise BadModel(
                "the GGUF header has an implausible count",
                value=count,
                limit=_MAX_COUNT,
                fix=_AGAIN,
            )
        return count

    def _string(self) -> str:
        return self._take(self._count()).decode("utf-8", errors="replace")

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise BadModel("unknown type of a GGUF metadata value", value=kind, fix=_AGAIN)
        inner, count = self._number("<I"), self._count()
        if inner in _SCALARS:
            form = f"<{count}{_SCALARS[inner][1]}"
            return list(struct.unpack(form, self._take(struct.calcsize(form))))
        return [self._value(inner) for _ in range(count)]

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dims = self._string(), self._number("<I")
        if dims > 4:
            raise BadModel(
                "a GGUF tensor has more than 4 dimensions", value=name, limit=4, fix=_AGAIN
            )
        shape = tuple(self._count() for _ in range(dims))[::-1]
        return name, shape, self._number("<I"), int(self._number("<Q"))

    def _placed(self, shape: tuple[int, ...], kind: int, begin: int) -> GgufTensor:
        if kind not in TYPES:
            raise BadModel(
                "a GGUF tensor has an unknown type",
                value=kind,
                limit=", ".join(name for name, _, _ in TYPES.values()),
            )
        name, block, nbytes = TYPES[kind]
        if not shape or shape[-1] % block:
            raise BadModel(
                f"the rows of a {name} tensor are not a multiple of its block size",
                value=list(shape),
                limit=f"blocks of {block}",
            )
        end = begin + prod(shape) // block * nbytes
        if end > len(self._data):
            raise BadModel(
                "the GGUF file is truncated", value=len(self._data), limit=end, fix=_AGAIN
            )
        return GgufTensor(name, shape, begin, end)


# ---- the model that it describes ---------------------------------------------------------------

ARCHITECTURES = {
    "llama": "llama",
    "mixtral": "llama",  # recognised by its experts
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
}
"""Ridgeline's family name → llama.cpp's architecture name."""
_FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_EXPERT_FIELDS = {
    "mixtral": {
        "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
    },
    "qwen3_moe": {
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
    },
}
_MODULES = {
    "attention.q": "attn_q",
    "attention.k": "attn_k",
    "attention.v": "attn_v",
    "attention.o": "attn_output",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
    "router": "ffn_gate_inp",
}
ROUTER, EXPERTS = "blk.{}.ffn_gate_inp.weight", "_exps"
"""A layer with the ROUTER tensor is routed: the names of its MLP tensors contain EXPERTS, and each
tensor holds all experts, [experts, outputs, inputs]."""


def family_of(file: Gguf) -> str:
    """Ridgeline's family name for the file's architecture. Raises BadModel if it is unsupported."""
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES.values():
        raise BadModel(
            "the architecture of this GGUF file is not supported",
            value=str(architecture),
            limit=", ".join(sorted(set(ARCHITECTURES.values()))),
            fix="use the model's safetensors directory",
        )
    routed = bool(file.metadata.get(f"{architecture}.expert_count"))
    if architecture == "qwen3moe" or (architecture == "llama" and routed):
        return "qwen3_moe" if architecture == "qwen3moe" else "mixtral"
    if routed:
        raise BadModel(
            "GGUF files with experts are not supported for this architecture",
            value=str(architecture),
        )
    return str(architecture)


def gguf_spec(name: str) -> ModelSpec:
    """The spec of a GGUF file. Weights stay packed where a kernel supports their type exactly; the
    others are decoded to float32."""
    file = read_gguf(name)
    spec = spec_from_config(gguf_config(file), name=name)
    kinds: set[str] = set()

    def on_linear(path: str, linear: LinearSpec) -> LinearSpec:
        at = _tensor_of(path, file)
        tied = path == "lm_head" and at not in file.tensors
        tensor = file.tensors.get("token_embd.weight" if tied else at)
        if tensor is None:
            raise BadModel("the GGUF file lacks a tensor", value=at)
        kinds.add(tensor.kind)
        return replace(linear, format=computed_format(tensor.kind))

    spec = map_linears(spec, on_linear)
    spec = _computed_together(spec)
    bits = [int(linear.format.bits) for linear in linears(spec).values()]
    run = ", ".join(f"{bits.count(n)} linears run as int{n}" for n in (4, 8) if n in bits)
    line = (
        f"GGUF ({', '.join(sorted(kinds))}): {run + ', exactly, ' if run else ''}"
        f"{bits.count(32)} decoded to float32"
    )
    table = computed_format(file.tensors["token_embd.weight"].kind)
    embed_format = None if table.kind == "dense" else table
    return replace(spec, embed_format=embed_format, rewrites=(*spec.rewrites, line))


_FORMATS: Mapping[str, Format] = {
    "Q4_0": blocks(4, 32),
    "Q4_1": blocks(4, 32, mins=True),
    "Q4_K": blocks(4, 32, mins=True, span=256),
    "Q5_0": blocks(8, 32),
    "Q5_1": blocks(8, 32, mins=True),
    "Q5_K": blocks(8, 32, mins=True, span=256),
    "Q8_0": blocks(8, 32),
    "IQ4_NL": blocks(8, 32),
    "IQ4_XS": blocks(8, 32, span=256),
    "Q2_K": blocks(8, 16, mins=True, span=256),
    "Q3_K": blocks(8, 16, span=256),
    "Q6_K": blocks(8, 16, span=256),
}


def computed_format(kind: str) -> Format:
    """The format in which a tensor of this GGUF type is multiplied, or looked up as a table."""
    return _FORMATS.get(kind, dense("float32"))


def _computed_together(spec: ModelSpec) -> ModelSpec:
    """Give q, k and v one common block format, and gate and up another: each group is computed as
    one product, although files like Q4_K_M store its members in different types."""
    by_path = linears(spec)

    def on_linear(path: str, linear: LinearSpec) -> LinearSpec:
        start, _, key = path.rpartition(".")
        keys = next((keys for keys in (("q", "k", "v"), ("gate", "up")) if key in keys), (key,))
        formats = {by_path[f"{start}.{key}" if start else key].format for key in keys}
        if len(formats) == 1 or any(format.kind == "dense" for format in formats):
            return linear
        return replace(linear, format=blocks_of_all(formats))

    return map_linears(spec, on_linear)


def _tensor_of(path: str, file: Gguf) -> str:
    """Name of the tensor that holds a linear; in a routed layer it holds all experts."""
    if path == "lm_head":
        return "output.weight"
    _, layer, inner = path.split(".", 2)
    routed = inner.startswith("mlp.") and ROUTER.format(layer) in file.tensors
    return f"blk.{layer}.{_MODULES[inner]}{EXPERTS if routed else ''}.weight"


def gguf_config(file: Gguf) -> dict[str, Any]:
    """The equivalent Hugging Face config.json. Raises BadModel for features it cannot express."""
    family, metadata = family_of(file), file.metadata
    start = str(metadata["general.architecture"]) + "."
    _refuse(file, start)
    config: dict[str, Any] = {"model_type": family, "dtype": "float32"}
    for theirs, ours in (_FIELDS | _EXPERT_FIELDS.get(family, {})).items():
        if start + theirs in metadata:
            config[ours] = metadata[start + theirs]
    if family == "qwen3_moe":  # llama.cpp renormalises, whatever the original says
        layers = range(num_layers(ConfigFields(config, {}, where=str(file.path))))
        plain = [i for i in layers if ROUTER.format(i) not in file.tensors]
        config |= {"norm_topk_prob": True, "mlp_only_layers": plain}
    config["vocab_size"] = file.tensors["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    bos = special_id(metadata, "bos")
    if bos is not None:
        config["bos_token_id"] = bos
    config["eos_token_id"] = list(end_of_generation(metadata))
    return config


def _refuse(file: Gguf, start: str) -> None:
    metadata = file.metadata
    if metadata.get(start + "expert_count") and "blk.0.ffn_gate.0.weight" in file.tensors:
        raise BadModel(
            "GGUF files with one tensor per expert (written before April 2024) are not supported",
            value=str(file.path),
            fix="convert the model again: current converters stack the experts (ffn_gate_exps)",
        )
    if metadata.get(start + "expert_shared_count"):
        raise BadModel("GGUF files with shared experts are not supported", value=str(file.path))
    if metadata.get(start + "rope.scaling.type", "none") not in ("none", None):
        raise BadModel(
            "GGUF files with scaled rotary embeddings are not supported",
            value=metadata[start + "rope.scaling.type"],
        )
    for name in ("rope_freqs.weight", "rope_factors_long.weight"):
        if name in file.tensors:
            raise BadModel(
                "GGUF files with custom rotary factors are not supported",
                value=name,
                fix="use the model's safetensors directory",
            )
    if "token_embd.weight" not in file.tensors:
        raise BadModel("the GGUF file lacks a tensor", value="token_embd.weight")
