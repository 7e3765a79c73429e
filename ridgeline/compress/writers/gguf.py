"""GGUF for llama.cpp, with the integers chosen by the method, bit for bit.

  Q4_0   4 symmetric bits in groups of 32       Q4_1   the same with zero-points
  Q5_0   5 symmetric bits in groups of 32       Q8_0   8 bits; the row's scale in each block
  Q4_K, Q6_K   K-quants; Q5_0 and Q8_0 if 256 does not divide the inputs

Q4_1 stores its minimum as fp16: scales have 7 significant bits there, so zero-point times scale is
exact. Embeddings and head keep the checkpoint's dtype, norms and biases are float32. Tokenizer and
chat templates are included. q and k rows of llama models are put in the order of llama.cpp. The
experts of a layer are one tensor, its router float32.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor

from ridgeline.compress.formats.coded import BLOCKS
from ridgeline.compress.quantize_model import FormatWriter, TableFormats, WriteJob
from ridgeline.compress.recipe import QuantizeRecipe
from ridgeline.compress.writers.gguf_tokenizer import tokenizer_metadata
from ridgeline.engine.checkpoints.gguf.weights import name_of
from ridgeline.engine.checkpoints.tensor_names import Part, parts
from ridgeline.engine.quant.grid import Grid
from ridgeline.errors import CannotRun
from ridgeline.modelspec.checkpoints.gguf_architectures.rows import ARCHITECTURES, Architecture
from ridgeline.modelspec.checkpoints.gguf_header import TYPES
from ridgeline.modelspec.model import MlpSpec, ModelSpec, RopeSpec
from ridgeline.modelspec.rope import inv_freq

NAME = "model.gguf"
_NUMBERS = {name: number for number, (name, _, _) in TYPES.items()}
_PLAIN = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_ALIGN = 32
ROPE_FREQS = "rope_freqs.weight"
_ROWS = 4096  # of a table, written at once
_K_TYPES = {"q4_k": "Q4_K", "q6_k": "Q6_K"}
WRITTEN = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "smollm3": "smollm3",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "granite": "granite",
    "seed_oss": "seed_oss",
    "exaone4": "exaone4",
    "ernie4_5": "ernie4_5",
    "arcee": "arcee",
    "gpt_oss": "gpt-oss",
}
"""Families that are written, and llama.cpp's name of their architecture."""
_WINDOWED = {"olmo3": 1, "gpt_oss": 1, "exaone4": 64}
"""Families whose windows llama.cpp computes layer by layer, and for how many layers it takes them
at least."""

_TYPES_32 = {(4, False): "Q4_0", (4, True): "Q4_1", (5, False): "Q5_0"}


def _architecture(spec: ModelSpec) -> Architecture:
    return ARCHITECTURES[WRITTEN[spec.family]]


class _TensorEntry(NamedTuple):
    """A tensor of the file: one part, or the parts of all experts in order."""

    parts: tuple[Part, ...]
    kind: str
    row: Architecture

    values: Tensor | None = None
    """Of a tensor that is computed from the spec and holds no part."""

    @property
    def name(self) -> str:
        return name_of(self.parts[0], self.row) if self.parts else ROPE_FREQS

    @property
    def shape(self) -> tuple[int, ...]:
        if self.values is not None:
            return tuple(self.values.shape)
        first = self.parts[0]
        return first.shape if first.expert is None else (len(self.parts), *first.shape)


def _write_gguf(job: WriteJob) -> int:
    """Write `model.gguf` into the folder; returns its bytes."""
    entries = _entries(job)
    target = job.folder / NAME
    with target.open("wb") as file:
        _write_header(file, _metadata(job), entries)
        for entry in entries:
            if entry.values is not None:
                written = file.write(entry.values.numpy().tobytes())
            else:
                pieces = (piece for part in entry.parts for piece in _bytes(job, part, entry.kind))
                written = sum(map(file.write, pieces))
            file.write(bytes(-written % _ALIGN))
    return target.stat().st_size


