"""Latent attention equals its definition in every form, over a cache that stays compressed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ridgeline.engine.attention import build_attention, choose, paged
from ridgeline.engine.attention.base import AttentionSite
from ridgeline.engine.attention.cache import KvCache
from ridgeline.engine.attention.full import FullAttention
from ridgeline.engine.attention.kv_format import kv_format
from ridgeline.engine.attention.latent import LatentUp
from ridgeline.engine.scheduler.plan import Run
from ridgeline.errors import CannotRun
from ridgeline.modelspec.cost import cost_model, kv_bytes_per_token
from ridgeline.modelspec.families.registry import spec_from_config
from ridgeline.modelspec.model import ModelSpec
from ridgeline.modelspec.rewrite import apply_quantization, linears, with_dtype, with_kv_dtype
from tests.conformance.tiny_models import BASE, FAMILIES, load_ours, make_model

BLOCK, NUM_BLOCKS = 5, 40
STEPS = [[(0, 31), (1, 1)], [(0, 1), (1, 1)], [(0, 4), (1, 9), (2, 70)], [(0, 1), (1, 1), (2, 1)]]
"""(sequence, new tokens) of each run, step by step."""


def make_spec(**fields: object) -> ModelSpec:
    model_type, own = FAMILIES["deepseek-v3"]
    return spec_from_config({"model_type": model_type, **BASE, **own, **fields}, name="latent")


def make_up(spec: ModelSpec) -> LatentUp:
    attention = spec.layers[0].attention
    assert attention.latent is not None
    size = (attention.k.num_out + attention.v.num_out, attention.latent.rank)
    return LatentUp(attention, torch.randn(size) / 3)


def make_steps() -> list[list[Run]]:
    order = iter(torch.randperm(NUM_BLOCKS).tolist())
    blocks: dict[int, list[int]] = {0: [], 1: [], 2: []}
    done = dict.fromkeys(blocks, 0)
    steps = []
    for step in STEPS:
        runs = []
        for seq, count in step:
            start, done[seq] = done[seq], done[seq] + count
            blocks[seq] += [next(order) for _ in range(-(-done[seq] // BLOCK) - len(blocks[seq]))]
            runs.append(Run(seq, start, (0,) * count, tuple(blocks[seq]), None))
        steps.append(runs)
    return steps


@pytest.mark.parametrize("piece", [(1, 1), (15, 2), (256, 8)])
@pytest.mark.parametrize("rank", [16, 400])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_form_equals_the_definition(
    rank: int, dtype: str, piece: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short runs absorb the projections into the queries, long ones expand keys and values."""
    monkeypatch.setattr(paged, "PIECE_TOKENS", piece[0])
    monkeypatch.setattr(paged, "PIECE_SEQS", piece[1])
    torch.manual_seed(rank)
    spec = with_kv_dtype(with_dtype(make_spec(kv_lora_rank=rank), "float32"), dtype)
    up, attention = make_up(spec), spec.layers[0].attention
    assert up.absorbs(4) and not up.absorbs(31)
    caches = [
        KvCache.allocate(spec, NUM_BLOCKS, BLOCK, torch.float32, "cpu", kv_format(dtype))
        for _ in range(2)
    ]
    fast, slow = (
        build_attention(name, spec, cache)
        for name, cache in zip(("torch", "reference"), caches, strict=True)
    )
    for runs in make_steps():
        num = sum(len(run.tokens) for run in runs)
        q_THD = torch.randn(num, attention.num_heads, attention.head_dim)
        rows_TW = torch.randn(num, rank + attention.rope.dim)
        found, expected = (
            own.prepare(runs).attend_latent(q_THD, rows_TW, 0, up)  # type: ignore[attr-defined]
            for own in (fast, slow)
        )
        assert torch.allclose(found, expected, atol=2e-4, rtol=2e-4)
        assert torch.equal(caches[0].layers[0], caches[1].layers[0])


