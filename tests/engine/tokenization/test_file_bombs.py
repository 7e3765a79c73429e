"""Files whose sizes explode are refused before they take memory or time."""

from __future__ import annotations

import json
import resource
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.engine.checkpoints.codecs.bitsandbytes import FourBitCodec
from ridgeline.engine.checkpoints.safetensors import entries_of
from ridgeline.engine.tokenization.growth import check_growth
from ridgeline.engine.tokenization.merges import ranked_merges
from ridgeline.engine.tokenization.tokenizer import load_tokenizer
from ridgeline.errors import BadModel
from ridgeline.modelspec.checkpoints.gguf_header import read_gguf
from ridgeline.modelspec.checkpoints.locate import model_path
from ridgeline.modelspec.checkpoints.safetensors_header import dtype_of_weights


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    """Each refusal comes within 2 CPU-seconds and 200 MiB."""
    began_s, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.process_time() - began_s < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


def replace_step(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


@pytest.mark.parametrize(
    "normalizer",
    [
        replace_step({"String": " "}, "x" * 100_000),
        {"type": "Sequence", "normalizers": [replace_step({"String": "a"}, "aa")] * 30},
        {"type": "Sequence", "normalizers": [replace_step({"Regex": ""}, "ab")] * 10},
        {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "x" * 1000}] * 3},
        {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 1000},
    ],
    ids=["one", "doubling", "between", "prepend", "steps"],
)
def test_normaliser_that_expands_texts_is_refused(
    normalizer: dict[str, Any], tmp_path: Path
) -> None:
    document = json.loads((model_path("demo") / "tokenizer.json").read_text())
    document["normalizer"] = normalizer
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadModel, match="limit: 64 times, 256 steps; fix: use the tokenizer"):
        load_tokenizer(str(tmp_path))


def test_post_processor_that_adds_thousands_of_tokens_is_refused() -> None:
    piece = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    processor = {"type": "TemplateProcessing", "single": [piece] * 5000, "pair": []}
    with pytest.raises(BadModel, match="adds too many tokens to a text; got 5000; limit: 256"):
        check_growth({"post_processor": processor})


def test_usual_normalisers_are_accepted() -> None:
    steps = [{"type": "Prepend", "prepend": "▁"}, replace_step({"String": " "}, "▁")]
    check_growth({"normalizer": {"type": "Sequence", "normalizers": steps}})
    check_growth({"decoder": replace_step({"String": "▁"}, " "), "normalizer": None})
    check_growth({"normalizer": replace_step({"Regex": " {2,}"}, "▁")})


def test_piece_of_a_hundred_thousand_characters_is_refused() -> None:
    with pytest.raises(BadModel, match=r"a piece of 120000 characters; .*limit: 1024 characters"):
        ranked_merges({"a": (0, 0.0), "a" * 120_000: (1, -1.0)})


@pytest.mark.parametrize("size", [50_000_000, 3, 0, -64, "64", None, 1 << 70])
def test_block_size_that_does_not_fit_its_blocks_is_refused(size: object) -> None:
    state = {"blocksize": size, "shape": [64, 64], "quant_type": "nf4", "dtype": "float32"}
    tensors = {
        ".weight": torch.zeros(2048, dtype=torch.uint8),
        ".weight.quant_map": torch.zeros(16),
        ".weight.absmax": torch.ones(64),
        ".weight.quant_state.bitsandbytes__nf4": torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        ),
    }
    with pytest.raises(BadModel, match="blocksize"):
        FourBitCodec(None).decode(  # type: ignore[arg-type]
            (64, 64), tensors.__contains__, tensors.__getitem__
        )


def sparse(file: Path, head: bytes, size: int) -> Path:
    """A file that claims `size` bytes and takes none."""
    with file.open("wb") as stream:
        stream.write(head)
        stream.truncate(size)
    return file


@pytest.mark.parametrize("claimed", [2**63, 8 << 30, 200 << 20])
def test_safetensors_header_of_gigabytes_is_refused(claimed: int, tmp_path: Path) -> None:
    sparse(tmp_path / "model.safetensors", claimed.to_bytes(8, "little"), 16 << 30)
    with pytest.raises(BadModel, match=r"limit: \d+"):
        entries_of(tmp_path)


@pytest.mark.parametrize("dtype", [["F32"], {"F32": 1}, 32, None])
def test_dtype_that_is_no_text_is_no_dtype(dtype: object, tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": dtype, "shape": [1], "data_offsets": [0, 4]}}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(4)
    (tmp_path / "model.safetensors").write_bytes(data)
    assert dtype_of_weights(tmp_path) is None


def gguf_head(tensors: int, keys: int) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys)


def array_key(inner: int, count: int) -> bytes:
    return (1).to_bytes(8, "little") + b"k" + struct.pack("<IIQ", 9, inner, count)


@pytest.mark.parametrize(
    "head",
    [
        gguf_head(0, 90_000_000),
        gguf_head(90_000_000, 0),
        gguf_head(0, 1) + array_key(8, 90_000_000),
        gguf_head(0, 1) + array_key(9, 90_000_000),
        gguf_head(0, 1) + array_key(5, 90_000_000),
        gguf_head(0, 1) + array_key(9, 1) + struct.pack("<IQ", 9, 1) * 3000,
    ],
    ids=["keys", "tensors", "texts", "arrays", "numbers", "nested"],
)
def test_gguf_counts_that_a_sparse_file_could_hold_are_refused(head: bytes, tmp_path: Path) -> None:
    file = sparse(tmp_path / "m.gguf", head, 8 << 30)
    with pytest.raises(BadModel, match="GGUF"):
        read_gguf(str(file))
