"""Writes checkpoints of tiny models in the quantised formats of other projects, and the same models
with the weights that these formats stand for.

Packing is written out here, number by number, from the formats' published layouts: nothing of
Ridgeline's readers is used.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ridgeline.modelspec.families.registry import FAMILIES
from tests.conformance.tiny_models import BASE
from tests.conformance.tiny_models import FAMILIES as CONFIGURATIONS

GROUP = 32
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "intermediate_size_mlp": 64,
    "v_head_dim": 16,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "hidden_size_per_layer_input": 32,
    "laurel_rank": 32,
    "global_head_dim": 32,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
Module = tuple[dict[str, Tensor], Tensor]
"""The tensors of one quantised linear, by suffix, and the dense weight they stand for."""


def _integers(shape: tuple[int, int], seed: int) -> tuple[Tensor, Tensor]:
    """Numbers 0..15 [N, K] and their float16 scales [N, K / GROUP]."""
    generator = torch.Generator().manual_seed(seed)
    q_NK = torch.randint(0, 16, shape, generator=generator)
    spread = torch.rand(shape[0], shape[1] // GROUP, generator=generator)
    return q_NK, ((0.5 + spread) * 0.3 / shape[1] ** 0.5).half()


def _word(nibbles: Tensor) -> Tensor:
    """int32 of eight numbers along the last dimension, the first in the lowest bits."""
    word = sum(nibbles[..., i].long() << 4 * i for i in range(8))
    assert isinstance(word, Tensor)
    return torch.where(word >= 1 << 31, word - (1 << 32), word).int()


def _dense(q_NK: Tensor, zero: Tensor | int, scale_NG: Tensor) -> Tensor:
    shift = zero if isinstance(zero, int) else zero.repeat_interleave(GROUP, 1)
    return (q_NK - shift).float() * scale_NG.float().repeat_interleave(GROUP, 1)


def gptq(shape: tuple[int, int], seed: int) -> Module:
    """Symmetric: every zero-point is 8, stored as 7."""
    (num_out, num_in), (q_NK, scale_NG) = shape, _integers(shape, seed)
    sevens = torch.full((num_in // GROUP, num_out // 8, 8), 7)
    tensors = {
        ".qweight": _word(q_NK.T.reshape(num_in // 8, 8, num_out).transpose(1, 2)),
        ".qzeros": _word(sevens),
        ".scales": scale_NG.T.contiguous(),
        ".g_idx": (torch.arange(num_in) // GROUP).int(),
    }
    return tensors, _dense(q_NK, 8, scale_NG)


def awq(shape: tuple[int, int], seed: int) -> Module:
    """With zero-points; words hold eight outputs in the order of AWQ's kernel."""
    num_out, num_in = shape
    q_NK, scale_NG = _integers(shape, seed)
    zero_NG = torch.randint(0, 16, scale_NG.shape, generator=torch.Generator().manual_seed(seed))
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    tensors = {
        ".qweight": _word(q_NK.T.reshape(num_in, num_out // 8, 8)[..., order]),
        ".qzeros": _word(zero_NG.T.reshape(-1, num_out // 8, 8)[..., order]),
        ".scales": scale_NG.T.contiguous(),
    }
    return tensors, _dense(q_NK, zero_NG, scale_NG)


def fp8_block(shape: tuple[int, int], seed: int) -> Module:
    """DeepSeek's FP8: a float32 scale for every block of weights."""
    num_out, num_in = shape
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    blocks = (-(-num_out // GROUP), -(-num_in // GROUP))
    scale = (0.5 + torch.rand(blocks, generator=generator)) / num_in**0.5
    spread = scale.repeat_interleave(GROUP, 0)[:num_out].repeat_interleave(GROUP, 1)[:, :num_in]
    tensors = {".weight": weight, ".weight_scale_inv": scale}
    return tensors, weight.float() * spread


def compressed(shape: tuple[int, int], seed: int) -> Module:
    """compressed-tensors, pack-quantized: numbers -8..7, stored plus 8."""
    num_out, num_in = shape
    q_NK, scale_NG = _integers(shape, seed)
    tensors = {
        ".weight_packed": _word(q_NK.reshape(num_out, num_in // 8, 8)),
        ".weight_scale": scale_NG,
        ".weight_shape": torch.tensor(shape),
    }
    return tensors, _dense(q_NK, 8, scale_NG)


FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def mxfp4(shape: tuple[int, int], seed: int) -> Module:
    """compressed-tensors' MXFP4: two numbers a byte, a power of two for every 32."""
    num_out, num_in = shape
    generator = torch.Generator().manual_seed(seed)
    code_NK = torch.randint(0, 16, shape, generator=generator)
    exponent = torch.randint(121, 124, (num_out, num_in // 32), generator=generator)
    table = torch.tensor([*FP4, *(-x for x in FP4)])
    scale = torch.exp2(exponent.float() - 127).repeat_interleave(32, 1)
    pairs = code_NK.reshape(num_out, num_in // 2, 2)
    tensors = {
        ".weight_packed": (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8),
        ".weight_scale": exponent.to(torch.uint8),
    }
    return tensors, table[code_NK] * scale


def nvfp4(shape: tuple[int, int], seed: int) -> Module:
    """compressed-tensors' NVFP4: two numbers a byte, an E4M3 scale for every 16, one for all."""
    num_out, num_in = shape
    generator = torch.Generator().manual_seed(seed)
    code_NK = torch.randint(0, 16, shape, generator=generator)
    spread = torch.rand(num_out, num_in // 16, generator=generator)
    scale = (200 * (0.5 + spread)).to(torch.float8_e4m3fn)
    whole = torch.tensor([4000.0])  # divides
    table = torch.tensor([*FP4, *(-x for x in FP4)])
    pairs = code_NK.reshape(num_out, num_in // 2, 2)
    tensors = {
        ".weight_packed": (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8),
        ".weight_scale": scale,
        ".weight_global_scale": whole,
    }
    return tensors, table[code_NK] * (scale.float() / whole).repeat_interleave(16, 1)


def bnb_nf4(shape: tuple[int, int], seed: int) -> Module:
    """bitsandbytes' 4 bits: entries of a table of 16, a scale for every 64, first one high."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.sort(torch.rand(16, generator=generator) * 2 - 1).values
    code = torch.randint(0, 16, (shape[0] * shape[1],), generator=generator)
    absmax = (0.5 + torch.rand(len(code) // 64, generator=generator)) / shape[1] ** 0.5
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(shape)}
    tensors = {
        ".weight": (code[::2] << 4 | code[1::2]).to(torch.uint8).unsqueeze(1),
        ".weight.absmax": absmax,
        ".weight.quant_map": table,
        ".weight.quant_state.bitsandbytes__nf4": torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        ),
    }
    return tensors, (table[code] * absmax.repeat_interleave(64)).view(shape)


def _compressed_config(layout: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": {**group, "format": layout}},
        "ignore": ["lm_head"],
    }


FORMATS: dict[str, tuple[Callable[[tuple[int, int], int], Module], dict[str, Any]]] = {
    "GPTQ": (
        gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False},
    ),
    "AWQ": (
        awq,
        {
            "quant_method": "awq",
            "version": "gemm",
            "bits": 4,
            "group_size": GROUP,
            "zero_point": True,
        },
    ),
    "FP8 blocks": (
        fp8_block,
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [GROUP, GROUP],
        },
    ),
    "compressed-tensors": (
        compressed,
        _compressed_config("pack-quantized", type="int", symmetric=True, group_size=GROUP),
    ),
    "MXFP4": (mxfp4, _compressed_config("mxfp4-pack-quantized", type="float", group_size=32)),
    "bitsandbytes": (
        bnb_nf4,
        {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_compute_dtype": "float32",
        },
    ),
}


FURTHER: dict[str, tuple[Callable[[tuple[int, int], int], Module], dict[str, Any]]] = {
    "NVFP4": (
        nvfp4,
        _compressed_config("nvfp4-pack-quantized", type="float", strategy="tensor_group",
                           group_size=16),
    ),
}  # fmt: skip
"""Formats that are not tested with every family."""


def configuration_of(family: str) -> str | None:
    """The name of a family's first configuration in `tiny_models`; None if there is none."""
    names = (name for name, (kind, _) in CONFIGURATIONS.items() if kind == family)
    return next(names, None)


def sizes_of(name: str) -> dict[str, int]:
    """Sizes that the formats' groups divide, of those that a configuration has."""
    fields = {**BASE, **CONFIGURATIONS[name][1]}
    return {key: size for key, size in SIZES.items() if key in fields}


def matrix() -> dict[str, tuple[str, ...]]:
    """The formats tested for each family that runs."""
    return {family: tuple(FORMATS) for family in FAMILIES if configuration_of(family) is not None}


def quantise(source: Path, quantised: Path, dense: Path, name: str, seed: int = 0) -> int:
    """Write `source` in a format, and with the weights it stands for; returns their number."""
    write, config = (FORMATS | FURTHER)[name]
    shutil.copytree(source, dense)
    shutil.copytree(source, quantised)
    count = 0
    for file in sorted(source.glob("*.safetensors")):
        plain = load_file(file)
        packed = dict(plain)
        for tensor, weight in plain.items():
            if not is_quantised(tensor, weight):
                continue
            module, count = tensor.removesuffix(".weight"), count + 1
            raw, plain[tensor] = write((weight.shape[0], weight.shape[1]), seed + count)
            del packed[tensor]
            packed |= {module + suffix: value.contiguous() for suffix, value in raw.items()}
        save_file(plain, dense / file.name, {"format": "pt"})
        save_file(packed, quantised / file.name, {"format": "pt"})
    file = quantised / "config.json"
    fields = json.loads(file.read_text("utf-8"))
    file.write_text(json.dumps({**fields, "quantization_config": config}), "utf-8")
    return count


_LEFT_DENSE = (
    *("embed_tokens", "lm_head", "norm", "mlp.gate.", "router", "shared_expert_gate"),
    "altup.",  # matrices of as many rows as hidden states, which no published checkpoint quantises
    *("in_proj_b.", "in_proj_a."),  # as few rows as heads; Qwen3-Next's are one matrix, and tested
)


def is_quantised(tensor: str, weight: Tensor) -> bool:
    """Whether quantisers take a tensor: the linears of attention and of feed-forward layers."""
    moe_gate = tensor.endswith((".gate.weight", ".conv1d.weight"))
    return (
        weight.dim() == 2
        and tensor.endswith(".weight")
        and not moe_gate
        and not any(part in tensor for part in _LEFT_DENSE)
    )
