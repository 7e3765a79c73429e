"""Floats in 4 and 8 bits: NF4 and FP8. Storage formats: no supported CPU multiplies them directly.

  nf4           bitsandbytes: the nearest of 16 values, spaced as quantiles of a normal,
                times the largest magnitude of 64 consecutive weights (Dettmers et al., "QLoRA",
                NeurIPS 2023, arXiv 2305.14314)
  fp8-tensor    e4m3 (largest 448) with one scale per tensor, per output, or per 128 x 128 block
  fp8-channel   (Micikevicius et al., "FP8 Formats for Deep Learning", 2022, arXiv 2209.05433)
  fp8-block

Invariant: round to nearest, no text read; the same weights give the same bytes.

When it loses: against integers of the same width in groups with searched scales, on weights without
outliers. NF4 has no kernel here and is computed in float32.
"""

from __future__ import annotations

import json

import torch
from torch import Tensor

from ridgeline.compress.formats.coded import CodedWeight
from ridgeline.compress.formats.lattice import round_up_significant

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
NF4_BLOCK = 64
FP8_TOP = 448.0
FP8_BLOCK = 128
_STATE = ".weight.quant_state.bitsandbytes__nf4"


def code_nf4(weight_OI: Tensor, dtype: str) -> CodedWeight:
    """bitsandbytes' layout, the first of two weights in the high nibble; `dtype` is the model's."""
    shape = (weight_OI.shape[0], weight_OI.shape[1])
    rows_BJ = weight_OI.float().reshape(-1, NF4_BLOCK)
    absmax_B = rows_BJ.abs().amax(1)
    table = torch.tensor(NF4)
    between = (table[1:] + table[:-1]) / 2
    scaled_BJ = rows_BJ / torch.where(absmax_B == 0, 1.0, absmax_B).unsqueeze(1)
    index = torch.bucketize(scaled_BJ, between).to(torch.uint8).view(-1, 2)
    state = {"quant_type": "nf4", "blocksize": NF4_BLOCK, "dtype": dtype, "shape": list(shape)}
    return CodedWeight(
        "nf4",
        shape,
        {
            ".weight": ((index[:, 0] << 4) | index[:, 1]).view(-1, 1),
            ".weight.absmax": absmax_B,
            ".weight.quant_map": table,
            _STATE: torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
        },
    )


def code_fp8(weight_OI: Tensor, kind: str) -> CodedWeight:
    """e4m3 values and scales; scales have bfloat16's precision, rounded up so that nothing
    saturates.
    """
    weight_OI = weight_OI.float()
    num_out, num_in = weight_OI.shape
    rows, columns = {
        "fp8-tensor": (num_out, num_in),
        "fp8-channel": (1, num_in),
        "fp8-block": (FP8_BLOCK, FP8_BLOCK),
    }[kind]
    padded = torch.nn.functional.pad(weight_OI, (0, -num_in % columns, 0, -num_out % rows))
    tiles = padded.view(len(padded) // rows, rows, -1, columns)
    scale_AB = round_up_significant(tiles.abs().amax((1, 3)).clamp(min=1e-12) / FP8_TOP, 8)
    wide = scale_AB.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:num_out, :num_in]
    values = (weight_OI / wide).to(torch.float8_e4m3fn)
    name = ".weight_scale_inv" if kind == "fp8-block" else ".weight_scale"
    scale = scale_AB.reshape(1) if kind == "fp8-tensor" else scale_AB
    return CodedWeight(kind, (num_out, num_in), {".weight": values, name: scale})
