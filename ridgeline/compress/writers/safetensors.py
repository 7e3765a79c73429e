"""Quantised checkpoints for other engines: compressed-tensors, GPTQ, AWQ, FP8.

One shard per layer, so one layer is in memory at a time. The integers are those of the grids, bit
for bit; only the packing differs (`ridgeline.engine.checkpoints` reads it back and documents it).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ridgeline.compress.formats.coded import CodedWeight
from ridgeline.compress.formats.floats import FP8_BLOCK
from ridgeline.compress.quantize_model import HOLDERS, FormatWriter, TableFormats, WriteJob
from ridgeline.compress.recipe import GROUPS, QuantizeRecipe
from ridgeline.engine.checkpoints.codecs.awq import ORDER
from ridgeline.engine.checkpoints.codecs.bit_packing import pack_words
from ridgeline.engine.checkpoints.safetensors import INDEX, entries_of
from ridgeline.engine.checkpoints.tensor_names import Part, layouts_of, locate, parts, row_sizes
from ridgeline.engine.checkpoints.write_packed import copy_config
from ridgeline.engine.dtype import DTYPES
from ridgeline.engine.quant.grid import Grid, stack_grids
from ridgeline.errors import CannotRun
from ridgeline.modelspec.model import ModelSpec
from ridgeline.modelspec.rewrite import linears

Encode = Callable[[Grid], dict[str, Tensor]]
Refuse = Callable[[ModelSpec, QuantizeRecipe, TableFormats], None]


def _write_compressed(job: WriteJob) -> int:
    """compressed-tensors: pack-quantized up to 4 bits, int-quantized (W8A8) at 8."""
    dtype = DTYPES[job.spec.stored_dtype]
    if job.recipe.numbers != "int":
        return write_shards(job, None, _compressed_config(job))

    def encode(grid: Grid) -> dict[str, Tensor]:
        return _bytes(grid, dtype) if grid.bits == 8 else _packed(grid, dtype)

    return write_shards(job, encode, _compressed_config(job))


def _packed(grid: Grid, dtype: torch.dtype) -> dict[str, Tensor]:
    tensors = {
        ".weight_packed": pack_words(grid.q_OI, grid.bits),
        ".weight_scale": _exactly(grid.scale_OG, dtype),
        ".weight_shape": torch.tensor(grid.shape),
    }
    if grid.zero_OG is not None:
        words = pack_words(grid.zero_OG.T.contiguous(), grid.bits)
        tensors[".weight_zero_point"] = words.T.contiguous()
    return tensors


def _bytes(grid: Grid, dtype: torch.dtype) -> dict[str, Tensor]:
    q_OI = (grid.q_OI.to(torch.int16) - 128).to(torch.int8)
    return {".weight": q_OI, ".weight_scale": _exactly(grid.scale_OG, dtype)}


def _exactly(scale_OG: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales in `dtype`. Raises CannotRun if that would change them."""
    narrow_OG = scale_OG.to(dtype)
    lost = (narrow_OG.float() != scale_OG) & (scale_OG.abs() > 1e-12)
    if lost.any():
        raise CannotRun(
            "scales that this format cannot hold exactly",
            value=float(scale_OG[lost][0]),
            limit=str(dtype),
            fix="use --format ridgeline",
        )
    return narrow_OG


def _write_fp8(job: WriteJob) -> int:
    """FP8 in blocks, as in DeepSeek's checkpoints and transformers."""
    config = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        "modules_to_not_convert": ["lm_head"],
    }
    return write_shards(job, None, config)


def _compressed_config(job: WriteJob) -> dict[str, Any]:
    """The quantisation config, with one group of modules per width."""
    if job.recipe.numbers != "int":
        groups = [_float_group(job.recipe)]
    elif not job.recipe.widths:
        groups = [_integer_group(job.recipe, ["Linear"])]
    else:
        groups = [_integer_group(recipe, names) for recipe, names in _by_width(job)]
    layouts = {group["format"] for group in groups}
    return {
        "quant_method": "compressed-tensors",
        "format": layouts.pop() if len(layouts) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {f"group_{at}": group for at, group in enumerate(groups)},
        "ignore": ["lm_head", *_routers(job)],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _by_width(job: WriteJob) -> list[tuple[QuantizeRecipe, list[str]]]:
    """Each width's recipe and the modules that use it."""
    found: dict[int, tuple[QuantizeRecipe, list[str]]] = {}
    for name, inside in tensor_names(job.source, job.spec).items():
        part = inside[0]
        if part.layer is None or job.weights.grid(part) is None:
            continue
        own = job.recipe.at(part.key, part.layer, part.shape[1])
        found.setdefault(own.bits, (own, []))[1].append(name.removesuffix(".weight"))
    return [found[bits] for bits in sorted(found)]


def _integer_group(recipe: QuantizeRecipe, targets: list[str]) -> dict[str, Any]:
    weights = {
        "num_bits": recipe.bits,
        "type": "int",
        "symmetric": not recipe.zeros,
        "strategy": "channel" if recipe.group_size is None else "group",
        "group_size": recipe.group_size,
        "dynamic": False,
        "observer": "minmax",
    }
    rows = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    eight = recipe.bits == 8
    layout = "int-quantized" if eight else "pack-quantized"
    return _group(layout, weights, rows if eight else None, targets)


def _float_group(recipe: QuantizeRecipe) -> dict[str, Any]:
    """FP8 weights only: activations stay unquantised."""
    weights = {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": recipe.numbers.removeprefix("fp8-"),
        "dynamic": False,
        "observer": "minmax",
    }
    return _group("float-quantized", weights, None, ["Linear"])


def _group(
    layout: str, weights: dict[str, Any], rows: dict[str, Any] | None, targets: list[str]
) -> dict[str, Any]:
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": rows,
        "output_activations": None,
        "format": layout,
    }