def _entries(job: WriteJob) -> list[_TensorEntry]:
    by_name: dict[str, list[Part]] = {}
    row = _architecture(job.spec)
    for part in parts(job.spec):
        by_name.setdefault(name_of(part, row), []).append(part)
    entries = [
        _TensorEntry(tuple(inside), _kind(job, inside[0]), row) for inside in by_name.values()
    ]
    rope = _rope(job.spec)
    if rope.kind == "llama3":  # llama.cpp divides each frequency by a factor
        plain, scaled = inv_freq(replace(rope, kind="default")), inv_freq(rope)
        factors = torch.tensor(plain, dtype=torch.float64) / torch.tensor(scaled)
        entries.append(_TensorEntry((), "F32", row, factors.float()))
    return entries


def _refuse(spec: ModelSpec, recipe: QuantizeRecipe, tables: TableFormats) -> None:
    if spec.family not in WRITTEN:
        raise CannotRun(
            "GGUF of this family is not written",
            value=spec.family,
            limit=", ".join(WRITTEN),
        )
    routed = [layer.mlp for layer in spec.layers if layer.mlp.router is not None]
    if routed and (len(routed) < len(spec.layers) or not all(mlp.norm_topk for mlp in routed)):
        raise CannotRun(
            "llama.cpp routes every layer of such models, and renormalises the chosen experts",
            value=f"{len(routed)} of {len(spec.layers)} layers",
            fix="use --format ridgeline",
        )
    windowed = any(layer.attention.window for layer in spec.layers)
    if windowed and len(spec.layers) < _WINDOWED.get(spec.family, math.inf):
        raise CannotRun(
            "GGUF of a model with sliding windows is not written", fix="use --format ridgeline"
        )
    if recipe.widths:
        raise CannotRun("GGUF is written with one width", value="--bits-budget")
    _refuse_rope(spec)
    if recipe.method == "llm-int8":
        raise CannotRun(
            "GGUF has no place for the inputs that are kept apart",
            value="llm-int8",
            fix="use --format ridgeline",
        )
    for format in tables:
        if format is not None and format.kind not in ("dense", "bf16"):
            raise CannotRun("LM head and embeddings stay as they are in GGUF", value=format.kind)
    odd = [n for layer in spec.layers for n in (layer.mlp.down.num_in, spec.hidden_size) if n % 32]
    if odd:
        raise CannotRun("GGUF's blocks are of 32 inputs", value=odd[0])
    if recipe.numbers in _K_TYPES or (recipe.numbers == "int" and recipe.bits == 8):
        return
    fits = recipe.numbers == "int" and recipe.group_size == 32
    if fits and (recipe.bits, recipe.zeros) in _TYPES_32:
        return
    raise CannotRun(
        "GGUF holds no such grid",
        value=f"{recipe.bits} bits, groups of {recipe.group_size}, {recipe.numbers}"
        + (", zero-points" if recipe.zeros else ""),
        limit="--group-size 32 with 4 bits (--sym, --asym) or 5 (--sym); 8 bits; q4_k, q6_k",
        fix="use --bits 4 --group-size 32, --bits 8, or --numbers q4_k",
    )


def _refuse_rope(spec: ModelSpec) -> None:
    ropes = {layer.attention.rope for layer in spec.layers if layer.attention.rope.dim}
    rope = _rope(spec)
    by_default = replace(rope, kind="default", theta=1.0, factor=1.0, original_max_positions=None)
    own = by_default != RopeSpec(dim=rope.dim, theta=1.0)
    held = rope.kind in ("default", "linear", "llama3") or (rope.kind == "yarn" and not own)
    if len(ropes) > 1 or not held:
        raise CannotRun(
            "GGUF with such rotary embeddings is not written",
            value=", ".join(sorted(rope.kind for rope in ropes)),
            limit="default, linear, llama3, yarn with its default factors",
            fix="use --format ridgeline",
        )


def _rope(spec: ModelSpec) -> RopeSpec:
    """The rotary embedding of the layers that have one."""
    ropes = (layer.attention.rope for layer in spec.layers)
    return next((rope for rope in ropes if rope.dim), spec.layers[0].attention.rope)


def _kind(job: WriteJob, part: Part) -> str:
    if len(part.shape) == 1 or part.key == "router":
        return "F32"
    if part.layer is None:
        return _PLAIN[job.spec.stored_dtype]
    own = job.recipe.at(part.key, part.layer, part.shape[1])
    if own.numbers in _K_TYPES:
        return _K_TYPES[own.numbers]
    return "Q8_0" if own.bits == 8 else _TYPES_32[own.bits, own.zeros]


