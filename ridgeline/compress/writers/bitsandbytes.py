"""Checkpoints for bitsandbytes: NF4 in blocks of 64, and LLM.int8.

LLM.int8 stores `weight` as int8 with `SCB`, the largest magnitude that a row can hold (127 times
its scale). The runtime decides which activations are multiplied in 16 bits, at the threshold of 6
that the config names.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.compress.quantize_model import FormatWriter, TableFormats, WriteJob
from ridgeline.compress.recipe import QuantizeRecipe
from ridgeline.compress.writers.safetensors import holding, refuse, write_shards
from ridgeline.engine.quant.grid import Grid
from ridgeline.errors import CannotRun
from ridgeline.modelspec.model import ModelSpec

_FOUR = {
    "load_in_4bit": True,
    "load_in_8bit": False,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": False,
    "bnb_4bit_compute_dtype": "float32",
    "bnb_4bit_quant_storage": "uint8",
}
_EIGHT = {
    "load_in_4bit": False,
    "load_in_8bit": True,
    "llm_int8_threshold": 6.0,
    "llm_int8_has_fp16_weight": False,
    "llm_int8_skip_modules": ["lm_head"],
}


def _write(job: WriteJob) -> int:
    """NF4 with block scales in float32 (no double quantisation)."""
    eight = job.recipe.numbers == "int"
    config = {"quant_method": "bitsandbytes", **(_EIGHT if eight else _FOUR)}
    return write_shards(job, _rows if eight else None, config)


def _rows(grid: Grid) -> dict[str, Tensor]:
    return {
        ".weight": (grid.q_OI.to(torch.int16) - 128).to(torch.int8),
        ".SCB": (grid.scale_OG[:, 0] * 127).contiguous(),
        ".weight_format": torch.tensor(0, dtype=torch.uint8),  # row after row
    }


def _refuse(spec: ModelSpec, recipe: QuantizeRecipe, tables: TableFormats) -> None:
    if recipe.numbers == "int" and recipe.bits != 8:
        raise CannotRun(
            "bitsandbytes holds NF4, and whole numbers of 8 bits",
            value=f"{recipe.bits} bits",
            fix="use --numbers nf4, or --bits 8",
        )
    refuse(spec, recipe, tables)


BITSANDBYTES = FormatWriter(holding(_refuse, "nf4", "int"), _write)
