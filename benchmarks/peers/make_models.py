"""A llama shape with one set of random weights, as each peer reads it.

    ENV/bin/python make_models.py SHAPE.json FOLDER

Runs in llama.cpp's environment (numpy, gguf, llama_cpp). Writes into FOLDER: `hf/` (safetensors in
bfloat16, config.json, tokenizer.json), `bf16.gguf`, and what llama.cpp's own quantiser makes of
that: `f16.gguf` (for OpenVINO), `q4_0.gguf`, `q8_0.gguf`. The rows of q and k keep their order:
with random weights the order of rotary pairs changes no time.
"""

from __future__ import annotations

import ctypes
import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

STD = 0.02
FTYPES = {
    "f16": llama_cpp.LLAMA_FTYPE_MOSTLY_F16,
    "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
}


def matrices(shape: dict[str, Any]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(name in safetensors, name in GGUF, shape) of every weight."""
    hidden, ffn, head = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    queries, keys = shape["num_attention_heads"] * head, shape["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", "token_embd.weight", (shape["vocab_size"], hidden)
    for i in range(shape["num_hidden_layers"]):
        layer, block = f"model.layers.{i}.", f"blk.{i}."
        yield layer + "input_layernorm.weight", block + "attn_norm.weight", (hidden,)
        yield layer + "self_attn.q_proj.weight", block + "attn_q.weight", (queries, hidden)
        yield layer + "self_attn.k_proj.weight", block + "attn_k.weight", (keys, hidden)
        yield layer + "self_attn.v_proj.weight", block + "attn_v.weight", (keys, hidden)
        yield layer + "self_attn.o_proj.weight", block + "attn_output.weight", (hidden, queries)
        yield layer + "post_attention_layernorm.weight", block + "ffn_norm.weight", (hidden,)
        yield layer + "mlp.gate_proj.weight", block + "ffn_gate.weight", (ffn, hidden)
        yield layer + "mlp.up_proj.weight", block + "ffn_up.weight", (ffn, hidden)
        yield layer + "mlp.down_proj.weight", block + "ffn_down.weight", (hidden, ffn)
    yield "model.norm.weight", "output_norm.weight", (hidden,)


def bfloat16(size: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    """Bits of normal numbers; of ones for a norm."""
    if len(size) == 1:
        return np.full(size, 0x3F80, dtype=np.uint16)
    values = generator.standard_normal(size, dtype=np.float32) * np.float32(STD)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def write(shape: dict[str, Any], folder: Path) -> None:
    """`hf/` and `bf16.gguf`, weight by weight."""
    generator = np.random.default_rng(0)
    (folder / "hf").mkdir(exist_ok=True)
    header: dict[str, Any] = {}
    offset = 0
    for name, _, size in matrices(shape):
        num_bytes = 2 * int(np.prod(size))
        ends = [offset, offset + num_bytes]
        header[name] = {"dtype": "BF16", "shape": size, "data_offsets": ends}
        offset += num_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    writer = _gguf_writer(shape, folder / "bf16.gguf")
    with (folder / "hf" / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, name, size in matrices(shape):
            bits = bfloat16(size, generator)
            file.write(bits.tobytes())
            _add(writer, name, bits)
    config = {"architectures": ["LlamaForCausalLM"], **shape}
    (folder / "hf" / "config.json").write_text(json.dumps(config, indent=1))
    words = json.dumps(tokenizer_json(shape["vocab_size"]))
    (folder / "hf" / "tokenizer.json").write_text(words, encoding="utf-8")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, name: str, bits: np.ndarray) -> None:
    if bits.ndim == 1:
        writer.add_tensor(name, np.ones(bits.shape, dtype=np.float32))
        return
    kind = gguf.GGMLQuantizationType.BF16
    writer.add_tensor(name, bits.view(np.uint8), raw_dtype=kind)


def _gguf_writer(shape: dict[str, Any], path: Path) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("random")
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_head_count(shape["num_attention_heads"])
    writer.add_head_count_kv(shape["num_key_value_heads"])
    writer.add_key_length(shape["head_dim"])
    writer.add_value_length(shape["head_dim"])
    writer.add_layer_norm_rms_eps(shape["rms_norm_eps"])
    writer.add_rope_freq_base(shape["rope_theta"])
    writer.add_rope_dimension_count(shape["head_dim"])
    writer.add_vocab_size(shape["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    _add_tokenizer(writer, shape["vocab_size"])
    return writer


def _words(vocab_size: int) -> list[str]:
    """Byte-level BPE: 256 bytes, one merge, and made-up words, as many as the model has rows."""
    letters = [chr(i) for i in (*range(33, 127), *range(161, 173), *range(174, 256))]
    letters += [chr(256 + i) for i in range(256 - len(letters))]
    words = ["<unk>", "<s>", "</s>", *letters, "ab"]
    return words + [f"<word{i}>" for i in range(len(words), vocab_size)]


def _add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    kinds = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (vocab_size - 3)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(_words(vocab_size))
    writer.add_token_types([int(kind) for kind in kinds])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def tokenizer_json(vocab_size: int) -> dict[str, Any]:
    """The same tokenizer, as Hugging Face's library reads it."""
    bytes_as_letters = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    special = [
        {"id": i, "content": word, "special": True, "single_word": False, "lstrip": False}
        | {"rstrip": False, "normalized": False}
        for i, word in enumerate(_words(vocab_size)[:3])
    ]
    vocab = {word: i for i, word in enumerate(_words(vocab_size))}
    return {
        "version": "1.0",
        "added_tokens": special,
        "pre_tokenizer": {**bytes_as_letters, "use_regex": True},
        "decoder": {**bytes_as_letters, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": [["a", "b"]]},
    }


def quantise(folder: Path) -> None:
    for name, ftype in FTYPES.items():
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.nthread = ftype, 2
        source, target = folder / "bf16.gguf", folder / f"{name}.gguf"
        failed = llama_cpp.llama_model_quantize(
            str(source).encode(), str(target).encode(), ctypes.byref(params)
        )
        if failed:
            raise SystemExit(f"llama.cpp could not write {target.name}")


def main() -> None:
    shape, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "done").exists():
        write(shape, folder)
        quantise(folder)
        (folder / "done").touch()


if __name__ == "__main__":
    main()
