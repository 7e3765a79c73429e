"""Writes the frozen vectors of tests/engine/foreign: small modules by the formats' own libraries.

Runs in a separate environment, where compressed-tensors and bitsandbytes are installed; needs
nothing of Ridgeline. Each case is `NAME/raw/SUFFIX` tensors and `NAME/truth`, what the library
itself decodes them to.

    python scripts/foreign_vectors.py tests/engine/checkpoints/vectors.safetensors
"""

from __future__ import annotations

import sys

import torch
from bitsandbytes import functional as bnb
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.mx_utils import decompress_mx_scale
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import save_file

SHAPE, GROUP = (16, 128), 64
Tensors = dict[str, torch.Tensor]


def weight(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(SHAPE, generator=torch.Generator().manual_seed(7)) * 0.05).to(dtype)


def compressed(name: str, layout: str, dtype: torch.dtype, **args: object) -> Tensors:
    """One module through the library's compressor and back."""
    quant = QuantizationArgs(**args)
    scheme = QuantizationScheme(targets=["Linear"], weights=quant)
    groups = SHAPE[1] // GROUP if args["strategy"] == "group" else 1
    parts = weight(torch.float32).view(SHAPE[0], groups, -1)
    if args["strategy"] == "block":
        blocks = weight(torch.float32).view(2, 8, 2, 64).transpose(1, 2).reshape(2, 2, -1)
        scale = blocks.abs().amax(2) / 448
    elif args["type"] == "float":
        scale = parts.abs().amax(2) / 448
    elif args["symmetric"]:
        scale = parts.abs().amax(2) / (2 ** (quant.num_bits - 1) - 0.5)
    else:
        scale = (parts.amax(2) - parts.amin(2)) / (2**quant.num_bits - 1)
    state = {"weight": weight(dtype), "weight_scale": scale.to(dtype)}
    zero = torch.zeros_like(scale, dtype=torch.int8)
    if not args.get("symmetric", True):
        low = -(2 ** (quant.num_bits - 1))
        zero = (low - parts.amin(2) / scale).round().clamp(low, -low - 1).to(torch.int8)
    if args["type"] == "int":
        state["weight_zero_point"] = zero
    compressor = BaseCompressor.get_value_from_registry(layout)
    packed = compressor.compress(dict(state), scheme)
    truth = compressor.decompress(dict(packed), scheme)["weight"]
    raw = {f"{name}/raw/.{key}": value.contiguous() for key, value in packed.items()}
    return {**raw, f"{name}/truth": truth.contiguous()}


