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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ridgeline.compress.formats.coded import BLOCKS
from ridgeline.compress.quantize_model import FormatWriter, TableFormats, WriteJob
from ridgeline.compress.recipe import QuantizeRecipe
from ridgeline.compress.writers.gguf_check import (
    refuse_lost,
    refuse_unread_biases,
    refuse_unread_layers,
)
from ridgeline.compress.writers.gguf_keys import WRITTEN, full_rope, model_keys
from ridgeline.compress.writers.gguf_tensors import (
    GgufEntry,
    alternated,
    arranged_rows,
    stored_values,
    tensor_entries,
)
from ridgeline.compress.writers.gguf_tokenizer import tokenizer_metadata
from ridgeline.engine.checkpoints.family_layouts import XIELU_PARTS
from ridgeline.engine.checkpoints.tensor_names import Part, parts
from ridgeline.engine.quant.grid import Grid
from ridgeline.errors import CannotRun
from ridgeline.modelspec.checkpoints.gguf_header import TYPES
from ridgeline.modelspec.model import ModelSpec

NAME = "model.gguf"
_NUMBERS = {name: number for number, (name, _, _) in TYPES.items()}
_PLAIN = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_ALIGN = 32
_ROWS = 4096  # of a table, written at once
_K_TYPES = {"q4_k": "Q4_K", "q6_k": "Q6_K"}
_WINDOWED = {
    **dict.fromkeys(
        (
            *("olmo3", "gpt_oss", "gemma2", "gemma3_text", "gemma4_text", "cohere2", "phi3"),
            *("exaone_moe", "mellum"),
        ),
        1,
    ),
    "exaone4": 64,
}
"""Families whose windows llama.cpp computes layer by layer, and for how many layers it takes them
at least."""

_TYPES_32 = {(4, False): "Q4_0", (4, True): "Q4_1", (5, False): "Q5_0"}


def _write_gguf(job: WriteJob) -> int:
    """Write `model.gguf` into the folder; returns its bytes."""
    spec = job.spec
    entries = tensor_entries(spec, lambda part: _kind(job, part))
    target = job.folder / NAME
    with target.open("wb") as file:
        file.write(_header(_metadata(job.source, spec, _xielu(job)), entries))
        for entry in entries:
            if entry.values is not None:
                written = file.write(entry.values.numpy().tobytes())
            else:
                written = sum(map(file.write, _pieces(job, entry)))
            file.write(bytes(-written % _ALIGN))
    return target.stat().st_size


def _check_source(source: Path, spec: ModelSpec) -> None:
    """Raise CannotRun if GGUF cannot hold the tokenizer, or llama.cpp would compute otherwise."""
    numbers = {f"xielu.{key}": [0.0] * len(spec.layers) for key in _XIELU}
    keys = numbers if spec.layers[0].mlp.activation == "xielu" else {}
    entries = tensor_entries(spec, lambda part: "F32")
    header = _header(_metadata(source, spec, keys), entries)
    lists = {entry.name: entry.values.tolist() for entry in entries if entry.values is not None}
    refuse_lost(spec, header, len(header) + sum(map(_padded, entries)), lists)


_XIELU = ("alpha_p", "alpha_n", "beta", "eps")


def _xielu(job: WriteJob) -> dict[str, list[float]]:
    """Numbers of the activations, one per layer, which are metadata."""
    found: dict[str, list[float]] = {}
    for part in parts(job.spec):
        if part.key in XIELU_PARTS:
            key = part.key.replace("xielu_", "xielu.")
            found.setdefault(key, []).append(job.weights.get(part).item())
    return found


def _refuse(spec: ModelSpec, recipe: QuantizeRecipe, tables: TableFormats) -> None:
    if spec.family not in WRITTEN:
        raise CannotRun(
            "GGUF of this family is not written",
            value=spec.family,
            limit=", ".join(WRITTEN),
        )
    routed = [layer.mlp for layer in spec.layers if layer.mlp.router is not None]
    plain = len(routed) < len(spec.layers) or not all(mlp.norm_topk for mlp in routed)
    if routed and plain and spec.family in ("mixtral", "qwen3_moe", "gpt_oss", "mellum"):
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
    refuse_unread_biases(spec)
    refuse_unread_layers(spec)
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
    _refuse_odd(spec)
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


def _refuse_odd(spec: ModelSpec) -> None:
    for part in parts(spec):
        if not _is_plain(part) and part.shape[1] % 32:
            raise CannotRun("GGUF's blocks are of 32 inputs", value=f"{part.shape[1]} ({part})")
        delta = None if part.layer is None else spec.layers[part.layer].attention.delta
        if part.key == "delta_o" and delta is not None and delta.value_dim % 32:
            raise CannotRun("GGUF's blocks are of 32 inputs", value=f"heads of {delta.value_dim}")


