"""gpt-oss checkpoints with experts in MXFP4, against the decoder of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ridgeline.engine.checkpoints.codecs.fp4 import fp4_grid, shared_exponents
from ridgeline.engine.checkpoints.load import load_decoder
from ridgeline.engine.checkpoints.safetensors import SINGLE
from ridgeline.engine.execution.runner import TorchRunner
from ridgeline.errors import BadModel
from ridgeline.modelspec.checkpoints.load import load_spec
from ridgeline.modelspec.cost import resident_weight_bytes
from ridgeline.modelspec.format import blocks
from ridgeline.modelspec.rewrite import with_activations
from tests.conformance.test_model_vs_transformers import log_softmax, reference_logits
from tests.conformance.tiny_models import VOCAB, make_model

pytestmark = pytest.mark.slow


def test_blocks_decode_as_in_transformers() -> None:
    blocks_OGB = torch.arange(256, dtype=torch.uint8).view(4, 4, 16)
    scales_OG = torch.tensor([[127, 120, 130, 1], [0, 140, 127, 126]] * 2, dtype=torch.uint8)
    theirs = convert_moe_packed_tensors(
        blocks_OGB.unsqueeze(0), scales_OG.unsqueeze(0), dtype=torch.float32
    )
    grid = fp4_grid(blocks_OGB.flatten(1), shared_exponents(scales_OG, "x"), 32)
    assert torch.equal(grid.dense(), theirs[0].T)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: Any) -> tuple[Any, Path]:
    """A model of transformers, and the same as a checkpoint in MXFP4."""
    directory = tmp_path_factory.mktemp("gpt-oss")
    model = make_model("gpt-oss", directory, hidden_size=64, intermediate_size=96)
    tensors = load_file(directory / SINGLE)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        experts, num_in, num_out = parameter.shape
        shape = (experts, num_out, num_in // 32)
        blocks_EOGB = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales_EOG = torch.randint(122, 126, shape, generator=generator, dtype=torch.uint8)
        del tensors[name]
        tensors |= {f"{name}_blocks": blocks_EOGB, f"{name}_scales": scales_EOG}
        dense = convert_moe_packed_tensors(blocks_EOGB, scales_EOG, dtype=torch.float32)
        parameter.data.copy_(dense)
    save_file(tensors, directory / SINGLE)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (directory / "config.json").write_text(json.dumps(config))
    return model, directory


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_packed_experts_give_the_logits_of_transformers(
    packed: tuple[Any, Path], backend: str
) -> None:
    model, directory = packed
    spec = load_spec(str(directory))
    assert spec.layers[0].mlp.gate.format == blocks(8, 32)
    assert any("MXFP4" in line for line in spec.rewrites)
    exact = with_activations(spec, "float32")
    decoder = load_decoder(
        str(directory), exact, device="cpu", compute_dtype=torch.float32, layer_backend=backend
    )
    if backend == "torch":  # native layers pad such small panels
        # An additional factor per output matters only in rows as short as these.
        assert decoder.nbytes == pytest.approx(resident_weight_bytes(exact), rel=0.05)
    tokens = [(7 * i * i + i) % VOCAB for i in range(50)]
    ours = log_softmax(TorchRunner(decoder, None, None).logits(tokens))
    theirs = log_softmax(reference_logits(model, tokens))
    assert float((ours - theirs).abs().max()) < 1e-4


def test_a_weight_without_its_scales_is_named(packed: tuple[Any, Path], tmp_path: Path) -> None:
    _, directory = packed
    tensors = load_file(directory / SINGLE)
    name = "model.layers.1.mlp.experts.down_proj_scales"
    save_file({k: v for k, v in tensors.items() if k != name}, tmp_path / SINGLE)
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    with pytest.raises(BadModel, match=r"layers\.1\.mlp\.experts\.down_proj lacks scales"):
        spec = load_spec(str(tmp_path))
        load_decoder(str(tmp_path), spec, device="cpu", compute_dtype=torch.float32)
