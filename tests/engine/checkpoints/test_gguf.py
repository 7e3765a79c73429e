"""GGUF: blocks as gguf-py decodes them (scripts/gguf_vectors.py), whole files there and back."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from ridgeline.compress.methods.rtn import round_rtn
from ridgeline.compress.quantize_model import WriteJob
from ridgeline.compress.writers import gguf
from ridgeline.config.improve import QuantizeOptions
from ridgeline.engine.checkpoints.gguf.decode_blocks import DECODERS, decode_blocks
from ridgeline.engine.checkpoints.gguf.weights import GgufWeights
from ridgeline.engine.checkpoints.load import load_decoder
from ridgeline.engine.checkpoints.tensor_names import Part, parts
from ridgeline.engine.execution.layers.native import NativeForward
from ridgeline.engine.execution.runner import TorchRunner
from ridgeline.engine.model.table import PackedTable
from ridgeline.engine.quant.blocks import round_to
from ridgeline.engine.quant.grid import Grid
from ridgeline.engine.tokenization import load_tokenizer
from ridgeline.engine.tokenization.gguf import tokenizer_of
from ridgeline.errors import BadInput, BadModel, CannotRun
from ridgeline.modelspec.checkpoints.gguf_header import TYPES, read_gguf
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.cost import resident_weight_bytes
from ridgeline.modelspec.format import blocks
from ridgeline.modelspec.rewrite import linears, with_blocks_decoded, with_dtype
from ridgeline.workflows.quantize.quantize import quantize

VECTORS = load_file(Path(__file__).with_name("gguf_vectors.safetensors"))
IDS = [(37 * i) % 4000 for i in range(48)]
BY_NAME = {name: (numbers, nbytes) for name, numbers, nbytes in TYPES.values()}


@pytest.mark.parametrize("kind", DECODERS)
def test_packed_blocks_decode_bit_for_bit(kind: str) -> None:
    blocks, truth = VECTORS[f"{kind}/blocks"], VECTORS[f"{kind}/truth"]
    assert blocks.shape[1] == BY_NAME[kind][1] and truth.shape[1] == BY_NAME[kind][0]
    found = decode_blocks(kind, blocks)
    assert found.dtype == np.float32
    assert np.array_equal(found, truth, equal_nan=True)


@pytest.mark.parametrize("kind", ["IQ2_XXS", "TQ1_0"])
def test_codebook_types_are_decoded_by_the_gguf_package(kind: str) -> None:
    blocks, truth = VECTORS[f"{kind}/blocks"], VECTORS[f"{kind}/truth"]
    assert blocks.shape[1] == BY_NAME[kind][1]
    assert np.array_equal(decode_blocks(kind, blocks), truth, equal_nan=True)


@pytest.mark.parametrize("kind", sorted(BY_NAME.keys() - {"F32", "F16", "BF16"}))
def test_every_block_type_decodes_to_its_size(kind: str) -> None:
    numbers, nbytes = BY_NAME[kind]
    blocks = np.zeros((2, nbytes), dtype=np.uint8)
    assert decode_blocks(kind, blocks).shape == (2, numbers)


def logits(model: str) -> torch.Tensor:
    spec = with_dtype(load_spec(model), "float32")
    decoder = load_decoder(model, spec, device="cpu", compute_dtype=torch.float32)
    return TorchRunner(decoder, None, None).logits(IDS)


@pytest.fixture(scope="module")
def q4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf") / "q4"
    quantize("demo", folder, QuantizeOptions(method="rtn", group_size=32, format="gguf"))
    return folder / "model.gguf"


@pytest.mark.slow
def test_q4_0_round_trip(q4: Path, tmp_path: Path) -> None:
    quantize("demo", tmp_path / "own", QuantizeOptions(method="rtn", group_size=32))
    spec = load_spec(str(q4))
    assert spec.layers[3].mlp.down.format == blocks(4, 32)
    assert spec.lm_head.format.kind == "dense"
    assert any("42 linears run as int4" in line for line in spec.rewrites)
    own = logits(str(tmp_path / "own"))
    assert (logits(str(q4)) - own).norm() < 1e-6 * own.norm()


@pytest.mark.slow
def test_q8_0_round_trip(tmp_path: Path) -> None:
    """What its rounding costs, and that of rows to 8 bits in groups of 32."""
    quantize("demo", tmp_path / "q8", QuantizeOptions(bits=8, format="gguf"))
    truth = logits("demo")
    change = (logits(str(tmp_path / "q8" / "model.gguf")) - truth).norm() / truth.norm()
    assert 1e-4 < change < 0.03


def as_q4_k_m(monkeypatch: pytest.MonkeyPatch, tables: bool) -> None:
    """What is written has its v (and down) in more bits in half of the layers, as Q4_K_M files."""

    def kind_of(job: WriteJob, part: Part) -> str:
        if part.layer is None:
            return "Q8_0" if tables and part.key == "embed" else real(job, part)
        return "Q8_0" if part.layer % 2 and part.key in ("v", "down") else real(job, part)

    def blocks_of(job: WriteJob, part: Part, kind: str) -> torch.Tensor | None:
        if kind != "Q8_0":
            return real_blocks(job, part, kind)
        weight_OI = job.weights.get(part).float() if part.layer is None else job.weights.get(part)
        rounded = round_to(weight_OI, 32)
        scale = rounded.scale_OS.reshape(-1, 1).view(torch.uint8)
        return torch.cat([scale, rounded.q_OI.reshape(-1, 32).view(torch.uint8)], 1)

    real, real_blocks = gguf._kind, gguf._blocks
    monkeypatch.setattr(gguf, "_kind", kind_of)
    monkeypatch.setattr(gguf, "_blocks", blocks_of)


@pytest.mark.slow
@pytest.mark.parametrize("numbers", ["q4_k", "q6_k"])
def test_layers_may_mix_block_types(
    numbers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every layer packed, in native segments; the model of the decoded weights within what rows of
    8 bits cost; nothing of it in float32."""
    as_q4_k_m(monkeypatch, tables=True)
    quantize("demo", tmp_path / "m", QuantizeOptions(numbers=numbers, format="gguf"))  # type: ignore[arg-type]
    name = str(tmp_path / "m" / "model.gguf")
    kinds = {key: tensor.kind for key, tensor in read_gguf(name).tensors.items()}
    assert kinds["blk.1.attn_v.weight"] == "Q8_0" != kinds["blk.1.attn_q.weight"]
    spec = with_dtype(load_spec(name), "float32")
    assert {linear.format.kind for linear in linears(spec).values()} == {"blocks"}
    decoder = load_decoder(name, spec, device="cpu", compute_dtype=torch.float32)
    assert isinstance(decoder.forward, NativeForward)
    # The spec leaves out a float per output, which shows where rows have 256 inputs.
    assert decoder.nbytes == pytest.approx(resident_weight_bytes(spec), rel=0.03)
    float_spec = with_blocks_decoded(spec)
    assert resident_weight_bytes(float_spec) > 3 * resident_weight_bytes(spec)
    floats = load_decoder(name, float_spec, device="cpu", compute_dtype=torch.float32)
    truth = TorchRunner(floats, None, None).logits(IDS)
    found = TorchRunner(decoder, None, None).logits(IDS)
    assert 0 < (found - truth).norm() < 0.03 * truth.norm()