def _routers(job: WriteJob) -> list[str]:
    return ["re:.*mlp.gate$", "re:.*gate$"] if any(x.mlp.router for x in job.spec.layers) else []


def _write_gptq(job: WriteJob) -> int:
    """GPTQ v2: zero-points stored unchanged."""
    config = {
        "quant_method": "gptq",
        "checkpoint_format": "gptq_v2",
        "bits": job.recipe.bits,
        "group_size": job.recipe.group_size or -1,
        "sym": not job.recipe.zeros,
        "desc_act": False,
        "lm_head": False,
        "pack_dtype": "int32",
    }
    return write_shards(job, _gptq, config)


def _gptq(grid: Grid) -> dict[str, Tensor]:
    zero_OG = grid.zero_OG
    if zero_OG is None:
        zero_OG = torch.full_like(grid.scale_OG, grid.middle).to(torch.uint8)
    return {
        ".qweight": pack_words(grid.q_OI, grid.bits).T.contiguous(),
        ".qzeros": pack_words(zero_OG.T.contiguous(), grid.bits),
        ".scales": _exactly(grid.scale_OG, torch.float16).T.contiguous(),
        ".g_idx": grid.groups().to(torch.int32),
    }


def _write_awq(job: WriteJob) -> int:
    """AWQ's GEMM layout; symmetric grids with an explicit zero-point of 8."""
    config = {
        "quant_method": "awq",
        "version": "gemm",
        "bits": 4,
        "group_size": job.recipe.group_size,
        "zero_point": True,
        "modules_to_not_convert": None,
    }
    return write_shards(job, _awq, config)


def _awq(grid: Grid) -> dict[str, Tensor]:
    zero_OG = grid.zero_OG
    if zero_OG is None:
        zero_OG = torch.full_like(grid.scale_OG, 8).to(torch.uint8)
    if grid.shape[0] % 8:
        raise CannotRun("AWQ packs outputs by eight", value=grid.shape[0])
    return {
        ".qweight": _in_eights(grid.q_OI),
        ".qzeros": _in_eights(zero_OG),
        ".scales": _exactly(grid.scale_OG, torch.float16).T.contiguous(),
    }


def _in_eights(numbers_OR: Tensor) -> Tensor:
    rows_RW8 = numbers_OR.T.reshape(numbers_OR.shape[1], -1, 8)[:, :, list(ORDER)]
    return pack_words(rows_RW8.flatten(1).contiguous(), 4)


def write_shards(job: WriteJob, encode: Encode | None, config: Mapping[str, Any]) -> int:
    """Write shards, index and config; returns the bytes of the shards."""
    copy_config(job.source, job.folder, job.spec, {**config, **job.made})
    names = tensor_names(job.source, job.spec)

    def tensors(inside: Sequence[str]) -> dict[str, Tensor]:
        return dict(_tensors(job, encode, {name: names[name] for name in inside}))

    return save_shards(job.folder, names_by_shard(names), tensors)


def save_shards(
    folder: Path,
    shards: Sequence[Sequence[str]],
    tensors_of: Callable[[Sequence[str]], dict[str, Tensor]],
) -> int:
    """Write one file for each group of names, one at a time, and the index; returns the bytes of
    tensors.
    """
    index: dict[str, str] = {}
    total = 0
    for number, inside in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = tensors_of(inside)
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    document = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / INDEX).write_text(json.dumps(document, indent=1), encoding="utf-8")
    return total


def names_by_shard(names: Mapping[str, list[Part]]) -> list[list[str]]:
    """The tensor names of each file: one per layer, and one per table, which may be larger."""
    found: dict[object, list[str]] = {}
    for name, inside in names.items():
        part = inside[0]
        alone = part.key in ("embed", "lm_head")
        found.setdefault(part.key if alone else part.layer, []).append(name)
    return list(found.values())


