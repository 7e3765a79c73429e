"""Codecs against what the formats' own libraries decode (scripts/foreign_vectors.py), bit for bit.

GPTQ's vectors are packed by a slow reference below; GPTQModel reads what we write of it
(scripts/readback.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ridgeline.engine.checkpoints.codecs.base import Codec, codec_for
from ridgeline.engine.checkpoints.codecs.bit_packing import num_words, pack_words, unpack
from ridgeline.engine.checkpoints.safetensors import TensorEntry
from ridgeline.engine.quant.grid import Grid
from ridgeline.errors import BadModel
from ridgeline.modelspec.checkpoints.quantised import QuantisedCheckpoint
from ridgeline.modelspec.checkpoints.quantization_config import read_quantization_config

VECTORS = load_file(Path(__file__).with_name("vectors.safetensors"))
NAMES = {torch.int32: "I32", torch.int8: "I8", torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3"}


def decoded(codec: Codec, raw: dict[str, torch.Tensor]) -> torch.Tensor | Grid:
    entries = {
        suffix: TensorEntry(Path(), tuple(t.shape), NAMES.get(t.dtype, "F32"))
        for suffix, t in raw.items()
    }
    assert all(codec.belongs(suffix) for suffix in raw), raw.keys()
    shape = codec.shape(entries, raw.__getitem__)
    return codec.decode(shape, raw.__contains__, raw.__getitem__)


def case(name: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    start = f"{name}/raw/"
    raw = {key.removeprefix(start): t for key, t in VECTORS.items() if key.startswith(start)}
    return raw, VECTORS[f"{name}/truth"]


def compressed(layout: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "format": layout}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"g": group}}


CASES: dict[str, dict[str, Any]] = {
    f"packed_{bits}_{kind}": compressed(
        "pack-quantized",
        num_bits=bits,
        type="int",
        symmetric=kind == "sym",
        strategy="group",
        group_size=64,
    )
    for bits in (2, 3, 4, 5, 8)
    for kind in ("sym", "asym")
} | {
    "int_channel": compressed(
        "int-quantized", num_bits=8, type="int", symmetric=True, strategy="channel"
    ),
    "float_channel": compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    "float_block": compressed(
        "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[8, 64]
    ),
    "nvfp4": compressed(
        "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16
    ),
    "mxfp4": compressed(
        "mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32
    ),
    "awq": {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 64},
    "bnb_nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "bnb_fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "bnb_int8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
}


@pytest.mark.parametrize("name", CASES)
def test_weights_decode_as_with_the_formats_library(name: str) -> None:
    raw, truth = case(name)
    found = decoded(codec_for(read_quantization_config(CASES[name], name)), raw)
    dense = found.dense() if isinstance(found, Grid) else found
    if name == "bnb_int8":  # two products, which its library rounds in the other order
        assert torch.allclose(dense, truth.float(), rtol=3e-7, atol=0)
    else:
        assert torch.equal(dense.to(truth.dtype), truth)
    raw[next(iter(sorted(raw)))] = torch.zeros_like(raw[next(iter(sorted(raw)))])
    spoilt = decoded_or_none(codec_for(read_quantization_config(CASES[name], name)), raw)
    assert spoilt is None or not torch.equal(spoilt, dense)  # a tensor that is not read would pass


def decoded_or_none(codec: Codec, raw: dict[str, torch.Tensor]) -> torch.Tensor | None:
    try:
        found = decoded(codec, raw)
    except (BadModel, RuntimeError):
        return None
    return found.dense() if isinstance(found, Grid) else found


def gptq_words(numbers: list[list[int]], bits: int) -> torch.Tensor:
    """Rows of numbers as one stream of bits each: slow, obvious."""
    rows = []
    for row in numbers:
        stream = sum(value << (i * bits) for i, value in enumerate(row))
        count = -(-len(row) * bits // 32)
        words = [(stream >> (32 * w)) & 0xFFFFFFFF for w in range(count)]
        rows.append([word - 2**32 if word >= 2**31 else word for word in words])
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("sym", [True, False])
def test_gptq(bits: int, version: int, sym: bool) -> None:
    generator = torch.Generator().manual_seed(bits)
    q_KN = torch.randint(0, 2**bits, (64, 32), generator=generator)
    zero_GN = torch.randint(0, 2**bits, (2, 32), generator=generator)
    zero_GN = torch.full_like(zero_GN, 2 ** (bits - 1)) if sym else zero_GN
    scale_GN = torch.rand(2, 32, generator=generator).half()
    group_K = torch.randperm(64, generator=generator) // 32
    stored_GN = (zero_GN - (2 - version)) % 2**bits
    raw = {
        ".qweight": gptq_words(q_KN.T.tolist(), bits).T.contiguous(),
        ".qzeros": gptq_words(stored_GN.tolist(), bits),
        ".scales": scale_GN,
        ".g_idx": group_K.int(),
    }
    truth_KN = scale_GN.float()[group_K] * (q_KN - zero_GN[group_K]).float()
    for declared in (version,) if not sym else (1, 2):  # the zeros decide, not the metadata
        config = {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": 32,
            "sym": sym,
            "checkpoint_format": "gptq" if declared == 1 else "gptq_v2",
        }
        found = decoded(codec_for(read_quantization_config(config, "test")), raw)
        assert isinstance(found, Grid) and (found.zero_OG is None) == sym
        assert torch.equal(found.dense(), truth_KN.T)


def test_asymmetric_zero_points_in_a_symmetric_gptq_checkpoint_are_refused() -> None:
    raw = {
        ".qweight": torch.zeros(4, 8, dtype=torch.int32),
        ".qzeros": torch.tensor([[0x12345678]], dtype=torch.int32),
        ".scales": torch.ones(1, 8).half(),
    }
    foreign = QuantisedCheckpoint(codec="gptq", name="", bits=4, group_size=32)
    with pytest.raises(BadModel, match="sym with zero-points"):
        decoded(codec_for(foreign), raw)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count", [1, 31, 32, 100])
def test_packed_words_round_trip_and_match_gptq(bits: int, count: int) -> None:
    numbers = torch.randint(0, 2**bits, (5, count), dtype=torch.uint8)
    words = pack_words(numbers, bits)
    assert words.shape[1] == num_words(bits, count)
    assert torch.equal(words, gptq_words(numbers.tolist(), bits))
    assert torch.equal(unpack(words, bits, count), numbers)


def test_words_with_padding_bits_are_unpacked() -> None:
    numbers = torch.arange(20, dtype=torch.uint8).remainder(8).view(1, 20)
    words = [sum(int(v) << (3 * i) for i, v in enumerate(numbers[0, a : a + 10])) for a in (0, 10)]
    packed = torch.tensor([words], dtype=torch.int32)
    assert torch.equal(unpack(packed, 3, 20, wasteful=True), numbers)


def grouped(**fields: Any) -> dict[str, Any]:
    """A config of 8-bit integers whose only group has further fields."""
    config = compressed("int-quantized", num_bits=8)
    groups = config["config_groups"]
    return {**config, "config_groups": {key: {**row, **fields} for key, row in groups.items()}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "quip"}, "unknown quant_method"),
        ({"quant_method": "torchao"}, "is not stable"),
        ({"quant_method": "gptq", "bits": 5}, "5 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": [1]}, "dynamic"),
        ({"quant_method": "gptq", "bits": 4, "rotated": "hadamard"}, "rotated"),
        ({"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round"}, "packing"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "W4A8_AWQ"),
        (compressed("int-quantized", num_bits=8) | {"transform_config": {"a": 1}}, "rotated"),
        (compressed("int-quantized") | {"sparsity_config": {"format": "24"}}, "sparsity"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "gemv"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "e5m2"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "config_groups"),
        (compressed("mxfp6-pack-quantized", num_bits=6, type="float"), "mxfp6"),
        (compressed("nvfp4-pack-quantized", num_bits=4, type="float", group_size=32), "32"),
        (compressed("pack-quantized", num_bits=4, type="float", strategy="group"), "float"),
        (compressed("pack-quantized", num_bits=4, strategy="group"), "group_size"),
        (["gptq"], "not an object"),
        (compressed("int-quantized", num_bits=8, dynamic=True), "dynamic"),
        (compressed("int-quantized", num_bits=8, rotated="hadamard"), "rotated"),
        (grouped(output_activations={"num_bits": 8}), "output_activations"),
        (grouped(lookup_table=[1, 2]), "lookup_table"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"down": {"rotated": 1}}}, "rotated"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "rotated": 1}, "rotated"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": True}, "both"),
    ],
)
def test_unknown_and_contradictory_configs_are_rejected(config: Any, message: str) -> None:
    with pytest.raises(BadModel, match=message):
        read_quantization_config(config, "here")


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "gptq", "bits": 4, "method": "gptq", "format": "gptq_v2", "hyb_act": True},
        {"quant_method": "awq", "bits": 4, "method": "awq", "format": "gemm", "desc_act": False},
        {"quant_method": "fp8", "kv_cache_scheme": "static"},
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
    ],
)
def test_notes_of_other_tools_are_harmless(config: Any) -> None:
    read_quantization_config(config, "here")