def test_scoring_without_a_cache_equals_the_definition() -> None:
    torch.manual_seed(0)
    spec = with_dtype(make_spec(), "float32")
    up, attention = make_up(spec), spec.layers[0].attention
    cache = KvCache.allocate(spec, NUM_BLOCKS, BLOCK, torch.float32, "cpu")
    q_THD = torch.randn(23, attention.num_heads, attention.head_dim)
    rows_TW = torch.randn(23, 16 + attention.rope.dim)
    run = Run(0, 0, (0,) * 23, tuple(range(5)), None)
    slow = build_attention("reference", spec, cache).prepare([run])
    expected: Tensor = slow.attend_latent(q_THD, rows_TW, 0, up)  # type: ignore[attr-defined]
    found = FullAttention(spec, 23, torch.empty(0)).attend_latent(q_THD, rows_TW, 0, up)
    assert torch.allclose(found, expected, atol=1e-4)


def test_the_cache_holds_one_latent_row_per_token_and_layer() -> None:
    spec = with_dtype(make_spec(), "float32")
    cache = KvCache.allocate(spec, NUM_BLOCKS, BLOCK, torch.float32, "cpu")
    per_token = 3 * (16 + 6) * 4
    assert kv_bytes_per_token(spec) == cost_model(spec).kv_bytes_per_token == per_token
    assert cache.nbytes == NUM_BLOCKS * BLOCK * per_token


def test_an_int8_cache_of_latents_is_refused_with_the_reason() -> None:
    spec = with_kv_dtype(with_dtype(make_spec(), "float32"), "int8")
    site = AttentionSite.of(spec, torch.device("cpu"), torch.float32, BLOCK)
    with pytest.raises(CannotRun, match="a latent row is neither"):
        choose("auto", site)
    with pytest.raises(CannotRun, match="no kernel for latent attention"):
        choose("native", site)


def test_absorbed_weights_stay_plain_when_the_others_are_quantised() -> None:
    spec = apply_quantization(with_dtype(make_spec(), "float32"), "int8")
    kinds = {path: linear.format.kind for path, linear in linears(spec).items()}
    assert kinds["layers.0.kv_up.k"] == kinds["layers.0.kv_up.v"] == "dense"
    assert kinds["layers.0.attention.kv_down"] == kinds["layers.0.attention.q"] == "int8"


@pytest.mark.parametrize("name", ["deepseek-v3", "glm4-moe"])
def test_layers_that_predict_further_tokens_are_left_unread(name: str, tmp_path: Path) -> None:
    """Published checkpoints hold a layer after the last one, which their configs do not count."""
    from safetensors.torch import load_file, save_file

    make_model(name, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    extra = {f"model.layers.3.{own}": torch.ones(2, 2) for own in ("eh_proj.weight", "x.weight")}
    save_file({**tensors, **extra}, file, metadata={"format": "pt"})
    load_ours(tmp_path)


@pytest.mark.parametrize("name", ["deepseek-v3", "minimax-m2"])
def test_fp8_blocks_are_read_as_they_are_published(name: str, tmp_path: Path) -> None:
    """E4M3 weights with a float32 scale per block: the model that their values stand for."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    packed, dense = tmp_path / "packed", tmp_path / "dense"
    make_model(name, packed).save_pretrained(dense)
    tensors, size = load_file(packed / "model.safetensors"), 16
    values = dict(tensors)
    for key in [k for k in tensors if "_proj" in k or ".experts." in k]:
        weight = tensors[key]
        rows, columns = ((extent + size - 1) // size for extent in weight.shape)
        scale = torch.rand(rows, columns) / 100 + 0.01
        wide = scale.repeat_interleave(size, 0).repeat_interleave(size, 1)
        wide = wide[: weight.shape[0], : weight.shape[1]]
        tensors[key] = (weight / wide).to(torch.float8_e4m3fn)
        tensors[f"{key.removesuffix('.weight')}.weight_scale_inv"] = scale
        values[key] = tensors[key].float() * wide
    save_file(tensors, packed / "model.safetensors", {"format": "pt"})
    save_file(values, dense / "model.safetensors", {"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [size, size]}
    (packed / "config.json").write_text(json.dumps({**config, "quantization_config": fp8}))
    tokens = list(range(20))
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(dense, attn_implementation="eager")
        theirs = model(torch.tensor([tokens])).logits[0]
    ours = load_ours(packed).paged_logits(tokens, [13, 7], [5, 9, 2, 11])
    assert torch.allclose(ours.log_softmax(-1), theirs.log_softmax(-1), atol=1e-4)