def fp4(name: str, layout: str, group: int) -> Tensors:
    """One module in 4-bit floats through the library's compressor and back."""
    value = weight(torch.float32)
    parts = value.view(SHAPE[0], SHAPE[1] // group, group)
    state: Tensors = {"weight": value}
    if layout.startswith("nvfp4"):
        strategy = "tensor_group"
        global_scale = 448 * 6 / value.abs().max()
        scale = parts.abs().amax(2) / 6 * global_scale
        state["weight_scale"] = scale.to(torch.float8_e4m3fn).float()
        state["weight_global_scale"] = global_scale.reshape(1)
    else:
        strategy = "group"
        state["weight_scale"] = torch.exp2(torch.floor(torch.log2(parts.abs().amax(2))) - 2)
    quant = QuantizationArgs(num_bits=4, type="float", strategy=strategy, group_size=group)
    scheme = QuantizationScheme(targets=["Linear"], weights=quant)
    compressor = BaseCompressor.get_value_from_registry(layout)
    packed = compressor.compress(state, scheme)
    scale = packed["weight_scale"]
    # The compressor itself decodes to bfloat16; its parts decode to float32.
    truth = dequantize(
        x_q=unpack_fp4_from_uint8(packed["weight_packed"], *SHAPE, torch.float32),
        scale=decompress_mx_scale(scale).float() if layout.startswith("mx") else scale.float(),
        args=quant,
        global_scale=packed.get("weight_global_scale"),
        dtype=torch.float32,
    )
    raw = {f"{name}/raw/.{key}": tensor.contiguous() for key, tensor in packed.items()}
    return {**raw, f"{name}/truth": truth.contiguous()}


def awq() -> Tensors:
    """Random words, decoded by compressed-tensors' AutoAWQ converter."""
    generator = torch.Generator().manual_seed(3)
    low, high = -(2**31), 2**31 - 1
    tensors = {
        "m.qweight": torch.randint(low, high, (SHAPE[1], SHAPE[0] // 8), generator=generator),
        "m.qzeros": torch.randint(low, high, (2, SHAPE[0] // 8), generator=generator),
        "m.scales": (torch.rand(2, SHAPE[0], generator=generator) * 0.01).half(),
    }
    tensors = {k: v if k.endswith("scales") else v.int() for k, v in tensors.items()}
    raw = {f"awq/raw/{key[1:]}": value.clone() for key, value in tensors.items()}
    done = AutoAWQConverter(group_size=GROUP).process(dict(tensors))
    quant = QuantizationArgs(num_bits=4, symmetric=False, strategy="group", group_size=GROUP)
    scheme = QuantizationScheme(targets=["Linear"], weights=quant)
    state = {key.removeprefix("m."): value for key, value in done.items()}
    state["weight_scale"] = state["weight_scale"].float()
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    return {**raw, "awq/truth": compressor.decompress(state, scheme)["weight"].contiguous()}


def bitsandbytes_4(kind: str) -> Tensors:
    value = (torch.randn(64, 512, generator=torch.Generator().manual_seed(5)) * 0.05).float()
    packed, state = bnb.quantize_4bit(
        value, blocksize=64, compress_statistics=True, quant_type=kind
    )
    truth = bnb.dequantize_4bit(packed, state)
    raw = {f".weight.{key}": tensor for key, tensor in state.as_dict(packed=True).items()}
    raw[".weight"] = packed
    return {f"bnb_{kind}/raw/{key}": tensor.contiguous() for key, tensor in raw.items()} | {
        f"bnb_{kind}/truth": truth.contiguous()
    }


def bitsandbytes_8() -> Tensors:
    q, scale, _ = bnb.int8_vectorwise_quant(weight(torch.float16))
    truth = bnb.int8_vectorwise_dequant(q, scale)
    return {
        "bnb_int8/raw/.weight": q.contiguous(),
        "bnb_int8/raw/.SCB": scale.float().contiguous(),
        "bnb_int8/truth": truth.contiguous(),
    }


def bitsandbytes_rows() -> Tensors:
    """Rows with and without outliers, each alone, times an int8 weight (threshold 6)."""
    q, scale, _ = bnb.int8_vectorwise_quant(weight(torch.float16))
    x = torch.randn(8, SHAPE[1], generator=torch.Generator().manual_seed(9)).clamp(-5, 5)
    x[1, 5], x[2, 7], x[2, 100], x[3, 0], x[4, 127] = 30.0, -60.0, 9.0, -6.0, 5.996
    x = x.half().float()
    rows = []
    for row in x.split(1):
        codes, step, columns = bnb.int8_vectorwise_quant(row.half(), threshold=6.0)
        mixed = torch.ops.bitsandbytes.int8_mixed_scaled_mm
        rows.append(mixed(row, codes, q, step, scale, columns, None)[0])
    named = {"weight": q, "SCB": scale.float(), "x": x, "y": torch.cat(rows)}
    return {f"bnb_int8_rows/{key}": value.contiguous() for key, value in named.items()}


def main(target: str) -> None:
    tensors: Tensors = {}
    for bits in (2, 3, 4, 5, 8):
        for symmetric in (True, False):
            tensors |= compressed(
                f"packed_{bits}_{'sym' if symmetric else 'asym'}",
                "pack-quantized",
                torch.bfloat16,
                num_bits=bits,
                type="int",
                symmetric=symmetric,
                strategy="group",
                group_size=GROUP,
            )
    whole = {"num_bits": 8, "type": "int", "strategy": "channel"}
    tensors |= compressed("int_channel", "int-quantized", torch.bfloat16, symmetric=True, **whole)
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
    tensors |= compressed(
        "float_channel", "float-quantized", torch.bfloat16, strategy="channel", **fp8
    )
    tensors |= compressed(
        "float_block",
        "float-quantized",
        torch.bfloat16,
        strategy="block",
        block_structure=[8, 64],
        **fp8,
    )
    tensors |= fp4("nvfp4", "nvfp4-pack-quantized", 16)
    tensors |= fp4("mxfp4", "mxfp4-pack-quantized", 32)
    tensors |= awq()
    for kind in ("nf4", "fp4"):
        tensors |= bitsandbytes_4(kind)
    tensors |= bitsandbytes_8()
    tensors |= bitsandbytes_rows()
    save_file(tensors, target)
    print(f"{len({name.split('/')[0] for name in tensors})} cases in {target}")


if __name__ == "__main__":
    main(sys.argv[1])