def _is_plain(part: Part) -> bool:
    """Whether a part is stored as it is: norms, biases, routers, tables, gates of layer inputs, and
    what latent attention multiplies as plain numbers."""
    if part.layer is None or part.key in ("kv_up", "input_gate", "input_up"):
        return True
    return _is_float(part)


def _is_float(part: Part) -> bool:
    """Whether llama.cpp has a part in float32."""
    small = len(part.shape) < 2 or part.key in ("delta_a", "delta_b", "delta_conv")
    return small or part.key.endswith(("router", "norm"))


def _refuse_rope(spec: ModelSpec) -> None:
    rope = full_rope(spec)
    own = (rope.beta_fast, rope.beta_slow) != (32.0, 1.0) and WRITTEN[spec.family] not in _LIMITS
    held = ("default", "linear", "llama3", "longrope", "proportional", "yarn")
    if rope.kind not in held or (rope.kind == "yarn" and own):
        raise CannotRun(
            "GGUF with such rotary embeddings is not written",
            value=rope.kind,
            limit="default, linear, llama3, longrope, proportional, yarn with its default limits",
            fix="use --format ridgeline",
        )


_LIMITS = ("deepseek2", "mistral3")
"""Architectures of which the converter writes YaRN's limits. llama.cpp reads those of Ministral 3
alone, and computes Kimi K2 with the default ones, in the published files too."""


def _kind(job: WriteJob, part: Part) -> str:
    if _is_float(part):
        return "F32"
    if _is_plain(part):
        return _PLAIN[job.spec.stored_dtype]
    own = job.recipe.at(part.key, part.layer, part.shape[1])
    if own.numbers in _K_TYPES:
        return _K_TYPES[own.numbers]
    return "Q8_0" if own.bits == 8 else _TYPES_32[own.bits, own.zeros]


def _pieces(job: WriteJob, entry: GgufEntry) -> Iterator[bytes]:
    if [part.key for part in entry.parts] == ["delta_b", "delta_a"]:
        values = [job.weights.get(part) for part in entry.parts]
        yield alternated(values, job.spec, entry).float().contiguous().numpy().tobytes()
        return
    for part in entry.parts:
        yield from _bytes(job, entry, part)


def _bytes(job: WriteJob, entry: GgufEntry, part: Part) -> Iterator[bytes]:
    """A part as stored in the file; unquantised tensors, which may be large, in pieces."""
    blocks = _blocks(job, part, entry.kind)
    if blocks is not None:
        rows = arranged_rows(blocks.view(part.shape[0], -1), job.spec, part)
        yield rows.contiguous().numpy().tobytes()
        return
    dtype = _DTYPES[entry.kind]
    for rows in torch.split(stored_values(job.weights.get(part), job.spec, entry, part), _ROWS):
        yield rows.to(dtype).contiguous().view(torch.uint8).numpy().tobytes()


def _blocks(job: WriteJob, part: Part, kind: str) -> Tensor | None:
    """The rows of a quantised part as bytes; None if it is not quantised."""
    coded = job.weights.coded(part)
    if coded is not None:
        return coded.tensors[BLOCKS]
    grid = job.weights.grid(part)
    return None if grid is None else _ENCODERS[kind](grid)


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


def _header(metadata: dict[str, Any], entries: list[GgufEntry]) -> bytes:
    """All that comes before the weights, padded to where they begin."""
    out = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(entries), len(metadata)))
    for key, value in metadata.items():
        out += _string(key) + _value(value)
    at = 0
    for entry in entries:
        shape = entry.shape
        out += _string(entry.name) + struct.pack("<I", len(shape))
        out += struct.pack(f"<{len(shape)}Q", *shape[::-1])
        out += struct.pack("<IQ", _NUMBERS[entry.kind], at)
        at += _padded(entry)
    return bytes(out) + bytes(-len(out) % _ALIGN)


def _padded(entry: GgufEntry) -> int:
    """Bytes of a tensor with those up to the next one."""
    _, block, nbytes = TYPES[_NUMBERS[entry.kind]]
    size = math.prod(entry.shape) // block * nbytes
    return -(-size // _ALIGN) * _ALIGN


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


def _metadata(
    source: Path, spec: ModelSpec, lists: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    return {
        "general.architecture": WRITTEN[spec.family],
        "general.name": Path(spec.name).name,
        "general.quantization_version": 2,
        **model_keys(spec, lists),
        **tokenizer_metadata(source, spec),
    }


GGUF = FormatWriter(_refuse, _write_gguf, _check_source, any_layers=True)