def refuse(spec: ModelSpec, recipe: QuantizeRecipe, tables: TableFormats) -> None:
    """Raise CannotRun for tables in fewer bits, and for groups that do not divide the inputs."""
    for format in tables:
        if format is not None and format.kind not in ("dense", "bf16"):
            raise CannotRun(
                "LM head and embeddings stay as they are in this format",
                value=format.kind,
                fix="leave out --lm-head-bits and --embedding-bits, or use --format ridgeline",
            )
    if recipe.group_size is not None:
        _refuse_ragged(spec, recipe.group_size)


def _refuse_ragged(spec: ModelSpec, group: int) -> None:
    """Reject groups that do not divide the inputs, naming those that would."""
    inputs = {
        path: linear.num_in
        for path, linear in linears(spec).items()
        if path != "lm_head" and not path.endswith("router")
    }
    odd = next((path for path, num_in in inputs.items() if num_in % group), None)
    if odd is None:
        return
    fit = [str(size) for size in GROUPS if not any(num_in % size for num_in in inputs.values())]
    choose = f"--group-size {' or '.join(fit)}, or " if fit else ""
    raise CannotRun(
        "groups must divide the inputs in this format",
        value=f"{inputs[odd]} inputs of {odd} in groups of {group}",
        limit=f"of {', '.join(map(str, GROUPS))} these divide all inputs: {', '.join(fit) or '-'}",
        fix=f"use {choose}--format ridgeline",
    )


def _refuse_gptq(spec: ModelSpec, recipe: QuantizeRecipe, tables: TableFormats) -> None:
    if recipe.bits == 5:
        raise CannotRun("GPTQ's layout holds 2, 3, 4 and 8 bits", value=recipe.bits)
    refuse(spec, recipe, tables)


def _refuse_awq(spec: ModelSpec, recipe: QuantizeRecipe, tables: TableFormats) -> None:
    if recipe.bits != 4:
        raise CannotRun("AWQ's layout holds 4 bits", value=recipe.bits, fix="use --bits 4")
    refuse(spec, recipe, tables)


def tensor_names(source: Path, spec: ModelSpec) -> dict[str, list[Part]]:
    """Tensor name → the parts of `spec` stored in it, in order; named as in the folder `source`."""
    entries = entries_of(source)
    sizes = [row_sizes(layer) for layer in spec.layers]
    layout = next(
        layout
        for layout in layouts_of(spec.family, entries)
        if not any(place.stacked for place in layout.values())
    )
    found: dict[str, list[Part]] = {}
    for part in parts(spec):
        at = locate(part, layout, sizes[part.layer] if part.layer is not None else {})
        found.setdefault(at.name, []).append(part)
    return found


def _tensors(
    job: WriteJob, encode: Encode | None, names: Mapping[str, list[Part]]
) -> Iterator[tuple[str, Tensor]]:
    dtype = DTYPES[job.spec.stored_dtype]
    for name, inside in names.items():
        coded = [found for part in inside if (found := job.weights.coded(part)) is not None]
        if coded:
            module = name.removesuffix(".weight")
            for suffix, tensor in _alone(coded, name).tensors.items():
                exact = _exactly(tensor, dtype) if suffix == ".weight_scale" else tensor
                yield module + suffix, exact
            continue
        grids = [grid for part in inside if (grid := job.weights.grid(part)) is not None]
        if grids and encode is not None:
            module = name.removesuffix(".weight")
            for suffix, tensor in encode(stack_grids(grids)).items():
                yield module + suffix, tensor
        else:
            values = [job.weights.get(part) for part in inside]
            whole = values[0] if len(values) == 1 else torch.cat(values)
            yield name, whole.to(dtype).contiguous()


def _alone(coded: list[CodedWeight], name: str) -> CodedWeight:
    if len(coded) > 1:
        raise CannotRun("tensors that hold several weights are not written so", value=name)
    return coded[0]


def holding(then: Refuse, *numbers: str) -> Refuse:
    """A check that runs `then` after the checks common to all formats."""

    def both(spec: ModelSpec, recipe: QuantizeRecipe, tables: TableFormats) -> None:
        if recipe.method == "llm-int8":
            raise CannotRun(
                "this format has no place for the inputs that are kept apart",
                value="llm-int8",
                fix="use --format ridgeline",
            )
        if recipe.widths and "fp8-tensor" not in numbers:
            raise CannotRun(
                "this format holds one width",
                value="--bits-budget",
                fix="use --format ridgeline or compressed-tensors",
            )
        if recipe.numbers not in numbers:
            raise CannotRun(
                "this format does not hold such numbers",
                value=recipe.numbers,
                limit=", ".join(numbers),
                fix=f"use --format {HOLDERS[recipe.numbers]}",
            )
        then(spec, recipe, tables)

    return both


COMPRESSED = FormatWriter(holding(refuse, "int", "fp8-tensor", "fp8-channel"), _write_compressed)
GPTQ = FormatWriter(holding(_refuse_gptq, "int"), _write_gptq)
AWQ = FormatWriter(holding(_refuse_awq, "int"), _write_awq)
FP8 = FormatWriter(holding(refuse, "fp8-block"), _write_fp8)