@pytest.mark.slow
def test_q4_0_embedding_table_stays_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As llama.cpp writes it: looked up in 4 bits, multiplied with by the tied head, exactly."""
    source = {}

    def blocks(job: WriteJob, part: Part, kind: str) -> torch.Tensor | None:
        if part.key != "embed":
            return real(job, part, kind)
        found = round_rtn(job.weights.get(part).float(), None, job.recipe)
        assert isinstance(found, Grid)
        source["embed"] = found.dense()
        return gguf._ENCODERS["Q4_0"](found)

    real, kind_of = gguf._blocks, gguf._kind
    monkeypatch.setattr(gguf, "_blocks", blocks)
    monkeypatch.setattr(
        gguf, "_kind", lambda job, part: "Q4_0" if part.key == "embed" else kind_of(job, part)
    )
    quantize("demo", tmp_path / "q4", QuantizeOptions(method="rtn", group_size=32, format="gguf"))
    name = str(tmp_path / "q4" / "model.gguf")
    spec = with_dtype(load_spec(name), "float32")
    decoder = load_decoder(name, spec, device="cpu", compute_dtype=torch.float32)
    assert isinstance(decoder.table, PackedTable)
    # The spec leaves out a float per output, which shows where rows have 256 inputs.
    assert decoder.nbytes == pytest.approx(resident_weight_bytes(spec), rel=0.03)
    assert decoder.lm_head.native.packed.lines is decoder.table.native.packed.lines  # type: ignore[attr-defined]
    ids = torch.arange(spec.vocab_size)
    assert torch.equal(decoder.table.rows(ids), source["embed"])
    assert torch.equal(GgufWeights(name, spec).get(next(parts(spec))), source["embed"])


@pytest.mark.slow
def test_tokenizer_and_chat_template_are_read_from_the_file(q4: Path) -> None:
    demo, theirs = load_tokenizer("demo"), load_tokenizer(str(q4))
    text = "def f(x):\n    return x + 1  # naïve <|end|> 12345\n"
    assert theirs.encode(text) == demo.encode(text)
    assert theirs.decode(demo.encode(text)) == demo.decode(demo.encode(text))
    chat = [{"role": "user", "content": "hello"}]
    assert theirs.apply_chat_template(chat) == demo.apply_chat_template(chat)


def test_sentence_pieces_merge_by_score() -> None:
    pieces = ["<unk>", "<s>", "▁", "a", "b", "ab", "▁ab", "<0x21>"]
    scores = [0.0, 0.0, -5.0, -4.0, -3.0, -1.0, -2.0, 0.0]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 1, 1, 1, 1, 1, 6],
        "tokenizer.ggml.bos_token_id": 1,
    }
    inner = tokenizer_of(metadata)
    assert inner.encode("ab ab!").ids == [1, 6, 6, 7]
    assert inner.decode([6, 6, 7]) == "ab ab!"
    with pytest.raises(BadModel, match=r"kind that is not read.*bert"):
        tokenizer_of({**metadata, "tokenizer.ggml.model": "bert"})
    unknown = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "unheard-of"}
    with pytest.raises(BadModel, match=r"word pattern.*unheard-of"):
        tokenizer_of({**metadata, **unknown})


@pytest.mark.parametrize("keep", [0, 3, 30, 5000, -100])
def test_damaged_file_is_reported(q4: Path, tmp_path: Path, keep: int) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(q4.read_bytes()[:keep])
    with pytest.raises(BadModel, match=r"empty|not a GGUF|exceeds|truncated"):
        load_spec(str(broken))


def test_unsupported_files_are_rejected(q4: Path, tmp_path: Path) -> None:
    raw = q4.read_bytes()
    other = tmp_path / "other.gguf"
    other.write_bytes(raw.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba", 1))
    with pytest.raises(BadModel, match="architecture"):
        load_spec(str(other))
    other.write_bytes(raw[:4] + struct.pack("<I", 9) + raw[8:])
    with pytest.raises(BadModel, match="version"):
        load_spec(str(other))
    with pytest.raises(BadModel, match="no such GGUF"):
        read_gguf(str(tmp_path / "none.gguf"))
    for choices in (
        QuantizeOptions(format="gguf"),
        QuantizeOptions(format="gguf", group_size=64, zeros=True),
    ):
        with pytest.raises(CannotRun, match="GGUF holds no such grid"):
            quantize("demo", tmp_path / "x", choices)
    with pytest.raises(BadInput):
        quantize("demo", tmp_path / "x", QuantizeOptions(bits=16, format="gguf"))


@pytest.mark.parametrize(
    "broken",
    [
        {"tokenizer.ggml.merges": ["a nothing-like-it"]},
        {"tokenizer.ggml.merges": ["alone"]},
        {"tokenizer.ggml.tokens": 7},
        {"tokenizer.ggml.bos_token_id": 10**6},
        {"tokenizer.ggml.token_type": 3},
    ],
)
def test_broken_tokenizer_is_reported(
    q4: Path, broken: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    header = read_gguf(str(q4))
    damaged = msgspec.structs.replace(header, metadata=header.metadata | broken)
    monkeypatch.setattr("ridgeline.engine.tokenization.tokenizer.read_gguf", lambda _: damaged)
    with pytest.raises(BadModel, match="the GGUF file"):
        load_tokenizer(str(q4))