def _bytes(job: WriteJob, part: Part, kind: str) -> Iterator[bytes]:
    """A part as stored in the file; unquantised tensors, which may be large, in pieces."""
    blocks = _blocks(job, part, kind)
    if blocks is not None:
        rows = _llama_cpp_rows(blocks.view(part.shape[0], -1), job, part)
        yield rows.contiguous().numpy().tobytes()
        return
    dtype = _DTYPES[kind]
    for rows in torch.split(_llama_cpp_rows(job.weights.get(part), job, part), _ROWS):
        yield rows.to(dtype).contiguous().view(torch.uint8).numpy().tobytes()


def _blocks(job: WriteJob, part: Part, kind: str) -> Tensor | None:
    """The rows of a quantised part as bytes; None if it is not quantised."""
    coded = job.weights.coded(part)
    if coded is not None:
        return coded.tensors[BLOCKS]
    grid = job.weights.grid(part)
    return None if grid is None else _ENCODERS[kind](grid)


def _llama_cpp_rows(value: Tensor, job: WriteJob, part: Part) -> Tensor:
    """q and k rows in the order of llama.cpp's rotary embedding: halves of a head interleaved."""
    key = part.key.partition(".")[0]
    if not _architecture(job.spec).paired_rows or key not in ("q", "k") or part.layer is None:
        return value
    size = job.spec.layers[part.layer].attention.head_dim
    halves = value.view(-1, 2, size // 2, *value.shape[1:])
    return halves.transpose(1, 2).reshape(value.shape)


def _halves(scale: Tensor) -> Tensor:
    half = scale.half()
    if not torch.equal(torch.where(scale.abs() < 1e-12, 0.0, scale), half.float()):
        raise CannotRun("scales that fp16 cannot hold exactly", fix="use --format ridgeline")
    return half.contiguous().view(torch.uint8)


def _q4_0(grid: Grid) -> Tensor:
    """Blocks of 18 bytes: fp16 scale, then 16 low and 16 high nibbles."""
    scale = _halves(grid.scale_OG.reshape(-1, 1))
    q = grid.q_OI.reshape(-1, 2, 16)
    return torch.cat([scale, q[:, 0] | (q[:, 1] << 4)], 1)


def _q4_1(grid: Grid) -> Tensor:
    """Blocks of 20 bytes: fp16 scale and minimum, then nibbles as in Q4_0."""
    assert grid.zero_OG is not None
    scale = grid.scale_OG.reshape(-1, 1)
    low = -grid.zero_OG.float().reshape(-1, 1) * scale
    q = grid.q_OI.reshape(-1, 2, 16)
    return torch.cat([_halves(scale), _halves(low), q[:, 0] | (q[:, 1] << 4)], 1)


def _q5_0(grid: Grid) -> Tensor:
    """Blocks of 22 bytes: fp16 scale, the 32 fifth bits, then nibbles as in Q4_0."""
    scale = _halves(grid.scale_OG.reshape(-1, 1))
    q = grid.q_OI.reshape(-1, 2, 16)
    fifth = (grid.q_OI.reshape(-1, 4, 8) >> 4) << torch.arange(8, dtype=torch.uint8)
    low = q & 15
    return torch.cat([scale, fifth.sum(2, dtype=torch.uint8), low[:, 0] | (low[:, 1] << 4)], 1)


def _q8_0(grid: Grid) -> Tensor:
    """Blocks of 34 bytes: fp16 scale, then 32 signed bytes."""
    scale = _halves(grid.scale_OG.repeat_interleave(grid.shape[1] // 32, 1).reshape(-1, 1))
    q = (grid.q_OI.to(torch.int16) - 128).to(torch.int8).view(torch.uint8)
    return torch.cat([scale, q.reshape(-1, 32)], 1)


_ENCODERS = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q8_0": _q8_0}

# ---- the header --------------------------------------------------------------------------------


def _write_header(file: BinaryIO, metadata: dict[str, Any], entries: list[_TensorEntry]) -> None:
    file.write(b"GGUF" + struct.pack("<IQQ", 3, len(entries), len(metadata)))
    for key, value in metadata.items():
        file.write(_string(key) + _value(value))
    at = 0
    for entry in entries:
        shape = entry.shape
        file.write(_string(entry.name) + struct.pack("<I", len(shape)))
        file.write(struct.pack(f"<{len(shape)}Q", *shape[::-1]))
        file.write(struct.pack("<IQ", _NUMBERS[entry.kind], at))
        _, block, nbytes = TYPES[_NUMBERS[entry.kind]]
        size = math.prod(shape) // block * nbytes
        at += -(-size // _ALIGN) * _ALIGN
    file.write(bytes(-file.tell() % _ALIGN))


def _string(text: str) -> bytes:
    raw = text.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    """Type and value: bool, int (u32), float (f32), text, and lists of text, int or float."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if value and isinstance(value[0], float):
        return struct.pack("<IIQ", 9, 6, len(value)) + struct.pack(f"<{len(value)}f", *value)
    if value and isinstance(value[0], bool):
        return struct.pack("<IIQ", 9, 7, len(value)) + bytes(value)
    if value and isinstance(value[0], int):
        return struct.pack("<IIQ", 9, 5, len(value)) + struct.pack(f"<{len(value)}i", *value)
    return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))


def _metadata(job: WriteJob) -> dict[str, Any]:
    spec, name = job.spec, WRITTEN[job.spec.family]
    attention, mlp, rope = spec.layers[0].attention, spec.layers[0].mlp, _rope(spec)
    return {
        "general.architecture": name,
        "general.name": Path(spec.name).name,
        "general.quantization_version": 2,
        f"{name}.block_count": len(spec.layers),
        f"{name}.context_length": spec.max_positions,
        f"{name}.embedding_length": spec.hidden_size,
        f"{name}.feed_forward_length": mlp.up.num_out,
        f"{name}.attention.head_count": attention.num_heads,
        f"{name}.attention.head_count_kv": attention.num_kv_heads,
        f"{name}.attention.key_length": attention.head_dim,
        f"{name}.attention.value_length": attention.head_dim,
        f"{name}.attention.layer_norm_rms_epsilon": float(spec.norm_eps),
        f"{name}.rope.freq_base": float(rope.theta),
        f"{name}.rope.dimension_count": rope.dim,
        f"{name}.vocab_size": spec.vocab_size,
        **_scaling(name, rope),
        **_granite(spec),
        **_windows(name, spec),
        **_experts(name, mlp),
        **tokenizer_metadata(job.source, job.spec),
    }


def _scaling(name: str, rope: RopeSpec) -> dict[str, Any]:
    if rope.kind not in ("linear", "yarn"):
        return {}
    start = f"{name}.rope.scaling."
    found: dict[str, Any] = {f"{start}type": rope.kind, f"{start}factor": float(rope.factor)}
    if rope.original_max_positions is not None:
        found[f"{start}original_context_length"] = rope.original_max_positions
    return found


def _granite(spec: ModelSpec) -> dict[str, Any]:
    """Granite's four multipliers."""
    if spec.family != "granite":
        return {}
    layer = spec.layers[0]
    return {
        "granite.attention.scale": float(layer.attention.scale),
        "granite.embedding_scale": float(spec.embed_scale),
        "granite.residual_scale": float(layer.residual_scale),
        "granite.logit_scale": 1.0 / spec.logit_scale,
    }


def _windows(name: str, spec: ModelSpec) -> dict[str, Any]:
    windows = [layer.attention.window for layer in spec.layers]
    largest = max((window for window in windows if window), default=None)
    if largest is None:
        return {}
    return {
        f"{name}.attention.sliding_window": largest,
        f"{name}.attention.sliding_window_pattern": [window is not None for window in windows],
    }


def _experts(name: str, mlp: MlpSpec) -> dict[str, Any]:
    if mlp.router is None:
        return {}
    return {
        f"{name}.expert_count": mlp.num_experts,
        f"{name}.expert_used_count": mlp.experts_per_token,
        f"{name}.expert_feed_forward_length": mlp.up.num_out,
    }


def _check_source(source: Path, spec: ModelSpec) -> None:
    tokenizer_metadata(source, spec)


GGUF = FormatWriter(_refuse, _write_gguf, _check_source)
